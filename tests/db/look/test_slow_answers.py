"""What people are told where answers are slow: drain times, who uses a limit up, what to set."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from callqueue import Concurrency, Rule, SlidingWindow, TokenBucket
from callqueue.execution import claim
from callqueue.ledger import ledger_time
from callqueue.limits.kinds import Limit
from callqueue.look import look
from callqueue.models import CallAttempt, CallQueue
from tests.support.behaviour import release, send

Rules = Callable[..., None]
CALL = {"method": "get", "params": {"url": "http://vendor.example/"}}


def answered(count: int, seconds: float, *, is_stamped: bool = True) -> None:
    """So many attempts of the rule were answered just now, each after so many seconds."""
    now = ledger_time.now("default")
    begun = now - timedelta(seconds=seconds)
    CallAttempt.objects.bulk_create(
        CallAttempt(
            call_id=10_000 + i,
            number=1,
            rule="r",
            queue="q",
            released_at=begun,
            started_at=begun,
            sent_at=begun if is_stamped else None,
            finished_at=now - timedelta(milliseconds=i),
            outcome=CallAttempt.Outcome.SUCCEEDED,
        )
        for i in range(count)
    )


@pytest.mark.parametrize(
    ("limit", "is_stamped", "least", "most"),
    [
        (SlidingWindow("10/s"), True, 18, 22),  # it ages when it was sent
        (SlidingWindow("10/s", strict=True), True, 50, 135),
        (SlidingWindow("10/s"), False, 50, 135),
        (Concurrency(10), True, 50, 135),
        (TokenBucket("10/s", burst=10), False, 50, 135),
    ],
    ids=["stamped", "strict", "no HTTP", "in flight", "bucket, no HTTP"],
)
def test_where_calls_wait_for_answers_the_drain_time_knows_how_long_those_take(
    rules: Rules, limit: Limit, is_stamped: bool, least: float, most: float
) -> None:
    rules(r=Rule(limits=[limit]))
    answered(10, 10.0, is_stamped=is_stamped)
    CallQueue.objects.send_many([CALL] * 100, rule="r")
    seconds = look("default").rule("r").seconds()
    assert seconds is not None and least <= seconds <= most


def test_a_call_that_waits_for_those_in_flight_says_so(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(2)]))
    answered(10, 10.0)
    calls = [send("r") for _ in range(3)]
    release()
    claim.begin("default", list(CallAttempt.objects.open().values_list("pk", flat=True)))
    told = calls[-1].forecast()
    assert "used up by 2 calls in flight, which take 10 seconds each" in told.reason
    assert told.release_at is not None


def test_a_call_that_is_out_says_where_since_when_and_until_when(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(2)], queues="q", total_timeout=60))
    call = send("r")
    release()
    call.refresh_from_db()
    reason = call.forecast().reason
    assert reason.startswith("it was dispatched to q ")
    assert "no worker has begun it; it is taken back in " in reason
    claim.begin("default", list(CallAttempt.objects.values_list("pk", flat=True)))
    reason = call.forecast().reason
    assert reason.startswith("it is under way: a worker of q began it ")
    assert "without an answer it is given up in " in reason
