"""Slow answers on few slots: calls that arrive one by one and take seconds, and a rule with fast
answers on the same worker.

In: how many calls a second, how long an answer takes, and who makes them. Out: how many were in
flight at once, how long a call waited for a slot, the p95 of fast calls alone and beside the slow
ones, and the worker's memory, processor and connections to the database.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.benchmarks import machine
from tests.benchmarks.report import quantiles, say
from tests.benchmarks.stage import Stage, open_stage
from tests.support.recorder import Arrival, Recorder, most_at_once

SLOTS = 4
FAST = 5  # fast calls a second
ALONE = 12.0  # seconds in which they are made alone
SETTINGS = """
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CALLQUEUE = {
    "ALLOWED_NETWORKS": ["127.0.0.0/8"],
    "CALLS_PER_SLOT": %d,
    "RULES": {
        "slow": Rule(queues="{queue}", limits=[SlidingWindow("100000/s")],
                     read_timeout=90, total_timeout=90),
        "fast": Rule(queues="{queue}", limits=[SlidingWindow("100000/s")]),
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
    steady: float
    per_slot: int

    @property
    def seconds(self) -> float:
        return self.answer + self.steady


FOUR_HUNDRED = Scene(rate=40, answer=10.0, steady=10.0, per_slot=120)
TWO_THOUSAND = Scene(rate=67, answer=30.0, steady=10.0, per_slot=600)


def measure(names: list[str] | None = None) -> list[dict[str, Any]]:
    """A row for each contestant."""
    rows = [
        ("callqueue, prefork", _Callqueue, "prefork", FOUR_HUNDRED),
        ("callqueue, threads", _Callqueue, "threads", FOUR_HUNDRED),
        ("callqueue_run", _Run, "", FOUR_HUNDRED),
        ("raw Celery, prefork", _Raw, "prefork", FOUR_HUNDRED),
        ("callqueue, prefork, 2,000", _Callqueue, "prefork", TWO_THOUSAND),
    ]
    found = []
    for name, contestant, pool, scene in rows:
        if names and not any(wanted in name for wanted in names):
            continue
        say(f"slow: {name}")
        with open_stage(SETTINGS % scene.per_slot) as on, Recorder() as vendor:
            found.append({"name": name, **_run(contestant(on, vendor, pool), scene)})
        say("  " + ", ".join(f"{key} {value}" for key, value in found[-1].items()))
    return found


def _run(contestant: _Contestant, scene: Scene) -> dict[str, Any]:
    worker = contestant.start()
    try:
        _send_evenly(contestant.send_fast, FAST, 2.0)
        contestant.wait_for(int(FAST * 2.0))
        contestant.vendor.clear()
        sent = _send_evenly(contestant.send_fast, FAST, ALONE)
        alone = _waits(sent, contestant.wait_for(len(sent)))
        contestant.vendor.clear()
        contestant.began = time.monotonic()
        watch = _Watch(contestant, worker.pid, scene)
        fast: list[float] = []
        beside = threading.Thread(
            target=lambda: fast.extend(_send_evenly(contestant.send_fast, FAST, scene.seconds))
        )
        beside.start()
        slow = _send_evenly(
            lambda n: contestant.send_slow(n, scene.answer), scene.rate, scene.seconds
        )
        beside.join()
        watch.stop()
        arrivals = contestant.vendor.arrivals()
    finally:
        contestant.stop()
    arrived = [one for one in arrivals if one.path == "/delay"]
    quick = [one for one in arrivals if one.path == "/ok"]
    return {
        "sent": len(slow),
        "in_flight": most_at_once(arrived),
        "to_wire_ms": _rounded(_waits(slow, arrived)),
        "slot_ms": contestant.slot_waits(),
        "fast_alone_p95_ms": quantiles(alone, 0.95)[0],
        "fast_beside_p95_ms": quantiles(_waits(fast, quick), 0.95)[0],
        "fast_made": f"{len(quick)} of {len(fast)}",
        **watch.found,
    }


class _Contestant:
    """Who makes the calls, on one worker of four slots."""

    began = 0.0

    def __init__(self, on: Stage, vendor: Recorder, pool: str) -> None:
        self.on, self.vendor, self.pool = on, vendor, pool
        self.running: list[Any] = []

    def start(self) -> Any:
        """The worker's process, ready for work."""
        raise NotImplementedError

    def send_slow(self, number: int, answer: float) -> None:
        self.send("slow", self.vendor.url("/delay", s=answer, n=number))

    def send_fast(self, number: int) -> None:
        self.send("fast", self.vendor.url("/ok", n=number))

    def send(self, rule: str, url: str) -> None:
        raise NotImplementedError

    def slot_waits(self) -> list[float] | None:
        """From its release to its begin, in ms: p50, p95, most. None where nobody knows."""
        return None

    def wait_for(self, count: int) -> list[Arrival]:
        return self.vendor.wait_for(count, 60)

    def stop(self) -> None:
        for running in self.running:
            running.kill()  # what is still waiting would be made for minutes


class _Callqueue(_Contestant):
    def start(self) -> Any:
        self.on.processes.environment["PGAPPNAME"] = "callqueue-worker"
        self.running.append(self.on.processes.worker(concurrency=SLOTS, pool=self.pool))
        self.on.processes.environment["PGAPPNAME"] = "callqueue-dispenser"
        self.running.append(self.on.processes.dispenser())
        return self.running[0]

    def send(self, rule: str, url: str) -> None:
        from callqueue.models import CallQueue

        CallQueue.objects.send({"method": "get", "params": {"url": url}}, rule=rule)

    def slot_waits(self) -> list[float]:
        from callqueue.models import CallAttempt

        rows = CallAttempt.objects.filter(rule="slow").values_list("released_at", "started_at")
        waits = [(began - released).total_seconds() for released, began in rows if began]
        return _rounded([wait * 1000 for wait in waits])


class _Run(_Callqueue):
    """No broker, and no slots: one process makes what it releases."""

    def start(self) -> Any:
        self.on.processes.environment["PGAPPNAME"] = "callqueue-worker"
        self.running.append(self.on.processes.run())
        self.running[0].wait_for_log("running all rules")
        return self.running[0]


class _Raw(_Contestant):
    def start(self) -> Any:
        queue = self.on.broker.queue("raw")
        self.on.processes.environment.update(RAW_BROKER_URL=self.on.broker.url, RAW_QUEUE=queue)
        command = [sys.executable, "-m", "celery", "--app", "tests.benchmarks.raw"]
        command += ["worker", "--hostname", f"raw-{queue}@%h", "--without-gossip"]
        command += ["--without-mingle", "--loglevel", "INFO", "--prefetch-multiplier", "1"]
        command += ["--concurrency", str(SLOTS), "--pool", self.pool, "--queues", queue]
        self.running.append(self.on.processes.start("raw", command))
        self.running[0].wait_for_log(" ready.")
        from tests.benchmarks import raw

        raw.app.conf.update(broker_url=self.on.broker.url, task_default_queue=queue)
        self.task = raw.call
        return self.running[0]

    def send(self, rule: str, url: str) -> None:
        self.task.delay(url)


class _Watch:
    """Looks at a worker each second: memory, processor time, connections to the database."""

    def __init__(self, contestant: _Contestant, pid: int, scene: Scene) -> None:
        self.memory = self.connections = 0.0
        self.contestant, self.pid, self._stop = contestant, pid, threading.Event()
        self.meter = machine.Meter({"worker": machine.family(pid)})
        self.meter.__enter__()
        self.began = time.monotonic()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        from django.db import connection

        sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND application_name = %s"
        while not self._stop.wait(1.0):
            self.memory = max(self.memory, machine.resident_mb(self.pid))
            with connection.cursor() as cursor:
                cursor.execute(sql, [self.contestant.on.database, "callqueue-worker"])
                self.connections = max(self.connections, cursor.fetchone()[0])
        connection.close()

    def stop(self) -> None:
        self._stop.set()
        self.thread.join()
        seconds = time.monotonic() - self.began
        self.meter.__exit__()
        self.found = {
            "memory_mb": round(self.memory),
            "connections": int(self.connections),
            "cpu_share": round(self.meter.seconds["worker"] / seconds, 2),
        }


def _send_evenly(send: Callable[[int], None], rate: float, seconds: float) -> list[float]:
    """Send so many a second, one by one; the instants just before each."""
    sent, began = list[float](), time.monotonic()
    for number in range(round(rate * seconds)):
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
        sent.append(time.monotonic())
        send(number)
    return sent


def _waits(sent: list[float], arrivals: list[Arrival]) -> list[float]:
    """From each send to its arrival, in ms; those that never arrived, until now."""
    arrived = {int(one.query["n"]): one.at for one in arrivals}
    now = time.monotonic()
    return [(arrived.get(number, now) - at) * 1000 for number, at in enumerate(sent)]


def _rounded(waits: list[float]) -> list[float]:
    """The median, the 95th of a hundred, and the most."""
    return [round(one, 1) for one in quantiles(waits, 0.5, 0.95, 1.0)]
