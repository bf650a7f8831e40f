"""By the vendor's own record: how much of a limit is used, and slow answers on few slots."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.benchmarks.rates import raw_worker
from tests.benchmarks.stage import Stage, open_stage, quantiles, say, wait_until
from tests.support.recorder import highest_in_window, most_at_once, used_share

EXACT = """
CALLQUEUE = {
    "ALLOWED_NETWORKS": ["127.0.0.0/8"],
    "RULES": {
        "r": Rule(queues="{queue}", limits=[SlidingWindow("LIMIT")]),
        "warm": Rule(queues="{queue}"),
    },
}
"""
WORKERS = 2
# so many, in a window of seconds, by an API that takes seconds, made by workers of so many slots
SCENARIOS = [(20, 1, 0.0, 2), (20, 1, 0.2, 8), (100, 1, 0.2, 16), (60, 10, 0.0, 2)]


def exact(options: Any) -> list[list[str]]:
    """A backlog under each scenario; at most W/(W + jitter) of a sliding window can be used."""
    found = [["limit", "most in a window", "of", "share used"]]
    for n, window, latency, slots in SCENARIOS:
        limit, path = f"{n}/{window}s", f"/delay?s={latency}" if latency else "/ok"
        say(f"exact: {limit}, an answer takes {latency:g} s")
        with open_stage(EXACT.replace("LIMIT", limit)) as on:
            for _ in range(WORKERS):
                on.processes.worker(concurrency=slots)
            on.processes.dispenser()
            backlog = max(int(n * options.drain / window), 3 * n)
            for rule, calls in (("warm", 4 * WORKERS * slots), ("r", backlog)):
                on.vendor.clear()
                on.send(calls, rule, path)
                wait_until(_none_is_left, 60 + 2 * calls * window / n)
                time.sleep(0.5)
            instants = [arrival.at for arrival in on.vendor.arrivals()]
        highest, share = highest_in_window(instants, window), used_share(instants, n, window)
        title = f"{limit}, an answer takes {latency:g} s"
        found.append([title, str(highest), str(n), f"{share:.3f}"])
        say(f"  {found[-1][1:]}")
    return found


def _none_is_left() -> bool:
    """By one statement: between two of them a call moves on, unseen by either."""
    from callqueue.models import CallQueue

    return not CallQueue.objects.filter(status__in=(0, 1, 2)).exists()


SLOTS = 4
WARM = 10  # calls that are made before, and answered at once
SLOW = """
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
STEADY = 10.0  # seconds for which all are in flight at once
# whether it is ours, so many calls a second, seconds that each takes, and CALLS_PER_SLOT
SCENES = {
    "prefork, 10 s": (True, 40, 10.0, 120),
    "prefork, 30 s": (True, 67, 30.0, 600),
    "raw Celery, prefork, 10 s": (False, 40, 10.0, 120),
}


def slots(options: Any) -> list[list[str]]:
    """Calls that arrive one by one and take seconds."""
    head = ["four slots", "slow calls sent", "most in flight"]
    found = [[*head, "wait for a slot, p95 ms", "memory, MB"]]
    for name, (is_ours, rate, seconds, per_slot) in SCENES.items():
        if options.only and not any(wanted in name for wanted in options.only):
            continue
        say(f"slow: {name}")
        with open_stage(SLOW % per_slot) as on:
            figures = _run((_Callqueue if is_ours else _Raw)(on), rate, seconds)
        found.append([name, *figures])
        say(f"  {figures}")
    return found


def _run(contestant: Any, rate: int, seconds: float) -> list[str]:
    """The figures of one row; what still waits is killed with its stage."""
    vendor = contestant.on.vendor
    for number in range(WARM):
        contestant.send("warm", vendor.url("/ok", n=number))
    vendor.wait_for(WARM, 60)
    vendor.clear()
    memory, over = [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            memory[0] = max(memory[0], _resident_mb(contestant.worker.pid))

    watching = threading.Thread(target=watch)
    watching.start()
    began, sent = time.monotonic(), round(rate * (seconds + STEADY))
    for number in range(sent):
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
        contestant.send("slow", vendor.url("/delay", s=seconds, n=number))
    over.set()
    watching.join()
    waits = "".join(f"{one:,.0f}" for one in quantiles(contestant.slot_waits(), 0.95))
    return [f"{sent:,}", f"{most_at_once(vendor.arrivals()):,}", waits, f"{memory[0]:.0f}"]


def _resident_mb(root: int) -> float:
    """Memory of a process and all that share its session, in MB, each its proportional share."""
    total = 0
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(place.name)) == root:
                lines = (place / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


class _Callqueue:
    def __init__(self, on: Stage) -> None:
        self.on, self.worker = on, on.processes.worker(concurrency=SLOTS)
        on.processes.dispenser()

    def send(self, rule: str, url: str) -> None:
        from callqueue.models import CallQueue

        CallQueue.objects.send({"method": "get", "params": {"url": url}}, rule=rule)

    def slot_waits(self) -> list[float]:
        """From its release to its begin, in ms; none where nobody knows."""
        from callqueue.models import CallAttempt

        rows = CallAttempt.objects.filter(rule="slow").values_list("released_at", "started_at")
        return [1000 * (began - released).total_seconds() for released, began in rows if began]


class _Raw:
    def __init__(self, on: Stage) -> None:
        self.on = on
        self.worker = raw_worker(on, SLOTS, "--loglevel", "INFO", "--prefetch-multiplier", "1")
        self.worker.wait_for_log(" ready.")
        from tests.benchmarks import raw

        raw.app.conf.update(broker_url=on.broker.url, task_default_queue=on.broker.queue("raw"))
        self.task = raw.call

    def send(self, rule: str, url: str) -> None:
        self.task.delay(url)

    def slot_waits(self) -> list[float]:
        return []
