"""What people are shown: requests and answers with everything that is probably secret replaced by
"[redacted]".

Stored values enter, even malformed ones; copies for the admin, the logs and the error texts leave.
Never raises, never touches what is stored, and shows a secret by its name, which tells nothing.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote_plus

from callqueue.security.secrets import Secret

REDACTED = "[redacted]"

_TELLING = ("token", "secret", "password", "passwd", "passphrase", "apikey", "signature", "credential", "session",
            "authorization", "privatekey", "accesskey")  # fmt: skip
_NAMES = frozenset(
    {"cookie", "setcookie", "auth", "pwd", "jwt", "bearer", "xcsrf", "cvc", "cvv", "otp"}
)
_IN_QUERY = frozenset({"key", "sig", "pass", "hmac"})  # too common in bodies, telling in a query
_MAX_DEPTH = 80
_SHOWN_SECRET = re.compile(r"\[secret [^\]]+\]")
_BEGIN, _END = "\ue000", "\ue001"  # around a secret's name while a shell command is put together
_HTTP_VERBS = frozenset({"get", "options", "head", "post", "put", "patch", "delete"})
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

_USERINFO = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]{0,20}://)[^\s/?#@\"'<>\\]{1,512}@")
_PAIR = re.compile(r"(?<![\w.%+-])([\w.%+\[\]-]{1,80})=([^&;\s\"'<>#\\,]{1,8192})")
_SCHEME = re.compile(r"\b(Bearer|Basic|Digest|Negotiate|Token|ApiKey|AWS4-HMAC-SHA256)([ \t]{1,4})"
                     r"([A-Za-z0-9._~+/=:-]{8,8192})", re.IGNORECASE)  # fmt: skip
_QUOTED = re.compile(r"""(["'])([\w.$ -]{1,80})\1(\s{0,4}:\s{0,4})"""
                     r"""(?:"(?:[^"\\]|\\.){0,8192}"?|'(?:[^'\\]|\\.){0,8192}'?|-?\d[\w.+-]{0,100})""")  # fmt: skip
_ESCAPED = re.compile(r"""(\\{1,4}")([\w.$ -]{1,80})\1(\s{0,4}:\s{0,4})"""
                      r"""(?:\\{1,4}"[^"\\]{0,8192}\1?|-?\d[\w.+-]{0,100})""")  # fmt: skip
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
    """A copy of a call's params for showing, whatever its method; a secret is shown as "[secret
    NAME]".
    """
    return _shown(_redacted(params))


def hidden_in(text: str) -> str:
    """What in a text that a person wrote stands for something that is not shown; empty where
    nothing does.
    """
    found = _SHOWN_SECRET.search(text)
    return REDACTED if REDACTED in text else found.group() if found else ""


def redact_text(text: str) -> str:
    """Free text (an error, a body, a log line) without bearer tokens, passwords in URLs, telling
    pairs and headers.
    """
    has_colon = (
        ":" in text
    )  # each answer's headers come this way: most hold nothing that an expression could begin with
    if has_colon:
        text = _HEADER_LINE.sub(_redact_line, text)
        text = _USERINFO.sub(rf"\1{REDACTED}@", text)
    if " " in text or "\t" in text:
        text = _SCHEME.sub(_redact_scheme, text)
    if has_colon:
        text = _ESCAPED.sub(_redact_quoted, _QUOTED.sub(_redact_quoted, text))
    return _PAIR.sub(_redact_pair, text) if "=" in text else text


def is_telling(name: object) -> bool:
    """Whether a header, field or parameter of this name probably holds a secret."""
    return _is_telling(str(name)[:200])


@lru_cache(maxsize=2048)
def _is_telling(name: str) -> bool:
    flat = re.sub(r"[^a-z0-9]", "", name.lower())
    return flat in _NAMES or any(word in flat for word in _TELLING)


def as_curl(method: str, params: Any) -> str:
    """The call as a command for a shell, safe to paste; empty for what is not HTTP.

    Secrets become "$NAME", to be set in the environment; what would be redacted is.
    """
    if str(method).lower() not in _HTTP_VERBS or not isinstance(params, Mapping):
        return ""
    shown = _redacted(_marked(params, 0))
    verb = str(method).upper()
    words = ["curl", "--globoff", "--head" if verb == "HEAD" else f"--request {verb}"]
    body, content_type = _curl_body(shown)
    headers = shown.get("headers") if isinstance(shown.get("headers"), dict) else {}
    given = {name.lower() for name in headers}
    if body is not None and "content-type" not in given:
        words.append(
            f"--header {_shell(f'Content-Type: {content_type}' if content_type else 'Content-Type:')}"
        )
    words += [
        f"--header {_shell(_header_line(name, value))}"
        for name, value in headers.items()
        if _sendable(name)
    ]
    words += _curl_credentials(shown)
    if body is not None:
        words.append(f"--data-raw {_shell(body)}")
    words.append(f"--url {_shell(_with_query(_text(shown.get('url')), shown.get('params')))}")
    return " ".join(words)


def printable(text: str) -> str:
    """The text with escapes for what would not be seen, or would move a terminal's cursor: a line
    stays one line.
    """
    return (
        text
        if text.isprintable()
        else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    )


# --- by place


def _redacted(params: Any) -> Any:
    if not isinstance(params, Mapping):
        return _any(params, 0)
    return {
        str(name): _PLACES.get(str(name), _by_name)(name, value, 1)
        for name, value in params.items()
    }


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
    if depth > _MAX_DEPTH:
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


def _is_reference(value: Any) -> bool:
    return isinstance(value, Secret)


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


# --- a shell command


def _marked(value: Any, depth: int) -> Any:
    """References become marks that survive redaction and encoding, and end as "$NAME" in the
    command.
    """
    if depth > _MAX_DEPTH:
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
    if _is_reference(value):
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
    return (
        "$'"
        + "".join(
            char if char.isprintable() and char not in "\\'" else _octal(char) for char in text
        )
        + "'"
    )


def _octal(char: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", "replace"))


def _header_line(name: str, value: Any) -> str:
    text = _text(value).replace("\r", " ").replace("\n", " ")
    return f"{name}: {text}" if text else f"{name};"


def _sendable(name: str) -> bool:
    return _HEADER_NAME.fullmatch(name) is not None


def _curl_credentials(shown: Mapping[str, Any]) -> list[str]:
    words = []
    cookies, auth = shown.get("cookies"), shown.get("auth")
    if isinstance(cookies, dict) and cookies:
        pairs = "; ".join(f"{name}={_text(value)}" for name, value in cookies.items())
        words.append(f"--header {_shell(_header_line('Cookie', pairs))}")
    if isinstance(auth, list):
        words.append(f"--user {_shell(':'.join(map(_text, auth)))}")
    return words


def _curl_body(shown: Mapping[str, Any]) -> tuple[str | None, str]:
    """The body and its content type; a text that the caller wrote has none of its own."""
    data = shown.get("data")
    if shown.get("json") is not None:
        return _json_text(shown["json"]), "application/json"
    if data is None:
        return None, ""
    if isinstance(data, str) or _is_reference(data):
        return _text(data), ""
    return _encoded(data), "application/x-www-form-urlencoded"


def _json_text(value: Any) -> str:
    return json.dumps(_references_as_text(value), ensure_ascii=False, default=str)


def _references_as_text(value: Any) -> Any:
    if _is_reference(value):
        return _text(value)
    if isinstance(value, Mapping):
        return {name: _references_as_text(item) for name, item in value.items()}
    return [_references_as_text(item) for item in value] if isinstance(value, list) else value


def _with_query(url: str, params: Any) -> str:
    query = (
        params
        if isinstance(params, str)
        else _text(params)
        if _is_reference(params)
        else _encoded(params)
    )
    if not query:
        return url
    address, mark, fragment = url.partition("#")
    return f"{address}{'&' if '?' in address else '?'}{query}{mark}{fragment}"


def _encoded(fields: Any) -> str:
    """A form or a query, as requests encodes it; None is left out."""
    pairs = (
        list(fields.items())
        if isinstance(fields, Mapping)
        else fields
        if isinstance(fields, list)
        else []
    )
    encoded = []
    for pair in pairs:
        if isinstance(pair, list | tuple) and len(pair) == 2:
            items = pair[1] if isinstance(pair[1], list) else [pair[1]]
            encoded += [
                f"{quote_plus(str(pair[0]))}={_encoded_value(item)}"
                for item in items
                if item is not None
            ]
    return "&".join(encoded)


def _encoded_value(value: Any) -> str:
    if _is_reference(value) or value == REDACTED:
        return _text(value)
    return quote_plus(str(value), errors="replace")
