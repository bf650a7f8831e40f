"""Calls a second and their cost, and the latency of one: callqueue and what it is compared with."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.benchmarks.stage import MS as HEADS
from tests.benchmarks.stage import ROOT, Stage, has_ended, in_ms, open_stage, say, wait_until

WORKERS, PROCESSES = 2, 2
BATCH = 1000  # calls that are sent in one transaction
TICK = os.sysconf("SC_CLK_TCK")
SERVERS = ("walwriter", "background writer", "checkpointer", "launcher")  # PostgreSQL's own
SETTINGS = """
CELERY_WORKER_PREFETCH_MULTIPLIER = 4
CALLQUEUE = {
    "ALLOWED_NETWORKS": ["127.0.0.0/8"],
    "RULES": {"bench": Rule(queues="{queue}", limits=[SlidingWindow("100000/s")])},
}
"""


class Callqueue:
    """Limits counted, attempts recorded, fences, acknowledged late, publications confirmed."""

    name = "callqueue"
    servers = ("postgresql", "rabbitmq")

    def __init__(self, on: Stage) -> None:
        self.stage = on
        self.running: list[Any] = []

    def start(self) -> None:
        """Bring up its processes, ready to work."""
        for _ in range(WORKERS):
            self.running.append(self.stage.processes.worker(concurrency=PROCESSES))
        self.running.append(self.stage.processes.dispenser())

    def stop(self) -> None:
        for running in self.running:
            running.stop()

    def enqueue(self, count: int) -> None:
        for left in range(count, 0, -BATCH):
            self.stage.send(min(left, BATCH), "bench")

    def send_one_by_one(self, count: int) -> list[float]:
        """Send at irregular intervals, which meet every phase of a poll; the instants before each."""
        rand, sent = random.Random(1), []
        for _ in range(count):
            time.sleep(rand.uniform(0.1, 0.3))
            sent.append(time.monotonic())
            self.stage.send(1, "bench")
        return sent

    def cpu_seconds(self) -> float:
        """What its processes, this one and its share of the servers have used until now."""
        used, roots = sum(os.times()[:4]), {running.pid for running in self.running}
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                title = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode("latin-1")
                if os.getsid(int(place.name)) in roots or self._serves(title):
                    fields = (place / "stat").read_text().rpartition(")")[2].split()
                    used += (int(fields[11]) + int(fields[12])) / TICK
        return used

    def _serves(self, title: str) -> bool:
        if title.startswith("postgres:"):
            own = (f" {self.stage.database} ", *SERVERS)
            return "postgresql" in self.servers and any(word in title for word in own)
        return "rabbitmq" in self.servers and "beam.smp" in title and "rabbit" in title


class Workers(Callqueue):
    """No dispenser: one of the workers' processes releases, and makes a few calls itself."""

    name = "callqueue, workers alone"

    def start(self) -> None:
        for _ in range(WORKERS):
            self.running.append(self.stage.processes.worker(concurrency=PROCESSES))


class Run(Callqueue):
    """No broker: as many processes as the others' workers are, each releases and makes its own."""

    name = "callqueue_run, two processes"
    servers = ("postgresql",)

    def start(self) -> None:
        for _ in range(WORKERS):
            running = self.stage.processes.run()
            running.wait_for_log("running all rules")
            self.running.append(running)


class Raw(Callqueue):
    """Celery and a session, nothing else."""

    name = "raw Celery + Session"
    servers = ("rabbitmq",)

    def start(self) -> None:
        for _ in range(WORKERS):
            self.running.append(raw_worker(self.stage, PROCESSES, "--loglevel", "WARNING"))

    def enqueue(self, count: int) -> None:
        self._by_itself("enqueue", count)

    def send_one_by_one(self, count: int) -> list[float]:
        return list(json.loads(self._by_itself("apart", count).splitlines()[-1]))

    def _by_itself(self, what: str, count: int) -> str:
        url = self.stage.vendor.url()
        command = [sys.executable, "-m", "tests.benchmarks.raw", what, url, str(count)]
        options = {"env": {**os.environ, **raw_environment(self.stage)}, "stdout": subprocess.PIPE}
        return subprocess.run(command, check=True, cwd=ROOT, text=True, **options).stdout


