"""What calls become that were locked when their answers were recorded: kept, and written once their
rows are free.

In: endings of calls that an application's transaction has locked, in the transaction that records
their attempts. Out: those calls' columns, in a later round. The answer is safe and ages at once,
and no worker waits for somebody else's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from callqueue import callbacks, database, states, tables
from callqueue.ledger import row_locks
from callqueue.transitions import Ending, columns_of_call

MOST = 1000  # calls that one round ends


def keep(using: str, endings: Sequence[tuple[int, int, Ending]], now: datetime) -> None:
    """Keep (attempt, its number, what it makes of its call) for each call that is still there."""
    there = set(
        tables.calls(using)
        .filter(pk__in=[ending.call_id for _, _, ending in endings])
        .values_list("pk", flat=True)
    )
    rows = [
        tables.BelatedEnding(
            attempt_id=attempt,
            call_id=ending.call_id,
            number=number,
            columns=_as_json(columns_of_call(ending, now)),
        )
        for attempt, number, ending in endings
        if ending.call_id in there
    ]
    tables.BelatedEnding.objects.using(using).bulk_create(rows)


def write(using: str) -> int:
    """End the calls whose rows are free by now, those that have not gone on meanwhile; the count of
    them.
    """
    kept = tables.BelatedEnding.objects.using(using)
    ids = list(kept.order_by("pk").values_list("pk", flat=True)[:MOST])
    if not ids:
        return 0
    with database.writing(using):
        rows = list(database.locked(kept.filter(pk__in=ids).order_by("pk")))
        wanted = [row.call_id for row in rows]
        free, _ = row_locks.calls_to_end(using, wanted)
        there = set(tables.calls(using).filter(pk__in=wanted).values_list("pk", flat=True))
        kept.filter(
            pk__in=[row.pk for row in rows if row.call_id in free or row.call_id not in there]
        ).delete()
        endings = [
            _columns(row)
            for row in rows
            if free.get(row.call_id) == (states.DISPATCHED, row.number)
        ]
        database.update_each(tables.CallQueue, using, endings)
    for status in {columns["status"] for columns in endings} & set(states.FINAL):
        callbacks.announce(
            using, [columns["pk"] for columns in endings if columns["status"] == status], status
        )
    return len(endings)


def _as_json(columns: dict[str, Any]) -> dict[str, Any]:
    """With instants as text, to the microsecond."""
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
