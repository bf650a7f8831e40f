"""Forecasts: the limit or hold that binds, the place in the queue, and a time that holds when the
queue is then run.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from callqueue import Concurrency, Forecast, Rule, SlidingWindow, database, forecast
from callqueue.history import sums
from callqueue.ledger import ledger_time
from callqueue.maintenance import recovery
from callqueue.models import CallAttempt, CallQueue, DispenserState
from callqueue.testing import run_callqueue, travel
from tests.support.behaviour import Vendor, release, send

Rules = Callable[..., None]
URL = {"method": "get", "params": {"url": "http://vendor.example/"}}


@pytest.fixture(autouse=True)
def _a_dispenser_runs(db: None) -> None:
    recovery.beat("default", "a dispenser")
    DispenserState.objects.update(digest="its settings")


def seconds_from_now(instant: datetime | None) -> float:
    assert instant is not None
    return (instant - database.clock("default")).total_seconds()


def made(*released: datetime, **columns: Any) -> None:
    """An attempt of each of these instants, answered at once where nothing else is said."""
    CallAttempt.objects.bulk_create(
        CallAttempt(
            call_id=1, number=1, rule="r", outcome="succeeded", released_at=at,
            **{"finished_at": at, **columns},
        )
        for at in released
    )  # fmt: skip


def test_a_call_that_may_go_goes_now(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/m")]))
    found = send("r").forecast()
    assert (found.reason, found.position) == ("it goes at the next pass", 1)
    assert seconds_from_now(found.release_at) < 1


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


@pytest.mark.parametrize(("rate", "window"), [("3000/10s", 10), ("3000/h", 3600)])
def test_the_next_call_goes_when_the_first_leaves_as_the_pass_will_find(
    rules: Rules, rate: str, window: int
) -> None:
    """Though what the window holds is tallied, and sums say by the minute when it ended."""
    rules(r=Rule(limits=[SlidingWindow(rate)]))
    now = ledger_time.now("default")
    made(*(now - timedelta(seconds=t) for t in [window - 4] + [window / 4] * 2999))
    while sums.add_up("default"):
        pass
    call = send("r")
    first = ledger_time.to_wall("default", now + timedelta(seconds=4))
    found = call.forecast().release_at
    assert found is not None
    assert abs(found - first) < timedelta(seconds=0.2)


def test_released_attempts_that_no_worker_begins_leave_no_time(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/m")]))
    for _ in range(3):
        send("r")
    release()
    CallAttempt.objects.update(released_at=ledger_time.now("default") - timedelta(seconds=30))
    found = CallQueue.objects.waiting()[0].forecast()
    assert found.release_at is None
    assert (
        found.reason
        == "SlidingWindow 2/m is used up by attempts in flight, and no worker has begun 2 of them"
    )


def test_what_waits_for_answers_of_unknown_length_has_no_time(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(1)]))
    send("r")
    found = send("r").forecast()
    assert found == Forecast(
        "Concurrency 1 is used up, and how long a call takes is not known yet", 2, None
    )


def test_a_call_that_waits_no_more_has_no_forecast_but_its_state(rules: Rules) -> None:
    rules(r=Rule())
    call = send("r")
    call.cancel()
    assert call.forecast() == Forecast("it is cancelled")


def test_past_the_cap_it_does_not_pretend_to_know(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/m")]))
    monkeypatch.setattr(forecast, "CAP", 5)
    CallQueue.objects.send_many([URL] * 10, rule="r")
    assert CallQueue.objects.order_by("pk")[5].forecast().position == 6
    assert CallQueue.objects.order_by("pk")[9].forecast() == Forecast(
        "more than 5 calls go before it"
    )


def test_a_forecast_makes_the_same_number_of_statements_whatever_waits(
    rules: Rules, django_assert_num_queries: Any, django_assert_max_num_queries: Any
) -> None:
    rules(r=Rule(limits=[SlidingWindow("10/m")]))
    calls = CallQueue.objects.send_many([URL] * 300, rule="r")
    with django_assert_max_num_queries(25) as few:
        calls[0].forecast()
    with django_assert_num_queries(len(few)):
        calls[-1].forecast()
