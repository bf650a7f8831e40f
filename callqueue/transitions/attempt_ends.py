"""What the end of an attempt makes of its call: done, to be retried (and when), failed or unknown.

In: the job (or the row of a call whose worker fell silent), its rule, and what happened. Out: a
result. Shared by the executor, which has answers, and recovery, which ends attempts that fell
silent. Writes nothing.
"""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import Any

from callqueue import states
from callqueue.handlers import HTTP_METHODS, IDEMPOTENT
from callqueue.limits.rules import Rule, backoff
from callqueue.transitions.job import Job, Result

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
    """Sent perhaps, no answer: retried where safe, or where the rule says so; else UNKNOWN. What
    would be retried and has no rule any more is FAILED.
    """
    on_lost = "auto" if rule is None else rule.on_lost
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
