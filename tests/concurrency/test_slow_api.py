"""An API that takes longer than a limit's window to answer gets the whole of the limit, and never
more.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from callqueue import Rule, SlidingWindow, TokenBucket, control
from callqueue.models import CallQueue
from tests.support.slow_api import SlowApi
from tests.support.verdicts import never_over

URL = {"method": "post", "params": {"url": "http://vendor.example/"}}
LIMITS = {
    "window": SlidingWindow("20/s"),
    # by an operator's rate: whom to tell of, and when, it says, and not the worker's own settings
    "longer": SlidingWindow("1200/m"),
    "tallied": SlidingWindow("100000/m"),
    "bucket": TokenBucket("20/s", burst=10),
}


@pytest.mark.usefixtures("transactional_db")
def test_a_limit_is_used_though_nothing_is_answered(rules: Callable[..., None]) -> None:
    rules(**{name: Rule(limits=[limit]) for name, limit in LIMITS.items()})
    for name in ("longer", "tallied"):
        control.change_limit("default", name, f"{name}#0", "20/s")
    for name in LIMITS:
        CallQueue.objects.send_many([URL] * 200, rule=name)
    api = SlowApi(latency=60)
    api.run(3.0)
    for name in ("window", "longer", "tallied"):
        never_over(api.sent[name], 20, 1.0, of=name)
        assert len(api.sent[name]) >= 40, name  # 20 if they aged from their answers
    instants = api.sent["bucket"]
    level, at = 10.0, instants[0]
    for instant in instants:
        level, at = min(10.0, level + 20 * (instant - at)) - 1, instant
        assert level >= 0
    assert len(instants) >= 25  # 10 if they aged from their answers
