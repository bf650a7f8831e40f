"""Tells the ledger when calls were sent that are not answered yet, so that they age meanwhile.

In: the jobs that are under way, every TELL seconds, from whoever runs them. Out: `sent_at` of their
attempts, of many in one statement. Told is what no answer can change any more: a whole request that
the other side has, to which no second one can follow. What is not told stays charged until it is
answered, so nothing is lost where telling fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from django.db import DatabaseError, InterfaceError, connections

from callqueue import clocks, conf, database, events, tables
from callqueue.database import from_us
from callqueue.ledger import clock_jumps
from callqueue.limits.kinds import SECOND
from callqueue.transitions import Job

TELL = 0.1  # seconds between two looks at what is under way
# seconds after which a call is told of that is not answered: most are answered before that
SLOW = 0.1
# seconds before the ledger has to know: the next look, the statement, and releases ahead of slots
MARGIN = 0.35
# seconds past what its limits have time for by which a call was sent at the latest, as far as the
# ledger is told: else nobody would see that it has aged away (BELATED in ledger/charges.py)
LATE = 2.0
LONGEST = 10.0  # seconds after which a call is told of, whatever its limits have time for


def tell(using: str, under_way: Iterable[Job]) -> int:
    """Tell the ledger of these calls, if there is one among them that it should know now; the count
    of those told. Two short statements, or none.
    """
    now = clocks.monotonic()
    jobs = [job for job in under_way if _is_slow(job, now)]
    patience = _patience({job.rule_name for job in jobs})
    jobs = [job for job in jobs if patience[job.rule_name] is not None]
    if not any(now - job.gate.sent_at + MARGIN >= (patience[job.rule_name] or 0) for job in jobs):
        return 0
    jobs.sort(key=lambda job: job.attempt_id)
    try:
        return _told(using, jobs, patience)
    except clock_jumps.Jumped:
        clock_jumps.watch(using).settle()
    except (DatabaseError, InterfaceError) as error:
        events.emit("database_away", during="tell", error=type(error).__name__, calls=len(jobs))
        if not database.in_transaction(using):
            with suppress(DatabaseError, InterfaceError):
                connections[using].close()
    return 0


def _is_slow(job: Job, now: float) -> bool:
    """Whether it is to be told of: sent a while ago, as a whole, and arrived."""
    gate = job.gate
    if gate is None or job.told is not None or job.redirects or not gate.is_whole:
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


def _patience(rules: Iterable[str]) -> dict[str, float | None]:
    """By rule, for how many seconds after it was sent nobody need know of a call; None where its
    limits ask for the answer.
    """
    budgets = conf.current().book.budgets
    found: dict[str, float | None] = {}
    for rule in rules:
        limits = [budget.limit for budget in budgets.get(rule, ())]
        patient = [limit.patience_us / SECOND for limit in limits if limit.ages_unanswered]
        found[rule] = min(LONGEST, *patient) if patient else None
    return found


def _told(using: str, jobs: Sequence[Job], patience: Mapping[str, float | None]) -> int:
    """Write when these were sent, of those that are open and still their worker's. On the clock as
    it is now, erring late.
    """
    with database.writing(using):
        reading = clock_jumps.held(using)
        clock_jumps.check(using, reading)
        longest = {rule: (seconds or 0.0) + LATE for rule, seconds in patience.items()}
        sent = {
            job.attempt_id: from_us(
                reading.latest(max(job.arrived or 0.0, reading.before - longest[job.rule_name]))
            )
            for job in jobs
        }
        rows = [
            {"pk": job.attempt_id, "sent_at": sent[job.attempt_id], "worker": job.worker}
            for job in jobs
        ]
        fence = "t.finished_at IS NULL AND t.worker = v.v2"
        count = database.update_each(tables.CallAttempt, using, rows, fence)
    for job in jobs:
        job.told = sent[job.attempt_id]
    return count
