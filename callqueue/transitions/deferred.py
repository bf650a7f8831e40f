"""What calls become that were locked when their answers were recorded: kept, and written once their
rows are free.

In: columns of calls that an application's transaction has locked, in the transaction that records
their attempts. Out: those columns, in a later round. The answer is safe and ages at once, and no
worker waits for somebody else's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from callqueue import callbacks, database, tables
from callqueue.ledger import row_locks
from callqueue.ledger.transaction import untimed
from callqueue.states import FINAL, Move
from callqueue.transitions.ends import Job

MOST = 1000  # calls that one round ends


def keep(using: str, jobs: Sequence[Job], columns: Sequence[dict[str, Any]]) -> None:
    """Keep what the calls of these jobs become, in columns, for those that are still there."""
    listed = tables.calls(using).filter(pk__in=[job.pk for job in jobs])
    there = set(listed.values_list("pk", flat=True))
    rows = [
        tables.BelatedEnding(
            attempt_id=job.attempt_id, call_id=job.pk, number=job.number, columns=_as_json(one)
        )
        for job, one in zip(jobs, columns, strict=True)
        if job.pk in there
    ]
    # An earlier try may have kept them, whose answer was lost.
    tables.BelatedEnding.objects.using(using).bulk_create(rows, ignore_conflicts=True)


def end_deferred(using: str) -> int:
    """End calls whose rows are free by now and that have not gone on; the count of them."""
    kept = tables.BelatedEnding.objects.using(using)
    ids = list(kept.order_by("pk").values_list("pk", flat=True)[:MOST])
    if not ids:
        return 0

    def work() -> list[dict[str, Any]]:
        rows = list(database.locked(kept.filter(pk__in=ids).order_by("pk")))
        wanted = [row.call_id for row in rows]
        free, _ = row_locks.calls_to_end(using, wanted)
        there = set(tables.calls(using).filter(pk__in=wanted).values_list("pk", flat=True))
        settled = [row.pk for row in rows if row.call_id in free or row.call_id not in there]
        kept.filter(pk__in=settled).delete()
        ended = [_columns(row) for row in rows if _is_out(row, free)]
        database.update_each(tables.CallQueue, using, ended)
        return ended

    ended = untimed(using, work)
    for status in {columns["status"] for columns in ended} & set(FINAL):
        callbacks.tell(using, [one["pk"] for one in ended if one["status"] == status], status)
    return len(ended)


def _is_out(row: Any, free: dict[int, tuple[int, int]]) -> bool:
    """Whether the call of a kept row is free, and is still out with its attempt."""
    status, number = free.get(row.call_id, (None, None))
    return status in Move.RECORD.sources and number == row.number


def _as_json(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns with instants as text, to the microsecond."""
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in columns.items()
    }


def _columns(row: Any) -> dict[str, Any]:
    """A call's columns as they were before they were kept as JSON."""
    field: Any = tables.CallQueue._meta.get_field
    return {
        name: field("id" if name == "pk" else name).to_python(value)
        for name, value in row.columns.items()
    }
