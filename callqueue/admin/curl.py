"""A call as a curl command that is safe to paste: no secrets, nothing that a shell acts on."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from callqueue.handlers import HTTP_METHODS
from callqueue.security.redaction import redact_all_but_secrets
from callqueue.security.secrets import Secret

_BEGIN, _END = "\ue000", "\ue001"  # around a secret's name while a command is put together
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # "@file: x" would be read from a file


def as_curl(method: str, params: Any) -> str:
    """The call as one shell line, redacted; "" if not HTTP. A secret is "$NAME", to be exported."""
    if str(method).lower() not in HTTP_METHODS or not isinstance(params, Mapping):
        return ""
    shown, verb = _mark_secrets(redact_all_but_secrets(params)), str(method).upper()
    headers, data = shown.get("headers"), shown.get("data")
    given = headers if isinstance(headers, dict) else {}
    lines = {name: value for name, value in given.items() if _HEADER_NAME.fullmatch(name)}
    kind, body = None, data
    if shown.get("json") is not None:
        kind, body = "application/json", json.dumps(shown["json"], ensure_ascii=False, default=str)
    elif data is not None and not isinstance(data, str):
        kind, body = "application/x-www-form-urlencoded", _url_encoded(data)
    if body is not None and "content-type" not in map(str.lower, lines):
        lines = {"Content-Type": kind, **lines}  # curl has one of its own
    if isinstance(cookies := shown.get("cookies"), dict) and cookies:
        lines["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
    words = ["curl --globoff", "--head" if verb == "HEAD" else f"--request {verb}"]
    words += [f"--header {_quoted(_header_line(name, value))}" for name, value in lines.items()]
    if isinstance(auth := shown.get("auth"), list):
        words.append(f"--user {_quoted(':'.join(map(str, auth)))}")
    if body is not None:
        words.append(f"--data-raw {_quoted(body)}")
    url, mark, fragment = str(shown.get("url") or "").partition("#")
    if query := _url_encoded(shown.get("params") or ""):
        url += f"{'&' if '?' in url else '?'}{query}"
    return " ".join([*words, f"--url {_quoted(url + mark + fragment)}"])


def _mark_secrets(value: Any) -> Any:
    # a secret becomes the name of a shell's variable, between marks that no text keeps
    if isinstance(value, Secret):
        return _BEGIN + re.sub(r"\W|^(?=\d)", "_", value.name, flags=re.ASCII) + _END
    if isinstance(value, str):
        return value.replace(_BEGIN, "\ufffd").replace(_END, "\ufffd")
    if isinstance(value, Mapping):
        return {_mark_secrets(str(name)): _mark_secrets(item) for name, item in value.items()}
    return [_mark_secrets(item) for item in value] if isinstance(value, list) else value


def _url_encoded(fields: Any) -> str:
    pairs = list(fields.items()) if isinstance(fields, dict) else fields
    if not isinstance(pairs, list) or not all(isinstance(p, list | tuple) for p in pairs):
        return str(fields)
    listed = [(p[0], p[1] if isinstance(p[1], list) else [p[1]]) for p in pairs if len(p) == 2]
    every = [(str(name), str(one)) for name, all_ in listed for one in all_ if one is not None]
    text = urlencode(every, safe="[]", errors="replace")
    return text.replace(quote(_BEGIN), _BEGIN).replace(quote(_END), _END)


def _header_line(name: str, value: Any) -> str:
    if value is None:  # taken away, of those that curl adds
        return f"{name}:"
    text = re.sub("[\r\n]", " ", str(value))
    return f"{name}: {text}" if text else f"{name};"


def _quoted(text: str) -> str:
    """One word: secrets in double quotes, control characters as bash, zsh, POSIX 2024 have it."""
    words = []
    for index, part in enumerate(re.split(f"{_BEGIN}(\\w*){_END}", text.replace("\0", ""))):
        if index % 2:
            words.append(f'"${part}"')
        elif part.isprintable():
            words.append(shlex.quote(part) if part else "")
        else:
            octal = (f"\\{byte:03o}" for byte in part.encode("utf-8", "replace"))
            words.append(f"$'{''.join(octal)}'")
    return "".join(words) or "''"
