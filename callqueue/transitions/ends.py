"""A job, which is a begun attempt with its call; the result that came of it; and what the end of an
attempt makes of its call: done, to be retried (and when), failed or unknown. Writes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, cast

from callqueue import clocks, states, tables
from callqueue.clocks import Mono, Reading
from callqueue.database import from_us, to_us
from callqueue.handlers import HTTP_METHODS, IDEMPOTENT
from callqueue.ledger.transaction import EndingCall
from callqueue.limits.rules import Rule, backoff
from callqueue.states import FINAL, Move

LONGEST_MESSAGE = 2000  # characters of a call's or an attempt's error message that are kept


@dataclass
class Job:
    """A begun attempt: its row and its call's, as they were read, and the clock that came along."""

    attempt: tables.CallAttempt = field(repr=False)
    call: tables.CallQueue = field(repr=False)
    clock: Reading
    rule: Rule | None  # None: these settings have it no more
    lease_ends_at: Mono = Mono(0.0)  # monotonic
    unfit: str | None = None  # why it cannot be made any more
    # what its request passes, and which knows when it was sent; None before it is made
    gate: Any = None
    # what says whether it is begun, where that was not committed yet when it took off
    clearance: Any = None

    @property
    def sound_rule(self) -> Rule:
        """The rule, of a job that is fit."""
        assert self.rule is not None
        return self.rule

    @property
    def facts(self) -> dict[str, Any]:
        return {"call_id": self.call.id, "rule": self.call.rule, "attempt": self.attempt.number}

    @property
    def params(self) -> Mapping[str, Any]:
        """What its method is given, of a job that is fit."""
        return cast(Mapping[str, Any], self.call.call_data["params"])

    def ledger_time_now(self) -> datetime:
        """The latest that ledger time can be now."""
        return self.ledger_time_at(clocks.monotonic())

    def to_wall(self, instant: datetime) -> datetime:
        """What the database's clock showed at an instant of ledger time, as of begin."""
        return instant + timedelta(microseconds=self.clock.moved)

    def ledger_time_at(self, instant: Mono) -> datetime:
        """The latest that ledger time can have been at this monotonic instant."""
        return from_us(self.clock.latest_ledger_time_at(instant))

    def slot_opens_at(self) -> Mono | None:
        """The monotonic instant at which its slot has certainly opened; None without a slot."""
        send_at = self.attempt.send_at
        return None if send_at is None else self.clock.monotonic_at(to_us(send_at))


@dataclass
class Result:
    """What came of a job: what its call becomes, how its attempt ended, what is kept of both."""

    job: Job
    outcome: str  # the attempt's
    status: int  # the call's
    due_at: datetime  # when the call may go again, or was due, by the clock as begin read it
    failed_count: int
    throttled_count: int
    why: str = field(default="", repr=False)  # the call's text
    error: str = field(default="", repr=False)  # the attempt's
    response: Any = field(default=None, repr=False)
    value: Any = field(default=None, repr=False)  # what a handler returned
    # ledger time as begin read it, and the process's own clock; None and 0: as of the record
    sent_at: datetime | None = None
    ended_at: datetime | None = None
    ended_mono: Mono = Mono(0.0)
    cost: Any = None  # None: the call's
    # the arguments of `holds.lay`, where the provider asked for a hold
    hold: dict[str, Any] | None = field(default=None, repr=False)
    is_whole: bool = True  # all of the response's body was read
    # the columns of what is kept of the answer, with nothing secret in them
    kept: Mapping[str, Any] | None = field(default=None, repr=False)
    is_bare: bool = False  # its texts were left out, since they could not be stored

    def stamp(
        self, ended_at: datetime, ended_mono: Mono, sent_at: datetime | None = None
    ) -> Result:
        """This result, ended then, and sent then if that is known."""
        self.ended_at, self.ended_mono, self.sent_at = ended_at, ended_mono, sent_at
        return self


STALE = "not retried: its idempotency key would be older than idempotency_ttl"


def is_key_stale(job: Job, at: datetime) -> bool:
    """Whether its idempotency key may be forgotten by then (wall time): a retry may act twice."""
    call, rule = job.call, job.rule
    if call.method in IDEMPOTENT or call.method not in HTTP_METHODS or call.first_sent_dt is None:
        return False
    if rule is None or rule.idempotency_header is None:
        return False
    return at - call.first_sent_dt > rule.idempotency_ttl


