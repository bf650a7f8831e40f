"""Withholding: what is said about a call is kept only where it tells none of its secrets. Each part
that tells one is withheld: a JSON string, a word or a line with its neighbours, or all of it.

A text tells a value if it holds 8 ASCII letters or digits of it in a row, in any encoding listed in
SECURITY.md; a value that has fewer is looked for whole. What is left is tested again as a whole.
While a call is made, log records of Celery and urllib3 that tell one of its secrets are dropped.
"""

from __future__ import annotations

import html
import json
import logging
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from callqueue.security.redaction import redact_text
from callqueue.security.secrets import walk_json
from callqueue.texts import storable

WITHHELD = "[withheld: it repeats a secret]"
PAYLOAD = "[payload]"
PART, BASE64_PART, HEX_PART = 8, 9, 16  # letters and digits in a row that tell a value, by encoding
LAYERS = 4  # encodings inside each other
ALONE = 4  # a value of fewer characters is found only where no letter or digit touches it
TELLING = 6  # characters from which on a string of a payload tells something
LONGEST = 16384  # characters at each end of an error's text that are looked at
_PAYLOAD_PART = 24  # as many characters of a payload in a row are taken out: common words are not
_LEAST_PIECE = 6  # a part of a value that is told on its own, such as a URL's path
_LEAST_BASE64 = 6  # characters of base64 that a short value must decide to be known by them

_NESTED = re.compile(r"%(?:25)+(?=[0-9A-Fa-f]{2})|&(?:amp;|#0{0,4}38;|#[xX]0{0,4}26;)+")
_ESCAPE = re.compile(
    r"\\++(?:u\{([0-9A-Fa-f]{1,6})\}|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|x([0-9A-Fa-f]{2})"
    r"|([nrtfbva]))?"
    r"|&(?:#[xX]0*([0-9A-Fa-f]{1,6})|#0*([0-9]{1,7})|([A-Za-z][A-Za-z0-9]{1,31}));"
)
_LETTERS = dict(zip("nrtfbva", "\n\r\t\f\b\v\a", strict=True))
_LETTER, _DECIMAL, _NAMED = 5, 7, 8  # groups of _ESCAPE that hold no hexadecimal number
_WIDE = re.compile(r"[^\0-\xff]+")
_UTF_8 = re.compile(r"[\xc2\xc3][\x80-\xbf]")
_FLAT = {code: chr(code).lower() if chr(code).isalnum() else None for code in range(128)}
_FLAT |= dict.fromkeys(range(128, 256))
_PLAIN = str.maketrans("+", " ", "\\\r")
_SCHEME = re.compile(  # at the beginning of a value: it tells nothing
    r"(?i)(basic|bearer|digest|negotiate|ssws|aws4-\S{1,20}"
    r"|[a-z0-9-]{0,20}(auth|hmac|key|token)[a-z0-9-]{0,9}) +(?=\S)"
)
_FRAME = re.compile(r"-----[^\n-]*-----")
_JSON_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*\\?(?:"|\Z)', re.DOTALL)
_JSON_REST = re.compile(r"(?:[\[\]{}:,\s]++|-?[0-9][0-9.eE+-]*+|true|false|null)*+")
_WORDS, _LINES = re.compile(r"(\s+|[?&=])"), re.compile(r"(\n)")
_WORD = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]{0,39}")
_AFTER_HOST, _ROUTE = re.compile(r"[/?#&=;]"), re.compile(r"[a-z]*")
_TASKS = ("celery_task", "django_task")


def tells(text: str, values: Iterable[str]) -> bool:
    """Whether the text tells one of the values, in whatever encoding."""
    detector = _detector(tuple(values))
    return detector is not None and any(map(detector.finds_in, _decodings(text)))


