"""What a permit costs: admitted at once, beside a limiter in Redis, and an urgent one beside a
backlog.

The other keeps a limit on its own calls alone. A permit keeps it together with queued calls, says
so in a table that survives a crash, and waits for the disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.flat import make_calls
from tests.benchmarks.report import quantiles, say
from tests.benchmarks.stage import open_stage
from tests.support import servers

SETTINGS = """
CALLQUEUE = {
    "ALLOWED_NETWORKS": ["127.0.0.0/8"],
    "RULES": {
        "r": Rule(limits=[SlidingWindow("1000/s"), SlidingWindow("5000/10s")]),
        "busy": Rule(limits=[SlidingWindow("20/s")]),
    },
}
"""
TAKEN, BACKLOG, URGENT = 300, 100_000, 40


def measure(backlog: int = BACKLOG) -> dict[str, dict[str, Any]]:
    """By name: milliseconds, the median, the 95th of a hundred and the most."""
    with open_stage(SETTINGS) as stage:
        import callqueue
        from callqueue.models import RuleState

        def permit() -> None:
            with callqueue.permit("r"):
                pass

        def commit() -> None:
            RuleState.objects.filter(rule="r").update(served=0)

        found = {"callqueue.permit, until the block begins": _of(_begins())}
        found["callqueue.permit, with its end"] = _timed("callqueue.permit", permit)
        found["one row updated, and committed"] = _timed("a commit", commit)
        found |= _in_redis()
        say(f"{backlog} calls that wait ...")
        make_calls("busy", backlog, "''")
        stage.processes.worker()  # without one, what is released keeps its charge
        stage.processes.dispenser()
        time.sleep(3.0)
        waits = []
        for _ in range(URGENT):
            began = time.perf_counter()
            with callqueue.permit("busy", priority=9):
                waits.append(1000 * (time.perf_counter() - began))
            time.sleep(0.02)
        found[f"an urgent permit, 20/s, {backlog:,} calls waiting"] = _of(waits)
    return found


def _begins() -> list[float]:
    """What an empty block waits for its begin, again and again."""
    import callqueue

    spent = []
    for _ in range(TAKEN):
        began = time.perf_counter()
        with callqueue.permit("r"):
            spent.append(1000 * (time.perf_counter() - began))
    return spent[10:]


def _in_redis() -> dict[str, dict[str, Any]]:
    if servers.refusal("redis"):
        say("no redis")
        return {}
    from limits import RateLimitItemPerSecond, storage, strategies

    redis = os.environ.get(*servers.DEFAULTS["redis"])
    limiter = strategies.MovingWindowRateLimiter(storage.RedisStorage(redis))
    item = RateLimitItemPerSecond(100_000)
    name = "limits, moving window, Redis"
    return {name: _timed(name, lambda: limiter.hit(item, "callqueue-benchmark"))}


def _timed(name: str, take: Callable[[], Any]) -> dict[str, Any]:
    say(name)
    for _ in range(10):
        take()
    spent = []
    for _ in range(TAKEN):
        began = time.perf_counter()
        take()
        spent.append(1000 * (time.perf_counter() - began))
    return _of(spent)


def _of(spent: list[float]) -> dict[str, Any]:
    found = quantiles(spent, 0.5, 0.95, 1.0)
    return dict(zip(("median", "p95", "worst"), found, strict=True))
