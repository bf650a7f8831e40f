"""Secrets by reference: `{"$secret": NAME}` becomes its value in the worker, and is scrubbed from all that is kept.

Params with references and the SECRETS setting enter; params with values, and the values to scrub, leave. Nothing here
stores or logs a value, and no error contains one.
"""

from __future__ import annotations

import html.entities
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, overload
from urllib.parse import urlsplit

from callqueue.exceptions import CallQueueError

SECRET = "$secret"
SCRUBBED = "[secret]"
SHORT = 4  # a value of fewer characters is scrubbed only where it stands alone
_LEAST_PIECE = 6  # a part of a value is scrubbed on its own from this length on
_LEAST_BASE64 = 8
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{1,20} +(?=\S)")
_NAMED = {ord(char): name for name, char in html.entities.html5.items() if len(char) == 1 and name.endswith(";")}


class SecretError(CallQueueError):
    """A secret has no usable value now. The text names it and never contains a value."""


def resolve(params: Any, secrets: Mapping[str, str | Callable[[], str]]) -> tuple[Any, tuple[str, ...]]:
    """A copy of `params` with every reference replaced, and the texts that `scrub` must take out, longest first.

    A callable is called once per resolve. Besides the values, the texts are what is as secret as they are: the token
    after a value's scheme ("Bearer ..."), the path and query of a value that is a URL, and "user:password".
    SecretError when a name is unknown, its callable fails, or it gives anything but a non-empty string.
    """
    values: dict[str, str] = {}
    resolved = _resolved(params, secrets, values)
    texts = {text for value in values.values() for text in _pieces(value)}
    texts.update(_basic_pair(params, resolved))
    return resolved, tuple(sorted(texts, key=lambda text: (-len(text), text)))


def has_secret(params: Any) -> bool:
    """Whether a reference is anywhere inside."""
    pending = [params]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            if SECRET in value:
                return True
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
    return False


@overload
def scrub(text: str, values: Iterable[str]) -> str: ...
@overload
def scrub(text: bytes, values: Iterable[str]) -> bytes: ...
def scrub(text: str | bytes, values: Iterable[str]) -> str | bytes:
    """`text` with "[secret]" for every value, however it was encoded on its way back.

    Found are: the value itself, percent-encoded (either case, "+" for a space, twice over), JSON- and Python-escaped,
    HTML-escaped, its UTF-8 read as Latin-1, any mixture of these, and base64 of it at any offset, which covers a
    basic-auth header whatever the user. A value shorter than 4 characters is replaced only where no letter or digit
    touches it: `42` is scrubbed in "id=42", not in "1429". Scrub before cutting: half a secret is not recognised.
    """
    pattern = _pattern(tuple(values))
    if pattern is None or not text:
        return text
    if isinstance(text, bytes):
        return pattern.sub(SCRUBBED, text.decode("latin-1")).encode("latin-1")
    return pattern.sub(SCRUBBED, text)


def scrub_json(value: Any, values: Iterable[str]) -> Any:
    """A copy of a JSON value with every string and every name scrubbed."""
    texts = tuple(values)
    if not texts:
        return value
    if isinstance(value, str):
        return scrub(value, texts)
    if isinstance(value, Mapping):
        return {scrub(str(name), texts): scrub_json(item, texts) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub_json(item, texts) for item in value]
    return value


