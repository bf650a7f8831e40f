"""A call as a curl command that is safe to paste: without its secrets, and without anything that a
shell or a terminal would act on.

A method and params as they are stored enter; one line leaves. Secrets become "$NAME".
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote_plus

from callqueue.handlers import HTTP_METHODS
from callqueue.security.redaction import MAX_DEPTH, REDACTED, redacted
from callqueue.security.secrets import Secret

_BEGIN, _END = "\ue000", "\ue001"  # around a secret's name while a command is put together
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def as_curl(method: str, params: Any) -> str:
    """The call as a command for a shell, safe to paste; empty for what is not HTTP.

    Secrets become "$NAME", to be set in the environment; what would be redacted is.
    """
    if str(method).lower() not in HTTP_METHODS or not isinstance(params, Mapping):
        return ""
    shown = redacted(_marked(params, 0))
    verb = str(method).upper()
    body, content_type = _body(shown)
    words = ["curl", "--globoff", "--head" if verb == "HEAD" else f"--request {verb}"]
    words += _headers(shown, content_type)
    words += _credentials(shown)
    if body is not None:
        words.append(f"--data-raw {_shell(body)}")
    words.append(f"--url {_shell(_with_query(_text(shown.get('url')), shown.get('params')))}")
    return " ".join(words)


def _headers(shown: Mapping[str, Any], content_type: str | None) -> list[str]:
    """The call's headers, and the content type of a body where they name none: curl has its own."""
    headers = shown.get("headers")
    given: dict[str, Any] = headers if isinstance(headers, dict) else {}
    sendable = [name for name in given if _HEADER_NAME.fullmatch(name)]
    lines = [_header_line(name, given[name]) for name in sendable]
    if content_type is not None and "content-type" not in map(str.lower, given):
        lines.insert(0, f"Content-Type: {content_type}" if content_type else "Content-Type:")
    return [f"--header {_shell(line)}" for line in lines]


def _marked(value: Any, depth: int) -> Any:
    """References become marks that survive redaction and encoding, and end as "$NAME" in the
    command.
    """
    if depth > MAX_DEPTH:
        return REDACTED
    if isinstance(value, str):
        return value.replace(_BEGIN, "\ufffd").replace(_END, "\ufffd")
    if isinstance(value, Secret):
        return Secret(re.sub(r"\W|^(?=\d)", "_", value.name, flags=re.ASCII))
    if isinstance(value, Mapping):
        return {_marked(str(name), depth): _marked(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, depth + 1) for item in value]
    return value


def _text(value: Any) -> str:
    if isinstance(value, Secret):
        return f"{_BEGIN}{value.name}{_END}"
    return "" if value is None else str(value)


def _shell(text: str) -> str:
    """One shell word: everything in single quotes, except the references, in double quotes.

    What a terminal would act on, were the command pasted into it, is escaped: the command is one
    line, and nothing but it.
    """
    words = []
    for index, part in enumerate(re.split(f"{_BEGIN}(\\w*){_END}", text.replace("\0", ""))):
        if index % 2:
            words.append(f'"${part}"')
        elif part:
            words.append(shlex.quote(part) if part.isprintable() else _escaped(part))
    return "".join(words) or "''"


def _escaped(text: str) -> str:
    """A part of a word in the quotes of bash, zsh and POSIX 2024 that take escapes."""
    safe = (char if char.isprintable() and char not in "\\'" else _octal(char) for char in text)
    return f"$'{''.join(safe)}'"


def _octal(char: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", "replace"))


def _header_line(name: str, value: Any) -> str:
    if value is None:  # taken away, of those that curl adds
        return f"{name}:"
    text = _text(value).replace("\r", " ").replace("\n", " ")
    return f"{name}: {text}" if text else f"{name};"


def _credentials(shown: Mapping[str, Any]) -> list[str]:
    words = []
    cookies, auth = shown.get("cookies"), shown.get("auth")
    if isinstance(cookies, dict) and cookies:
        pairs = "; ".join(f"{name}={_text(value)}" for name, value in cookies.items())
        words.append(f"--header {_shell(_header_line('Cookie', pairs))}")
    if isinstance(auth, list):
        words.append(f"--user {_shell(':'.join(map(_text, auth)))}")
    return words


def _body(shown: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The body and its content type; a text that the caller wrote has none of its own."""
    data = shown.get("data")
    if shown.get("json") is not None:
        text = json.dumps(shown["json"], ensure_ascii=False, default=_text)
        return text, "application/json"
    if data is None:
        return None, None
    if isinstance(data, str | Secret):
        return _text(data), ""
    return _encoded(data), "application/x-www-form-urlencoded"


def _with_query(url: str, params: Any) -> str:
    query = _text(params) if isinstance(params, str | Secret) else _encoded(params)
    if not query:
        return url
    address, mark, fragment = url.partition("#")
    return f"{address}{'&' if '?' in address else '?'}{query}{mark}{fragment}"


def _encoded(fields: Any) -> str:
    """A form or a query, as requests encodes it; None is left out."""
    pairs = list(fields.items()) if isinstance(fields, Mapping) else fields
    encoded = []
    for pair in pairs if isinstance(pairs, list) else []:
        if isinstance(pair, list | tuple) and len(pair) == 2:
            items = pair[1] if isinstance(pair[1], list) else [pair[1]]
            name = quote_plus(str(pair[0]))
            encoded += [f"{name}={_encoded_value(item)}" for item in items if item is not None]
    return "&".join(encoded)


def _encoded_value(value: Any) -> str:
    if isinstance(value, Secret) or value == REDACTED:
        return _text(value)
    return quote_plus(str(value), errors="replace")
