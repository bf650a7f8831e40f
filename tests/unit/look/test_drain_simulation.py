"""The judge of the estimate is right by itself: what the ledger's rule makes of a backlog, in whole
microseconds and without a clock.
"""

from __future__ import annotations

from typing import Any

import pytest

from callqueue.limits.budgets import bind
from callqueue.limits.kinds import (
    SECOND,
    Concurrency,
    FixedWindow,
    SlidingWindow,
    TokenBucket,
    Usage,
)
from callqueue.limits.rules import Rule
from tests.support.drain_simulation import DELIVERY, NOTICE, Simulated, simulate

NOW = 1000 * SECOND
NEARLY_MIDNIGHT = 20_000 * 86400 * SECOND - 1800 * SECOND
TOKENS = SlidingWindow("90000/m", unit="tokens")
TWO = [SlidingWindow("100/s", name="fast"), SlidingWindow("600/m", name="slow")]
# what drains under which limits, how, in how many seconds, and what binds
DRAINS: dict[str, tuple[int, list[Any], dict[str, Any], float, str | None]] = {
    "a window, every period and jitter": (200, [SlidingWindow("20/s")], {}, 9 * 1.05 + 0.2, "SlidingWindow 20/s"),
    "in flight, by answers": (40, [Concurrency(4)], {"latency": 0.5}, 9 * (0.5 + DELIVERY + NOTICE) + 0.5 + DELIVERY, "Concurrency 4"),
    "a bucket, its burst, then its rate": (200, [TokenBucket("20/s", burst=20)], {}, 180 / 20 + 0.2, "TokenBucket 20/s"),
    "a calendar's next window": (15, [FixedWindow("10/d")], {"start": NEARLY_MIDNIGHT}, 1800 + 60 + 0.2, "FixedWindow 10/d"),
    "of two the slower": (1000, TWO, {}, 60.2 + 3 * 1.05 + 0.2, "slow"),
    "each key has its own": (200, [SlidingWindow("5/s", per="key")], {"keys": 10}, 3 * 1.05 + 0.2, "SlidingWindow 5/s per key"),
    "costs count in their unit": (121, [TOKENS], {"cost": {"tokens": 1500}}, 2 * 60.2 + 0.2, None),
    "no cost in the unit": (121, [TOKENS], {}, 0.2 + DELIVERY, None),
    "what others used": (1, [SlidingWindow("20/s")], {"start": NOW, "usage": {"r#0": Usage(open=2, aged=[(NOW - SECOND // 2, 18)])}}, 0.5 + 0.2, None),
    "nothing": (0, [SlidingWindow("1/s")], {}, 0.0, None),
}  # fmt: skip


def drain(calls: int, *limits: Any, **options: Any) -> Simulated:
    return simulate(bind({"r": Rule(limits=limits)}), "r", calls, **options)


@pytest.mark.parametrize("what", DRAINS)
def test_a_backlog_drains_as_its_limits_let_it(what: str) -> None:
    calls, limits, options, seconds, binding = DRAINS[what]
    found = drain(calls, *limits, **options)
    assert found.seconds == pytest.approx(seconds, abs=0.1, rel=0.02)
    assert binding is None or found.binding_limit == binding


@pytest.mark.parametrize("seconds", [0.2, 30])
def test_a_slow_api_costs_a_limit_nothing(seconds: float) -> None:
    for limit in SlidingWindow("20/s"), TokenBucket("20/s", burst=20):
        found = drain(2020, limit, latency=seconds)
        assert 2000 / (found.seconds - seconds) >= 0.94 * 20


def test_a_bucket_of_one_token_waits_until_the_ledger_knows_of_each_call() -> None:
    limit = TokenBucket("20/s", burst=1)
    assert drain(21, limit, latency=1.0, is_told=False).seconds > 20
    assert 20 * 0.15 < drain(21, limit, latency=1.0).seconds < 20 * 0.3


def test_queues_have_the_limit_each() -> None:
    book = bind({"r": Rule(queues=["a", "b"], limits=[SlidingWindow("5/s", per="queue")])})
    assert simulate(book, "r", 40).seconds == pytest.approx(3 * 1.05 + 0.2, abs=0.1)
