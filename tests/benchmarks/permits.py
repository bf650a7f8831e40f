"""What a permit costs: admitted at once, beside a limiter in Redis and one in the process; an
urgent one beside a backlog; and what permits that wait ask of the database.

The others keep a limit on their own calls alone. A permit keeps it together with queued calls, says
so in a table that survives a crash, and waits for the disk.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.flat import make_calls
from tests.benchmarks.report import quantiles, say
from tests.benchmarks.stage import open_stage
from tests.support import servers

SETTINGS = (
    'CALLQUEUE = {"ALLOWED_NETWORKS": ["127.0.0.0/8"], "RULES": {"r": Rule(limits=[SlidingWindow("1000/s"), SlidingWindow("5000/10s")]),'
    ' "busy": Rule(limits=[SlidingWindow("20/s")]), "far": Rule(limits=[SlidingWindow("50/m")]),'
    ' "near": Rule(limits=[SlidingWindow("20/s")])}}'
)
TAKEN, BACKLOG, URGENT = 300, 100_000, 40
WAITERS, WAITED = 50, 10.0  # permits that wait, and seconds for which their statements are counted


def measure(
    backlog: int = BACKLOG,
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, float]]]:
    """By name: milliseconds, the median and the 95th of a hundred; and what permits that wait ask,
    and are granted.
    """
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
        found |= _others()
        waits_ask = {
            "50 wait, the next slot is a minute off": _asked_by_waiters("far"),
            "50 wait, 20 slots a second": _asked_by_waiters("near"),
        }
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
    return found, waits_ask


def _asked_by_waiters(rule: str) -> dict[str, float]:
    """Statements a second of each of the permits that wait, and how many are granted a second: each
    is ended at once, and another waits in its place. One thread makes the steps of all, each when
    it is due.
    """
    from django.db import connection

    import callqueue
    from callqueue.permits.asking import Options
    from callqueue.permits.granted import Permit
    from callqueue.permits.waiting import Waiter
    from callqueue.transitions import Job

    say(f"{WAITERS} permits that wait for {rule}")
    for _ in range(50 if rule == "far" else 20):
        with callqueue.permit(rule):
            pass
    asked = granted = 0

    def count(execute: Any, *args: Any) -> Any:
        nonlocal asked
        asked += 1
        return execute(*args)

    wanted = Options(rule).wanted()
    steps = [(0.0, n, Waiter(wanted)) for n in range(WAITERS)]
    began, end = None, time.monotonic() + 600
    with connection.execute_wrapper(count):
        while time.monotonic() < end:
            due, n, waiter = heapq.heappop(steps)
            time.sleep(max(0.0, due - time.monotonic()))
            found = waiter.step()
            if isinstance(found, Job):
                permit = Permit(waiter.using, found)
                permit.end_with(permit.ended(None))
                found, waiter, granted = 0.0, Waiter(wanted), granted + 1
            heapq.heappush(steps, (time.monotonic() + found, n, waiter))
            if began is None and all(at for at, *_ in steps):  # each has made its first step
                asked = granted = 0
                began, end = time.monotonic(), time.monotonic() + WAITED
    spent = time.monotonic() - (began or 0.0)
    for _, _, waiter in steps:
        waiter.withdraw()
    return {"asked": asked / spent / WAITERS, "granted": granted / spent}


def _begins() -> list[float]:
    """What an empty block waits for its begin, again and again."""
    import callqueue

    spent = []
    for _ in range(TAKEN):
        began = time.perf_counter()
        with callqueue.permit("r"):
            spent.append(1000 * (time.perf_counter() - began))
    return spent[10:]


def _others() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    if servers.refusal("redis"):
        say("no redis")
    else:
        from limits import RateLimitItemPerSecond, storage, strategies

        redis = os.environ.get(*servers.DEFAULTS["redis"])
        limiter = strategies.MovingWindowRateLimiter(storage.RedisStorage(redis))
        item = RateLimitItemPerSecond(100_000)
        name = "limits, moving window, Redis"
        found[name] = _timed(name, lambda: limiter.hit(item, "callqueue-benchmark"))
    try:
        from pyrate_limiter import Duration, Limiter, Rate
    except ImportError:
        say("no pyrate-limiter")
    else:
        in_process = Limiter(Rate(100_000, Duration.SECOND))
        name = "pyrate-limiter, in the process"
        found[name] = _timed(name, lambda: in_process.try_acquire("r"))
    return found


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
