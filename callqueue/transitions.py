"""What the end of an attempt makes of its call: done, to be retried (and when), failed or unknown.

In: the call's counts, its rule, what came of the attempt. Out: the columns that the call gets.
Shared by the executor, which records answers, and recovery, which ends attempts that fell silent.
Writes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from django.db.models import Case, Q, Value, When

from callqueue import database, events, states, tables
from callqueue.handlers import HTTP_METHODS, IDEMPOTENT
from callqueue.ledger import row_locks
from callqueue.limits.backoff import delay
from callqueue.limits.rules import Rule

LONGEST_MESSAGE = 2000


class Counted(Protocol):
    """What endings need to know of a call: CallQueue has it, and so has the executor's Job."""

    @property
    def pk(self) -> int: ...
    @property
    def method(self) -> str: ...
    @property
    def failed_count(self) -> int: ...
    @property
    def throttled_count(self) -> int: ...
    @property
    def unique_key(self) -> str | None: ...
    @property
    def callback(self) -> str | None: ...
    @property
    def first_sent_dt(self) -> datetime | None: ...
    @property
    def due_at_dt(self) -> datetime: ...


@dataclass(frozen=True)
class Ending:
    """The state that an attempt's end puts its call in. `due_at`: when it may go again, or was due
    where it has ended.
    """

    call_id: int
    status: int
    error_message: str
    failed_count: int
    throttled_count: int
    unique_key: str | None
    callback: str | None
    first_sent_dt: datetime | None
    due_at: datetime


def is_idempotent(method: str) -> bool:
    """Whether HTTP defines the method as idempotent (RFC 9110 section 9.2.2); handlers' methods are
    not.
    """
    return method in IDEMPOTENT


def after_success(call: Counted, now: datetime) -> Ending:
    """The call is done."""
    return _ending(call, states.DONE, "", now)


def after_failure(
    call: Counted, rule: Rule | None, why: str, now: datetime, after: float | None = None
) -> Ending:
    """Retried after `after` seconds (None: the rule's backoff), or FAILED: no attempts left, or the
    idempotency key too old.
    """
    failed = call.failed_count + 1
    if rule is None or failed >= rule.retry.max_attempts:
        return _ending(call, states.FAILED, why, now, failed=failed)
    if _key_is_stale(call, rule, now):
        why = f"{why}; not retried: its idempotency key is older than idempotency_ttl"
        return _ending(call, states.FAILED, why, now, failed=failed)
    retry = rule.retry
    seconds = after
    if seconds is None:
        seconds = delay(
            failed,
            base=retry.base,
            factor=retry.factor,
            cap=retry.cap,
            jitter=retry.jitter,
            rand=random.random(),
        )
    return _ending(
        call,
        states.ERROR,
        why,
        now,
        failed=failed,
        due_at=now + timedelta(seconds=max(0.0, seconds)),
    )


def after_throttle(call: Counted, rule: Rule, why: str, now: datetime, until: datetime) -> Ending:
    """Goes again when the hold ends; no attempt is used up until it has happened `max_rate_limited`
    times to this call.
    """
    throttled = call.throttled_count + 1
    if throttled >= rule.retry.max_rate_limited:
        seconds = max(0.0, (until - now) / timedelta(seconds=1))
        ending = after_failure(call, rule, f"{why} (throttled {throttled} times)", now, seconds)
        return Ending(**{**vars(ending), "throttled_count": throttled})
    return _ending(call, states.ERROR, why, now, throttled=throttled, due_at=until)


def after_loss(call: Counted, rule: Rule, why: str, now: datetime) -> Ending:
    """Sent perhaps, and no answer: retried where that is safe or the rule says so, UNKNOWN for the
    rest.
    """
    if rule.on_lost == "retry" or (rule.on_lost == "auto" and is_idempotent(call.method)):
        return after_failure(call, rule, why, now)
    return _ending(call, states.UNKNOWN, why, now, failed=call.failed_count + 1)


def after_giving_up(call: Counted, why: str, now: datetime) -> Ending:
    """No retry can help."""
    return _ending(call, states.FAILED, why, now, failed=call.failed_count + 1)


def after_void(call: Counted, now: datetime) -> Ending:
    """The attempt never reached the wire: the call waits as it did before."""
    status = states.ERROR if call.failed_count or call.throttled_count else states.NEW
    return _ending(call, status, "", now)


def after_expiry(call: Counted, now: datetime) -> Ending:
    """It was too late before the request was sent."""
    return _ending(call, states.EXPIRED, "its expires_at had passed before it could be sent", now)


def columns_of_call(ending: Ending, now: datetime) -> dict[str, Any]:
    """The call's columns, for one bulk update."""
    final = ending.status in states.FINAL
    return {
        "pk": ending.call_id,
        "status": ending.status,
        "due_at_dt": ending.due_at,
        "ready": not final and ending.due_at <= now,
        "failed_count": ending.failed_count,
        "throttled_count": ending.throttled_count,
        "error_message": ending.error_message[:LONGEST_MESSAGE],
        "finished_at_dt": now if final else None,
        "first_sent_dt": ending.first_sent_dt,
        "active_key": None if final else ending.unique_key,
        "callback_pending": final and bool(ending.callback),
    }


def _ending(
    call: Counted,
    status: int,
    why: str,
    now: datetime,
    *,
    failed: int | None = None,
    throttled: int | None = None,
    due_at: datetime | None = None,
) -> Ending:
    return Ending(
        call_id=call.pk,
        status=status,
        error_message=why,
        failed_count=call.failed_count if failed is None else failed,
        throttled_count=call.throttled_count if throttled is None else throttled,
        unique_key=call.unique_key,
        callback=call.callback,
        first_sent_dt=call.first_sent_dt,
        due_at=due_at or call.due_at_dt,
    )


def _key_is_stale(call: Counted, rule: Rule, now: datetime) -> bool:
    if is_idempotent(call.method) or call.method not in HTTP_METHODS or call.first_sent_dt is None:
        return False
    return rule.idempotency_header is not None and now - call.first_sent_dt > rule.idempotency_ttl


def ended(status: int) -> dict[str, Any]:
    """The columns of a call that every final state sets."""
    return {
        "status": status,
        "finished_at_dt": database.ClockNow(),
        "active_key": None,
        "ready": False,
        "callback_pending": Case(
            When(Q(callback__isnull=True) | Q(callback=""), then=Value(False)), default=Value(True)
        ),
    }


def undo(using: str, attempt_ids: Sequence[int]) -> int:
    """Void attempts that no worker has begun, and let their calls wait again; the count of calls.
    Passes over what is locked.
    """
    count = row_locks.take_back(using, attempt_ids)
    if count:
        events.tell("attempts_voided", calls=count)
    return count


def undo_released(using: str, rules: Sequence[str], since: datetime) -> int:
    """The same for whatever was released of these rules since then."""
    released = tables.attempts(using).unbegun().filter(rule__in=rules, released_at__gte=since)
    ids = list(released.values_list("pk", flat=True))
    return undo(using, ids) if ids else 0
