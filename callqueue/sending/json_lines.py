"""JSON Lines: a file of JSON documents, one a line, or of one document over several lines.

A file of any size is read line by line. Documents are JSON in the strict sense.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from typing import IO, Any

from callqueue import conf

BOM = b"\xef\xbb\xbf"
LONGEST_LINE = 16 * 2**20


def documents(source: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Each line that is not empty, with its number; or a document over several lines."""
    source.seek(0)
    if whole := _one_document(source):
        yield whole
        return
    source.seek(0)
    longest = _longest()
    number = 0
    while line := source.readline(longest + 1):
        number += 1
        if len(line) > longest and not line.endswith(b"\n"):
            while (rest := source.readline(longest)) and not rest.endswith(b"\n"):
                continue
        if number == 1:
            line = line.removeprefix(BOM)
        if line.strip():
            yield number, line


def parse(text: bytes) -> Any:
    """A JSON document, strictly: no key twice, no NaN, no infinite number. Else ValueError."""
    if len(text) > _longest():
        raise ValueError(f"is longer than {_longest()} bytes")
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_without_repetition,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        row = f"line {error.lineno} of it, " if error.lineno > 1 else ""
        raise ValueError(f"is not JSON: {error.msg} ({row}column {error.colno})") from None
    except RecursionError:
        raise ValueError("is nested too deep") from None


def seekable(source: IO[bytes], into: IO[bytes]) -> IO[bytes]:
    """`source`, or a copy of it in the file `into` where it can be read only once, as a pipe."""
    if source.seekable():
        return source
    while chunk := source.read(io.DEFAULT_BUFFER_SIZE * 8):
        into.write(chunk)
    into.seek(0)
    return into


def _one_document(source: IO[bytes]) -> tuple[int, bytes] | None:
    """The whole file as one document, with its first line's number; None where it is JSON lines."""
    text = source.read(_longest() + 1)
    body = text.removeprefix(BOM).lstrip()
    first, _, rest = body.partition(b"\n")
    if len(text) > _longest() or not rest.strip() or _is_json(first):
        return None
    looks_like_lines = rest.lstrip().startswith(b"{") or first.strip() not in (b"{", b"[")
    if looks_like_lines and not _is_json(body):
        return None
    return text[: len(text) - len(body)].count(b"\n") + 1, body


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _longest() -> int:
    return max(LONGEST_LINE, 8 * conf.current().max_call_bytes)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"has the key {name[:60]!r} twice in one object")
            seen.add(name)
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"has {name}, which is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"has the number {text[:40]}, which is too large")
    return number
