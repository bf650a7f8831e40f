"""Permits in Celery tasks that run in their caller (`task_always_eager`), in and out of its
transaction, and in a task that itself has been admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from celery import current_app, shared_task
from django.db import transaction

import callqueue
from callqueue import Concurrency, NotNow, QueuedTask, Rule, SlidingWindow
from callqueue.models import CallAttempt, CallQueue
from callqueue.testing import run_callqueue
from tests.support.waiters import waiting as waiting_rows

Rules = Callable[..., None]


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    before = current_app.conf.task_always_eager, current_app.conf.task_eager_propagates
    current_app.conf.task_always_eager = current_app.conf.task_eager_propagates = True
    yield
    current_app.conf.task_always_eager, current_app.conf.task_eager_propagates = before


@shared_task
def refund(wait: float | None = 0) -> int:
    with callqueue.permit("r", wait=wait, label="refund") as permit:
        return permit.attempt_id


@shared_task(base=QueuedTask, rule="r")
def queued_refund() -> int:
    return int(refund.delay().get())


def test_an_eager_task_takes_a_permit_in_its_callers_thread(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h")]))
    row = CallAttempt.objects.get(pk=refund.delay().get())
    assert row.outcome == "succeeded" and row.call.path == "refund"
    with pytest.raises(NotNow):
        refund.delay()


def test_a_task_sent_on_commit_takes_it_after_the_transaction(rules: Rules) -> None:
    rules(r=Rule())
    with transaction.atomic():
        transaction.on_commit(refund.delay)
        assert not CallAttempt.objects.exists()
    assert CallAttempt.objects.get().outcome == "succeeded"


def test_an_admitted_task_takes_a_permit_of_its_own(rules: Rules) -> None:
    """Eagerly it runs at once and is not charged; from the queue it is, and the permit besides."""
    rules(r=Rule(limits=[SlidingWindow("2/h")]))
    queued_refund.delay()
    assert CallQueue.objects.get().method == "permit" and CallAttempt.objects.count() == 1
    current_app.conf.task_always_eager = False
    queued_refund.delay()
    current_app.conf.task_always_eager = True
    run_callqueue()
    call = CallQueue.objects.exclude(method="permit").get()
    assert CallAttempt.objects.count() == 2, "one more attempt than that would be over the limit"
    assert call.status != CallQueue.Status.DONE
    assert "NotNow" in call.error_message


def test_what_is_in_flight_itself_does_not_wait_for_itself_without_an_end(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(1)]))
    with callqueue.permit("r"), pytest.raises(NotNow, match="used up"):
        refund.delay(wait=0.2)
    assert not waiting_rows().exists()
