"""Prunes the counted history: how long stretches of each width are kept.

In: the database's clock. Out: deleted rows of totals and peaks. Never touches an attempt.
"""

from __future__ import annotations

from callqueue import database, tables
from callqueue.database import to_us
from callqueue.limits.kinds import SECOND

MINUTE, QUARTER, LONG = 60, 900, 7200  # seconds of the stretches that are kept
HOUR, DAY = 3600, 86400
# How long each is kept, in seconds. Those of keys are quarters of an hour.
KEPT = {MINUTE: 3 * HOUR, QUARTER: 2 * DAY, LONG: 9 * DAY}
PRUNED = 2000  # rows that one statement deletes


def prune(using: str) -> None:
    """Delete the stretches that no range shows any more."""
    now = to_us(database.clock(using)) // SECOND
    for width, kept in KEPT.items():
        for rows in (tables.totals(using), tables.peaks(using)):
            old = rows.filter(width=width, start__lt=now - kept).order_by("start")
            while pks := list(old.values_list("pk", flat=True)[:PRUNED]):
                database.delete_each(rows.model, using, pks)
