"""The importer: sends the calls of a file, one JSON document a line, or one over several lines.

A file of any size is read line by line; calls are written in batches, in one transaction, which is
rolled back where a line is bad, so that all of the file is sent or nothing. Every line is checked
whatever the others are, and what is refused is told with its line and reason.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import IO, TYPE_CHECKING, Any

from django.db import transaction

from callqueue import conf
from callqueue.exceptions import CallQueueError, InvalidCall
from callqueue.security.secrets import references_to
from callqueue.sending import insertion, intake

if TYPE_CHECKING:
    from callqueue.models import CallQueue

BATCH = 1000
BOM = b"\xef\xbb\xbf"
LONGEST_LINE = 16 * 2**20
_INSTANTS = ("not_before", "expires_at")
Refused = Callable[[int, str], None]
Progress = Callable[[int, int | None], None]


@dataclass
class Imported:
    """What became of a file: lines that hold a call, those refused, calls sent, calls that the
    router discarded.
    """

    lines: int = 0
    refused: int = 0
    sent: int = 0
    discarded: int = 0


def send_file(
    source: IO[bytes],
    *,
    using: str,
    rule: str | None = None,
    skip_bad: bool = False,
    names_secrets: bool = False,
    refused: Refused,
    progress: Progress | None = None,
) -> Imported:
    """Send the calls in `source`, which can be sought. With a bad line nothing is sent, unless
    `skip_bad`.

    `rule` is for calls that name none. In a file that `names_secrets`, {"$secret": NAME} is one; in
    any other it is data. `refused` is told (line, why) of each bad line; `progress` (lines done,
    about how many there are).
    """
    if rule is not None:
        conf.current().rule(rule)
    done, told = Imported(), progress or _tell_nobody
    size = source.seek(0, io.SEEK_END)
    with transaction.atomic(using=using):
        same = {} if rule is None else {"rule": rule}
        for batch in _batches(_prepared(source, done, same, names_secrets, refused)):
            if skip_bad or not done.refused:
                done.sent += len(insertion.insert_many(batch, batch_size=BATCH, using=using))
            told(done.lines, round(done.lines * size / max(1, source.tell())))
        if done.refused and not skip_bad:
            transaction.set_rollback(True, using=using)
            done.sent = 0
    return done


def rereadable(source: IO[bytes], into: IO[bytes]) -> IO[bytes]:
    """`source`, or, where it can be read only once, such as a pipe, a copy of it, made `into` a
    temporary file.
    """
    if source.seekable():
        return source
    while chunk := source.read(io.DEFAULT_BUFFER_SIZE * 8):
        into.write(chunk)
    into.seek(0)
    return into


def documents(source: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Each line that is not empty with its number, from 1; a document over several lines is one, at
    its first line.
    """
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


def parse_document(text: bytes) -> Any:
    """A JSON document, strictly: no key twice, no NaN, no number past what a float holds.
    ValueError says why not.
    """
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


def request_of(document: Any, same: Mapping[str, Any]) -> intake.CallRequest:
    """The request that a document is: `call_data` itself, or an envelope, which writes instants as
    ISO 8601 text.
    """
    if isinstance(document, list):
        raise InvalidCall("call_data", "is a list; write one call per line")
    if isinstance(document, dict) and "call_data" in document:
        document = {
            name: value
            for name, value in document.items()
            if value is not None or name == "call_data"
        }
        for name in _INSTANTS:
            if name in document:
                document[name] = _instant(name, document[name])
    return intake.request_of(document, same)


def _prepared(
    source: IO[bytes],
    done: Imported,
    same: Mapping[str, Any],
    names_secrets: bool,
    refused: Refused,
) -> Iterator[CallQueue | None]:
    """The unsaved row of each good line; None for a line that is bad or discarded, so that batches
    are of so many lines.
    """
    for number, text in documents(source):
        done.lines += 1
        call = None
        try:
            request = request_of(parse_document(text), same)
            if names_secrets:
                request = replace(request, call_data=references_to(request.call_data))
            call = intake.prepare(request)
            done.discarded += call is None
        except (CallQueueError, ValueError) as error:
            done.refused += 1
            refused(number, str(error))
        yield call


def _batches(items: Iterator[CallQueue | None]) -> Iterator[list[CallQueue]]:
    while lines := list(islice(items, BATCH)):
        yield [call for call in lines if call is not None]


def _tell_nobody(done: int, total: int | None) -> None:
    """No progress is wanted."""


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


def _instant(name: str, value: Any) -> datetime:
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise InvalidCall(
            name, 'is not an instant; write ISO 8601 with an offset, as in "2030-01-31T12:00:00Z"'
        ) from None
