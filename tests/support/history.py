"""Calls and attempts that ended some time ago, written as the database holds them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from callqueue import states
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt, CallQueue
from tests.support.behaviour import send

NOON = timezone.now().replace(microsecond=0) - timedelta(hours=1)


def ended(status: int, hours_ago: float = 0.1, rule: str = "r", **options: Any) -> CallQueue:
    call = send(rule, **options)
    finished = timezone.now() - timedelta(hours=hours_ago)
    CallQueue.objects.filter(pk=call.pk).update(status=status, finished_at_dt=finished, ready=False)
    return call


def failing(hours_ago: float, outcome: str = states.ERRORED) -> CallQueue:
    """A call that will be retried, and whose last attempt ended so long ago."""
    call = send("r")
    CallQueue.objects.filter(pk=call.pk).update(
        status=states.ERROR, ready=False, due_at_dt=timezone.now() + timedelta(days=1)
    )
    at = ledger_time.now("default") - timedelta(hours=hours_ago)
    CallAttempt.objects.create(
        call=call, number=1, rule="r", released_at=at, finished_at=at, outcome=outcome
    )
    return call


def statuses(*calls: CallQueue) -> list[int]:
    found = CallQueue.objects.in_bulk([call.pk for call in calls])
    return [found[call.pk].status for call in calls]


def attempt(
    at: datetime,
    *,
    rule: str = "r",
    seconds: float = 0.2,
    outcome: str = states.SUCCEEDED,
    **columns: Any,
) -> CallAttempt:
    values = dict.fromkeys(("released_at", "started_at", "sent_at"), at)
    values["finished_at"] = at + timedelta(seconds=seconds)
    own = {"call_id": 1, "number": 1, "rule": rule, "outcome": outcome}
    return CallAttempt(**own, **{**values, **columns})


def paced(count: int, every: float, **columns: Any) -> None:
    CallAttempt.objects.bulk_create(
        [attempt(NOON + timedelta(seconds=n * every), **columns) for n in range(count)]
    )
