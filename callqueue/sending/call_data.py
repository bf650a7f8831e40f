"""Checks of call_data: its JSON, its method, its URL, and by a table each param that the method
takes. Where a string is wanted, a Secret may stand, whose value the worker checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from callqueue import handlers, states
from callqueue.exceptions import InvalidCall, NotAllowed
from callqueue.handlers import HTTP_METHODS
from callqueue.security.addresses import Unreadable, place_of, place_refusal
from callqueue.sending.validation import plain_copy
from callqueue.texts import suggest
from callqueue.values import (
    Ban,
    Check,
    check_dict,
    check_each,
    flaw_in,
    is_secret,
    kind_of,
    path_of,
    refuse_unknown,
    shown_name,
    text_check,
)

_AT_URL = "params.url"
_UNSAFE_IN_URL = re.compile(
    r"[\x00-\x20\x7f-\xa0\\\u1680\u2000-\u200f\u2028-\u202f\u205f-\u2064\u3000\ufeff]"
)


@dataclass(frozen=True)
class Reach:
    hosts: tuple[str, ...]  # ALLOWED_HOSTS
    networks: tuple[str, ...]  # ALLOWED_NETWORKS


def check_url(url: object, reach: Reach) -> tuple[str, int]:
    """Host (lower-case ASCII, not resolved) and port of an http(s) URL. InvalidCall, NotAllowed."""
    if not isinstance(url, str) or not url:
        raise InvalidCall(_AT_URL, f"must be an http or https URL, not {kind_of(url)}")
    if _UNSAFE_IN_URL.search(url):
        raise InvalidCall(
            _AT_URL,
            "contains white space, a control character or a backslash; percent-encode it",
        )
    try:
        place = place_of(url)
    except Unreadable as error:
        raise InvalidCall(_AT_URL, str(error)) from None
    if forbidden := place_refusal(place, reach.hosts, reach.networks):
        raise NotAllowed(f"{_AT_URL}: {forbidden}")
    return place.host.removesuffix("."), place.port


# What requests would take, and where it is stated here.
ELSEWHERE = {
    "timeout": (
        "belongs to the rule: set Rule(connect_timeout=..., read_timeout=..., total_timeout=...)"
    ),
    "verify": "belongs to the rule: set Rule(verify=...)",
    "stream": "is the app's own: answers are always read within MAX_RESPONSE_BYTES",
    "proxies": "is not offered: calls connect directly, to the address that was checked",
    "cert": (
        "is not offered: give the rule a handler of your own (HANDLERS) for client certificates"
    ),
    "allow_redirects": (
        "is not offered: redirects are not followed; give the URL that the answer's Location names"
    ),
    "hooks": "is code, not JSON: set Rule(classify=...) to judge answers",
    "files": (
        "is not offered: bodies are JSON or text; upload from a handler of your own (HANDLERS)"
    ),
}
# Headers that say where a request begins and ends, and who reads it.
FRAMING = frozenset({
    "connection", "content-length", "host", "keep-alive", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
})  # fmt: skip
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

_CONTROL: Ban = (
    re.compile(r"[\x00-\x08\x0a-\x1f\x7f]"),
    "contains a line break or a control character",
)
_LATIN_1: Ban = (
    re.compile(r"[^\x00-\xff]"),
    "contains a character outside Latin-1; encode it as the API documents",
)
_HEADER = (_CONTROL, (re.compile(r"\A[ \t]|[ \t]\Z"), "begins or ends with white space"), _LATIN_1)
_COOKIE = (
    (re.compile(r"[\x00-\x1f\x7f;]"), "contains ';', a line break or a control character"),
    _LATIN_1,
)
_PASSWORD = (_CONTROL, _LATIN_1)
_USER = (
    *_PASSWORD,
    (re.compile(":"), "contains ':', which basic authentication keeps for its own use"),
)


def check_call_data(
    call_data: object,
    *,
    methods: Callable[[], Collection[str]],
    reach: Reach,
    secret_names: Collection[str],
    max_bytes: int,
) -> tuple[dict[str, Any], str]:
    """A plain JSON copy of `call_data`, its method in lower case, and its URL's host ("" if none or
    secret). InvalidCall names the field, NotAllowed the host. A Secret may stand for any string in
    params: the worker checks its value. A dict that looks like a reference to one is a dict.
    """
    if not isinstance(call_data, dict):
        raise InvalidCall(
            "call_data", f"must be a dict with 'method' and 'params', not {kind_of(call_data)}"
        )
    plain = plain_copy(call_data, max_bytes, secret_names)
    for name in plain:
        if name not in ("method", "params"):
            is_param = name in HTTP_PARAMS
            why = "; it belongs into params" if is_param else suggest(name, ("method", "params"))
            raise InvalidCall(path_of("call_data", name), f"is unknown{why}")
    plain["method"] = method = _checked_method(plain.get("method"), methods)
    if "params" not in plain:
        raise InvalidCall("params", "is missing: a dict of the method's arguments")
    return plain, check_params(method, plain["params"], reach)


def check_params(method: str, params: object, reach: Reach) -> str:
    """Check a method's params; their URL's host, "" if none or secret. InvalidCall, NotAllowed."""
    host = ""
    if not isinstance(params, dict):
        raise InvalidCall("params", f"must be a dict, not {kind_of(params)}")
    if method in HTTP_METHODS:
        refuse_unknown(params, HTTP_PARAMS, ELSEWHERE)
        if "url" not in params:
            raise InvalidCall("params.url", "is missing: the http or https URL to call")
        if not is_secret(params["url"]):
            host, _ = check_url(params["url"], reach)
        check_each(params, HTTP_PARAMS)
        if params.get("data") and params.get("json") is not None:
            raise InvalidCall("params.data", "and params.json are both given; a call has one body")
    elif built_in := handlers.find_built_in(method):
        built_in.check(params)  # other handlers check their own
    return host


def _checked_method(method: object, methods: Callable[[], Collection[str]]) -> str:
    if not isinstance(method, str) or not method:
        state = f"must be a string, not {kind_of(method)}" if method else "is missing"
        raise InvalidCall(
            "method", f"{state}: an HTTP verb, 'send_email', 'celery_task' or a handler's name"
        )
    if method in HTTP_METHODS:
        return method
    known, lowered = methods(), method.lower()
    if lowered == states.PERMIT:
        raise InvalidCall("method", "'permit' is not sent: take a permit with callqueue.permit()")
    if lowered not in known:
        raise InvalidCall("method", f"{shown_name(method)} is unknown{suggest(lowered, known)}")
    return lowered


def _accept_anything(field: str, value: Any) -> None:
    """It is checked elsewhere, or nothing is wrong with it."""


def _check_headers(field: str, headers: Any) -> None:
    seen = set()
    for name, value in check_dict(field, headers).items():
        lowered = name.lower()
        if not _TOKEN.fullmatch(name):
            raise InvalidCall(field, f"{shown_name(name)} is not a header's name")
        if lowered in FRAMING:
            why = "is written from the URL and the body; leave it out"
        elif lowered in seen:
            why = "is given twice, in different spellings"
        else:
            why = "" if value is None else flaw_in(value, _HEADER)
        if why:
            raise InvalidCall(path_of(field, name), why)
        seen.add(lowered)


def _check_cookies(field: str, cookies: Any) -> None:
    for name, value in check_dict(field, cookies).items():
        if not _TOKEN.fullmatch(name):
            raise InvalidCall(field, f"{shown_name(name)} is not a cookie's name")
        if why := flaw_in(value, _COOKIE):
            raise InvalidCall(path_of(field, name), why)


def _check_auth(field: str, auth: Any) -> None:
    if not isinstance(auth, list) or len(auth) != 2:
        raise InvalidCall(
            field, "must be [user, password]; for another scheme give an Authorization header"
        )
    text_check(*_USER)(f"{field}[0]", auth[0])
    text_check(*_PASSWORD)(f"{field}[1]", auth[1])


def _check_form_fields(field: str, value: Any) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            _check_field_value(field, name, item)
    elif isinstance(value, list):
        for index, pair in enumerate(value):
            if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
                raise InvalidCall(f"{field}[{index}]", "must be a pair [name, value]")
            _check_field_value(f"{field}[{index}]", 1, pair[1])
    elif not isinstance(value, str) and not is_secret(value):
        why = f"must be a string, a dict or a list of pairs, not {kind_of(value)}"
        raise InvalidCall(field, why)


def _check_field_value(field: str, name: str | int, value: Any) -> None:
    if isinstance(value, dict):
        why = f"is {kind_of(value)}, which a query or form cannot carry; use params.json"
        raise InvalidCall(path_of(field, name), why)
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, list | dict):
            raise InvalidCall(
                f"{path_of(field, name)}[{index}]", "is nested, which a query or form cannot carry"
            )


HTTP_PARAMS: dict[str, Check] = {
    "url": _accept_anything,
    "params": _check_form_fields,
    "data": _check_form_fields,
    "json": _accept_anything,
    "headers": _check_headers,
    "cookies": _check_cookies,
    "auth": _check_auth,
}
