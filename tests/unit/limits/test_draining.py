"""The quick estimate of a drain agrees with the simulation that follows every call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow, TokenBucket
from callqueue.limits.budgets import bind
from callqueue.limits.kinds import SECOND, Limit, Usage
from callqueue.limits.simulation import simulate

NOON = 1_800_014_400 * SECOND  # 2027-01-15 12:00 UTC


def drained(
    limit: Limit, calls: float, usage: Usage | None = None, latency: float = 0.0
) -> float | None:
    return limit.seconds_until_gone(limit.meter(usage or Usage(), NOON), calls, NOON, latency)


limits = st.one_of(
    st.builds(
        lambda n, seconds: SlidingWindow(f"{n}/{seconds}s"),
        n=st.integers(1, 50),
        seconds=st.integers(1, 30),
    ),
    st.builds(
        lambda n, burst: TokenBucket(f"{n}/s", burst=burst),
        n=st.integers(1, 50),
        burst=st.integers(2, 50),
    ),
    st.builds(lambda n: FixedWindow(f"{n}/h"), n=st.integers(1, 50)),
)


@given(limit=limits, calls=st.integers(1, 400))
def test_it_is_what_the_simulation_takes(limit: Limit, calls: int) -> None:
    estimate = drained(
        limit, calls, Usage(level=limit.capacity * getattr(limit, "period_us", 0), since=NOON)
    )
    simulated = simulate(
        bind({"r": Rule(limits=[limit])}),
        "r",
        calls,
        latency=0.0,
        start=NOON,
        delivery=0.0,
        notice=0.0,
    )
    assert estimate == pytest.approx(simulated.seconds, rel=0.06, abs=1.0)


def test_what_is_charged_already_is_waited_for() -> None:
    limit = SlidingWindow("10/m", jitter=0)
    full = Usage(aged=[(NOON - 20 * SECOND, 10)])
    assert drained(limit, 1) == 0
    assert drained(limit, 1, full) == pytest.approx(40, abs=0.001)
    assert drained(limit, 11, full) == pytest.approx(100, abs=0.001)


def test_open_attempts_take_at_least_a_period_more() -> None:
    assert drained(
        SlidingWindow("10/m", jitter=0), 1, Usage(open=10), latency=2.0
    ) == pytest.approx(62)


def test_concurrency_needs_to_know_how_long_calls_take() -> None:
    assert drained(Concurrency(4), 100) is None
    assert drained(Concurrency(4), 3) == 0
    assert drained(Concurrency(4), 100, latency=0.5) == pytest.approx(12.5)


def test_a_backlog_of_centuries_is_no_long_sum() -> None:
    years = drained(FixedWindow("1/d"), 10_000_000)
    assert years == pytest.approx(10_000_000 * 86400, rel=0.001)
