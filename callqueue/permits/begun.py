"""A permit's attempt once it is begun: the job that its end is written by, and when its slot opens.

Instants are monotonic, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from callqueue import clocks, database
from callqueue.clocks import Reading
from callqueue.database import from_us
from callqueue.dispatch.turns import Answer
from callqueue.permits.asking import Wanted
from callqueue.transitions import Job


@dataclass(frozen=True)
class Granted:
    """A permit's attempt, and the monotonic instant at which it may begin (None: now)."""

    attempt_id: int
    queue: str
    reading: Reading
    begins_at: float | None


def granted_by(answer: Answer) -> Granted:
    """What a pass has granted."""
    assert answer.attempt_id is not None and answer.reading is not None
    begins_at = None if answer.send_at is None else answer.reading.monotonic_at(answer.send_at)
    return Granted(answer.attempt_id, answer.queue, answer.reading, begins_at)


def job_of(wanted: Wanted, owner: str, granted: Granted, due_at: datetime | None) -> Job:
    """The attempt as a job, as a worker has it of a call."""
    return Job(
        attempt_id=granted.attempt_id,
        number=1,
        queue=granted.queue,
        send_at=None,
        pk=0,
        rule_name=wanted.rule_name,
        key=wanted.key,
        cost=wanted.cost,
        method=wanted.method,
        params={},
        failed_count=0,
        throttled_count=0,
        unique_key=None,
        callback=None,
        first_sent_dt=None,
        due_at_dt=due_at or from_us(granted.reading.wall),
        idempotency_key="",
        worker=owner,
        clock=granted.reading,
        charged=wanted.cost,
        rule=wanted.rule,
        begins_at=_by_own_clock(granted.begins_at),
        lease_ends=(granted.begins_at or granted.reading.before) + wanted.lease,
    )


def until_slot(job: Job) -> float:
    """Seconds until the job's slot has certainly opened."""
    return 0.0 if job.begins_at is None else max(0.0, job.begins_at - now())


def _by_own_clock(instant: float | None) -> float | None:
    """A monotonic instant as the waiter counts its seconds."""
    return None if instant is None else instant + (now() - clocks.monotonic())


def now() -> float:
    """Seconds that go on as the waiter's do: with the test's clock, where a test holds one."""
    return clocks.monotonic() + database.server_clock.ahead.total_seconds()
