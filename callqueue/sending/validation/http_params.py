"""Checks of what an HTTP call takes: its URL, query, body, headers, cookies and credentials."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from callqueue.exceptions import InvalidCall
from callqueue.sending.validation.refusals import kind_of, path_of, shown
from callqueue.sending.validation.urls import Reach, check_url
from callqueue.sending.validation.value_checks import is_secret, named
from callqueue.texts import suggest

HTTP_PARAMS = ("url", "params", "data", "json", "headers", "cookies", "auth")
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
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_COOKIE_CONTROL = re.compile(r"[\x00-\x1f\x7f;]")


def check_http_params(params: dict[str, Any], reach: Reach) -> None:
    """InvalidCall where no request could be written of this, NotAllowed where it may not go."""
    if "url" not in params:
        raise InvalidCall("params.url", "is missing: the http or https URL to call")
    for name, value in params.items():
        if name == "url":
            if not is_secret(value):
                check_url(value, reach)
        elif name not in HTTP_PARAMS:
            why = ELSEWHERE.get(name) or f"is unknown{suggest(name, HTTP_PARAMS)}"
            raise InvalidCall(path_of("params", name), why)
        elif value is not None and name != "json":
            _CHECKS[name](f"params.{name}", value)
    if params.get("data") and params.get("json") is not None:
        raise InvalidCall("params.data", "and params.json are both given; a call has one body")


def _check_headers(field: str, headers: Any) -> None:
    seen = set()
    for name, value in named(field, headers).items():
        if not _TOKEN.fullmatch(name):
            raise InvalidCall(field, f"{shown(name)} is not a header's name")
        lowered = name.lower()
        refuse = partial(InvalidCall, path_of(field, name))
        if lowered in FRAMING:
            raise refuse("is written from the URL and the body; leave it out")
        if lowered in seen:
            raise refuse("is given twice, in different spellings")
        seen.add(lowered)
        if type(value) is str:
            _check_header_value(field, name, value)
        elif value is not None and not is_secret(value):
            raise refuse(f"must be a string, not {kind_of(value)}")


def _check_header_value(field: str, name: str, value: str) -> None:
    if _CONTROL.search(value):
        why = "contains a line break or a control character"
    elif value[:1] in (" ", "\t") or value[-1:] in (" ", "\t"):
        why = "begins or ends with white space"
    elif not value.isascii() and max(value) > "\xff":
        why = "contains a character outside Latin-1; encode it as the API documents"
    else:
        return
    raise InvalidCall(path_of(field, name), why)


def _check_cookies(field: str, cookies: Any) -> None:
    for name, value in named(field, cookies).items():
        if not _TOKEN.fullmatch(name):
            raise InvalidCall(field, f"{shown(name)} is not a cookie's name")
        if is_secret(value):
            continue
        refuse = partial(InvalidCall, path_of(field, name))
        if not isinstance(value, str):
            raise refuse(f"must be a string, not {kind_of(value)}")
        if _COOKIE_CONTROL.search(value):
            raise refuse("contains ';', a line break or a control character")
        if max(value, default="") > "\xff":
            raise refuse("contains a character outside Latin-1")


def _check_auth(field: str, auth: Any) -> None:
    if not isinstance(auth, list) or len(auth) != 2:
        raise InvalidCall(
            field, "must be [user, password]; for another scheme give an Authorization header"
        )
    for index, part in enumerate(auth):
        if not is_secret(part):
            _check_credential(f"{field}[{index}]", part)
    if isinstance(auth[0], str) and ":" in auth[0]:
        raise InvalidCall(
            f"{field}[0]", "contains ':', which basic authentication keeps for its own use"
        )


def _check_credential(field: str, part: Any) -> None:
    if not isinstance(part, str):
        raise InvalidCall(field, f"must be a string, not {kind_of(part)}")
    if _CONTROL.search(part):
        raise InvalidCall(field, "contains a line break or a control character")
    if max(part, default="") > "\xff":
        raise InvalidCall(
            field, "contains a character outside Latin-1; encode it as the API documents"
        )


def _check_fields(field: str, value: Any) -> None:
    """A string, or names with one value or several: what a query or a form can say."""
    if isinstance(value, str) or is_secret(value):
        return
    if isinstance(value, dict):
        for name, item in value.items():
            _check_field_value(field, name, item)
    elif isinstance(value, list):
        for index, pair in enumerate(value):
            if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
                raise InvalidCall(f"{field}[{index}]", "must be a pair [name, value]")
            _check_field_value(f"{field}[{index}]", 1, pair[1])
    else:
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


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "headers": _check_headers,
    "cookies": _check_cookies,
    "auth": _check_auth,
    "params": _check_fields,
    "data": _check_fields,
}
