"""travel: what time it is for the queue."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from django.utils import timezone

from callqueue import Rule, SlidingWindow, TokenBucket, database
from callqueue.models import CallQueue
from callqueue.testing import Clock, FakeTransport, run_callqueue, travel
from tests.db.testing.calls import send, status_of

Rules = Callable[..., None]
Status = CallQueue.Status


def test_later_a_limit_has_room_again(rules: Rules, callqueue_transport: FakeTransport) -> None:
    rules(default=Rule(limits=[SlidingWindow("2/h")]))
    callqueue_transport.default = 200
    for _ in range(5):
        send()
    assert run_callqueue() == 2
    with travel(minutes=30):
        assert run_callqueue() == 0
    with travel(hours=1, seconds=1) as clock:
        assert run_callqueue() == 2
        clock.forward(hours=1, seconds=1)
        assert run_callqueue() == 1


def test_a_call_that_is_due_later_goes_later(
    rules: Rules, callqueue_transport: FakeTransport, callqueue_clock: Clock
) -> None:
    rules(default=Rule())
    callqueue_transport.default = 200
    call = send(not_before=timezone.now() + timedelta(days=2))
    assert run_callqueue() == 0
    callqueue_clock.forward(days=1)
    assert run_callqueue() == 0
    callqueue_clock.forward(days=1)
    assert run_callqueue() == 1
    assert status_of(call) == Status.DONE


def test_a_call_that_nobody_made_in_time_expires(rules: Rules, callqueue_clock: Clock) -> None:
    rules(default=Rule(limits=[TokenBucket("1/d", burst=1)]))
    call = send(expires_at=timezone.now() + timedelta(hours=1))
    callqueue_clock.forward(hours=2)
    run_callqueue()
    assert status_of(call) == Status.EXPIRED


def test_rows_and_timezone_now_are_of_the_clocks_time(rules: Rules) -> None:
    rules(default=Rule())
    real = timezone.now()
    with travel(days=10):
        assert timezone.now() - real > timedelta(days=9)
        call = CallQueue.objects.get(pk=send().pk)
        assert abs(call.created_dt - database.clock("default")) < timedelta(minutes=1)
        (row,) = CallQueue.objects.due()
        assert row == call
    assert timezone.now() - real < timedelta(days=1)
    assert not CallQueue.objects.due()
    assert database.clock("default") - real < timedelta(days=1)


def test_travelling_to_an_instant_and_back(db: None) -> None:
    noon = timezone.now().replace(hour=12) + timedelta(days=3)
    with travel(to=noon) as clock:
        assert abs(clock.now() - noon) < timedelta(minutes=1)
        with travel(hours=-1):
            assert abs(clock.now() - noon) > timedelta(minutes=59)
        assert abs(clock.now() - noon) < timedelta(minutes=1)
