"""Sends the calls of a file (JSON, or JSON lines) in one transaction: all, none, or all but bad."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, islice
from typing import IO, TYPE_CHECKING, Any

from django.db import transaction

from callqueue import conf
from callqueue.exceptions import CallQueueError, InvalidCall
from callqueue.security.secrets import secrets_from_references
from callqueue.sending import intake

if TYPE_CHECKING:
    from callqueue.models import CallQueue

BATCH = 1000
BOM = b"\xef\xbb\xbf"
_INSTANTS = ("not_before", "expires_at")
Refused = Callable[[int, str], None]


@dataclass
class Imported:
    """What became of a file: lines with a call, refused ones, calls sent, and discarded."""

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
    progress: Callable[[int], None] | None = None,
) -> Imported:
    """Send the calls in `source`. With a bad line nothing is sent, unless `skip_bad`.

    `rule` is for calls that name none. In a file that `names_secrets`, {"$secret": NAME} is one; in
    any other it is data. `refused` is told (line, why) of each bad line, `progress` the lines done.
    """
    if rule is not None:
        conf.current().rule(rule)  # else UnknownRule
    done, same = Imported(), {} if rule is None else {"rule": rule}
    with transaction.atomic(using=using):
        prepared = _prepared_calls(source, done, same, names_secrets, refused)
        while lines := list(islice(prepared, BATCH)):
            if skip_bad or not done.refused:
                calls = [call for call in lines if call is not None]
                done.sent += len(intake.insert_many(calls, batch_size=BATCH, using=using))
            if progress is not None:
                progress(done.lines)
        if done.refused and not skip_bad:
            transaction.set_rollback(True, using=using)
            done.sent = 0
    return done


def _prepared_calls(
    source: IO[bytes],
    done: Imported,
    same: Mapping[str, Any],
    names_secrets: bool,
    refused: Refused,
) -> Iterator[CallQueue | None]:
    """A row for each document, counted in `done`; None for one that is refused or discarded."""
    for number, text in _numbered_documents(source):
        done.lines += 1
        call = None
        try:
            request = _request_of(_parse_json(text), same)
            if names_secrets:
                request = replace(request, call_data=secrets_from_references(request.call_data))
            call = intake.prepare(request)
            done.discarded += call is None
        except (CallQueueError, ValueError) as error:
            done.refused += 1
            refused(number, str(error))
        yield call


def _numbered_documents(source: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Each line that is not empty, with its number; or the whole, if it looks like one document."""
    number, first, rest = 1, source.readline().removeprefix(BOM), iter(source)
    while first and not first.strip():
        number, first = number + 1, source.readline()
    if not _is_json(first):
        lines = list(rest)
        whole, second = b"".join([first, *lines]), next(filter(bytes.strip, lines), b"")
        begins = first.strip() in (b"{", b"[") and not second.lstrip().startswith(b"{")
        if second and (begins or _is_json(whole)):
            lines, first = [], whole
        rest = iter(lines)
    for at, line in enumerate(chain([first], rest), number):
        if line.strip():
            yield at, line


def _parse_json(text: bytes) -> Any:
    """A JSON document with no name twice in an object. Else ValueError."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_dict_of_distinct_names)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        row = f"line {error.lineno} of it, " if error.lineno > 1 else ""
        raise ValueError(f"is not JSON: {error.msg} ({row}column {error.colno})") from None
    except RecursionError:
        raise ValueError("is nested too deep") from None


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _dict_of_distinct_names(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    names = Counter(name for name, _ in pairs)
    for name in (name for name, times in names.items() if times > 1):
        raise ValueError(f"has the key {name[:60]!r} twice in one object")
    return dict(pairs)


def _request_of(document: Any, same: Mapping[str, Any]) -> intake.CallRequest:
    if isinstance(document, list):
        raise InvalidCall("call_data", "is a list; write one call per line")
    if isinstance(document, dict) and "call_data" in document:
        document = {
            name: _parse_instant(name, value) if name in _INSTANTS else value
            for name, value in document.items()
            if value is not None or name == "call_data"  # null is as if left out
        }
    return intake.request_of(document, same)


def _parse_instant(name: str, value: Any) -> datetime:
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise InvalidCall(
            name, 'is not an instant; write ISO 8601 with an offset, as in "2030-01-31T12:00:00Z"'
        ) from None
