"""Tells the ledger when calls were sent that are not answered yet, so that they age meanwhile.
Told is what no answer can change any more: a whole request that the other side has, to which no
second one can follow. What is not told stays charged until it is answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from django.db import DatabaseError, InterfaceError, connections

from callqueue import clocks, database, events, transitions
from callqueue.clocks import Mono
from callqueue.database import from_us
from callqueue.ledger import settings
from callqueue.ledger.tallies import is_tallied
from callqueue.ledger.transaction import Locked, transaction
from callqueue.limits.kinds import SECOND
from callqueue.transitions import Job

TELL = 0.1  # seconds between two looks at what is under way
# seconds after which a call is told of that is not answered: most are answered before that
SLOW = 0.1
# seconds past its limits' patience: the ledger is told of no earlier instant of sending, else
# nobody would see that the call has aged away (BELATED in ledger/account.py)
LATE = 2.0
AWAY = 5.0  # seconds until the next try, where the database is away


def tell(using: str, under_way: Iterable[Job]) -> int | None:
    """Tell of those of these calls that are slow and have arrived; the count. None: no database."""
    now = clocks.monotonic()
    slow = (job for job in under_way if _is_to_be_told_of(job.gate, now))
    jobs = sorted(slow, key=lambda job: job.attempt.id)
    if not jobs:
        return 0
    try:
        patience = {name: _patience(using, name) for name in {job.call.rule for job in jobs}}
        jobs = [job for job in jobs if patience[job.call.rule] is not None]
        write = partial(_write_sent_at, using, jobs, patience)
        count = transaction(using, write) if jobs else 0
    except (DatabaseError, InterfaceError) as error:
        events.emit("database_away", during="tell", error=type(error).__name__, calls=len(jobs))
        if not database.in_transaction(using):
            with suppress(DatabaseError, InterfaceError):
                connections[using].close()
        return None
    for job in jobs:
        job.gate.is_told = True
    return count


def _write_sent_at(
    using: str, jobs: Sequence[Job], patience: Mapping[str, float | None], locked: Locked
) -> int:
    reading, rows = locked.reading, []
    for job in jobs:
        earliest = reading.before - (patience[job.call.rule] or 0.0) - LATE
        sent = max(job.gate.arrived_at or Mono(0.0), earliest)
        sent_at = from_us(reading.latest_ledger_time_at(sent))
        rows.append({"pk": job.attempt.id, "worker": job.attempt.worker, "sent_at": sent_at})
    return transitions.tell_when_sent(using, rows)


def _patience(using: str, rule: str) -> float | None:
    """Seconds for which limits in force do without news that a call was sent; None: for ever."""
    limits = [budget.limit for budget in settings.book_lately(using).budgets.get(rule, ())]
    patient = [
        limit.patience_us / SECOND
        for limit in limits
        if limit.ages_unanswered and not is_tallied(limit)
    ]
    return min(patient, default=None)


def _is_to_be_told_of(gate: Any, now: Mono) -> bool:
    """Whether what passed the gate is untold, whole, sent SLOW ago, and arrived (noted in it)."""
    if gate is None or gate.is_told or not gate.is_whole:
        return False
    sent = gate.sent_at
    if sent is None or now - sent < SLOW:
        return False
    if gate.arrived_at is None or gate.arrived_at < sent:
        has_arrived = gate.has_arrived()
        # A packet that was lost and sent again has been counted since the last look.
        gate.arrived_at = None if not has_arrived else now if gate.is_late else sent
        gate.is_late = not has_arrived
    return gate.arrived_at is not None
