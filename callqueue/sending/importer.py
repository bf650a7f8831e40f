"""The importer: sends the calls of a file, one JSON document a line.

Calls are written in batches, in one transaction, which is rolled back where a line is bad, so that
all of the file is sent or nothing. Every line is checked whatever the others are, and what is
refused is told with its line and reason.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import IO, TYPE_CHECKING, Any

from django.db import transaction

from callqueue import conf
from callqueue.exceptions import CallQueueError, InvalidCall
from callqueue.security.secrets import references_to
from callqueue.sending import insertion, intake, json_lines

if TYPE_CHECKING:
    from callqueue.models import CallQueue

BATCH = 1000
_INSTANTS = ("not_before", "expires_at")
Refused = Callable[[int, str], None]
Progress = Callable[[int, int | None], None]


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


def request_of(document: Any, same: Mapping[str, Any]) -> intake.CallRequest:
    """The request in a document: `call_data`, or an envelope with instants as ISO 8601 text."""
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
    for number, text in json_lines.documents(source):
        done.lines += 1
        call = None
        try:
            request = request_of(json_lines.parse(text), same)
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


def _instant(name: str, value: Any) -> datetime:
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise InvalidCall(
            name, 'is not an instant; write ISO 8601 with an offset, as in "2030-01-31T12:00:00Z"'
        ) from None
