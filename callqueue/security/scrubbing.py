"""Scrubbing: takes secrets, and a call's own strings, out of texts. First scrub, then cut, then
keep or log.

Texts and the values to look for enter; texts without them leave. A text is read as it stands and as
whoever wrote it may have encoded it, so what is found is the value in whatever spelling, and any
part of it that is 8 characters or longer. Pure but for `at_work`, which scrubs what others log
while a call is made.
"""

from __future__ import annotations

import html.entities
import logging
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from callqueue.security.redaction import redact_text
from callqueue.texts import storable

SCRUBBED = "[secret]"
PAYLOAD = "[payload]"
SHORT = 4  # a value of fewer characters is scrubbed only where it stands alone
SAMPLE, MANY = (
    4,
    100,
    # characters of a value that are looked for first; from how many of them on a text is cut up
    # instead
)
PART = 8  # as many characters of a value in a row are scrubbed wherever they are
TELLING = 6  # characters from which on a string of a payload tells something
_BASE64_PART = 10  # characters of base64 that 8 characters decide at least, wherever they stand
_PAYLOAD_PART = 24  # as many characters of it in a row are taken out: common words are not
# a part of a value that is told on its own, such as a URL's path, is scrubbed from this length on
_LEAST_PIECE = 6
_LONGEST = 65536  # characters at each end of an error's text that are looked at
_WIDEST = 16  # characters that one character may become in some encoding
_TASKS = ("celery_task", "django_task")
_LOGGERS = ("celery.app.trace", "urllib3.connection", "urllib3.connectionpool", "urllib3.response", "urllib3.util.retry",
            "urllib3.poolmanager", "requests")  # fmt: skip


def scrub(text: str, values: Iterable[str]) -> str:
    """`text` with "[secret]" for every value, and for any 8 characters of one, however encoded on
    their way back.

    Found are: the value itself; percent-encoded (any of its characters, either case, several times
    over), "+" for a space; JSON's, JavaScript's and Python's escapes, as in a value's repr; HTML's
    entities; its UTF-8 read as Latin-1; any mixture of these; base64 of it at any offset and broken
    into lines, which covers a basic-auth header whatever the user; and hex. Of a URL that is a
    value also its host, path and query. A value of fewer than 8 characters is found whole, one of
    fewer than 4 only where no letter or digit touches it: `42` is scrubbed in "id=42", not in
    "1429".
    """
    wanted = _wanted(tuple(values))
    if wanted is None or not text:
        return text
    return _replaced(text, _spans(text, wanted), SCRUBBED)


def scrub_json(value: Any, values: Iterable[str]) -> Any:
    """A copy of a JSON value with every string and every name scrubbed."""
    texts = tuple(values)
    if not texts or not holds("\n".join(_strings(value)), texts):
        return value
    if isinstance(value, str):
        return scrub(value, texts)
    if isinstance(value, Mapping):
        return {scrub(str(name), texts): scrub_json(item, texts) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub_json(item, texts) for item in value]
    return value


def holds(text: str, values: Iterable[str]) -> bool:
    """Whether there is anything in the text that `scrub` would take out."""
    wanted = _wanted(tuple(values))
    return wanted is not None and next(_spans(text, wanted), None) is not None


def room_for(values: Iterable[str]) -> int:
    """How many characters a value may take in a text. Of one that is read only so far, as many at
    its end may be half of it.
    """
    return max(map(len, values), default=0) * _WIDEST


def clean(text: str, values: Iterable[str], payload: Sequence[str] = ()) -> str:
    """An error's text as it may be kept and logged: without these values, these strings of a
    payload, and what looks like a credential. Cut it afterwards, not before.
    """
    if not text:
        return text
    if len(text) > 2 * _LONGEST:
        text = f"{text[:_LONGEST]} ... {text[-_LONGEST:]}"
    text = scrub(text, values)
    if payload:
        needles = (
            _Needle(form, min(len(form), _PAYLOAD_PART), "text")
            for string in payload
            for form in _as_text(string)
        )
        text = _replaced(text, _spans(text, _Wanted.of(needles)), PAYLOAD)
    return storable(redact_text(text))


