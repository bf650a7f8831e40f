"""What people are shown: requests and answers with everything that is probably secret replaced by
"[redacted]".

Stored values enter, even malformed ones; copies for the admin, the logs and the error texts leave.
Never raises, never touches what is stored, and shows a secret by its name, which tells nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from callqueue.security.credentials import SCHEME_AND_TOKEN, is_telling
from callqueue.security.secrets import Secret

REDACTED = "[redacted]"

_IN_QUERY = frozenset({"key", "sig", "pass", "hmac"})  # too common in bodies, telling in a query
MAX_DEPTH = 80
_SHOWN_SECRET = re.compile(r"\[secret [^\]]+\]")

_USERINFO = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]{0,20}://)[^\s/?#@\"'<>\\]{1,512}@")
_PAIR = re.compile(r"(?<![\w.%+-])([\w.%+\[\]-]{1,80})=([^&;\s\"'<>#\\,]{1,8192})")
_QUOTED = re.compile(
    r"""(["'])([\w.$ -]{1,80})\1(\s{0,4}:\s{0,4})"""
    r"""(?:"(?:[^"\\]|\\.){0,8192}"?|'(?:[^'\\]|\\.){0,8192}'?|-?\d[\w.+-]{0,100})"""
)
_ESCAPED = re.compile(
    r"""(\\{1,4}")([\w.$ -]{1,80})\1(\s{0,4}:\s{0,4})"""
    r"""(?:\\{1,4}"[^"\\]{0,8192}\1?|-?\d[\w.+-]{0,100})"""
)
_HEADER_LINE = re.compile(
    r"(?im)^([ \t>]{0,8})([A-Za-z0-9_-]{1,80})([ \t]{0,4}:[ \t]{0,4})(\S[^\r\n]{0,8192})"
)


def redact_headers(headers: Any) -> dict[str, Any]:
    """A copy of the headers, the telling ones redacted whole, tokens inside the others too."""
    if not isinstance(headers, Mapping):
        return {}
    return {str(name): _by_name(name, value, 0) for name, value in headers.items()}


def redact_url(url: Any) -> Any:
    """The URL without its user:password, and without the values of telling query parameters."""
    if not isinstance(url, str):
        return _any(url, 0)
    return _PAIR.sub(_redact_pair, _USERINFO.sub(rf"\1{REDACTED}@", url))


def redact_params(params: Any) -> Any:
    """A copy of a call's params for showing; a secret is shown as "[secret NAME]"."""
    return _shown(redacted(params))


def redacted(params: Any) -> Any:
    """A redacted copy of a call's params in which a secret is still a Secret."""
    if not isinstance(params, Mapping):
        return _any(params, 0)
    return {
        str(name): _PLACES.get(str(name), _by_name)(name, value, 1)
        for name, value in params.items()
    }


def hidden_in(text: str) -> str:
    """What in a person's text stands for something that is not shown; "" where nothing does."""
    found = _SHOWN_SECRET.search(text)
    return REDACTED if REDACTED in text else found.group() if found else ""


def redact_text(text: str) -> str:
    """Free text without bearer tokens, passwords in URLs, telling pairs and header lines."""
    # each answer's headers come this way: most hold nothing that an expression could begin with
    has_colon = ":" in text
    if has_colon:
        text = _HEADER_LINE.sub(_redact_line, text)
        text = _USERINFO.sub(rf"\1{REDACTED}@", text)
    if " " in text or "\t" in text:
        text = SCHEME_AND_TOKEN.sub(_redact_scheme, text)
    if has_colon:
        text = _ESCAPED.sub(_redact_quoted, _QUOTED.sub(_redact_quoted, text))
    return _PAIR.sub(_redact_pair, text) if "=" in text else text


def printable(text: str) -> str:
    """The text in one line, with escapes for what is not seen or would move a cursor."""
    return (
        text
        if text.isprintable()
        else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    )


# --- by place


def _shown(value: Any) -> Any:
    """A redacted copy as JSON: nothing in it is deeper than what was redacted, so this ends."""
    if isinstance(value, Secret):
        return f"[secret {value.name}]"
    if isinstance(value, dict):
        return {name: _shown(item) for name, item in value.items()}
    return [_shown(item) for item in value] if isinstance(value, list) else value


def _by_name(name: object, value: Any, depth: int) -> Any:
    if value is None or _tells_nothing(value):
        return value
    if is_telling(name) and not _is_count(name, value):
        return REDACTED
    return _any(value, depth)


def _is_count(name: object, value: Any) -> bool:
    """ "max_tokens": 1500 is an amount, not a token; flags and empty values tell nothing either."""
    if isinstance(value, bool) or value in ("", [], {}):
        return True
    return isinstance(value, int | float) and str(name).lower().endswith("tokens")


def _any(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        return REDACTED
    if isinstance(value, str):
        return _text_or_json(value)
    if isinstance(value, Mapping):
        return {str(name): _by_name(name, item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_any(item, depth + 1) for item in value]
    return value


def _text_or_json(text: str) -> str:
    """JSON that travels as text is redacted by its names; other text as text."""
    if text[:1] in "{[" and text[-1:] in "}]" and len(text) > 1:
        try:
            read = json.loads(text)
            return json.dumps(_any(read, 1), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return redact_text(text)


def _url(_name: object, value: Any, _depth: int) -> Any:
    return redact_url(value)


def _headers(_name: object, value: Any, depth: int) -> Any:
    return redact_headers(value) if isinstance(value, Mapping) else _any(value, depth)


def _cookies(_name: object, value: Any, depth: int) -> Any:
    """A cookie is a credential, whatever it is called."""
    if not isinstance(value, Mapping):
        return _by_name("cookie", value, depth)
    return {str(name): item if _tells_nothing(item) else REDACTED for name, item in value.items()}


def _auth(_name: object, value: Any, depth: int) -> Any:
    """[user, password] without the password; a user without one is an API key."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return _by_name("auth", value, depth)
    user, password = value
    if not isinstance(user, str) or password in ("", None):
        user = user if _tells_nothing(user) else REDACTED
    return [user, password if _tells_nothing(password) or password in ("", None) else REDACTED]


def _fields(_name: object, value: Any, depth: int) -> Any:
    """A query or a form: text, names with values, or pairs."""
    if isinstance(value, Mapping):
        return {str(name): _by_field(name, item, depth) for name, item in value.items()}
    if isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in value
    ):
        return [[_any(name, depth), _by_field(name, item, depth)] for name, item in value]
    return _any(value, depth)


def _by_field(name: object, value: Any, depth: int) -> Any:
    if str(name).lower() in _IN_QUERY and value not in ("", None) and not _tells_nothing(value):
        return REDACTED
    return _by_name(name, value, depth)


_PLACES = {
    "url": _url,
    "headers": _headers,
    "cookies": _cookies,
    "auth": _auth,
    "params": _fields,
    "data": _fields,
}


def _tells_nothing(value: Any) -> bool:
    """Whether it is a secret, or what is shown in its place."""
    return isinstance(value, Secret) or (
        isinstance(value, str) and _SHOWN_SECRET.fullmatch(value) is not None
    )


# --- inside text


def _redact_pair(match: re.Match[str]) -> str:
    name = match.group(1)
    if is_telling(name) or name.lower() in _IN_QUERY:
        return f"{name}={REDACTED}"
    return match.group()


def _redact_scheme(match: re.Match[str]) -> str:
    """ "Basic" and "Token" are words too: what follows them is a credential when it does not look
    like one.
    """
    scheme, gap, value = match.groups()
    if scheme.lower() == "bearer" or not value.isalpha() or len(value) > 24:
        return f"{scheme}{gap}{REDACTED}"
    return match.group()


def _redact_quoted(match: re.Match[str]) -> str:
    quotation, name, colon = match.groups()
    if not is_telling(name) or (name.lower().endswith("tokens") and match.group()[-1].isdigit()):
        return match.group()
    return f"{quotation}{name}{quotation}{colon}{quotation}{REDACTED}{quotation}"


def _redact_line(match: re.Match[str]) -> str:
    indent, name, colon, _ = match.groups()
    return f"{indent}{name}{colon}{REDACTED}" if is_telling(name) else match.group()
