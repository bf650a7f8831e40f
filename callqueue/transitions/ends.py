"""A job, which is a begun attempt with its call; the result that came of it; and what the end of an
attempt makes of its call: done, to be retried (and when), failed or unknown.

In: what a worker read when it began the attempt, and what happened. Out: what the record writes.
Rows of calls have the names of a job that decide what its call becomes, so recovery, which has no
job, passes a row. What calls become that somebody had locked when their answers were recorded is
kept, in the transaction that records their attempts, and written once their rows are free: the
answer is safe and ages at once, and no worker waits for somebody else's transaction.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from callqueue import callbacks, clocks, database, states, tables
from callqueue.clocks import Reading
from callqueue.database import from_us, to_us
from callqueue.handlers import HTTP_METHODS, IDEMPOTENT
from callqueue.ledger.transaction import calls_to_end, untimed
from callqueue.limits.rules import Rule, backoff
from callqueue.states import FINAL, Move

LONGEST_MESSAGE = 2000  # characters of a call's or an attempt's error message that are kept


@dataclass
class Job:
    """A begun attempt and its call. `lease_ends` is monotonic. `unfit`: why it cannot be made any
    more.

    `charged`: what it was charged at its release. `is_through`: it is through its gate: it has been
    sent, or is about to be. `gate`: what its request passes, which
    knows when it was sent; None while there is no request. `arrived`: the monotonic instant by
    which the other side had all of it, as far as that is known; `is_late`: it did not at the last
    look; `is_told`: whether the ledger knows when it was sent.
    """

    attempt_id: int
    number: int
    queue: str
    send_at: datetime | None
    pk: int
    rule_name: str
    key: str
    cost: Any
    method: str
    params: Mapping[str, Any] = field(repr=False)
    failed_count: int
    throttled_count: int
    unique_key: str | None
    callback: str | None
    first_sent_dt: datetime | None
    due_at_dt: datetime
    idempotency_key: str
    worker: str
    clock: Reading
    trace_context: str | None = None
    charged: Any = 1
    rule: Rule | None = None
    lease_ends: float = 0.0
    unfit: str | None = None
    is_through: bool = False
    gate: Any = None
    arrived: float | None = None
    is_late: bool = False
    is_told: bool = False

    @property
    def sound_rule(self) -> Rule:
        """The rule, of a job that is fit."""
        assert self.rule is not None
        return self.rule

    @property
    def facts(self) -> dict[str, Any]:
        """What events say of it."""
        return {"call_id": self.pk, "rule": self.rule_name, "attempt": self.number}

    def now(self) -> datetime:
        """The latest that ledger time can be now."""
        return self.shown_at(clocks.monotonic())

    def wall(self, instant: datetime) -> datetime:
        """What the database's clock showed at an instant of ledger time, as of begin."""
        return instant + timedelta(microseconds=self.clock.moved)

    def shown_at(self, instant: float) -> datetime:
        """The latest that ledger time can have been at this monotonic instant."""
        return from_us(self.clock.latest(instant))

    def arrived_by(self, sent: float, answered: float) -> float:
        """The latest instant at which the other side can have had all of a request that was sent
        then, as far as this process saw. All three are monotonic.
        """
        if self.arrived is not None:
            return max(sent, self.arrived)
        return answered if self.is_late else sent

    def slot_opens(self) -> float | None:
        """The monotonic instant at which its slot has certainly opened; None without a slot."""
        return None if self.send_at is None else self.clock.monotonic_at(to_us(self.send_at))


@dataclass
class Result:
    """What came of a job: what its call becomes, how its attempt ended, and what is kept of both.

    `status` and `due_at`: the call's state, and when it may go again (or was due, where it has
    ended), by the clock as it was set at begin. `why` is the call's text, `error` the attempt's;
    `value` is what a handler returned. `sent_at` and `ended_at` are ledger time as it was read at
    begin, `ended_mono` by this process's own clock; None and 0 where there is no instant but that
    of the record. `hold`: the arguments of `holds.lay`, where the provider asked for a hold.
    `is_whole`: whether all of the response's body was read; `kept`: the columns of what is kept of
    the answer, with nothing secret in them. `is_bare`: its texts were left out, since they could
    not be stored.
    """

    job: Job
    outcome: str
    status: int
    due_at: datetime
    failed_count: int
    throttled_count: int
    why: str = field(default="", repr=False)
    error: str = field(default="", repr=False)
    response: Any = field(default=None, repr=False)
    value: Any = field(default=None, repr=False)
    sent_at: datetime | None = None
    ended_at: datetime | None = None
    ended_mono: float = 0.0
    cost: Any = None
    hold: dict[str, Any] | None = field(default=None, repr=False)
    is_whole: bool = True
    kept: Mapping[str, Any] | None = field(default=None, repr=False)
    is_bare: bool = False

    def at(self, ended_at: datetime, ended_mono: float, sent_at: datetime | None = None) -> Result:
        """This result, with the instants at which its attempt was sent and ended."""
        self.ended_at, self.ended_mono, self.sent_at = ended_at, ended_mono, sent_at
        return self