def payload_of(method: str, params: Any) -> list[str]:
    """The strings in a call's params that tell something; of a task, which is named in them, those
    of its arguments.
    """
    if method in _TASKS and isinstance(params, Mapping):
        params = [params.get("args"), params.get("kwargs")]
    return sorted(
        {string for string in _strings(params, with_names=False) if len(string) >= TELLING},
        key=len,
        reverse=True,
    )


@contextmanager
def at_work(values: tuple[str, ...], method: str = "", params: Any = None) -> Iterator[None]:
    """While the block runs, this thread makes a call with these secrets and this payload.

    What Celery's and urllib3's own loggers say meanwhile is scrubbed, tracebacks included;
    `cleaned` knows what to take out.
    """
    if values:
        _watch_loggers()
    token = _in_hand.set((values, method, params))
    try:
        yield
    finally:
        _in_hand.reset(token)


def cleaned(text: str) -> str:
    """`clean` for the call that this thread makes."""
    values, method, params = _in_hand.get()
    return clean(text, values, payload_of(method, params))


# --- What is looked for


class _Needle(NamedTuple):
    """A text to look for, in one way to read: at least so many characters of it in a row.

    `samples` are short pieces of it and their places, so close together that every part that is
    long enough has one.
    """

    text: str
    least: int
    reading: str  # "text", "base64" or "hex"
    is_alone: bool = False
    has_backslash: bool = False

    @property
    def samples(self) -> Iterator[tuple[int, str]]:
        size = self.least if self.least == len(self.text) else min(SAMPLE, self.least)
        for at in range(0, len(self.text) - size + 1, self.least - size + 1):
            yield at, self.text[at : at + size]


class _Wanted(NamedTuple):
    """Needles by how a text is read for them: by each sample, the needles that have it, and
    where.
    """

    by_reading: Mapping[str, Mapping[str, Sequence[tuple[_Needle, int]]]]

    @classmethod
    def of(cls, needles: Iterable[_Needle]) -> _Wanted:
        """The needles in order."""
        found: dict[str, dict[str, list[tuple[_Needle, int]]]] = {
            "text": {},
            "base64": {},
            "hex": {},
        }
        for needle in dict.fromkeys(needles):
            for at, piece in needle.samples:
                found[needle.reading].setdefault(piece, []).append((needle, at))
        return cls(found)

    def among(self, reading: str, text: str) -> list[str]:
        """The samples that are in the text."""
        samples = self.by_reading[reading]
        if len(samples) < MANY:
            return [piece for piece in samples if piece in text]
        sizes = {len(piece) for piece in samples}
        there = (
            {text[at : at + size] for size in sizes for at in range(len(text) - size + 1)}
            if len(sizes) < 3
            else samples
        )
        return [piece for piece in samples.keys() & there if piece in text]


@lru_cache(maxsize=256)
def _wanted(values: tuple[str, ...]) -> _Wanted | None:
    pieces = {piece: None for value in values if value for piece in _pieces(value)}
    return (
        _Wanted.of(needle for piece, least in pieces for needle in _forms(piece, least))
        if pieces
        else None
    )


def _pieces(value: str) -> Iterator[tuple[str, int]]:
    """The value, and the parts of it that are seen on their own, each with how many characters of
    it in a row tell something.

    What is no secret in itself, such as "https://" or "Bearer ", tells nothing.
    """
    scheme = _SCHEME.match(value)
    is_composed = scheme is not None or "://" in value or "-----" in value
    yield value, len(value) if is_composed else PART
    if value.strip() != value:
        yield value.strip(), PART
    if scheme is not None:
        yield from _long(value[scheme.end() :])
    if "-----" in value:
        yield from _long(re.sub(r"-----[^\n-]*-----", "", value).strip())
    if "://" in value:
        yield from _pieces_of_url(value)


_SCHEME = re.compile(
    r"(?i)(basic|bearer|digest|negotiate|ssws|aws4-\S{1,20}|[a-z0-9-]{0,20}(auth|hmac|key|token)[a-z0-9-]{0,9}) +(?=\S)"
)


def _pieces_of_url(value: str) -> Iterator[tuple[str, int]]:
    """Clients report a URL in parts: "Max retries exceeded with url: /path?query"."""
    try:
        parts = urlsplit(value)
    except ValueError:
        return
    for host in (parts.netloc, parts.netloc.rpartition("@")[2].partition(":")[0]):
        yield from _long(host, whole=True)
    yield from _long(f"{parts.path}?{parts.query}" if parts.query else parts.path)
    for pair in parts.query.split("&"):
        yield from _long(pair.partition("=")[2])


