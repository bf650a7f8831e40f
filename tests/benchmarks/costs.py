"""Where the time of a call goes, and what a permit costs."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import requests

from tests.benchmarks import rates
from tests.benchmarks.stage import MS, in_ms, open_stage, say, timed
from tests.benchmarks.tables import make_calls
from tests.support import servers


class Parts:
    """CPU and wall seconds by part: `parts.take("begin", work)` returns what the work returns."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = defaultdict(float)
        self.wall: dict[str, float] = defaultdict(float)

    def take(self, name: str, work: Callable[..., Any], *given: Any, **how: Any) -> Any:
        cpu, wall = time.process_time(), time.monotonic()
        made = work(*given, **how)
        self.cpu[name] += time.process_time() - cpu
        self.wall[name] += time.monotonic() - wall
        return made


def parts(options: Any) -> list[list[str]]:
    """All in this one process, so that nothing competes; messages are full."""
    taken, calls = Parts(), options.calls
    with open_stage(rates.SETTINGS) as stage:
        from callqueue import database
        from callqueue.dispatch.dispenser import Dispenser
        from callqueue.execution import claim, recorder, request
        from callqueue.models import CallQueue

        say(f"parts: {calls} calls")
        messages = list[Any]()
        dispenser = Dispenser(publish=lambda using, packed: messages.extend(packed) or True)
        dispenser.run_once(maintain=False)  # to state its settings is on no call's way
        taken.take("send_many", stage.send, calls, "bench")
        with database.kept_connection("default"):
            # What no worker begins is bounded, so each round's calls are made before the next.
            while taken.take("release", dispenser.run_once, maintain=False):
                while messages:
                    jobs = taken.take("begin", claim.begin, "default", messages.pop(0)[1])
                    reports = taken.take(
                        "the request", lambda jobs: list(map(request.make, jobs)), jobs
                    )
                    taken.take("record", recorder.record, "default", reports)
        if (made := CallQueue.objects.done().count()) != calls:
            raise RuntimeError(f"{made} of {calls} calls were made: the figures are of those alone")
        url, body = stage.vendor.url(), "x" * 200
        with requests.Session() as session:
            session.trust_env = False
            for _ in range(calls):
                taken.take("a bare Session's post", lambda: session.post(url, data=body).content)
    return [["one process, full messages", "CPU ms", "wall ms"]] + [
        [name, f"{1000 * cpu / calls:.3f}", f"{1000 * taken.wall[name] / calls:.3f}"]
        for name, cpu in taken.cpu.items()
    ]


PERMITS = """
CALLQUEUE = {
    "ALLOWED_NETWORKS": ["127.0.0.0/8"],
    "RULES": {
        "r": Rule(limits=[SlidingWindow("1000/s"), SlidingWindow("5000/10s")]),
        "busy": Rule(limits=[SlidingWindow("20/s")]),
    },
}
"""
TAKEN, BACKLOG, URGENT = 300, 100_000, 40


def permits(options: Any) -> list[list[str]]:
    """Admitted at once, beside a limiter in Redis, and an urgent one beside a backlog."""
    with open_stage(PERMITS) as stage:
        import callqueue
        from callqueue.models import RuleState

        def begun(rule: str = "r", **how: Any) -> float:
            began = time.perf_counter()
            with callqueue.permit(rule, **how):
                return 1000 * (time.perf_counter() - began)

        def commit() -> None:
            RuleState.objects.filter(rule="r").update(served=0)

        found = {
            "callqueue.permit, until the block begins": [begun() for _ in range(TAKEN)][10:],
            "callqueue.permit, with its end": _again(begun),
            "one row updated, and committed": _again(commit),
            **_in_redis(),
        }
        say(f"{BACKLOG} calls that wait ...")
        make_calls("busy", BACKLOG, "''")
        stage.processes.worker()  # without one, what is released keeps its charge
        stage.processes.dispenser()
        time.sleep(3.0)
        waits = found[f"an urgent permit, 20/s, {BACKLOG:,} calls waiting"] = list[float]()
        for _ in range(URGENT):
            waits.append(begun("busy", priority=9))
            time.sleep(0.02)
    return [["until it may go", *MS], *([name, *in_ms(took, 3)] for name, took in found.items())]


def _in_redis() -> dict[str, list[float]]:
    if servers.refusal("redis"):
        say("no redis")
        return {}
    from limits import RateLimitItemPerSecond, storage, strategies

    redis = os.environ.get(*servers.DEFAULTS["redis"])
    limiter = strategies.MovingWindowRateLimiter(storage.RedisStorage(redis))
    item = RateLimitItemPerSecond(100_000)
    return {
        "limits, moving window, Redis": _again(lambda: limiter.hit(item, "callqueue-benchmark"))
    }


def _again(take: Callable[[], Any]) -> list[float]:
    """How long each of many takes, but for the first."""
    return [timed(take) for _ in range(TAKEN + 10)][10:]