def _resolved(value: Any, secrets: Mapping[str, str | Callable[[], str]], values: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        if SECRET in value:
            return _value_of(value, secrets, values)
        return {name: _resolved(item, secrets, values) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_resolved(item, secrets, values) for item in value]
    return value


def _value_of(reference: Mapping[str, Any], secrets: Mapping[str, str | Callable[[], str]], values: dict[str, str]) -> str:
    name = reference[SECRET]
    if len(reference) != 1 or not isinstance(name, str):
        raise SecretError(f"a reference to a secret is {{{SECRET!r}: NAME}} and nothing else")
    if name not in values:
        if name not in secrets:
            raise SecretError(f"secret {name!r} is not in SECRETS")
        values[name] = _called(name, secrets[name])
    return values[name]


def _called(name: str, source: str | Callable[[], str]) -> str:
    value, failed = source, ""
    if callable(source):
        try:
            value = source()
        except Exception as error:  # raised anew outside: its text and its traceback may hold the value
            failed = type(error).__name__
    if failed:
        raise SecretError(f"secret {name!r}: its callable raised {failed}")
    if not isinstance(value, str) or not value:
        raise SecretError(f"secret {name!r} is not a non-empty string")
    return value


def _pieces(value: str) -> set[str]:
    """The value, and the parts of it that must not be seen on their own."""
    pieces = {value}
    scheme = _SCHEME.match(value)
    if scheme:
        pieces.add(value[scheme.end() :])
    if "://" in value:
        pieces.update(_url_pieces(value))
    stripped = value.strip()
    pieces.add(stripped)
    return {piece for piece in pieces if piece and (piece == value or len(piece) >= _LEAST_PIECE)}


def _url_pieces(value: str) -> set[str]:
    """Clients report a URL in parts: "Max retries exceeded with url: /path?query"."""
    try:
        parts = urlsplit(value)
    except ValueError:
        return set()
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    pieces = {target, parts.path, parts.path.lstrip("/"), parts.query}
    pieces.update(pair.partition("=")[2] for pair in parts.query.split("&"))
    return pieces


def _basic_pair(params: Any, resolved: Any) -> list[str]:
    auth = resolved.get("auth") if isinstance(resolved, dict) else None
    if isinstance(auth, list) and len(auth) == 2 and has_secret(params["auth"]):
        return [f"{auth[0]}:{auth[1]}"]
    return []


@lru_cache(maxsize=64)
def _pattern(values: tuple[str, ...]) -> re.Pattern[str] | None:
    forms = {form for value in values if value for form in _forms(value)}
    if not forms:
        return None
    return re.compile("|".join(form for _, form in sorted(forms, reverse=True)))


def _forms(value: str) -> set[tuple[int, str]]:
    """(length, pattern) of every way the value is written; the longest is to be tried first."""
    spelled = "".join(_spellings(run.group()) for run in re.finditer(r"\\+|(?s:.)", value))
    if len(value) < SHORT:
        return {(len(value), rf"(?<![^\W_]){spelled}(?![^\W_])")}
    forms = {(len(value), spelled)}
    for encoding in ("utf-8", "latin-1"):
        try:
            forms |= {(len(core), _base64_spellings(core)) for core in _base64_cores(value.encode(encoding))}
        except UnicodeEncodeError:
            continue
    return forms


@lru_cache(maxsize=4096)
def _spellings(char: str) -> str:
    """A pattern for one character in any usual encoding. ASCII letters and digits are never encoded by any of them.

    A run of backslashes is taken as one, so that a flood of them in an answer cannot be divided in many ways.
    """
    if len(char) > 1:
        return rf"(?:\\{{{len(char)},{8 * len(char)}}}|(?:{_spellings(char[0])}){{{len(char)}}}+)"
    if char.isascii() and char.isalnum():
        return char
    code = ord(char)
    spellings = [*_SPECIAL.get(char, ()), re.escape(char), _percented(char, "utf-8")]
    spellings += [rf"&#0{{0,4}}{code};", rf"&#[xX]0{{0,4}}{_hex(f'{code:x}')};"]
    spellings.append("".join(rf"\\{{1,8}}u{_hex(unit)}" for unit in _utf16(char)))
    spellings.append(rf"\\{{1,8}}U{_hex(f'{code:08x}')}")
    if code < 256:
        spellings.append(rf"\\{{1,8}}x{_hex(f'{code:02x}')}")
        spellings.append(_percented(char, "latin-1"))
    if code in _NAMED:
        spellings.append(f"&{_NAMED[code]}")
    if not char.isascii():
        utf8 = char.encode("utf-8", "surrogatepass")
        spellings.append(re.escape(utf8.decode("latin-1")))
        spellings.append("".join(rf"\\{{1,8}}x{_hex(f'{byte:02x}')}" for byte in utf8))
    return f"(?:{'|'.join(dict.fromkeys(spellings))})"


_SPECIAL = {
    " ": (r"\+",),
    '"': (r"\\{1,8}\"", "&quot;"),
    "'": (r"\\{1,8}'", "&apos;"),
    "&": ("&amp;",),
    "<": ("&lt;",),
    ">": ("&gt;",),
    "\\": (r"\\{2,8}",),
    "/": (r"\\{1,8}/",),
    "\n": (r"\\{1,8}n", r"\r\n", r"\\{1,8}r\\{1,8}n", "%0[dD]%0[aA]"),
    "\r": (r"\\{1,8}r",),
    "\t": (r"\\{1,8}t",),
    "\f": (r"\\{1,8}f",),
    "\b": (r"\\{1,8}b",),
    "\v": (r"\\{1,8}v",),
    "\a": (r"\\{1,8}a",),
}


def _percented(char: str, encoding: str) -> str:
    return "".join(rf"%(?:25){{0,3}}{_hex(f'{byte:02x}')}" for byte in char.encode(encoding, "surrogatepass"))


def _utf16(char: str) -> list[str]:
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return [units[start : start + 4] for start in range(0, len(units), 4)]


def _hex(digits: str) -> str:
    return "".join(f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in digits)


def _base64_cores(raw: bytes) -> Iterable[str]:
    """The base64 of `raw` wherever it stands in a longer text: at each offset, the characters that it alone decides."""
    for offset in range(3):
        encoded = b64encode(b"\0" * offset + raw).decode("ascii")
        core = encoded[(0, 2, 3)[offset] : len(encoded) if (offset + len(raw)) % 3 == 0 else -(4 - _tail(offset, raw))]
        if len(core) >= _LEAST_BASE64:
            yield core
    whole = b64encode(raw).decode("ascii").rstrip("=")
    if len(whole) >= _LEAST_BASE64 - 2:
        yield whole


def _tail(offset: int, raw: bytes) -> int:
    """How many characters of the last group of four the bytes decide fully: one byte decides one, two decide two."""
    return (offset + len(raw)) % 3


def _base64_spellings(core: str) -> str:
    return "".join(_BASE64_SPECIAL.get(char, char) for char in core) + r"(?:=|%(?:25){0,3}3[dD]){0,2}"


_BASE64_SPECIAL = {
    "+": r"(?:\+|-|%(?:25){0,3}2[bB]|\\{1,8}u002[bB]|&#43;)",
    "/": r"(?:\\{0,8}/|_|%(?:25){0,3}2[fF]|\\{1,8}u002[fF]|&#47;)",
}
