"""How much of a limit is used where the API takes its time, and what telling the ledger costs: a
backlog under each scenario, with a worker that keeps any number of calls in flight.

The wire is left out (tests.support.slow_api), so that no machine is too small for what is in
flight: the dispenser, the ledger and what the worker writes are the real ones.
"""

from __future__ import annotations

from typing import Any

from tests.benchmarks.report import say
from tests.benchmarks.stage import open_stage
from tests.support.recorder import highest_in_window

LATENCIES = (0.2, 2, 10, 30)
LIMITS = (
    'SlidingWindow("20/s")',
    'SlidingWindow("100/s")',
    'TokenBucket("20/s", burst=20)',
    'TokenBucket("100/s", burst=50)',
)
WINDOW = 1.0


def measure(seconds: float, names: list[str] | None = None) -> list[dict[str, Any]]:
    """Each limit beside each latency, for so many seconds; those rows in which one of the names
    occurs.
    """
    rows = [(limit, latency) for limit in LIMITS for latency in LATENCIES]
    return [
        _measure(*row, seconds)
        for row in rows
        if not names or any(name in title(*row) for name in names)
    ]


def title(limit: str, latency: float) -> str:
    """What a row is called."""
    return f"{limit}, answers after {latency:g} s"


def _measure(limit: str, latency: float, seconds: float) -> dict[str, Any]:
    say(f"slow: {title(limit, latency)}")
    with open_stage(f'CALLQUEUE = {{"RULES": {{"r": Rule(limits=[{limit}])}}}}'):
        from callqueue import conf
        from callqueue.models import CallQueue
        from tests.support.slow_api import SlowApi

        kept = conf.current().rules["r"].limits[0]
        url = {"method": "post", "params": {"url": "http://vendor.example/"}}
        calls = round(kept.n * (seconds + 2)) + kept.capacity
        CallQueue.objects.send_many([url] * calls, rule="r")
        api = SlowApi(latency)
        api.run(seconds)
    is_window = kept.period_us == kept.window_us
    span = api.sent[-1] - api.sent[0]
    share = (len(api.sent) - kept.capacity) / (kept.n * span)
    found = {
        "limit": limit,
        "latency": latency,
        "calls": len(api.sent),
        "highest": highest_in_window(api.sent, WINDOW),
        "allowed": kept.n if is_window else kept.n + kept.capacity,
        "share": share,
        "told_per_100": 100 * api.statements["tell"] / len(api.sent),
        "all_per_100": 100 * sum(api.statements.values()) / len(api.sent),
    }
    say("  highest {highest} of {allowed}, used {share:.3f}, {told_per_100:.1f}".format(**found))
    return found