def withhold(text: str, values: Iterable[str]) -> str:
    """The text, WITHHELD for JSON strings, words or lines that tell a value; else for all of it."""
    values = tuple(values)
    if not tells(text, values):
        return text
    if _JSON_REST.fullmatch(_JSON_STRING.sub("", text)):
        put = json.dumps(WITHHELD)
        kept = _JSON_STRING.sub(lambda found: put if tells(found[0], values) else found[0], text)
        if not tells(kept, values):
            return kept
    for between in (_WORDS, _LINES):
        kept = _without_telling_pieces(between.split(text), values)
        if not tells(kept, values):
            return kept
    return WITHHELD


def clean_of_secrets(text: str, values: Iterable[str], payload: Sequence[str] = ()) -> str:
    """An error's text, of a long one both ends, as it may be kept and logged: without these values,
    these strings of a payload, and what looks like a credential. Cut it afterwards, not before.
    """
    if len(text) > 2 * LONGEST:
        text = f"{text[:LONGEST]} ... {text[-LONGEST:]}"
    # the payload first: half of one of its strings would not be known for it any more
    return storable(redact_text(withhold(_without_payload(text, payload), values)))


def payload_strings(method: str, params: Any) -> list[str]:
    """The strings in a call's params that tell something: values, and names that are more than a
    word; of a task, those of its arguments; of a URL, what follows its host.
    """
    found: list[str] = []
    if isinstance(params, Mapping):
        if method in _TASKS:
            params = [params.get("args"), params.get("kwargs")]
        elif isinstance(url := params.get("url"), str):
            found = _AFTER_HOST.split(url.partition("://")[2])[1:]
            found = [piece for piece in found if not _ROUTE.fullmatch(piece)]
            params = {**params, "url": None}
    for value in walk_json(params):
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Mapping):
            found += (name for name in map(str, value) if not is_plain_word(name))
    return sorted({text for text in found if len(text) >= TELLING}, key=len, reverse=True)


def is_plain_word(name: str) -> bool:
    """Whether a name in a payload is a word, which tells nothing of whom it is about."""
    return _WORD.fullmatch(name) is not None


def _without_telling_pieces(pieces: list[str], values: tuple[str, ...]) -> str:
    """The pieces in one, WITHHELD for those that tell, their neighbours, and on from there while a
    piece is part of a value: one may hold separators, which every second piece is.
    """
    detector = _detector(values)
    parts = "\0".join(form for size, form in detector.forms if size == PART) if detector else ""
    telling = {at for at in range(0, len(pieces), 2) if tells(pieces[at], values)}
    gone, edge = set(telling), set(telling)
    while edge:
        edge = {
            near
            for at in edge
            for near in (at - 2, at + 2)
            if 0 <= near < len(pieces) and (at in telling or pieces[near].translate(_FLAT) in parts)
        } - gone
        gone |= edge
    kept = list[str]()
    for at in range(0, len(pieces), 2):
        if at not in gone or at + 2 not in gone:
            kept += (WITHHELD if at in gone else pieces[at], *pieces[at + 1 : at + 2])
    return "".join(kept)


# --- How a text is read


def _decodings(text: str) -> Iterator[str]:
    """Yield the text in Latin-1 (a character a byte), then each decoding of it: LAYERS at most."""
    text = _in_latin_1(text)
    yield text
    for _ in range(LAYERS):
        before = text
        text = (
            _NESTED.sub(lambda found: found[0][0], text) if "%25" in text or "&" in text else text
        )
        text = unquote(text, encoding="latin-1") if "%" in text else text
        text = _in_latin_1(_ESCAPE.sub(_unescape, text) if "\\" in text or "&" in text else text)
        if text == before:
            return
        yield text


def _unescape(escape: re.Match[str]) -> str:
    group = escape.lastindex
    if group in (None, _LETTER):
        return _LETTERS[escape[group]] if group else ""
    if group == _NAMED:
        return html.unescape(escape[0])
    code = int(escape[group], 10 if group == _DECIMAL else 16)
    return chr(code) if code <= 0x10FFFF else ""


