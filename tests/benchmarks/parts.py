"""Where the time of a call goes: CPU and wall milliseconds of each part of its way, all in this one
process.

No worker, broker or dispenser process runs, so nothing competes: what is left is the code's own
cost, and the database's and the API's answers, for which only wall time passes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import requests

from tests.benchmarks.contestants import SETTINGS
from tests.benchmarks.report import say
from tests.benchmarks.stage import open_stage


class Parts:
    """CPU and wall seconds by part: `parts.take("begin", work)` returns what the work returns."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = defaultdict(float)
        self.wall: dict[str, float] = defaultdict(float)

    def take(self, name: str, work: Callable[[], Any]) -> Any:
        cpu, wall = time.process_time(), time.monotonic()
        made = work()
        self.cpu[name] += time.process_time() - cpu
        self.wall[name] += time.monotonic() - wall
        return made

    def per_call(self, calls: int) -> dict[str, dict[str, float]]:
        return {
            name: {"cpu_ms": cpu * 1000 / calls, "wall_ms": self.wall[name] * 1000 / calls}
            for name, cpu in self.cpu.items()
        }


def measure(calls: int) -> dict[str, dict[str, float]]:
    """Milliseconds per call by part, messages as full as a busy dispenser packs them; a bare
    requests.Session for comparison.
    """
    parts = Parts()
    with open_stage(SETTINGS) as on:
        from callqueue import database
        from callqueue.dispatch.dispenser import Dispenser
        from callqueue.execution import claim, recorder, request
        from callqueue.models import CallQueue

        say(f"parts: {calls} calls")
        messages = list[Any]()
        url, body = on.api.url("/call"), "x" * 200
        data = {"method": "post", "params": {"url": url, "data": body}}
        dispenser = Dispenser(publish=lambda using, packed: messages.extend(packed) or True)
        dispenser.run_once(
            maintain=False
        )  # to state its settings and make rows is on no call's way
        parts.take("send_many", lambda: CallQueue.objects.send_many([data] * calls, rule="bench"))
        with database.kept_connection("default"):
            # What no worker begins is bounded, so each round's calls are made before the next.
            # A round's chores (recovery, cleaning up) are on no call's way.
            while parts.take("release", lambda: dispenser.run_once(maintain=False)):
                while messages:
                    ids = messages.pop(0)[1]
                    jobs = parts.take("begin", lambda ids=ids: claim.begin("default", ids))
                    reports = parts.take(
                        "the request", lambda jobs=jobs: [request.make(job) for job in jobs]
                    )
                    parts.take(
                        "record", lambda reports=reports: recorder.record("default", reports)
                    )
        made = CallQueue.objects.done().count()
        if made != calls:
            raise RuntimeError(f"{made} of {calls} calls were made: the figures are of those alone")
        with requests.Session() as session:
            session.trust_env = False
            parts.take(
                "a bare Session's post",
                lambda: [session.post(url, data=body).content for _ in range(calls)],
            )
    return parts.per_call(calls)
