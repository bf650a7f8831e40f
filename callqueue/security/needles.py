"""What a scrub looks for: values, the parts of them that are seen on their own, in every encoding.

Values enter; needles leave, sorted by their samples, so that a text is looked through once. Pure.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from callqueue.security.allowance import spend
from callqueue.security.credentials import SCHEME
from callqueue.security.readings import AS_BASE64, decoded_text

SHORT = 4  # a value of fewer characters is scrubbed only where it stands alone
PART = 8  # as many characters of a value in a row are scrubbed wherever they are
_MANY = 100  # samples from which on a text is cut up instead
_BASE64_PART = 10  # characters of base64 that 8 characters decide at least, wherever they stand
_PAYLOAD_PART = 24  # as many characters of a payload in a row are taken out: common words are not
# a part of a value that is told on its own, such as a URL's path, is scrubbed from this length on
_LEAST_PIECE = 6


class Needle(NamedTuple):
    """A text to look for, in one way to read: at least so many characters of it in a row.

    `samples` are pieces of it of half that length, and their places, so close together that every
    part that is long enough has one.
    """

    text: str
    least: int
    reading: str  # "text", "base64" or "hex"
    is_alone: bool = False
    has_backslash: bool = False

    def __repr__(self) -> str:
        return f"<a needle of {len(self.text)} characters>"

    @property
    def samples(self) -> Iterator[tuple[int, str]]:
        size = self.least if self.least == len(self.text) else (self.least + 1) // 2
        for at in range(0, len(self.text) - size + 1, self.least - size + 1):
            yield at, self.text[at : at + size]


class Wanted(NamedTuple):
    """Needles by how a text is read for them, by the length of their samples, and by sample: which
    needles have it, and where.
    """

    by_reading: Mapping[str, Mapping[int, Mapping[str, Sequence[tuple[Needle, int]]]]]

    def __repr__(self) -> str:
        return "<what is wanted>"

    @classmethod
    def of(cls, needles: Iterable[Needle]) -> Wanted:
        """The needles in order."""
        found: dict[str, dict[int, dict[str, list[tuple[Needle, int]]]]] = {
            "text": {},
            "base64": {},
            "hex": {},
        }
        for needle in dict.fromkeys(needles):
            for at, piece in needle.samples:
                of_size = found[needle.reading].setdefault(len(piece), {})
                of_size.setdefault(piece, []).append((needle, at))
        return cls(found)

    def among(self, reading: str, text: str) -> Iterator[str]:
        """The samples that are in the text."""
        for size, samples in self.by_reading[reading].items():
            spend(len(text))
            if len(samples) < _MANY:
                yield from (piece for piece in samples if piece in text)
            else:
                pieces = {text[at : at + size] for at in range(len(text) - size + 1)}
                yield from (piece for piece in samples if piece in pieces)

    def having(self, reading: str, sample: str) -> Sequence[tuple[Needle, int]]:
        """The needles that have this sample, and where."""
        return self.by_reading[reading][len(sample)][sample]


@lru_cache(maxsize=256)
def wanted(values: tuple[str, ...]) -> Wanted | None:
    pieces = {piece: None for value in values if value for piece in _pieces(value)}
    return (
        Wanted.of(needle for piece, least in pieces for needle in _forms(piece, least))
        if pieces
        else None
    )


def of_payload(strings: Iterable[str]) -> Wanted:
    """The needles for a payload's strings: long parts of them, in no encoding but text."""
    return Wanted.of(
        Needle(form, min(len(form), _PAYLOAD_PART), "text")
        for string in strings
        for form in _as_text(string)
    )


def _pieces(value: str) -> Iterator[tuple[str, int]]:
    """The value, and the parts of it that are seen on their own, each with how many characters of
    it in a row tell something.

    What is no secret in itself, such as "https://" or "Bearer ", tells nothing.
    """
    scheme = SCHEME.match(value)
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


def _forms(piece: str, least: int) -> Iterator[Needle]:
    """A piece in every way to read a text."""
    is_alone, least = len(piece) < SHORT, max(least, min(PART, len(piece)))
    for form in _as_text(piece):
        edge = piece[:1] == "\\" or piece[-1:] == "\\"
        yield Needle(form, min(least, len(form)), "text", is_alone, edge)
    if is_alone:
        return
    for raw in _as_bytes(piece):
        yield Needle(raw.hex(), min(2 * least, 2 * len(raw)), "hex")
        for core in _base64_cores(raw):
            yield Needle(
                core.translate(AS_BASE64),
                len(core) if least > PART else min(_BASE64_PART, len(core)),
                "base64",
            )


def _as_text(piece: str) -> set[str]:
    """The bytes of a piece, a character each, as they stand and as they would be decoded."""
    plain = piece.encode("utf-8", "surrogatepass").decode("latin-1")
    return {form.replace("+", " ") for form in (plain, decoded_text(plain)) if form}


def _as_bytes(piece: str) -> set[bytes]:
    """In UTF-8, and in Latin-1 where it can be."""
    encoded = {piece.encode("utf-8", "surrogatepass")}
    return encoded if max(piece) > "\xff" else encoded | {piece.encode("latin-1")}


def _base64_cores(raw: bytes) -> Iterator[str]:
    """The base64 of `raw` at each offset in a longer text: the characters it alone decides."""
    whole = b64encode(raw).decode("ascii").rstrip("=")
    if len(whole) >= PART - 2:
        yield whole
    for offset, first in ((1, 2), (2, 3)):
        encoded = b64encode(b"\0" * offset + raw).decode("ascii")
        tail = (offset + len(raw)) % 3
        core = encoded[first : len(encoded) - (4 - tail) if tail else len(encoded)]
        if len(core) >= PART:
            yield core