def _long(piece: str, whole: bool = False) -> Iterator[tuple[str, int]]:
    if len(piece) >= _LEAST_PIECE:
        yield piece, len(piece) if whole else PART


def _forms(piece: str, least: int) -> Iterator[_Needle]:
    """A piece in every way to read a text."""
    is_alone, least = len(piece) < SHORT, max(least, min(PART, len(piece)))
    for form in _as_text(piece):
        edge = piece[:1] == "\\" or piece[-1:] == "\\"
        yield _Needle(form, min(least, len(form)), "text", is_alone, edge)
    if is_alone:
        return
    for raw in _as_bytes(piece):
        yield _Needle(raw.hex(), min(2 * least, 2 * len(raw)), "hex")
        for core in _base64_cores(raw):
            yield _Needle(
                core.translate(_AS_BASE64),
                len(core) if least > PART else min(_BASE64_PART, len(core)),
                "base64",
            )


def _as_text(piece: str) -> set[str]:
    """The bytes of a piece, one character each, as a text is read: as they stand, and as they would
    be decoded.
    """
    plain = piece.encode("utf-8", "surrogatepass").decode("latin-1")
    return {form.replace("+", " ") for form in (plain, _decoded_text(plain)) if form}


def _as_bytes(piece: str) -> set[bytes]:
    """In UTF-8, and in Latin-1 where it can be."""
    encoded = {piece.encode("utf-8", "surrogatepass")}
    return encoded if max(piece) > "\xff" else encoded | {piece.encode("latin-1")}


def _base64_cores(raw: bytes) -> Iterator[str]:
    """The base64 of `raw` wherever it stands in a longer text: at each offset, the characters that
    it alone decides.
    """
    whole = b64encode(raw).decode("ascii").rstrip("=")
    if len(whole) >= PART - 2:
        yield whole
    for offset, first in ((1, 2), (2, 3)):
        encoded = b64encode(b"\0" * offset + raw).decode("ascii")
        tail = (offset + len(raw)) % 3
        core = encoded[first : len(encoded) - (4 - tail) if tail else len(encoded)]
        if len(core) >= PART:
            yield core


# --- How a text is read


@dataclass(frozen=True)
class _Reading:
    """A text as bytes, one character each, and where in the original each began and ended."""

    text: str
    begins: Sequence[int]
    ends: Sequence[int]

    @classmethod
    def of(cls, text: str) -> _Reading:
        """The text as it stands, in UTF-8."""
        if text.isascii():
            return cls(text, range(len(text)), range(1, len(text) + 1))
        encoded = [char.encode("utf-8", "surrogatepass").decode("latin-1") for char in text]
        places = [place for place, char in enumerate(encoded) for _ in char]
        return cls("".join(encoded), places, [place + 1 for place in places])

    def spaced(self) -> _Reading:
        """With the space that "+" is in a form."""
        return _Reading(self.text.replace("+", " "), self.begins, self.ends)

    def lower(self) -> _Reading:
        """With small letters; there are no others of ASCII."""
        return _Reading(self.text.lower(), self.begins, self.ends)

    def as_base64(self) -> _Reading:
        """With both alphabets as one, and without line ends, wherever they are."""
        text = self.text.translate(_AS_BASE64)
        if "\n" not in text:
            return _Reading(text, self.begins, self.ends)
        kept = [place for place, char in enumerate(text) if char != "\n"]
        return _Reading(
            text.replace("\n", ""), [self.begins[p] for p in kept], [self.ends[p] for p in kept]
        )


_AS_BASE64 = str.maketrans("-_ ", "+/+")

