"""Where in a text a needle is, in whatever way the text is read.

A text and what is wanted enter; places leave, or the text without them. Pure. The time it takes
grows with the text, not with how often a needle repeats itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from callqueue.security.allowance import spend
from callqueue.security.needles import Needle, Wanted
from callqueue.security.readings import AS_BASE64, Reading, decoded, decoded_text


def spans(text: str, wanted: Wanted) -> Iterator[tuple[int, int]]:
    """Where in the text something is found."""
    if not text or not _may_hold(text, wanted):
        return
    plain = Reading.of(text)
    unescaped = decoded(plain)
    readings = [
        ("text", plain.spaced()),
        ("text", unescaped.spaced()),
        ("base64", unescaped.as_base64()),
        ("hex", unescaped.lower()),
    ]
    for name, reading in readings[1:] if unescaped is plain else readings:
        for begin, end, needle in _runs(name, reading.text, wanted):
            if not (needle.is_alone and _is_touched(reading.text, begin, end)):
                yield _span(reading, begin, end, needle, len(text))


def _may_hold(text: str, wanted: Wanted) -> bool:
    """Whether a closer look is worth it: the text as it is read below, without places."""
    plain = text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("latin-1")
    unescaped = decoded_text(plain)
    looks = [
        ("text", unescaped.replace("+", " ")),
        ("base64", unescaped.translate(AS_BASE64).replace("\n", "")),
        ("hex", unescaped.lower()),
        ("text", plain.replace("+", " ") if unescaped is not plain else ""),
    ]
    return any(True for name, reading in looks for _ in wanted.among(name, reading))


def _runs(reading: str, text: str, wanted: Wanted) -> Iterator[tuple[int, int, Needle]]:
    """Where enough characters in a row are those of a needle: each run of them, as far as it goes.

    What is covered is not looked at again, so that a needle that repeats itself takes no longer.
    What might be left beside it is too short to tell anything: where it is longer, it has a sample
    of its own.
    """
    # by needle, and how the two lie to each other: up to where they were compared
    done: dict[tuple[Needle, int], int] = {}
    for piece in wanted.among(reading, text):
        found, covered = text.find(piece), 0
        while found >= 0:
            for needle, at in wanted.having(reading, piece):
                if found >= done.get((needle, found - at), 0):
                    spend()
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


def _span(reading: Reading, begin: int, end: int, needle: Needle, size: int) -> tuple[int, int]:
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


def replaced(text: str, spans: Iterable[tuple[int, int]], by: str) -> str:
    """The text with `by` for each span; what overlaps or touches is one."""
    pieces, at, last = list[str](), 0, -1
    for begin, end in sorted(spans):
        if begin > last:
            pieces += (text[at:begin], by)
        at = last = max(last, end)
    return "".join([*pieces, text[at:]])