def _in_latin_1(text: str) -> str:
    """The text as Latin-1: UTF-8, UTF-8 read as Latin-1 and Latin-1 come to the same."""
    if text.isascii():
        return text
    return _UTF_8.sub(_latin_1_of_utf_8, _WIDE.sub(_utf_8_as_latin_1, text))


def _utf_8_as_latin_1(wide: re.Match[str]) -> str:
    return storable(wide[0]).encode().decode("latin-1")


def _latin_1_of_utf_8(two: re.Match[str]) -> str:
    """The Latin-1 character whose two bytes of UTF-8 these are, each read as a character."""
    return chr(ord(two[0][0]) % 4 * 64 + ord(two[0][1]) % 64)


class _Detector(NamedTuple):
    """Finds values in a text, in whatever encoding, once that is decoded."""

    heads: frozenset[str]  # the PART characters at each place of a form where a run may begin
    forms: Sequence[tuple[int, str]]  # (how many characters of it in a row tell it, form)
    wholes: Sequence[str]  # looked for whole, among letters and digits alone
    patterns: Sequence[re.Pattern[str]]  # short values, as they stand

    def __repr__(self) -> str:
        return "<detector>"

    def finds_in(self, decoded: str) -> bool:
        flat = decoded.translate(_FLAT)
        heads = self.heads
        for at in [at for at in range(len(flat) - PART + 1) if flat[at : at + PART] in heads]:
            for size, form in self.forms:
                if at + size <= len(flat) and flat[at : at + size] in form:
                    return True
        if any(whole in flat for whole in self.wholes):
            return True
        plain = decoded.translate(_PLAIN) if self.patterns else ""
        return any(pattern.search(plain) for pattern in self.patterns)


# --- What is looked for


@lru_cache(maxsize=64)
def _detector(values: tuple[str, ...]) -> _Detector | None:
    """What finds these values, by each part and encoding that tells; None: nothing to find."""
    forms, wholes = dict[tuple[int, str], None](), dict[str, None]()
    patterns = dict[str, None]()
    for piece, is_whole in (found for value in values if value for found in _telling_parts(value)):
        for decoded in _decodings(piece):
            flat, plain = decoded.translate(_FLAT), decoded.translate(_PLAIN)
            if len(flat) >= PART and not is_whole:
                forms[PART, flat] = None
            elif len(flat) >= PART:
                wholes[flat] = None
            elif plain and len(piece) >= ALONE:
                patterns[re.escape(plain)] = None
            elif plain:
                patterns[rf"(?<![^\W_]){re.escape(plain)}(?![^\W_])"] = None
        for size, form in _encoded_forms(piece) if len(piece) >= ALONE else ():
            if is_whole or len(form) < size:
                wholes[form] = None
            else:
                forms[size, form] = None
    heads = (form[at : at + PART] for size, form in forms for at in range(len(form) - size + 1))
    found = _Detector(frozenset(heads), [*forms], [*wholes], [*map(re.compile, patterns)])
    return found if any(found) else None


def _telling_parts(value: str) -> Iterator[tuple[str, bool]]:
    """The parts of a value that tell it: a URL's host, path, ...; whether only as a whole."""
    pieces = [(value, False), (value.strip(), False)]
    if scheme := _SCHEME.match(value):
        pieces = [(value[scheme.end() :], False)]
    elif "-----" in value:
        pieces = [(_FRAME.sub("", value).strip(), False)]
    elif "://" in value:
        try:
            parts = urlsplit(value)
        except ValueError:
            parts = urlsplit("")
        user, _, host = parts.netloc.rpartition("@")
        pieces = [(user, False), (host, True), (host.partition(":")[0], True)]
        pieces += [(f"{parts.path}?{parts.query}" if parts.query else parts.path, False)]
        pieces += [(pair.partition("=")[2], False) for pair in parts.query.split("&")]
    long = [(piece, is_whole) for piece, is_whole in pieces if len(piece) >= _LEAST_PIECE]
    yield from long or {(value, False), (value.strip() or value, False)}


