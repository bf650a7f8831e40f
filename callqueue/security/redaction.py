"""What people are shown: requests and answers with everything that is probably secret replaced by
"[redacted]". Never raises, never touches what is stored, and shows a secret by its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from callqueue.security.secrets import Secret, replace_secrets

REDACTED = "[redacted]"
MAX_DEPTH = 80
_TELLING = re.compile(
    r"token|secret|password|passwd|passphrase|apikey|signature|credential|session|authorization"
    r"|privatekey|accesskey|^(?:cookie|setcookie|auth|pwd|jwt|bearer|xcsrf|cvc|cvv|otp)$"
)
_IN_QUERY = frozenset({"key", "sig", "pass", "hmac"})  # too common in bodies, telling in a query
_SHOWN_SECRET = re.compile(r"\[secret [^\]]+\]")

# in free text: what stands before, a name, what stands between, a value
_PAIR = re.compile(r"""((?<![\w.%+-]))([\w.%+\[\]-]{1,80})(=)([^&;\s"'<>#\\,]{1,8192})""")
_LINE = re.compile(
    r"(?m)^([ \t>]{0,8})([A-Za-z0-9_-]{1,80})([ \t]{0,4}:[ \t]{0,4})(\S[^\r\n]{0,8192})"
)
_QUOTED = re.compile(
    r"""(["'])([\w.$ -]{1,80})(\1\s{0,4}:\s{0,4})"""
    r"""("(?:[^"\\]|\\.){0,8192}"?|'(?:[^'\\]|\\.){0,8192}'?|-?\d[\w.+-]{0,100})"""
)
_ESCAPED = re.compile(
    r"""(\\{1,4}")([\w.$ -]{1,80})(\1\s{0,4}:\s{0,4})"""
    r"""(\\{1,4}"[^"\\]{0,8192}\1?|-?\d[\w.+-]{0,100})"""
)
_USERINFO = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]{0,20}://)[^\s/?#@\"'<>\\]{1,512}@")
_SCHEME = re.compile(
    r"(?i)\b(basic|bearer|digest|negotiate|token|apikey|aws4-hmac-sha256)([ \t]{1,4})"
    r"([A-Za-z0-9._~+/=:-]{8,8192})"
)


def is_telling(name: object) -> bool:
    """Whether a header, field or parameter of this name probably holds a secret."""
    return _is_telling_name(str(name)[:200])


def redact_headers(headers: Any) -> dict[str, Any]:
    """A copy of the headers, the telling ones redacted whole, tokens inside the others too."""
    if not isinstance(headers, Mapping):
        return {}
    return {str(name): _redact_value(name, value, 0) for name, value in headers.items()}


def redact_url(url: Any) -> Any:
    """The URL without its user:password, and without the values of telling query parameters."""
    if not isinstance(url, str):
        return _redact_nested(url, 0)
    return _PAIR.sub(_redact_query_pair, _USERINFO.sub(rf"\1{REDACTED}@", url))


def redact_params(params: Any) -> Any:
    """A copy of a call's params for showing; a secret is shown as "[secret NAME]"."""
    return replace_secrets(redact_all_but_secrets(params), "[secret {}]".format)


def redact_call_data(call_data: Any) -> Any:
    """A copy of a call's data, its params redacted."""
    if not isinstance(call_data, dict):
        return redact_params(call_data)
    return {
        name: redact_params(value) if name == "params" else value
        for name, value in call_data.items()
    }


def redact_all_but_secrets(params: Any) -> Any:
    """A redacted copy of a call's params in which a secret is still a Secret."""
    if not isinstance(params, Mapping):
        return _redact_nested(params, 0)
    return {str(name): _redact_param(str(name), value) for name, value in params.items()}


def hidden_marker_in(text: str) -> str:
    """A marker in a text of something that is not shown; "" where there is none."""
    found = _SHOWN_SECRET.search(text)
    return REDACTED if REDACTED in text else found.group() if found else ""