def raw_environment(stage: Stage) -> dict[str, str]:
    """With settings, Celery sets Django up, as in every Django project's workers. They are those of a
    project without callqueue, which would look for calls in these workers.
    """
    own = {"DJANGO_SETTINGS_MODULE": "django.conf.global_settings"}
    return own | {"RAW_BROKER_URL": stage.broker.url, "RAW_QUEUE": stage.broker.queue("raw")}


def raw_worker(stage: Stage, slots: int, *options: str) -> Any:
    """A worker of the queue "raw"."""
    queue, processes = stage.broker.queue("raw"), stage.processes
    command = [sys.executable, "-m", "celery", "--app", "tests.benchmarks.raw", "worker"]
    command += ["--hostname", f"raw{len(processes.started)}-{queue}@%h", "--queues", queue]
    command += ["--without-gossip", "--without-mingle"]
    before = processes.environment
    processes.environment = {**before, **raw_environment(stage)}
    worker = processes.start("raw", [*command, "--concurrency", str(slots), *options])
    processes.environment = before
    return worker


ALL = {"callqueue": Callqueue, "workers": Workers, "run": Run, "raw": Raw}


def throughput(options: Any) -> list[list[str]]:
    """From the first `send` to the last record. Rounds are interleaved, for a noisy machine."""
    names = options.only or list(ALL)
    rates: dict[str, list[float]] = {name: [] for name in names}
    costs: dict[str, list[float]] = {name: [] for name in names}
    with open_stage(SETTINGS) as stage:
        for number in range(options.rounds):
            for name in names:
                say(f"throughput: round {number + 1} of {options.rounds}, {ALL[name].name}")
                seconds, cpu = _round(stage, ALL[name](stage), options.calls)
                rates[name].append(options.calls / seconds)
                costs[name].append(1000 * cpu / options.calls)
                say(f"  {rates[name][-1]:,.0f} calls/s, {costs[name][-1]:.2f} CPU ms a call")
    own = statistics.median(rates[names[0]])
    found = [["", "calls/s", f"{names[0]} is x", "CPU ms a call"]]
    for name in names:
        rate, cost = statistics.median(rates[name]), statistics.median(costs[name])
        found.append([ALL[name].name, f"{rate:,.0f}", f"{own / rate:.2f}", f"{cost:.2f}"])
    return found


def _round(stage: Stage, contestant: Callqueue, calls: int) -> tuple[float, float]:
    """Seconds, and CPU seconds."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE callqueue_callqueue, callqueue_callattempt")
        cursor.execute("VACUUM ANALYZE callqueue_callqueue, callqueue_callattempt")
    stage.vendor.clear()
    contestant.start()
    try:
        contestant.enqueue(400)
        _wait(stage, 400, 120)
        stage.vendor.clear()
        began, cpu = time.monotonic(), contestant.cpu_seconds()
        contestant.enqueue(calls)
        ended = _wait(stage, calls, 60 + calls / 50)
        cpu = contestant.cpu_seconds() - cpu
        if (arrived := stage.vendor.count()) != calls:
            raise AssertionError(f"{contestant.name}: {arrived} requests arrived for {calls} calls")
        return ended - began, cpu
    finally:
        contestant.stop()


def _wait(stage: Stage, calls: int, timeout: float) -> float:
    wait_until(lambda: stage.vendor.count() >= calls, timeout)
    return wait_until(has_ended, timeout, every=0.005)


def latency(options: Any) -> list[list[str]]:
    """Two workers of two processes stand by, with a dispenser process or alone."""
    found = [["from send to the wire, idle", *HEADS]]
    for system in [ALL[name] for name in options.only or ALL]:
        say(f"latency: {system.name}")
        with open_stage(SETTINGS) as stage:
            contestant = system(stage)
            contestant.start()
            try:
                contestant.enqueue(20)
                _wait(stage, 20, 120)
                time.sleep(1)
                stage.vendor.clear()
                sent = contestant.send_one_by_one(options.sends)
                arrived = sorted(one.at for one in stage.vendor.wait_for(options.sends, 60))
            finally:
                contestant.stop()
        waits = [1000 * (at - began) for began, at in zip(sent, arrived, strict=True)]
        found.append([system.name, *in_ms(waits)])
        say(f"  {found[-1][1:]}")
    return found