def _encoded_forms(piece: str) -> Iterator[tuple[int, str]]:
    """(How many characters tell it, form): hex; base64 at each offset, those it alone decides."""
    encodings = ("utf-8", "latin-1") if max(piece) < "\u0100" else ("utf-8",)
    for raw in {piece.encode(name, "surrogatepass") for name in encodings}:
        yield HEX_PART, raw.hex()
        for offset in range(3):
            bits = 8 * (offset + len(raw))
            whole = b64encode(bytes(offset) + raw).decode()
            core = whole[-(-8 * offset // 6) : bits // 6]
            if len(core) < _LEAST_BASE64 and not offset:
                core = whole.rstrip("=")
            if len(core) >= _LEAST_BASE64:
                yield BASE64_PART, core.translate(_FLAT)


# --- A payload in what is said


def _without_payload(text: str, strings: Sequence[str]) -> str:
    """The text without the strings, as they are or as errors show them, or 24 characters of one."""
    forms = sorted(
        {form for string in strings for form in _spellings(string)}, key=len, reverse=True
    )
    long = "\0".join(form for form in forms if len(form) > _PAYLOAD_PART)
    text = "".join(_cut_shared_runs(text, long)) if long else text
    for form in forms:
        if len(form) <= _PAYLOAD_PART:
            text = text.replace(form, PAYLOAD)
    return text


def _cut_shared_runs(text: str, long: str) -> Iterator[str]:
    """The text in pieces, PAYLOAD for each run of 24 characters or more that `long` has too."""
    step, done, at = _PAYLOAD_PART // 2, 0, 0  # a run that is long enough holds a whole step
    while at + step <= len(text):
        begin, end = at, at + step
        if text[begin:end] in long:
            while begin > done and text[begin - 1 : end] in long:
                begin -= 1
            while end < len(text) and text[begin : end + 1] in long:
                end += 1
            if end - begin >= _PAYLOAD_PART:
                yield from (text[done:begin], PAYLOAD)
                done = end
        at = max(at + step, done)
    yield text[done:]


def _spellings(string: str) -> Iterator[str]:
    yield string
    for quoted in (repr(string), ascii(string), json.dumps(string)):
        yield quoted[1:-1]
    yield html.escape(string)
    yield from (quote(string, safe, errors="replace") for safe in ("/", ""))


# --- While a call is made

_LOGGERS = (
    "celery.app.trace",
    "urllib3.connection",
    "urllib3.connectionpool",
    "urllib3.response",
    "urllib3.util.retry",
    "urllib3.poolmanager",
    "requests",
)
_LONGEST = 65536  # characters of a record; one that is longer is dropped unread
_in_hand: ContextVar[tuple[tuple[str, ...], str, Any]] = ContextVar(
    "callqueue_in_hand", default=((), "", None)
)


@contextmanager
def withholding(values: tuple[str, ...], method: str = "", params: Any = None) -> Iterator[None]:
    """While the block runs, this thread makes a call with these secrets and this payload: no record
    of Celery's and urllib3's loggers tells one; `clean_of_call_in_hand` knows what to take out.
    """
    if values:
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_tells_no_secret)
    token = _in_hand.set((values, method, params))
    try:
        yield
    finally:
        _in_hand.reset(token)


def clean_of_call_in_hand(text: str) -> str:
    """The text, clean of the secrets and the payload of the call that this thread makes."""
    values, method, params = _in_hand.get()
    return clean_of_secrets(text, values, payload_strings(method, params))


def _tells_no_secret(record: logging.LogRecord) -> bool:
    """Whether it may be logged: not if it tells a secret in hand, or is too long or unreadable."""
    values = _in_hand.get()[0]
    if not values:
        return True
    try:
        own = logging.makeLogRecord(record.__dict__)  # formatting writes into it
        text = f"{logging.Formatter().format(own)}\n{record.__dict__}"
    except Exception:  # arguments that do not fit: logging would say so, and show them
        return False
    return len(text) <= _LONGEST and not tells(text, values)
