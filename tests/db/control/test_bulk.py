"""Requeueing and cancelling by the thousand."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from callqueue import Rule, SlidingWindow, states
from callqueue.control import bulk
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt, CallQueue
from tests.db.commands import run
from tests.support.behaviour import release, send
from tests.support.history import ended, failing, statuses

Rules = Callable[..., None]
Status = CallQueue.Status


@pytest.fixture(autouse=True)
def two_rules(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("100/s", per="key")]), other=Rule())


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
    CallAttempt.objects.filter(call=begun).update(started_at=ledger_time.now("default"))
    waiting, failing_one, done = send("r"), failing(1), ended(Status.DONE)
    ran = run("cancel", "--all")
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