def redact_text(text: str) -> str:
    """Free text without bearer tokens, passwords in URLs, telling pairs and header lines."""
    # each answer's headers come this way: most hold nothing that an expression could begin with
    if ":" in text:
        text = _USERINFO.sub(rf"\1{REDACTED}@", text)
        for form in (_LINE, _QUOTED, _ESCAPED):
            text = form.sub(_redact_named, text)
    if " " in text or "\t" in text:
        text = _SCHEME.sub(_redact_credential, text)
    return _PAIR.sub(_redact_query_pair, text) if "=" in text else text


@lru_cache(maxsize=2048)
def _is_telling_name(name: str) -> bool:
    return _TELLING.search(re.sub(r"[^a-z0-9]", "", name.lower())) is not None


def _redact_param(name: str, value: Any) -> Any:
    """The param redacted; all cookies, each password, and a user who has no password, whole."""
    if name == "url":
        return redact_url(value)
    if name == "cookies":
        if not isinstance(value, Mapping):
            return _redact_value("cookie", value, 1)
        return {
            str(cookie): _redact_value("cookie", item, 1, shows_counts=False)
            for cookie, item in value.items()
        }
    if name == "auth" and isinstance(value, list | tuple) and len(value) == 2:
        user, password = value
        if not isinstance(user, str) or password in ("", None):
            user = _redact_value("auth", user, 1, shows_counts=False)
        return [user, _redact_value("auth", password, 1)]
    return _redact_value(name, value, 1, is_query=name in ("params", "data"))


def _redact_value(
    name: object, value: Any, depth: int, *, is_query: bool = False, shows_counts: bool = True
) -> Any:
    """Redacted: whole if its name is telling, but for counts ("max_tokens"), flags and "" or []."""
    if value is None or _is_shown_secret(value):
        return value
    if not is_telling(name) and not (is_query and str(name).lower() in _IN_QUERY):
        return _redact_nested(value, depth, is_query=is_query)
    is_count = isinstance(value, bool) or value in ("", [], {})
    is_count |= isinstance(value, int | float) and str(name).lower().endswith("tokens")
    return value if is_count and shows_counts else REDACTED


def _redact_nested(value: Any, depth: int, *, is_query: bool = False) -> Any:
    if depth > MAX_DEPTH:
        return REDACTED
    if isinstance(value, str):
        return _redact_json_or_text(value)
    if isinstance(value, Mapping):
        return {
            str(name): _redact_value(name, item, depth + 1, is_query=is_query)
            for name, item in value.items()
        }
    if not isinstance(value, list | tuple):
        return value
    # of a query, pairs are names and values
    if is_query and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
        return [
            [_redact_nested(name, depth), _redact_value(name, item, depth + 1, is_query=True)]
            for name, item in value
        ]
    return [_redact_nested(item, depth + 1) for item in value]


def _redact_json_or_text(text: str) -> str:
    """The text redacted: by its names if it is JSON, else as text."""
    if text[:1] in "{[" and text[-1:] in "}]" and len(text) > 1:
        try:
            return json.dumps(_redact_nested(json.loads(text), 1), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return redact_text(text)


def _is_shown_secret(value: Any) -> bool:
    return isinstance(value, Secret) or (
        isinstance(value, str) and _SHOWN_SECRET.fullmatch(value) is not None
    )


# --- inside text


def _redact_named(found: re.Match[str]) -> str:
    before, name, between, value = found.groups()
    is_count = name.lower().endswith("tokens") and value.isdigit()
    return f"{before}{name}{between}{REDACTED}" if is_telling(name) and not is_count else found[0]


def _redact_query_pair(found: re.Match[str]) -> str:
    return f"{found[2]}={REDACTED}" if found[2].lower() in _IN_QUERY else _redact_named(found)


def _redact_credential(found: re.Match[str]) -> str:
    """What follows "Bearer" and the like redacted; after "Basic", "Token", ... not a mere word."""
    scheme, gap, value = found.groups()
    if scheme.lower() == "bearer" or not value.isalpha() or len(value) > 24:
        return f"{scheme}{gap}{REDACTED}"
    return found[0]