STALE = "not retried: its idempotency key would be older than idempotency_ttl"


def is_key_stale(job: Job, rule: Rule, at: datetime) -> bool:
    """Whether the provider may have forgotten the key of this call's first request by then, so that
    a retry could be made twice.
    """
    if job.method in IDEMPOTENT or job.method not in HTTP_METHODS or job.first_sent_dt is None:
        return False
    return rule.idempotency_header is not None and at - job.first_sent_dt > rule.idempotency_ttl


def after_success(job: Job, value: object = None, note: str = "") -> Result:
    """The call is done. `value`: what a handler returned; `note`: what was odd about the answer."""
    return _result(job, states.SUCCEEDED, states.DONE, "", error=note, value=value)


def after_failure(
    job: Job, rule: Rule | None, why: str, now: datetime, after: float | None = None
) -> Result:
    """Retried after `after` seconds (None: the rule's backoff), or FAILED: no attempts left, or the
    idempotency key too old by then.
    """
    failed = job.failed_count + 1
    if rule is None or failed >= rule.retry.max_attempts:
        return _failed(job, states.ERRORED, why)
    seconds = backoff(rule.retry, failed, random.random()) if after is None else after
    due_at = now + timedelta(seconds=max(0.0, seconds))
    if is_key_stale(job, rule, due_at):
        return _failed(job, states.ERRORED, f"{why}; {STALE}", error=why)
    return _result(job, states.ERRORED, states.ERROR, why, failed_count=failed, due_at=due_at)


def after_throttle(job: Job, rule: Rule, why: str, now: datetime, until: datetime) -> Result:
    """Goes again when the hold ends; no attempt is used up until it has happened `max_rate_limited`
    times to this call.
    """
    throttled = job.throttled_count + 1
    if throttled < rule.retry.max_rate_limited:
        result = _result(job, states.THROTTLED, states.ERROR, why, due_at=until)
    else:
        seconds = max(0.0, (until - now) / timedelta(seconds=1))
        result = after_failure(job, rule, f"{why} (throttled {throttled} times)", now, seconds)
    result.outcome, result.error, result.throttled_count = states.THROTTLED, why, throttled
    return result


def after_loss(job: Job, rule: Rule | None, why: str, now: datetime) -> Result:
    """Sent perhaps, no answer: retried where safe, or where the rule says so; else UNKNOWN, as a
    permit is always. What would be retried and has no rule any more is FAILED.
    """
    on_lost = "auto" if rule is None else rule.on_lost
    on_lost = "unknown" if job.method == states.PERMIT else on_lost
    if on_lost == "retry" or (on_lost == "auto" and job.method in IDEMPOTENT):
        return after_failure(job, rule, why, now)
    return _result(job, states.LOST, states.UNKNOWN, why, failed_count=job.failed_count + 1)


def after_giving_up(job: Job, why: str) -> Result:
    """No retry can help."""
    return _failed(job, states.GAVE_UP, why)


def after_void(job: Job, why: str, due_at: datetime | None = None) -> Result:
    """The attempt never reached the wire: the call waits as it did before, or until `due_at`."""
    status = states.ERROR if job.failed_count or job.throttled_count else states.NEW
    return _result(job, states.VOIDED, status, "", error=why, due_at=due_at or job.due_at_dt)


def after_expiry(job: Job) -> Result:
    """It was too late before the request was sent."""
    why = "its expires_at had passed before it could be sent"
    return _result(job, states.VOIDED, states.EXPIRED, why, error="expired")


def after_unfitness(job: Job, why: str) -> Result:
    """The call cannot be made any more: it has failed, and the attempt is not charged."""
    return _failed(job, states.VOIDED, why)


def _failed(job: Job, outcome: str, why: str, error: str | None = None) -> Result:
    failed = job.failed_count + 1
    return _result(job, outcome, states.FAILED, why, error=error, failed_count=failed)


def _result(
    job: Job, outcome: str, status: int, why: str, *, error: str | None = None, **changed: Any
) -> Result:
    """The result of a job, of whose call nothing has changed but what is named."""
    counts = {name: getattr(job, name) for name in ("failed_count", "throttled_count")}
    columns = {**counts, "due_at": job.due_at_dt, **changed}
    return Result(job, outcome, status, why=why, error=why if error is None else error, **columns)


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
        free, _ = calls_to_end(using, wanted)
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
