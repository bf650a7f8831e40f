"""A text as it may be read: as it stands, with its escapes and entities decoded, as base64, as hex.

A text enters; bytes leave, one character each, with their places in the text. Pure.
"""

from __future__ import annotations

import html.entities
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from callqueue.security.allowance import spend


@dataclass(frozen=True)
class Reading:
    """A text as bytes, one character each, and where in the original each began and ended."""

    text: str = field(repr=False)
    begins: Sequence[int]
    ends: Sequence[int]

    @classmethod
    def of(cls, text: str) -> Reading:
        """The text as it stands, in UTF-8."""
        if text.isascii():
            return cls(text, range(len(text)), range(1, len(text) + 1))
        encoded = [char.encode("utf-8", "surrogatepass").decode("latin-1") for char in text]
        places = [place for place, char in enumerate(encoded) for _ in char]
        return cls("".join(encoded), places, [place + 1 for place in places])

    def spaced(self) -> Reading:
        """With the space that "+" is in a form."""
        return Reading(self.text.replace("+", " "), self.begins, self.ends)

    def lower(self) -> Reading:
        """With small letters; there are no others of ASCII."""
        return Reading(self.text.lower(), self.begins, self.ends)

    def as_base64(self) -> Reading:
        """With both alphabets as one, and without line ends, wherever they are."""
        text = self.text.translate(AS_BASE64)
        if "\n" not in text:
            return Reading(text, self.begins, self.ends)
        kept = [place for place, char in enumerate(text) if char != "\n"]
        return Reading(
            text.replace("\n", ""), [self.begins[p] for p in kept], [self.ends[p] for p in kept]
        )


AS_BASE64 = str.maketrans("-_ ", "+/+")

# Of a run of backslashes it is not told which of them belong to the text: all are left out, in what
# is looked for too. What Latin-1 has is read as its one byte there, so that UTF-8, Latin-1, and
# UTF-8 that was read as Latin-1 come to the same.
_TOKEN = re.compile(
    r"""
      % (?:25)*+ (?P<byte>[0-9A-Fa-f]{2})
    | % (?:25)++ (?P<sign>)
    | & (?:amp; | \#0{0,4}38; | \#[xX]0{0,4}26;)*
      (?: \#0{0,8}(?P<decimal>[0-9]{1,7})
        | \#[xX]0{0,8}(?P<hexadecimal>[0-9A-Fa-f]{1,6})
        | (?P<named>[A-Za-z][A-Za-z0-9]{0,31})
      );
    | \\++
      (?: [uU](?P<high>[dD][89abAB][0-9A-Fa-f]{2}) \\++ [uU](?P<low>[dD][c-fC-F][0-9A-Fa-f]{2})
        | u\{(?P<braced>[0-9A-Fa-f]{1,6})\}
        | u(?P<unit>[0-9A-Fa-f]{4})
        | U(?P<wide>[0-9A-Fa-f]{8})
        | x(?P<pair>[0-9A-Fa-f]{2})
        | (?P<letter>[nrtfbva])
      )?
    | \r
    | (?P<latin>[\xc2\xc3][\x80-\xbf])
    """,
    re.VERBOSE,
)
_FIRST = "%&\\\r\xc2\xc3"  # what a token begins with
# lines end with or without a CR
_LETTERS = {"n": "\n", "r": "", "t": "\t", "f": "\f", "b": "\b", "v": "\v", "a": "\a"}
_PASSES = 4  # encodings inside each other, besides those of one kind


def decoded(reading: Reading) -> Reading:
    """The text with whatever escapes and entities stand in it read, those inside each other too."""
    for _ in range(_PASSES):
        if not any(char in reading.text for char in _FIRST):
            break
        spend(len(reading.text))
        reading, is_changed = _decoded_once(reading)
        if not is_changed:
            break
    return reading


def decoded_text(text: str) -> str:
    """A text with its escapes and entities read, without their places, which takes less time."""
    for _ in range(_PASSES):
        if not any(char in text for char in _FIRST):
            break
        spend(len(text))
        before, text = text, _TOKEN.sub(_meaning_or_itself, text.replace('\\"', '"'))
        if text == before:
            break
    return text


def _meaning_or_itself(token: re.Match[str]) -> str:
    meant = _meaning(token)
    return token.group() if meant is None else meant


def _decoded_once(reading: Reading) -> tuple[Reading, bool]:
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
    return Reading("".join([*pieces, text[at:]]), begins, ends), True


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
