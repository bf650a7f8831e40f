"""Slow answers on few slots: calls that arrive one by one and take seconds.

In: how many calls a second, how long an answer takes, and who makes them. Out: how many were in
flight at once, how long a call waited for a slot, and the worker's memory.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from tests.benchmarks import machine
from tests.benchmarks.report import quantiles, say
from tests.benchmarks.stage import Stage, open_stage
from tests.support.recorder import Recorder, most_at_once

SLOTS = 4
WARM = 10  # calls that are made before, and answered at once
SETTINGS = """
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CALLQUEUE = {
    "ALLOWED_NETWORKS": ["127.0.0.0/8"],
    "CALLS_PER_SLOT": %d,
    "RULES": {
        "slow": Rule(queues="{queue}", limits=[SlidingWindow("100000/s")],
                     read_timeout=90, total_timeout=90),
        "warm": Rule(queues="{queue}", limits=[SlidingWindow("100000/s")]),
    },
}
"""


@dataclass(frozen=True)
class Scene:
    """So many calls a second, each answered after so many seconds; all are in flight at once for
    `steady` seconds. `per_slot`: CALLS_PER_SLOT.
    """

    rate: int
    answer: float
    per_slot: int
    steady: float = 10.0


FOUR_HUNDRED = Scene(rate=40, answer=10.0, per_slot=120)
TWO_THOUSAND = Scene(rate=67, answer=30.0, per_slot=600)


def measure(names: list[str] | None = None) -> list[dict[str, Any]]:
    """A row for each contestant."""
    rows = [
        ("prefork, 10 s", _Callqueue, FOUR_HUNDRED),
        ("prefork, 30 s", _Callqueue, TWO_THOUSAND),
        ("raw Celery, prefork, 10 s", _Raw, FOUR_HUNDRED),
    ]
    found = []
    for name, contestant, scene in rows:
        if names and not any(wanted in name for wanted in names):
            continue
        say(f"slow: {name}")
        with open_stage(SETTINGS % scene.per_slot) as on, Recorder() as vendor:
            found.append({"name": name, **_run(contestant(on, vendor), scene)})
        say("  " + ", ".join(f"{key} {value}" for key, value in found[-1].items()))
    return found


def _run(contestant: _Contestant, scene: Scene) -> dict[str, Any]:
    worker = contestant.start()
    try:
        for number in range(WARM):
            contestant.send("warm", contestant.vendor.url("/ok", n=number))
        contestant.vendor.wait_for(WARM, 60)
        contestant.vendor.clear()
        memory, over = [0.0], threading.Event()

        def watch() -> None:
            while not over.wait(1.0):
                memory[0] = max(memory[0], machine.resident_mb(worker.pid))

        watching = threading.Thread(target=watch)
        watching.start()
        began = time.monotonic()
        sent = round(scene.rate * (scene.answer + scene.steady))
        for number in range(sent):
            time.sleep(max(0.0, began + number / scene.rate - time.monotonic()))
            contestant.send("slow", contestant.vendor.url("/delay", s=scene.answer, n=number))
        over.set()
        watching.join()
        waits = contestant.slot_waits()
        return {
            "sent": sent,
            "in_flight": most_at_once(contestant.vendor.arrivals()),
            "slot_p95_ms": quantiles(waits, 0.95)[0] if waits else None,
            "memory_mb": round(memory[0]),
        }
    finally:
        for running in contestant.running:
            running.kill()  # what is still waiting would be made for minutes


class _Contestant:
    """Who makes the calls, on one worker of four slots."""

    def __init__(self, on: Stage, vendor: Recorder) -> None:
        self.on, self.vendor = on, vendor
        self.running: list[Any] = []

    def start(self) -> Any:
        """The worker's process, ready for work."""
        raise NotImplementedError

    def send(self, rule: str, url: str) -> None:
        raise NotImplementedError

    def slot_waits(self) -> list[float]:
        """From its release to its begin, in ms; none where nobody knows."""
        return []


class _Callqueue(_Contestant):
    def start(self) -> Any:
        self.running.append(self.on.processes.worker(concurrency=SLOTS))
        self.running.append(self.on.processes.dispenser())
        return self.running[0]

    def send(self, rule: str, url: str) -> None:
        from callqueue.models import CallQueue

        CallQueue.objects.send({"method": "get", "params": {"url": url}}, rule=rule)

    def slot_waits(self) -> list[float]:
        from callqueue.models import CallAttempt

        rows = CallAttempt.objects.filter(rule="slow").values_list("released_at", "started_at")
        return [1000 * (began - released).total_seconds() for released, began in rows if began]


class _Raw(_Contestant):
    def start(self) -> Any:
        queue = self.on.broker.queue("raw")
        self.on.processes.environment.update(RAW_BROKER_URL=self.on.broker.url, RAW_QUEUE=queue)
        command = [sys.executable, "-m", "celery", "--app", "tests.benchmarks.raw"]
        command += ["worker", "--hostname", f"raw-{queue}@%h", "--without-gossip"]
        command += ["--without-mingle", "--loglevel", "INFO", "--prefetch-multiplier", "1"]
        command += ["--concurrency", str(SLOTS), "--queues", queue]
        self.running.append(self.on.processes.start("raw", command))
        self.running[0].wait_for_log(" ready.")
        from tests.benchmarks import raw

        raw.app.conf.update(broker_url=self.on.broker.url, task_default_queue=queue)
        self.task = raw.call
        return self.running[0]

    def send(self, rule: str, url: str) -> None:
        self.task.delay(url)
