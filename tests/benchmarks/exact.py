"""How much of a limit is used, and whether it is ever exceeded, by the vendor's own record: a
backlog under each scenario.

A bound: a call ages from `jitter` after it was sent, so at most W/(W + jitter) of a sliding window
can be used.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tests.benchmarks import machine
from tests.benchmarks.report import say
from tests.benchmarks.stage import Stage, open_stage
from tests.support.recorder import Recorder, highest_in_window, used_share


@dataclass(frozen=True)
class Scenario:
    """A rate, an API of some latency (seconds), and workers with so many slots each; `goal` is the
    share asked for.
    """

    n: int
    window: float = 1.0
    jitter: float = 0.05
    latency: float = 0.0
    workers: int = 2
    slots: int = 2
    goal: float = 0.94

    @property
    def rate(self) -> str:
        return f"{self.n}/{self.window:g}s"

    @property
    def name(self) -> str:
        slots = f"{self.workers} x {self.slots} slots"
        return f"{self.rate}, jitter {self.jitter:g}, API of {self.latency:g} s, {slots}"

    @property
    def bound(self) -> float:
        return self.window / (self.window + self.jitter)

    @property
    def settings(self) -> str:
        limit = f'SlidingWindow("{self.rate}", jitter={self.jitter})'
        rules = (
            f'{{"r": Rule(queues="{{queue}}", limits=[{limit}]), "warm": Rule(queues="{{queue}}")}}'
        )
        return f'CALLQUEUE = {{"ALLOWED_NETWORKS": ["127.0.0.0/8"], "RULES": {rules}}}'


SCENARIOS = [
    Scenario(20),
    Scenario(20, latency=0.2, slots=8),
    Scenario(20, workers=1, slots=1),
    Scenario(20, jitter=0.01, goal=0.97),
    Scenario(100),
    Scenario(100, latency=0.2, slots=16),
    Scenario(100, latency=1.0, slots=32),
    Scenario(60, window=10.0, goal=0.99),
]


def measure(seconds: float) -> list[dict[str, Any]]:
    """Each scenario for about so many seconds: the share used, the highest use of any window, the
    messages per call.
    """
    return [_measure(scenario, seconds) for scenario in SCENARIOS]


def _measure(scenario: Scenario, seconds: float) -> dict[str, Any]:
    say(f"exact: {scenario.name}")
    with open_stage(scenario.settings) as on, Recorder() as vendor:
        for _ in range(scenario.workers):
            on.processes.worker(concurrency=scenario.slots)
        on.processes.dispenser()
        _drain(on, vendor, scenario, "warm", 4 * scenario.workers * scenario.slots)
        warm = _tasks(on)
        vendor.clear()
        calls = max(int(scenario.n * seconds / scenario.window), 3 * scenario.n)
        _drain(on, vendor, scenario, "r", calls)
        instants = [arrival.at for arrival in vendor.arrivals()]
        tasks = _tasks(on) - warm
    share = used_share(instants, scenario.n, scenario.window)
    found = {
        "name": scenario.name,
        "calls": calls,
        "requests": len(instants),
        "per_call": len(instants) / calls,
        "limit": scenario.n,
        "highest": highest_in_window(instants, scenario.window),
        "share": share,
        "of_bound": share / scenario.bound,
        "goal": scenario.goal,
        "tasks_per_call": tasks / calls,
    }
    say(
        "  highest {highest} of {limit}, used {share:.3f}, {of_bound:.3f} of the bound".format(
            **found
        )
    )
    return found


def _drain(on: Stage, vendor: Recorder, scenario: Scenario, rule: str, calls: int) -> None:
    from callqueue.models import CallQueue

    path = f"/delay?s={scenario.latency}" if scenario.latency else "/ok"
    CallQueue.objects.send_many(
        [{"method": "post", "params": {"url": vendor.url(path), "data": "x"}}] * calls, rule=rule
    )
    waiting = CallQueue.objects.filter(status__in=(0, 1, 2))
    machine.wait_until(lambda: not waiting.exists(), 60 + 2 * calls * scenario.window / scenario.n)
    time.sleep(0.5)


def _tasks(on: Stage) -> int:
    """How many messages the workers have received."""
    return sum(
        running.log.count("] received")
        for running in on.processes.started
        if running.name.startswith("worker")
    )
