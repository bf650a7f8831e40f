"""An API that takes longer than a limit's window to answer gets the whole of the limit, and never
more.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from callqueue import Rule, SlidingWindow, TokenBucket, control
from callqueue.limits.kinds import Limit
from callqueue.models import CallQueue
from tests.support.slow_api import SlowApi
from tests.support.verdicts import never_over

URL = {"method": "post", "params": {"url": "http://vendor.example/"}}


def sent(
    rules: Callable[..., None], limit: Limit, seconds: float, rate: str | None = None
) -> list[float]:
    """When the calls of a backlog were sent, in so many seconds in which none was answered. `rate`:
    what an operator gave the limit instead of its own.
    """
    rules(r=Rule(limits=[limit]))
    if rate is not None:
        control.change_limit("default", "r", "r#0", rate)
    CallQueue.objects.send_many([URL] * 500, rule="r")
    api = SlowApi(latency=60)
    api.run(seconds)
    return api.sent


@pytest.mark.usefixtures("transactional_db")
def test_a_window_is_used_though_nothing_is_answered(rules: Callable[..., None]) -> None:
    instants = sent(rules, SlidingWindow("20/s"), 4.0)
    never_over(instants, 20, 1.0)
    assert len(instants) >= 40  # 20 if they aged from their answers


@pytest.mark.usefixtures("transactional_db")
@pytest.mark.parametrize("own", ["1200/m", "100000/m"], ids=["a longer window", "a tallied one"])
def test_a_window_is_used_by_an_operators_rate(rules: Callable[..., None], own: str) -> None:
    """Whom to tell of, and when, the rate in force says, and not the worker's own settings."""
    instants = sent(rules, SlidingWindow(own), 4.0, rate="20/s")
    never_over(instants, 20, 1.0)
    assert len(instants) >= 40


@pytest.mark.usefixtures("transactional_db")
def test_a_bucket_is_used_though_nothing_is_answered(rules: Callable[..., None]) -> None:
    instants = sent(rules, TokenBucket("20/s", burst=10), 3.0)
    level, at = 10.0, instants[0]
    for instant in instants:
        level, at = min(10.0, level + 20 * (instant - at)) - 1, instant
        assert level >= 0
    assert len(instants) >= 25  # 10 if they aged from their answers
