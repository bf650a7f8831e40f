"""Which calls are found to be ready, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from django.utils import timezone

from callqueue import Rule, SlidingWindow, states
from callqueue.models import CallQueue
from tests.support.behaviour import release, send

Rules = Callable[..., None]


def test_higher_priority_first_then_the_order_of_being_due(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("3/m")]))
    low, high, middle = send("r"), send("r", priority=9), send("r", priority=5)
    late = send("r", priority=9)
    assert release() == [high, late, middle]
    assert low.status == states.NEW


def test_a_call_that_is_not_due_waits_and_keeps_nobody_back(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/m")]))
    later = send("r", priority=9, not_before=timezone.now() + timedelta(hours=1))
    now = send("r")
    assert release() == [now]
    CallQueue.objects.filter(pk=later.pk).update(due_at_dt=timezone.now() - timedelta(seconds=1))
    assert release() == [later]


def test_a_row_that_other_code_made_goes_too(rules: Rules) -> None:
    rules(r=Rule())
    made = CallQueue.objects.create(
        rule="r", call_data={"method": "get", "params": {"url": "http://vendor.example/"}}
    )
    assert release() == [made]


def test_a_row_that_other_code_cancelled_or_deleted_does_not_go(rules: Rules) -> None:
    rules(r=Rule())
    kept, cancelled, deleted = send("r"), send("r"), send("r")
    CallQueue.objects.filter(pk=cancelled.pk).update(status=states.CANCELLED)
    deleted.delete()
    assert release() == [kept]
