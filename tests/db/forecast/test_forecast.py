"""Forecasts: the limit or hold that binds, the place in the queue, and a time that holds when the
queue is then run.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from callqueue import Concurrency, Forecast, Rule, SlidingWindow, database, forecast
from callqueue.dispatch.dispenser import give_sign_of_life
from callqueue.history import sums
from callqueue.ledger import holds, ledger_time
from callqueue.models import CallAttempt, CallQueue, DispenserState
from callqueue.testing import run_callqueue, travel
from tests.support.behaviour import Vendor, release, send
from tests.support.history import attempt
from tests.support.ledger import CALL

Rules = Callable[..., None]


@pytest.fixture(autouse=True)
def _a_dispenser_runs(db: None) -> None:
    give_sign_of_life("default", "a dispenser")
    DispenserState.objects.update(digest="its settings")


def seconds_from_now(instant: datetime | None) -> float:
    assert instant is not None
    return (instant - database.clock("default")).total_seconds()


def test_a_call_that_may_go_goes_now_and_one_that_waits_no_more_has_but_its_state(
    rules: Rules,
) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/m")]))
    call = send("r")
    found = call.forecast()
    assert (found.reason, found.position) == ("it goes at the next pass", 1)
    assert seconds_from_now(found.release_at) < 1
    call.cancel()
    assert call.forecast() == Forecast("it is cancelled")


def test_the_position_follows_priority_and_the_order_of_being_due(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/m")]))
    calls = [send("r"), send("r", priority=5), send("r"), send("r", priority=5)]
    assert [call.forecast().position for call in calls] == [3, 1, 4, 2]


def test_a_call_goes_by_the_queue_that_has_room_first(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule(queues=["one", "two"], limits=[SlidingWindow("1/m", per="queue")]))
    with travel() as clock:
        send("r")
        run_callqueue()
        clock.forward(30)
        second = send("r")
        assert seconds_from_now(second.forecast().release_at) < 1, "by the other queue"
        run_callqueue()
        third = send("r")
        said, now = third.forecast().release_at, clock.now()
        run_callqueue(skip_waits=True)
        went = ledger_time.to_wall("default", CallAttempt.objects.get(call=third).released_at)
        assert said is not None
        assert said - now == pytest.approx(went - now, abs=timedelta(seconds=2))


def test_there_is_room_where_a_queue_that_is_free_of_holds_has_some(
    rules: Rules, remote: Vendor
) -> None:
    rules(r=Rule(queues=["one", "two"], limits=[SlidingWindow("1/m", per="queue")]))
    lasts = timedelta(minutes=1)
    holds.lay("default", ["r"], "queue", "one", lasts, "x", source="provider")
    assert CallQueue.objects.under_threshold("r")
    send("r")
    run_callqueue()
    assert not CallQueue.objects.under_threshold("r"), "two is used up"
    holds.lay("default", ["r"], "queue", "two", lasts, "x", source="provider")
    rules(r=Rule(queues=["one", "two"]))
    assert not CallQueue.objects.under_threshold("r")


@pytest.mark.parametrize(("rate", "window"), [("3000/40s", 40), ("3000/h", 3600)])
def test_the_next_call_goes_when_the_first_leaves_as_the_pass_will_find(
    rules: Rules, rate: str, window: int
) -> None:
    """Though what the window holds is tallied, and sums say by the minute when it ended."""
    rules(r=Rule(limits=[SlidingWindow(rate)]))
    now = ledger_time.now("default")
    ago = [window - 12] + [window / 4] * 2999
    CallAttempt.objects.bulk_create(
        [attempt(now - timedelta(seconds=seconds), seconds=0) for seconds in ago]
    )
    while sums.add_up("default"):
        pass
    first = ledger_time.to_wall("default", now + timedelta(seconds=12))
    found = send("r").forecast().release_at
    assert found is not None
    assert abs(found - first) < timedelta(seconds=0.2)


def test_where_no_time_can_be_given_the_reason_says_why(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/m")]), once=Rule(limits=[Concurrency(1)]))
    send("once")
    unknown = send("once").forecast()
    assert (unknown.position, unknown.release_at) == (2, None)
    assert "Concurrency 1 is used up, and how long a call takes is not known" in unknown.reason
    calls = [send("r") for _ in range(3)]
    release()
    CallAttempt.objects.update(released_at=ledger_time.now("default") - timedelta(seconds=30))
    found = calls[-1].forecast()
    assert found.release_at is None
    assert "SlidingWindow 2/m" in found.reason and "no worker has begun 2 of them" in found.reason


def test_past_the_cap_it_does_not_pretend_to_know(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/m")]))
    monkeypatch.setattr(forecast, "CAP", 5)
    calls = CallQueue.objects.send_many([CALL] * 10, rule="r")
    assert calls[5].forecast().position == 6
    assert calls[9].forecast() == Forecast("more than 5 calls go before it")


def test_a_forecast_makes_the_same_number_of_statements_whatever_waits(
    rules: Rules, django_assert_num_queries: Any, django_assert_max_num_queries: Any
) -> None:
    rules(r=Rule(limits=[SlidingWindow("10/m")]))
    calls = CallQueue.objects.send_many([CALL] * 300, rule="r")
    with django_assert_max_num_queries(25) as few:
        calls[0].forecast()
    with django_assert_num_queries(len(few)):
        calls[-1].forecast()
