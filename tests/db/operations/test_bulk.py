"""Requeueing and cancelling by the thousand."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from callqueue import Rule, SlidingWindow, states
from callqueue.models import CallAttempt, CallQueue
from callqueue.operations import bulk
from tests.db.commands import run
from tests.support.behaviour import release, send

Rules = Callable[..., None]
Status = CallQueue.Status


@pytest.fixture(autouse=True)
def two_rules(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("100/s", per="key")]), other=Rule())


def ended(status: int, hours_ago: float = 0.1, rule: str = "r", **options: Any) -> CallQueue:
    call = send(rule, **options)
    finished = timezone.now() - timedelta(hours=hours_ago)
    CallQueue.objects.filter(pk=call.pk).update(
        status=status, finished_at_dt=finished, ready=False, active_key=None
    )
    return call


def failing(hours_ago: float, outcome: str = states.ERRORED) -> CallQueue:
    """A call that will be retried, and whose last attempt ended so long ago."""
    call = send("r")
    CallQueue.objects.filter(pk=call.pk).update(
        status=states.ERROR, ready=False, due_at_dt=timezone.now() + timedelta(days=1)
    )
    at = timezone.now() - timedelta(hours=hours_ago)
    CallAttempt.objects.create(
        call=call, number=1, rule="r", released_at=at, finished_at=at, outcome=outcome
    )
    return call


def statuses(*calls: CallQueue) -> list[int]:
    found = CallQueue.objects.in_bulk([call.pk for call in calls])
    return [found[call.pk].status for call in calls]


def test_since_counts_from_the_end_and_for_an_error_from_its_last_failure() -> None:
    calls = (
        ended(Status.FAILED, 1),
        ended(Status.FAILED, 3),
        failing(1),
        failing(3),
        failing(1, states.VOIDED),
    )
    ran = run("requeue", "--status", "failed", "error", "--since", "2h")
    assert ran.out == "requeued 2 calls\n"
    assert statuses(*calls) == [Status.NEW, Status.FAILED, Status.NEW, Status.ERROR, Status.ERROR]


def test_cancel_takes_what_no_worker_has_begun() -> None:
    begun, released = send("r"), send("r")
    release()
    CallAttempt.objects.filter(call=begun).update(started_at=timezone.now())
    waiting, failing_one, done = send("r"), failing(1), ended(Status.DONE)
    ran = run("cancel")
    assert ran.out == "cancelled 3 calls\n"
    assert statuses(begun, released, waiting, failing_one, done) == [
        Status.DISPATCHED,
        Status.CANCELLED,
        Status.CANCELLED,
        Status.CANCELLED,
        Status.DONE,
    ]


def test_cancel_by_age_counts_what_never_ended_from_its_creation() -> None:
    old, young = send("r"), send("r")
    CallQueue.objects.filter(pk=old.pk).update(created_dt=timezone.now() - timedelta(hours=5))
    run("cancel", "--since", "2h")
    assert statuses(old, young) == [Status.NEW, Status.CANCELLED]


def test_many_calls_go_in_batches_with_word_of_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulk, "BATCH", 3)
    for _ in range(7):
        ended(Status.FAILED)
    told: list[tuple[int, int | None]] = []
    pick = bulk.Pick((Status.FAILED,))
    assert (
        bulk.requeue("default", pick, progress=lambda done, total: told.append((done, total))) == 7
    )
    assert told == [(3, 7), (6, 7), (7, 7)]
