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
from tests.benchmarks.stage import open_stage
from tests.support.recorder import Recorder, highest_in_window, used_share


@dataclass(frozen=True)
class Scenario:
    """A rate, an API of some latency (seconds), and workers with so many slots each."""

    n: int
    window: float = 1.0
    latency: float = 0.0
    slots: int = 2

    @property
    def name(self) -> str:
        return f"{self.n}/{self.window:g}s, an answer takes {self.latency:g} s"

    @property
    def settings(self) -> str:
        limit = f'SlidingWindow("{self.n}/{self.window:g}s")'
        rules = (
            f'{{"r": Rule(queues="{{queue}}", limits=[{limit}]), "warm": Rule(queues="{{queue}}")}}'
        )
        return f'CALLQUEUE = {{"ALLOWED_NETWORKS": ["127.0.0.0/8"], "RULES": {rules}}}'


WORKERS = 2
SCENARIOS = [
    Scenario(20),
    Scenario(20, latency=0.2, slots=8),
    Scenario(100, latency=0.2, slots=16),
    Scenario(60, window=10.0),
]


def measure(seconds: float) -> list[dict[str, Any]]:
    """Each scenario for about so many seconds: the share used, the highest use of any window."""
    return [_measure(scenario, seconds) for scenario in SCENARIOS]


def _measure(scenario: Scenario, seconds: float) -> dict[str, Any]:
    say(f"exact: {scenario.name}")
    with open_stage(scenario.settings) as on, Recorder() as vendor:
        for _ in range(WORKERS):
            on.processes.worker(concurrency=scenario.slots)
        on.processes.dispenser()
        _drain(vendor, scenario, "warm", 4 * WORKERS * scenario.slots)
        vendor.clear()
        _drain(
            vendor, scenario, "r", max(int(scenario.n * seconds / scenario.window), 3 * scenario.n)
        )
        instants = [arrival.at for arrival in vendor.arrivals()]
    share = used_share(instants, scenario.n, scenario.window)
    highest = highest_in_window(instants, scenario.window)
    say(f"  highest {highest} of {scenario.n}, used {share:.3f}")
    return {"name": scenario.name, "limit": scenario.n, "highest": highest, "share": share}


def _drain(vendor: Recorder, scenario: Scenario, rule: str, calls: int) -> None:
    from callqueue.models import CallQueue

    path = f"/delay?s={scenario.latency}" if scenario.latency else "/ok"
    CallQueue.objects.send_many(
        [{"method": "post", "params": {"url": vendor.url(path), "data": "x"}}] * calls, rule=rule
    )
    waiting = CallQueue.objects.filter(status__in=(0, 1, 2))
    machine.wait_until(lambda: not waiting.exists(), 60 + 2 * calls * scenario.window / scenario.n)
    time.sleep(0.5)