def after_success(job: Job, value: object = None, note: str = "") -> Result:
    """The call is done. `value`: what a handler returned; `note`: what was odd about the answer."""
    return _make_result(job, states.SUCCEEDED, states.DONE, "", error=note, value=value)


def after_failure(job: Job, why: str, now: datetime, after: float | None = None) -> Result:
    """Retried in `after` seconds (None: backoff), or FAILED: the last attempt, STALE or no rule."""
    failed, rule = job.call.failed_count + 1, job.rule
    if rule is None or failed >= rule.retry.max_attempts:
        return after_giving_up(job, why, states.ERRORED)
    seconds = backoff(rule.retry, failed, random.random()) if after is None else after
    due_at = now + timedelta(seconds=max(0.0, seconds))
    if is_key_stale(job, due_at):
        return after_giving_up(job, f"{why}; {STALE}", states.ERRORED, error=why)
    return _make_result(job, states.ERRORED, states.ERROR, why, failed_count=failed, due_at=due_at)


def after_throttle(job: Job, why: str, now: datetime, until: datetime) -> Result:
    """Goes again at `until`, using up no attempt; from `max_rate_limited` times on, a failure."""
    throttled = job.call.throttled_count + 1
    if throttled < job.sound_rule.retry.max_rate_limited:
        result = _make_result(job, states.THROTTLED, states.ERROR, why, due_at=until)
    else:
        seconds = max(0.0, (until - now) / timedelta(seconds=1))
        result = after_failure(job, f"{why} (throttled {throttled} times)", now, seconds)
    result.outcome, result.error, result.throttled_count = states.THROTTLED, why, throttled
    return result


def after_loss(job: Job, why: str, now: datetime) -> Result:
    """Sent perhaps, no answer: retried where safe, or where the rule says so; else UNKNOWN, as a
    permit is always. What would be retried and has no rule any more is FAILED.
    """
    on_lost, method = "auto" if job.rule is None else job.rule.on_lost, job.call.method
    on_lost = "unknown" if method == states.PERMIT else on_lost
    if on_lost == "retry" or (on_lost == "auto" and method in IDEMPOTENT):
        return after_failure(job, why, now)
    failed = job.call.failed_count + 1
    return _make_result(job, states.LOST, states.UNKNOWN, why, failed_count=failed)


def after_giving_up(
    job: Job, why: str, outcome: str = states.GAVE_UP, error: str | None = None
) -> Result:
    """No retry can help. `outcome`, `error` (None: `why`): the attempt's; voided: not charged."""
    failed = job.call.failed_count + 1
    return _make_result(job, outcome, states.FAILED, why, error=error, failed_count=failed)


def after_void(job: Job, why: str, due_at: datetime | None = None) -> Result:
    """The attempt never reached the wire: the call waits as it did before, or until `due_at`."""
    call = job.call
    status = states.ERROR if call.failed_count or call.throttled_count else states.NEW
    return _make_result(job, states.VOIDED, status, "", error=why, due_at=due_at or call.due_at_dt)


def after_expiry(job: Job) -> Result:
    why = "its expires_at had passed before it could be sent"
    return _make_result(job, states.VOIDED, states.EXPIRED, why, error="expired")


def _make_result(
    job: Job, outcome: str, status: int, why: str, *, error: str | None = None, **changed: Any
) -> Result:
    counts = {name: getattr(job.call, name) for name in ("failed_count", "throttled_count")}
    columns = {**counts, "due_at": job.call.due_at_dt, **changed}
    return Result(job, outcome, status, why=why, error=why if error is None else error, **columns)


def awaits_attempt(call: EndingCall | None, number: int) -> bool:
    """Whether a call still waits for its attempt of this number; None, locked or gone, does not."""
    return call is not None and call.status in Move.RECORD.sources and call.last_attempt == number


def with_later_changes(columns: dict[str, Any], call: EndingCall) -> dict[str, Any]:
    """These columns, changed by what other code has made of the call since its attempt began."""
    if call.postponed_to is not None:
        columns["due_at_dt"] = max(columns["due_at_dt"], call.postponed_to)
    columns["callback_pending"] |= bool(call.callback) and columns["status"] in FINAL
    return columns