# Of a run of backslashes it is not told which of them belong to the text: all are left out, in what
# is looked for too. What Latin-1 has is read as its one byte there, so that UTF-8, Latin-1, and
# UTF-8 that was read as Latin-1 come to the same.
_TOKEN = re.compile(
    r"%(?:25)*+(?P<byte>[0-9A-Fa-f]{2})|%(?:25)++(?P<sign>)"
    r"|&(?:amp;|\#0{0,4}38;|\#[xX]0{0,4}26;)*"
    r"(?:\#0{0,8}(?P<decimal>[0-9]{1,7})|\#[xX]0{0,8}(?P<hexadecimal>[0-9A-Fa-f]{1,6})|(?P<named>[A-Za-z][A-Za-z0-9]{0,31}));"
    r"|\\++(?:[uU](?P<high>[dD][89abAB][0-9A-Fa-f]{2})\\++[uU](?P<low>[dD][c-fC-F][0-9A-Fa-f]{2})"
    r"|u\{(?P<braced>[0-9A-Fa-f]{1,6})\}|u(?P<unit>[0-9A-Fa-f]{4})|U(?P<wide>[0-9A-Fa-f]{8})|x(?P<pair>[0-9A-Fa-f]{2})"
    r"|(?P<letter>[nrtfbva]))?|\r|(?P<latin>[\xc2\xc3][\x80-\xbf])"
)
_FIRST = "%&\\\r\xc2\xc3"  # what a token begins with
_LETTERS = {
    "n": "\n",
    "r": "",
    "t": "\t",
    "f": "\f",
    "b": "\b",
    "v": "\v",
    "a": "\a",
}  # lines end with or without a CR
_PASSES = 4  # encodings inside each other, besides those of one kind


def _decoded(reading: _Reading) -> _Reading:
    """The text with whatever escapes and entities stand in it read, those inside each other too."""
    for _ in range(_PASSES):
        if not any(char in reading.text for char in _FIRST):
            break
        reading, is_changed = _decoded_once(reading)
        if not is_changed:
            break
    return reading


def _decoded_text(text: str) -> str:
    """The same for a text alone, which takes less time."""
    for _ in range(_PASSES):
        if not any(char in text for char in _FIRST):
            break
        before, text = text, _TOKEN.sub(_meaning_or_itself, text.replace('\\"', '"'))
        if text == before:
            break
    return text


def _meaning_or_itself(token: re.Match[str]) -> str:
    meant = _meaning(token)
    return token.group() if meant is None else meant


def _decoded_once(reading: _Reading) -> tuple[_Reading, bool]:
    text, at = reading.text, 0
    pieces: list[str] = []
    begins: list[int] = []
    ends: list[int] = []
    for token in _TOKEN.finditer(text):
        meant = _meaning(token)
        if meant is None:
            continue
        begin, end = token.span()
        pieces += (text[at:begin], meant)
        begins.extend(reading.begins[at:begin])
        ends.extend(reading.ends[at:begin])
        begins.extend([reading.begins[begin]] * len(meant))
        ends.extend([reading.ends[end - 1]] * len(meant))
        at = end
    if not at:
        return reading, False
    begins.extend(reading.begins[at:])
    ends.extend(reading.ends[at:])
    return _Reading("".join([*pieces, text[at:]]), begins, ends), True


def _meaning(token: re.Match[str]) -> str | None:
    """What an escape or an entity stands for, as bytes; None where it is none."""
    kind, found = token.lastgroup, token.group(token.lastgroup or 0)
    if kind is None:
        return ""
    if kind in ("byte", "pair"):
        char = chr(int(found, 16))
        return "" if char == "\r" else char
    if kind == "sign":
        return "%"
    if kind == "letter":
        return _LETTERS[found]
    if kind == "latin":
        return chr(ord(found[0]) % 4 * 64 + ord(found[1]) % 64)
    if kind == "named":
        name = html.entities.html5.get(f"{found};")
        return None if name is None else name.encode().decode("latin-1")
    if kind == "low":
        units = bytes.fromhex(token["high"] + found)
        return units.decode("utf-16-be").encode().decode("latin-1")
    code = int(found, 10 if kind == "decimal" else 16)
    if code > 0x10FFFF or code == 0x0D:
        return "" if code == 0x0D else None
    return chr(code).encode("utf-8", "surrogatepass").decode("latin-1")


# --- Where it is found


def _spans(text: str, wanted: _Wanted) -> Iterator[tuple[int, int]]:
    """Where in the text something is found."""
    if not text or not _may_hold(text, wanted):
        return
    plain = _Reading.of(text)
    decoded = _decoded(plain)
    readings = [
        ("text", plain.spaced()),
        ("text", decoded.spaced()),
        ("base64", decoded.as_base64()),
        ("hex", decoded.lower()),
    ]
    for name, reading in readings[1:] if decoded is plain else readings:
        for begin, end, needle in _runs(name, reading.text, wanted):
            if not (needle.is_alone and _is_touched(reading.text, begin, end)):
                yield _span(reading, begin, end, needle, len(text))


