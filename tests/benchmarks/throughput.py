"""How many calls a second, end to end, and what each costs: callqueue and what it is compared
with, on the same machine, one after the other.

From the first row or message sent to the last call recorded, workers up and warm. Rounds are
interleaved, so that a noisy machine is noisy for all; the table has the median of the rounds.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from tests.benchmarks import contestants, machine
from tests.benchmarks.contestants import Contestant
from tests.benchmarks.report import say
from tests.benchmarks.stage import Stage, open_stage


@dataclass(frozen=True)
class Measured:
    """One round: seconds in all and for sending alone, CPU seconds by role."""

    count: int
    seconds: float
    sending: float
    cpu: dict[str, float]
    api: float

    @property
    def rate(self) -> float:
        return self.count / self.seconds

    @property
    def cpu_ms(self) -> float:
        return sum(self.cpu.values()) * 1000 / self.count


def measure(calls: int, rounds: int, names: list[str] | None) -> dict[str, Any]:
    """Every contestant, `rounds` times."""
    names = names or list(contestants.ALL)
    found: dict[str, list[Measured]] = {name: [] for name in names}
    with open_stage(contestants.SETTINGS) as stage:
        for number in range(rounds):
            for name in names:
                say(f"throughput: round {number + 1} of {rounds}, {contestants.ALL[name].name}")
                found[name].append(_round(stage, contestants.ALL[name](stage), calls))
                one = found[name][-1]
                parts = ", ".join(
                    f"{role} {cpu * 1000 / one.count:.2f}" for role, cpu in one.cpu.items()
                )
                say(
                    f"  {one.rate:,.0f} calls/s, sending took {one.sending:.2f} of {one.seconds:.2f} s; CPU ms: {parts}"
                )
    summed = {name: _summary(contestants.ALL[name].name, some) for name, some in found.items()}
    if "callqueue" in summed:
        for own in summed.values():
            own["ratio"] = summed["callqueue"]["rate"] / own["rate"]
    return summed


def _round(stage: Stage, contestant: Contestant, calls: int) -> Measured:
    stage.api.clear()
    _forget(stage)
    contestant.start()
    try:
        contestant.enqueue(400)
        _wait(stage, contestant, 400, 120)
        stage.api.clear()
        roles = {"api": machine.family(stage.api.process.pid), **contestant.roles()}
        with machine.Meter(roles) as meter:
            began = time.monotonic()
            contestant.enqueue(calls)
            sending = time.monotonic() - began
            ended = _wait(stage, contestant, calls, 60 + calls / 50)
        cpu = meter.seconds
        arrived = stage.api.count()
        if arrived != calls:
            raise AssertionError(f"{contestant.name}: {arrived} requests arrived for {calls} calls")
        return Measured(calls, ended - began, sending, cpu, cpu.pop("api"))
    finally:
        contestant.stop()


def _wait(stage: Stage, contestant: Contestant, calls: int, timeout: float) -> float:
    machine.wait_until(lambda: stage.api.count() >= calls, timeout)
    return machine.wait_until(contestant.has_ended, timeout, every=0.005)


def _forget(stage: Stage) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE callqueue_callqueue, callqueue_callattempt")
        cursor.execute("VACUUM ANALYZE callqueue_callqueue, callqueue_callattempt")


def _summary(title: str, rounds: list[Measured]) -> dict[str, Any]:
    roles = rounds[0].cpu
    return {
        "name": title,
        "calls": rounds[0].count,
        "rates": [round(one.rate) for one in rounds],
        "rate": statistics.median(one.rate for one in rounds),
        "cpu_ms": statistics.median(one.cpu_ms for one in rounds),
        "cpu_parts": {
            role: statistics.median(one.cpu[role] * 1000 / one.count for one in rounds)
            for role in roles
        },
        "api_cpu_ms": statistics.median(one.api * 1000 / one.count for one in rounds),
    }
