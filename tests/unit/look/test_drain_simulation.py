"""Simulations: what the ledger's rule makes of a backlog, in whole microseconds and without a
clock.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from callqueue.limits.budgets import bind
from callqueue.limits.kinds import (
    SECOND,
    Concurrency,
    FixedWindow,
    Limit,
    SlidingWindow,
    TokenBucket,
    Usage,
)
from callqueue.limits.rules import Rule
from tests.support.drain_simulation import DELIVERY, NOTICE, Simulated, simulate


def drain(calls: int, *limits: Limit, **options: Any) -> Simulated:
    return simulate(bind({"r": Rule(limits=limits)}), "r", calls, **options)


def test_a_sliding_window_gives_its_number_every_period_and_jitter() -> None:
    found = drain(200, SlidingWindow("20/s"))
    assert found.seconds == pytest.approx(9 * 1.05 + 0.2, abs=0.05)
    assert found.binding_limit == "SlidingWindow 20/s"


def test_concurrency_waits_for_answers() -> None:
    found = drain(40, Concurrency(4), latency=0.5)
    assert found.seconds == pytest.approx(9 * (0.5 + DELIVERY + NOTICE) + 0.5 + DELIVERY)
    assert found.binding_limit == "Concurrency 4"


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    found = drain(200, TokenBucket("20/s", burst=20))
    assert found.seconds == pytest.approx(180 / 20 + 0.2, rel=0.02)


def test_a_bucket_of_one_token_waits_until_the_ledger_knows_of_each_call() -> None:
    limit = TokenBucket("20/s", burst=1)
    assert drain(21, limit, latency=1.0, is_told=False).seconds > 20
    assert 20 * 0.15 < drain(21, limit, latency=1.0).seconds < 20 * 0.3


@pytest.mark.parametrize("seconds", [0.2, 2, 10, 30])
def test_a_slow_api_costs_a_limit_nothing(seconds: float) -> None:
    for limit in SlidingWindow("20/s"), TokenBucket("20/s", burst=20):
        found = drain(2020, limit, latency=seconds)
        assert 2000 / (found.seconds - seconds) >= 0.94 * 20


def test_a_calendar_window_waits_for_the_next_one() -> None:
    half_an_hour_before_midnight = 20_000 * 86400 * SECOND - 1800 * SECOND
    found = drain(15, FixedWindow("10/d"), start=half_an_hour_before_midnight)
    assert found.seconds == pytest.approx(1800 + 60 + 0.2)


def test_of_two_limits_the_one_that_makes_calls_wait_longest_binds() -> None:
    found = drain(1000, SlidingWindow("100/s", name="fast"), SlidingWindow("600/m", name="slow"))
    assert found.binding_limit == "slow"
    assert found.seconds == pytest.approx(60.2 + 3 * 1.05 + 0.2, abs=0.1)


def test_keys_have_the_limit_each() -> None:
    limit = SlidingWindow("5/s", per="key")
    assert drain(200, limit, keys=10).seconds == pytest.approx(3 * 1.05 + 0.2, abs=0.1)
    assert drain(200, limit, keys=1).seconds == pytest.approx(39 * 1.05 + 0.2, abs=0.1)


def test_queues_have_the_limit_each() -> None:
    book = bind({"r": Rule(queues=["a", "b"], limits=[SlidingWindow("5/s", per="queue")])})
    assert simulate(book, "r", 40).seconds == pytest.approx(3 * 1.05 + 0.2, abs=0.1)


def test_costs_count_in_their_unit() -> None:
    tokens = SlidingWindow("90000/m", unit="tokens")
    assert drain(121, tokens, cost={"tokens": 1500}).seconds == pytest.approx(
        2 * 60.2 + 0.2, abs=0.1
    )
    assert drain(121, tokens).binding_limit is None


def test_a_cost_that_no_limit_admits_is_refused() -> None:
    with pytest.raises(ValueError, match="could never be admitted"):
        drain(1, SlidingWindow("10/s"), cost=11)


def test_without_limits_nothing_binds() -> None:
    found = drain(1000)
    assert found.binding_limit is None
    assert found.seconds == pytest.approx(0.2 + DELIVERY)


def test_no_calls_take_no_time_but_an_answer() -> None:
    assert drain(0, SlidingWindow("1/s")).seconds == 0


def test_what_others_used_before_counts() -> None:
    now = 1000 * SECOND
    used = {"r#0": Usage(open=2, aged=[(now - SECOND // 2, 18)])}
    found = drain(1, SlidingWindow("20/s"), start=now, usage=used)
    assert found.seconds == pytest.approx(0.5 + 0.2, abs=0.01)


def test_an_emptied_bucket_is_waited_for() -> None:
    now = 1000 * SECOND
    limit = TokenBucket("10/s", burst=10)
    used = {"r#0": Usage(aged=[(now, 10)], since=now - 10 * SECOND, level=10 * limit.period_us)}
    assert drain(1, limit, start=now, usage=used).seconds == pytest.approx(0.1 + 0.2, abs=0.01)


def test_a_hundred_thousand_calls_are_simulated_in_seconds() -> None:
    began = time.process_time()
    drain(
        100_000,
        SlidingWindow("1000000/d"),
        SlidingWindow("100/s"),
        TokenBucket("90/s", burst=50),
        Concurrency(40),
    )
    assert time.process_time() - began < 5