def _may_hold(text: str, wanted: _Wanted) -> bool:
    """Whether it is worth to look closely: the text is read as below, but for where in it things
    are.
    """
    plain = text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("latin-1")
    decoded = _decoded_text(plain)
    return bool(
        wanted.among("text", decoded.replace("+", " "))
        or wanted.among("base64", decoded.translate(_AS_BASE64).replace("\n", ""))
        or wanted.among("hex", decoded.lower())
        or (decoded is not plain and wanted.among("text", plain.replace("+", " ")))
    )


def _runs(reading: str, text: str, wanted: _Wanted) -> Iterator[tuple[int, int, _Needle]]:
    """Where enough characters in a row are those of a needle: each run of them, as far as it goes.

    What is covered is not looked at again, so that a needle that repeats itself takes no longer.
    What might be left beside it is too short to tell anything: where it is longer, it has a sample
    of its own.
    """
    done: dict[
        tuple[_Needle, int], int
    ] = {}  # by needle, and how the two lie to each other: up to where they were compared
    for piece in wanted.among(reading, text):
        found, covered = text.find(piece), 0
        while found >= 0:
            for needle, at in wanted.by_reading[reading][piece]:
                if found >= done.get((needle, found - at), 0):
                    begin, end = _widened(text, needle.text, found, at, len(piece))
                    done[needle, found - at] = end
                    if end - begin >= needle.least:
                        covered = max(covered, end)
                        yield begin, end, needle
            found = text.find(piece, max(found + 1, covered - len(piece) + 1))


def _widened(text: str, wanted: str, found: int, at: int, sample: int) -> tuple[int, int]:
    begin, end, first, last = found, found + sample, at, at + sample
    while begin and first and text[begin - 1] == wanted[first - 1]:
        begin, first = begin - 1, first - 1
    while end < len(text) and last < len(wanted) and text[end] == wanted[last]:
        end, last = end + 1, last + 1
    return begin, end


def _is_touched(text: str, begin: int, end: int) -> bool:
    return text[begin - 1 : begin].isalnum() or text[end : end + 1].isalnum()


def _span(reading: _Reading, begin: int, end: int, needle: _Needle, size: int) -> tuple[int, int]:
    """The place in the original; with the padding of base64, and with the backslashes at the edge
    of a value that has some.
    """
    while needle.reading == "base64" and reading.text[end : end + 1] == "=":
        end += 1
    first, last = reading.begins[begin], reading.ends[end - 1]
    if needle.has_backslash:
        first = reading.ends[begin - 1] if begin else 0
        last = reading.begins[end] if end < len(reading.begins) else size
    return first, last


def _replaced(text: str, spans: Iterable[tuple[int, int]], by: str) -> str:
    """The text with `by` for each span; what overlaps or touches is one."""
    pieces, at, last = list[str](), 0, -1
    for begin, end in sorted(spans):
        if begin > last:
            pieces += (text[at:begin], by)
        at = last = max(last, end)
    return "".join([*pieces, text[at:]])


def _strings(value: Any, *, with_names: bool = True) -> Iterator[str]:
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            pending.extend(value.values())
            if with_names:
                pending.extend(map(str, value))
        elif isinstance(value, list | tuple):
            pending.extend(value)


# --- What others log meanwhile

_in_hand: ContextVar[tuple[tuple[str, ...], str, Any]] = ContextVar(
    "callqueue_in_hand", default=((), "", None)
)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class _Scrubbing(logging.Filter):
    """Takes the secrets of the call in hand out of a record: its message, its traceback, and what
    was given beside them.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        values = _in_hand.get()[0]
        if values:
            record.msg, record.args = scrub(_message(record), values), ()
            if record.exc_info:
                record.exc_text = logging.Formatter().formatException(record.exc_info)
            if record.exc_text and holds(record.exc_text, values):
                record.exc_text, record.exc_info = scrub(record.exc_text, values), None
            for name in record.__dict__.keys() - _STANDARD:
                record.__dict__[name] = scrub_json(record.__dict__[name], values)
        return True


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # arguments that do not fit: logging would say so, and show them
        return str(record.msg)


_scrubbing = _Scrubbing()


def _watch_loggers() -> None:
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_scrubbing)
