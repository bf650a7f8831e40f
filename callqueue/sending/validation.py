"""What `send` accepts: checks of call_data and of send's other arguments, before anything is
written.

Python values enter; plain JSON values leave, or InvalidCall (naming the field) or NotAllowed. Pure:
no Django, no database, no clock, no network; names are resolved and checked again in the worker. An
error never repeats a value, which may be secret: it names the path and the reason.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from math import isfinite
from typing import Any, NoReturn

from callqueue.exceptions import InvalidCall, NotAllowed
from callqueue.security.addresses import host_refusal, literal_address, refusal
from callqueue.security.secrets import MARK, Secret, marked, unmarked

HTTP_METHODS = frozenset({"get", "options", "head", "post", "put", "patch", "delete"})
METHODS = HTTP_METHODS | {"send_email", "celery_task"}
MAX_DEPTH = 64  # lists and mappings inside each other, call_data itself being the first
MAX_DIGITS = 4300  # Python's own bound on reading an integer back
MAX_TEXT = 255  # the width of the columns for key, unique_key and callback
MAX_COST = 2**31 - 1
LONGEST_AUTHORITY = 300  # characters of a URL's host and port; a host's name has at most 253

_PARAMS = {
    "send_email": (
        "to",
        "subject",
        "message",
        "from_email",
        "html_message",
        "cc",
        "bcc",
        "reply_to",
    ),
    "celery_task": (
        "name",
        "args",
        "kwargs",
        "options",
    ),  # options: the task's id and canvas, see queued_task.py
}
_HTTP_PARAMS = ("url", "params", "data", "json", "headers", "cookies", "auth")
_ELSEWHERE = {
    "timeout": "belongs to the rule: set Rule(connect_timeout=..., read_timeout=..., total_timeout=...)",
    "verify": "belongs to the rule: set Rule(verify=...)",
    "stream": "is the app's own: answers are always read within MAX_RESPONSE_BYTES",
    "proxies": "is not offered: calls connect directly, to the address that was checked",
    "cert": "is not offered: give the rule a handler of your own (HANDLERS) for client certificates",
    "allow_redirects": "belongs to the rule: set Rule(follow_redirects=...)",
    "hooks": "is code, not JSON: set Rule(classify=...) to judge answers",
    "files": "is not offered: bodies are JSON or text; upload from a handler of your own (HANDLERS)",
}
_FRAMING = frozenset({
    "host", "content-length", "transfer-encoding", "connection", "keep-alive", "proxy-connection", "te", "trailer",
    "upgrade",
})  # fmt: skip
_ADVICE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((bytes, bytearray, memoryview), "decode it to text, or send it as base64"),
    ((datetime, date, time), "send .isoformat()"),
    (timedelta, "send .total_seconds()"),
    ((set, frozenset), "send a sorted list"),
    (Mapping, "send dict(...)"),
    (complex, "send its parts"),
)
_UNSAFE_IN_URL = re.compile(
    r"[\x00-\x20\x7f-\xa0\\\u1680\u2000-\u200f\u2028-\u202f\u205f-\u2064\u3000\ufeff]"
)
_URL = re.compile(r"(https?)://([^/?#]*)(?:[/?#].*)?", re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::(.*))?")
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_UNSEEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029]"
)  # what moves a terminal's cursor, or begins another line
_COOKIE_CONTROL = re.compile(r"[\x00-\x1f\x7f;]")
_LINE_BREAK = re.compile(r"[\r\n\x00\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_PLAIN_NAME = re.compile(r"[A-Za-z_$][\w$-]{0,39}", re.ASCII)
_TASK_NAME = re.compile(r"[^\s\x00-\x1f\x7f-\x9f]+")
_HUGE = 10**MAX_DIGITS
_WIDE = 2**63
_encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode
_decode = json.JSONDecoder().decode


@dataclass(frozen=True)
class CheckedCall:
    """A call as it will be stored: the method in its canonical spelling, plain JSON values, and
    secrets by name.
    """

    method: str
    call_data: dict[str, Any]


def check_call(
    call_data: object,
    *,
    methods: Collection[str],
    allowed_hosts: Iterable[str],
    allowed_networks: Iterable[str],
    secret_names: Collection[str],
    max_bytes: int,
) -> CheckedCall:
    """As check_call_data, with the method beside the data."""
    checked = check_call_data(
        call_data,
        methods=methods,
        allowed_hosts=allowed_hosts,
        allowed_networks=allowed_networks,
        secret_names=secret_names,
        max_bytes=max_bytes,
    )
    return CheckedCall(checked["method"], checked)


def check_call_data(
    call_data: object,
    *,
    methods: Collection[str],
    allowed_hosts: Iterable[str],
    allowed_networks: Iterable[str],
    secret_names: Collection[str],
    max_bytes: int,
) -> dict[str, Any]:
    """A plain JSON copy of `call_data`, its method normalised. InvalidCall names the field,
    NotAllowed the host.

    A Secret is accepted in place of any string in params; what it stands for is not known here, so
    the worker repeats the checks with `check_params` once it is. A dict that looks like a reference
    to one is a dict.
    """
    if not isinstance(call_data, dict):
        raise InvalidCall(
            "call_data", f"must be a dict with 'method' and 'params', not {_kind(call_data)}"
        )
    plain = _plain_copy(call_data, max_bytes, secret_names)
    for name in plain:
        if name not in ("method", "params"):
            place = (
                "; it belongs into params"
                if name in _HTTP_PARAMS
                else _suggest(name, ("method", "params"))
            )
            raise InvalidCall(_path("call_data", name), f"is unknown{place}")
    plain["method"] = method = _checked_method(plain, methods)
    if "params" not in plain:
        raise InvalidCall("params", "is missing: a dict of the method's arguments")
    check_params(
        method, plain["params"], allowed_hosts=allowed_hosts, allowed_networks=allowed_networks
    )
    return plain


def check_params(
    method: str, params: object, *, allowed_hosts: Iterable[str], allowed_networks: Iterable[str]
) -> None:
    """Check what the method makes of its params, which are plain JSON. Call it again once secrets
    are resolved.
    """
    if not isinstance(params, dict):
        raise InvalidCall("params", f"must be a dict, not {_kind(params)}")
    if method in HTTP_METHODS:
        _check_http(params, tuple(allowed_hosts), tuple(allowed_networks))
    elif method == "send_email":
        _check_email(params)
    elif method == "celery_task":
        _check_task(params)


def check_url(
    url: object,
    *,
    allowed_hosts: Iterable[str],
    allowed_networks: Iterable[str],
    field: str = "params.url",
) -> str:
    """The host of an http(s) URL that may be called, lower-case ASCII. A name is not resolved
    here.
    """
    return check_place(
        url, allowed_hosts=allowed_hosts, allowed_networks=allowed_networks, field=field
    )[0]


def check_place(
    url: object,
    *,
    allowed_hosts: Iterable[str],
    allowed_networks: Iterable[str],
    field: str = "params.url",
) -> tuple[str, int]:
    """As check_url, with the port."""
    if not isinstance(url, str) or not url:
        raise InvalidCall(field, f"must be an http or https URL, not {_kind(url)}")
    return _checked_url(url, field, tuple(allowed_hosts), tuple(allowed_networks))


def check_key(key: object) -> str:
    """The key as it is stored: a string itself, a mapping as compact JSON with sorted names. At
    most 255 characters.
    """
    if key is None:
        return ""
    if isinstance(key, Mapping):
        named = {
            _checked_key_name(name): _checked_key_value(name, value) for name, value in key.items()
        }
        return _fitting("key", _encode(dict(sorted(named.items())))) if named else ""
    if not isinstance(key, str):
        raise InvalidCall("key", f"must be a string or a dict of names, not {_kind(key)}")
    text = _fitting("key", _plain("key", key))
    if _is_json_object(text):
        raise InvalidCall(
            "key", "is the text of a JSON object; give the dict itself for a key of several names"
        )
    return text


def check_cost(cost: object) -> int | dict[str, int]:
    """The cost: whole calls, or units by name. None is one call."""
    if cost is None:
        return 1
    if isinstance(cost, Mapping):
        return {
            _checked_unit(unit): _checked_amount(_path("cost", unit), amount)
            for unit, amount in cost.items()
        } or 1
    return _checked_amount("cost", cost)


def check_priority(priority: object) -> int:
    """A priority that fits its column; higher goes first."""
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidCall("priority", f"must be a whole number, not {_kind(priority)}")
    if not -32768 <= priority <= 32767:
        raise InvalidCall("priority", "must be from -32768 to 32767")
    return int(priority)


def check_times(now: datetime, not_before: object, expires_at: object) -> None:
    """Both are aware or None; the call does not expire before it may begin, nor before now."""
    begin, end = _aware("not_before", not_before), _aware("expires_at", expires_at)
    if end is None:
        return
    if end <= now:
        raise InvalidCall("expires_at", "is in the past")
    if begin is not None and end < begin:
        raise InvalidCall("expires_at", "is before not_before, so the call could never be made")


def check_unique_key(unique_key: object) -> str | None:
    """A non-empty text of at most 255 characters, or None."""
    if unique_key is None:
        return None
    if not isinstance(unique_key, str):
        raise InvalidCall("unique_key", f"must be a string, not {_kind(unique_key)}")
    if not unique_key:
        raise InvalidCall(
            "unique_key", "is empty: every such call would be the same; give None for no unique key"
        )
    return _fitting("unique_key", _plain("unique_key", unique_key))


def check_callback(callback: object) -> str | None:
    """The name of a Celery task, or None."""
    if callback is None:
        return None
    if not isinstance(callback, str):
        raise InvalidCall("callback", f"must be the name of a Celery task, not {_kind(callback)}")
    if not _TASK_NAME.fullmatch(callback):
        raise InvalidCall(
            "callback", "must be the name of a Celery task, such as 'shop.tasks.paid'"
        )
    return _fitting("callback", _storable("callback", callback))


# --- plain JSON


def _plain_copy(
    call_data: dict[Any, Any], max_bytes: int, secret_names: Collection[str]
) -> dict[str, Any]:
    """The value after a round trip through JSON, so that what is checked next is what will be read
    back.
    """
    has_secrets = _walk(call_data, max_bytes, secret_names)
    try:
        text = _encode(marked(call_data) if has_secrets else call_data)
        size = len(text) if text.isascii() else len(text.encode())
    except (ValueError, TypeError, RecursionError, OverflowError):
        raise InvalidCall("call_data", "cannot be written as JSON") from None
    if size > max_bytes:
        raise InvalidCall("call_data", f"is {size} bytes of JSON; MAX_CALL_BYTES is {max_bytes}")
    copy: dict[str, Any] = unmarked(_decode(text)) if has_secrets else _decode(text)
    return copy


def _walk(root: dict[Any, Any], max_bytes: int, secret_names: Collection[str]) -> bool:
    """Refuse, with its path, whatever is not JSON, too deep, too large or an unknown secret. Never
    recurses.

    Whether there is a secret.

    A path is kept as (path of the parent, key) and becomes text only in a refusal. `spent` never
    exceeds the size of the JSON and is bounded, so that a structure that shares its parts, or
    contains itself, ends the walk in time.
    """
    pending: list[tuple[Any, Any, int]] = [(root, None, 1)]
    spent, most, has_secrets = 0, 4 * max_bytes, False
    while pending:
        value, path, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise InvalidCall(_trail(path), f"is nested deeper than {MAX_DEPTH}")
        spent += 2 * len(value) + 1
        items: Iterable[tuple[Any, Any]]
        if isinstance(value, dict):
            items = value.items()
            spent += _checked_names(value, path)
        else:
            items = enumerate(value)
        if spent > most:
            break
        for key, item in items:
            kind = type(item)
            if kind is str:
                spent += len(item)
                if not item.isascii() or "\0" in item:
                    _check_text(item, (path, key))
            elif kind is dict or kind is list or isinstance(item, (dict, list, tuple)):
                pending.append((item, (path, key), depth + 1))
            elif kind is Secret:
                _check_secret(item, (path, key), secret_names)
                has_secrets = True
            elif item is not None and kind is not bool:
                spent += _checked_scalar(item, (path, key))
    if spent > most:
        raise InvalidCall(
            "call_data", f"is more than {most} bytes of JSON; MAX_CALL_BYTES is {max_bytes}"
        )
    return has_secrets


def _checked_names(value: dict[Any, Any], path: Any) -> int:
    spent = 0
    for key in value:
        if not isinstance(key, str):
            raise InvalidCall(
                _trail(path),
                f"has a key that is not a string but {_kind(key)}; JSON would change it",
            )
        spent += len(key)
        if not key.isascii() or "\0" in key:
            _check_text(key, path, "has a key that ")
    return spent


def _check_secret(secret: Secret, path: Any, secret_names: Collection[str]) -> None:
    """Of the names there are none is told: whoever reads the error may not be who wrote the
    settings.
    """
    if path[0] is None:
        raise InvalidCall(
            _trail(path), "must not be a secret, which may stand for any string inside params"
        )
    _check_text(secret.name, path, "is a secret whose name ")
    if secret.name not in secret_names:
        raise InvalidCall(
            _trail(path), f"names a secret that is not in SECRETS: {_shown(secret.name)}"
        )


def _check_text(text: str, path: Any, what: str = "") -> None:
    flaw = _text_flaw(text)
    if flaw:
        raise InvalidCall(_trail(path), what + flaw)


def _text_flaw(text: str) -> str:
    if "\0" in text:
        return "contains a NUL character, which databases cannot store"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "contains half of a surrogate pair, which is not text"
    return ""


def _checked_scalar(item: Any, path: Any) -> int:
    """How many bytes the value takes beyond the one that every value takes. Refuses what JSON has
    no word for.
    """
    if isinstance(item, str):
        _check_text(item, path)
        return len(item)
    if isinstance(item, float):
        if not isfinite(item):
            raise InvalidCall(_trail(path), "is not a finite number; JSON has no NaN or Infinity")
        return 0
    if not isinstance(item, int):
        advice = next(
            (advice for kinds, advice in _ADVICE if isinstance(item, kinds)),
            "send a string or a number",
        )
        raise InvalidCall(_trail(path), f"is not JSON but {_kind(item)}; {advice}")
    if -_WIDE <= item < _WIDE:
        return 0
    if not -_HUGE < item < _HUGE:
        raise InvalidCall(_trail(path), f"is a number of more than {MAX_DIGITS} digits")
    return item.bit_length() * 3 // 10


# --- the method and its params


def _checked_method(plain: dict[str, Any], methods: Collection[str]) -> str:
    method = plain.get("method")
    if not isinstance(method, str) or not method:
        state = f"must be a string, not {_kind(method)}" if method else "is missing"
        raise InvalidCall(
            "method", f"{state}: an HTTP verb, 'send_email', 'celery_task' or a handler's name"
        )
    if method in methods:
        return method
    lowered = method.lower()
    if lowered not in methods:
        raise InvalidCall("method", f"{_shown(method)} is unknown{_suggest(lowered, methods)}")
    return lowered


def _check_http(
    params: dict[str, Any], allowed_hosts: tuple[str, ...], allowed_networks: tuple[str, ...]
) -> None:
    if "url" not in params:
        raise InvalidCall("params.url", "is missing: the http or https URL to call")
    for name, value in params.items():
        if name == "url":
            if not isinstance(value, Secret):
                check_url(value, allowed_hosts=allowed_hosts, allowed_networks=allowed_networks)
        elif name not in _HTTP_PARAMS:
            why = _ELSEWHERE.get(name) or f"is unknown{_suggest(name, _HTTP_PARAMS)}"
            raise InvalidCall(_path("params", name), why)
        elif value is not None and name != "json":
            _HTTP_CHECKS[name](value)
    if params.get("data") is not None and params.get("json") is not None:
        raise InvalidCall("params.data", "and params.json are both given; a call has one body")


def _checked_url(
    url: str, field: str, allowed_hosts: tuple[str, ...], allowed_networks: tuple[str, ...]
) -> tuple[str, int]:
    """Only plain shapes pass, so that no other parser of URLs can see another host in them."""
    if _UNSAFE_IN_URL.search(url):
        raise InvalidCall(
            field, "contains white space, a control character or a backslash; percent-encode it"
        )
    match = _URL.fullmatch(url)
    if match is None:
        raise InvalidCall(field, "must begin with http:// or https://")
    authority = match.group(2)
    if "@" in authority:
        raise InvalidCall(
            field, "contains user:password@; give params.auth = [user, password] instead"
        )
    if len(authority) > LONGEST_AUTHORITY:  # before any cache sees it
        raise InvalidCall(field, "has a host with characters or lengths that no host name has")
    host, why = _read_authority(authority)
    if why:
        raise InvalidCall(field, why)
    port = _port_of(authority) or (443 if match.group(1).lower() == "https" else 80)
    forbidden = _forbidden(host, port, allowed_hosts, allowed_networks)
    if forbidden:
        raise NotAllowed(f"{field}: {forbidden}")
    return host, port


def _port_of(authority: str) -> int:
    """The port of an authority that was read; 0 where it names none."""
    port = authority.rpartition(":")[2] if not authority.endswith("]") and ":" in authority else ""
    return int(port or 0)


@lru_cache(maxsize=1024)
def _read_authority(authority: str) -> tuple[str, str]:
    """(host, "") or ("", what is wrong). The host is what requests would connect to, without its
    brackets.
    """
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        return "", "has a host that cannot be read"
    host, port = match.groups()
    if port is not None and not (
        port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535
    ):
        return "", "has a port that is not a number from 1 to 65535"
    if not host:
        return "", "has no host"
    if host.startswith("["):
        return _read_ipv6(host[1:-1])
    if not host.isascii():
        host = _ascii_host(host)
    host = host.lower().removesuffix(".")
    if not _HOST.fullmatch(host):
        return "", "has a host with characters or lengths that no host name has"
    return host, ""


def _read_ipv6(host: str) -> tuple[str, str]:
    import ipaddress

    try:
        return str(ipaddress.IPv6Address(host)), ""
    except ValueError:
        return "", "has brackets around something that is not an IPv6 address"


def _ascii_host(host: str) -> str:
    """As requests encodes it: full-width digits and the like become ASCII, other letters become
    xn--...
    """
    import idna

    try:
        return idna.encode(host, uts46=True).decode("ascii")
    except (idna.IDNAError, UnicodeError):
        return ""


@lru_cache(maxsize=1024)
def _forbidden(
    host: str, port: int, allowed_hosts: tuple[str, ...], allowed_networks: tuple[str, ...]
) -> str | None:
    """Why this host may not be called, as far as can be told without resolving it."""
    why: str | None = host_refusal(host, allowed_hosts, port)
    if why is None:
        address = literal_address(host)
        if address is not None:
            why = refusal(address, allowed_networks)
    return why


def _check_headers(headers: Any) -> None:
    seen = set()
    for name, value in _named("params.headers", headers).items():
        lowered = name.lower()
        if not _TOKEN.fullmatch(name):
            raise InvalidCall("params.headers", f"{_shown(name)} is not a header's name")
        if lowered in _FRAMING:
            raise InvalidCall(
                _path("params.headers", name), "is written from the URL and the body; leave it out"
            )
        if lowered in seen:
            raise InvalidCall(
                _path("params.headers", name), "is given twice, in different spellings"
            )
        seen.add(lowered)
        if type(value) is str:
            _check_header_value("params.headers", name, value)
        elif not _is_secret(value):
            raise InvalidCall(
                _path("params.headers", name), f"must be a string, not {_kind(value)}"
            )


def _check_header_value(field: str, name: str, value: str) -> None:
    if _CONTROL.search(value):
        why = "contains a line break or a control character"
    elif value[:1] in (" ", "\t") or value[-1:] in (" ", "\t"):
        why = "begins or ends with white space"
    elif not value.isascii() and max(value) > "\xff":
        why = "contains a character outside Latin-1; encode it as the API documents"
    else:
        return
    raise InvalidCall(_path(field, name), why)


def _check_cookies(cookies: Any) -> None:
    for name, value in _named("params.cookies", cookies).items():
        if not _TOKEN.fullmatch(name):
            raise InvalidCall("params.cookies", f"{_shown(name)} is not a cookie's name")
        if _is_secret(value):
            continue
        if not isinstance(value, str):
            raise InvalidCall(
                _path("params.cookies", name), f"must be a string, not {_kind(value)}"
            )
        if _COOKIE_CONTROL.search(value):
            raise InvalidCall(
                _path("params.cookies", name), "contains ';', a line break or a control character"
            )
        if max(value, default="") > "\xff":
            raise InvalidCall(_path("params.cookies", name), "contains a character outside Latin-1")


def _check_auth(auth: Any) -> None:
    if not isinstance(auth, list) or len(auth) != 2:
        raise InvalidCall(
            "params.auth",
            "must be [user, password]; for another scheme give an Authorization header",
        )
    for index, part in enumerate(auth):
        field = f"params.auth[{index}]"
        if _is_secret(part):
            continue
        if not isinstance(part, str):
            raise InvalidCall(field, f"must be a string, not {_kind(part)}")
        if _CONTROL.search(part):
            raise InvalidCall(field, "contains a line break or a control character")
        if max(part, default="") > "\xff":
            raise InvalidCall(
                field, "contains a character outside Latin-1; encode it as the API documents"
            )
    if isinstance(auth[0], str) and ":" in auth[0]:
        raise InvalidCall(
            "params.auth[0]", "contains ':', which basic authentication keeps for its own use"
        )


def _check_query(value: Any) -> None:
    _check_fields("params.params", value)


def _check_data(value: Any) -> None:
    _check_fields("params.data", value)


def _check_fields(field: str, value: Any) -> None:
    """A string, or names with one value or several: what a query or a form can say."""
    if isinstance(value, str) or _is_secret(value):
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
        raise InvalidCall(field, f"must be a string, a dict or a list of pairs, not {_kind(value)}")


def _check_field_value(field: str, name: str | int, value: Any) -> None:
    if isinstance(value, dict):
        raise InvalidCall(
            _path(field, name),
            f"is {_kind(value)}, which a query or form cannot carry; use params.json",
        )
    if isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, list | dict):
                raise InvalidCall(
                    f"{_path(field, name)}[{index}]",
                    "is nested, which a query or form cannot carry",
                )


_HTTP_CHECKS: dict[str, Callable[[Any], None]] = {
    "headers": _check_headers,
    "cookies": _check_cookies,
    "auth": _check_auth,
    "params": _check_query,
    "data": _check_data,
}


def _check_email(params: dict[str, Any]) -> None:
    _refuse_unknown(params, _PARAMS["send_email"])
    if not params.get("to"):
        raise InvalidCall("params.to", "is missing: an address, or a list of them")
    for name, value in params.items():
        field = f"params.{name}"
        if value is None or _is_secret(value):
            continue
        if name in ("to", "cc", "bcc", "reply_to"):
            _check_addresses(field, value)
        elif not isinstance(value, str):
            raise InvalidCall(field, f"must be a string, not {_kind(value)}")
        elif name in ("subject", "from_email"):
            _check_one_line(field, value)


def _check_addresses(field: str, value: Any) -> None:
    for index, address in enumerate([value] if isinstance(value, str) else _listed(field, value)):
        place = field if isinstance(value, str) else f"{field}[{index}]"
        if _is_secret(address):
            continue
        if not isinstance(address, str) or not address.strip():
            raise InvalidCall(place, "must be an address")
        _check_one_line(place, address)


def _check_one_line(field: str, value: str) -> None:
    if _LINE_BREAK.search(value):
        raise InvalidCall(field, "contains a line break, which would begin another mail header")


def _check_task(params: dict[str, Any]) -> None:
    _refuse_unknown(params, _PARAMS["celery_task"])
    name = params.get("name")
    if not _is_secret(name) and not (isinstance(name, str) and _TASK_NAME.fullmatch(name)):
        raise InvalidCall(
            "params.name", "must be the name of a Celery task, such as 'shop.tasks.ship'"
        )
    if params.get("args") is not None:
        _listed("params.args", params["args"])
    if params.get("kwargs") is not None:
        _named("params.kwargs", params["kwargs"])
    if params.get("options") is not None:
        _named("params.options", params["options"])


def _refuse_unknown(params: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in params:
        if name not in known:
            raise InvalidCall(_path("params", name), f"is unknown{_suggest(name, known)}")


def _listed(field: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidCall(field, f"must be a list, not {_kind(value)}")
    return value


def _named(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidCall(field, f"must be a dict of names, not {_kind(value)}")
    return value


def _is_secret(value: Any) -> bool:
    return isinstance(value, Secret)


# --- send's other arguments


def _checked_key_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise InvalidCall(
            "key",
            f"has a name that is not a string but {_kind(name)}" if name else "has an empty name",
        )
    return _plain("key", name)


def _checked_key_value(name: str, value: object) -> str:
    field = _path("key", name)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidCall(field, f"must be a string or a whole number, not {_kind(value)}")
    if isinstance(value, str):
        return _plain(field, value)
    if abs(value) >= 10**MAX_TEXT:
        _refuse_length("key")
    return int.__repr__(value)


def _is_json_object(text: str) -> bool:
    if not text.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _checked_unit(unit: object) -> str:
    if not isinstance(unit, str) or not unit:
        raise InvalidCall("cost", "has a unit that is not a name, such as 'tokens'")
    return _fitting("cost", _plain("cost", unit))


def _checked_amount(field: str, amount: object) -> int:
    if isinstance(amount, bool) or not isinstance(amount, int):
        raise InvalidCall(field, f"must be a whole number, not {_kind(amount)}")
    if not 0 <= amount <= MAX_COST:
        raise InvalidCall(
            field, "must not be negative" if amount < 0 else f"must not be over {MAX_COST}"
        )
    return int(amount)


def _aware(field: str, value: object) -> datetime | None:
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise InvalidCall(field, f"must be a datetime, not {_kind(value)}")
    if value.utcoffset() is None:
        raise InvalidCall(
            field, "is naive; give it a time zone, as django.utils.timezone.now() has"
        )
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise InvalidCall(field, "is out of the range of dates in UTC") from None


def _storable(field: str, text: str) -> str:
    flaw = _text_flaw(text)
    if flaw:
        raise InvalidCall(field, flaw)
    return str(text)


def _plain(field: str, text: str) -> str:
    """A name that may be shown anywhere: in a log, a table, a terminal."""
    if _UNSEEN.search(text):
        raise InvalidCall(field, "contains a control character or a line break")
    return _storable(field, text)


def _fitting(field: str, text: str) -> str:
    if len(text) > MAX_TEXT:
        _refuse_length(field)
    return text


def _refuse_length(field: str) -> NoReturn:
    raise InvalidCall(field, f"is longer than {MAX_TEXT} characters")


# --- the words of a refusal


def _trail(path: Any) -> str:
    """The text of a path kept as (parent, key)."""
    keys = []
    while path is not None:
        path, key = path
        keys.append(key)
    trail = ""
    for key in reversed(keys):
        trail = _path(trail, key)
    trail = trail or "call_data"
    return trail if len(trail) <= 200 else f"{trail[:100]}...{trail[-80:]}"


def _path(parent: str, key: object) -> str:
    if isinstance(key, int):
        return f"{parent}[{key}]"
    shown = key if isinstance(key, str) and _PLAIN_NAME.fullmatch(key) else f"[{_shown(key)}]"
    return f"{parent}.{shown}" if parent and not shown.startswith("[") else f"{parent}{shown}"


def _shown(name: object) -> str:
    text = ascii(str(name))
    return text if len(text) <= 42 else f"{text[:38]}...'"


def _kind(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, str):
        return "a string" if value else "an empty string"
    if isinstance(value, dict) and len(value) == 1 and MARK in value:
        return "a dict (if it was to name a secret: that is callqueue.Secret(NAME) now)"
    name = type(value).__name__
    return _KINDS.get(name, name)


_KINDS = {
    "Secret": "a secret",
    "dict": "a dict",
    "list": "a list",
    "int": "a number",
    "float": "a number",
    "bool": "a boolean",
}


def _suggest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are {', '.join(map(repr, names[:12]))}" if names else ""
