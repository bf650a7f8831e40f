"""Tells the ledger when calls were sent that are not answered yet, so that they age meanwhile.

In: the jobs that are under way, every TELL seconds, from whoever runs them. Out: `sent_at` of their
attempts: of many in one statement, or in that of a record that is made anyway. Told is what no
answer can change any more: a whole request that the other side has, to which no second one can
follow. What is not told stays charged until it is answered, so nothing is lost where telling fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from django.db import DatabaseError, InterfaceError, connections

from callqueue import clocks, database, events, tables
from callqueue.clocks import Reading
from callqueue.database import from_us
from callqueue.ledger import agreement, clock_jumps
from callqueue.ledger.tallies import is_tallied
from callqueue.limits.kinds import SECOND
from callqueue.transitions import Job

TELL = 0.1  # seconds between two looks at what is under way
# seconds after which a call is told of that is not answered: most are answered before that
SLOW = 0.1
# seconds before the ledger has to know: the next look, the statement, and releases ahead of slots
MARGIN = 0.35
# the share of the time until then after which a call is told of where a record is made anyway
RIDES = 0.5
# seconds past what its limits have time for by which a call was sent at the latest, as far as the
# ledger is told: else nobody would see that it has aged away (BELATED in ledger/charges.py)
LATE = 2.0
AWAY = 5.0  # seconds until the next try, where the database is away
LONGEST = 10.0  # seconds after which a call is told of, whatever its limits have time for


def tell(using: str, under_way: Iterable[Job]) -> int | None:
    """Tell the ledger of these calls, if there is one among them that it should know now; the count
    of those told, None where the database is away. One short statement on PostgreSQL, two
    elsewhere, or none.
    """
    now = clocks.monotonic()
    patience = _Patience(using)
    jobs = [job for job in under_way if _is_slow(job, now)]
    try:
        jobs = [job for job in jobs if patience.of(job) is not None]
        if not any(_age(job, now) + MARGIN >= (patience.of(job) or 0) for job in jobs):
            return 0
        jobs.sort(key=lambda job: job.attempt_id)
        with database.writing(using):
            count = _write(using, jobs, patience)
    except clock_jumps.Jumped:
        clock_jumps.watch(using).settle()
        return 0
    except (DatabaseError, InterfaceError) as error:
        events.emit("database_away", during="tell", error=type(error).__name__, calls=len(jobs))
        if not database.in_transaction(using):
            with suppress(DatabaseError, InterfaceError):
                connections[using].close()
        return None
    for job in jobs:
        job.is_told = True
    return count


def riding(using: str, under_way: Iterable[Job]) -> list[Job]:
    """Those of these calls that a record may tell of which is made now: soon they would have to be
    told of by a statement of their own.
    """
    now, patience = clocks.monotonic(), _Patience(using)
    return [
        job
        for job in under_way
        if _is_slow(job, now)
        and (time := patience.of(job)) is not None
        and _age(job, now) >= RIDES * (time - MARGIN)
    ]


def sent_at(using: str, job: Job, reading: Reading) -> datetime:
    """When the ledger is told that it was sent: on the clock as it is now, erring late."""
    return from_us(reading.latest(_instant(job, reading.before, _Patience(using))))


class _Patience:
    """For how many seconds after it was sent nobody need know of a call, by rule; None where its
    limits ask for the answer. Tallied ones do. By the limits in force.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        self._found: dict[str, float | None] = {}

    def of(self, job: Job) -> float | None:
        name = job.rule_name
        if name not in self._found:
            in_force = agreement.book_lately(self._using)
            limits = [budget.limit for budget in in_force.budgets.get(name, ())]
            patient = [
                limit.patience_us / SECOND
                for limit in limits
                if limit.ages_unanswered and not is_tallied(limit)
            ]
            self._found[name] = min(LONGEST, *patient) if patient else None
        return self._found[name]


def _is_slow(job: Job, now: float) -> bool:
    """Whether it is to be told of: sent a while ago, as a whole, and arrived."""
    gate = job.gate
    if gate is None or job.is_told or not gate.is_whole:
        return False
    sent = gate.sent_at
    if sent is None or now - sent < SLOW:
        return False
    if job.arrived is None or job.arrived < sent:
        has_arrived = gate.has_arrived()
        # A packet that was lost and sent again has been counted since the last look.
        job.arrived = None if not has_arrived else now if job.is_late else sent
        job.is_late = not has_arrived
    return job.arrived is not None


def _age(job: Job, now: float) -> float:
    """For how many seconds it has been on its way."""
    return now - float(job.gate.sent_at)


def _instant(job: Job, now: float, patience: _Patience) -> float:
    """When it was sent, as the ledger is told, by this process's monotonic clock."""
    return max(job.arrived or 0.0, now - (patience.of(job) or 0.0) - LATE)


def _write(using: str, jobs: Sequence[Job], patience: _Patience) -> int:
    """Write when these were sent, of those that are open and still their worker's; the count of
    them. Within a transaction, which holds off whoever moves the ledger.
    """
    # Where nothing is written, the frame's row may be missing: it is made below.
    if database.returns_updated(using) and (count := _write_at_once(using, jobs, patience)):
        return count
    reading = clock_jumps.held(using)
    clock_jumps.check(using, reading)
    rows: list[Mapping[str, Any]] = [
        {
            "pk": job.attempt_id,
            "sent_at": from_us(reading.latest(_instant(job, reading.before, patience))),
            "worker": job.worker,
        }
        for job in jobs
    ]
    fence = "t.finished_at IS NULL AND t.worker = v.v2"
    return database.update_each(tables.CallAttempt, using, rows, fence)


def _write_at_once(using: str, jobs: Sequence[Job], patience: _Patience) -> int:
    """Write when these were sent, in one statement that reads the clock, writes by it and returns
    it: PostgreSQL's. The frame is locked before any row is written, since every row is joined
    with it.
    """
    before = clocks.monotonic()
    values, params = [], list[Any]()
    for job in jobs:
        ago = round((before - _instant(job, before, patience)) * SECOND)
        values.append(f"({job.attempt_id}, {ago}, CAST(%s AS text))")
        params.append(job.worker)
    clock, attempts = database.clock_sql(using), tables.name(using, "CallAttempt")
    found = database.rows(
        using,
        f"WITH frame AS {clock_jumps.moved_sql(using, held=True)} "
        f"UPDATE {attempts} t SET sent_at = {clock} - v.ago * INTERVAL '1 microsecond' "
        f"FROM (VALUES {', '.join(values)}) AS v (id, ago, worker), frame "
        "WHERE t.id = v.id AND CASE WHEN t.finished_at IS NULL AND t.worker = v.worker "
        f"THEN 1 ELSE 0 END = 1 RETURNING {clock}, frame.served",
        params,
    )
    if found:
        clock_jumps.check(using, clock_jumps.brought(using, before, *found[0]))
    return len(found)
