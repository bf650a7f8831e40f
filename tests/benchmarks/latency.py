"""How long a call takes from the beginning of `send` to the API, while nothing else goes on.

Two workers of two processes stand by, with a dispenser process or alone. Calls are sent one at a
time at irregular intervals, so that they meet every phase of whatever polls.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from typing import Any

from tests.benchmarks import contestants, machine
from tests.benchmarks.contestants import Contestant
from tests.benchmarks.report import quantiles, say
from tests.benchmarks.stage import Stage, open_stage


def measure(calls: int, names: list[str] | None) -> dict[str, Any]:
    """The latencies of each contestant in milliseconds."""
    found: dict[str, Any] = {}
    for system in [contestants.ALL[name] for name in names or contestants.ALL if name != "loops"]:
        say(f"latency: {system.name}")
        with open_stage(contestants.SETTINGS) as on:
            contestant = system(on)
            contestant.start()
            try:
                contestant.enqueue(20)
                machine.wait_until(lambda on=on: on.api.count() >= 20, 120)
                machine.wait_until(contestant.has_ended, 30)
                time.sleep(1)
                on.api.clear()
                sent = _send(contestant, on, calls)
                machine.wait_until(lambda on=on: on.api.count() >= calls, 60)
                arrived = sorted(at for times in on.api.arrivals().values() for at in times)
            finally:
                contestant.stop()
        waits = sorted((at - began) * 1000 for began, at in zip(sent, arrived, strict=True))
        found[system.__name__] = {
            "name": system.name,
            "ms": [round(one, 2) for one in waits],
            **dict(zip(("median", "p95", "worst"), quantiles(waits, 0.5, 0.95, 1.0), strict=True)),
        }
        say(
            "  median {median:.1f} ms, p95 {p95:.1f} ms, worst {worst:.1f} ms".format(
                **found[system.__name__]
            )
        )
    return found


def _send(contestant: Contestant, on: Stage, calls: int) -> list[float]:
    """Send calls one at a time; the instants just before each."""
    command = contestant.command_to_send_apart(calls)
    if command is not None:
        said = subprocess.run(
            command,
            check=True,
            cwd=contestant.folder,
            env=contestant.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        return list(json.loads(said.stdout.splitlines()[-1]))
    rand, sent = random.Random(1), []
    for _ in range(calls):
        time.sleep(rand.uniform(0.1, 0.3))
        sent.append(time.monotonic())
        contestant.send()
    return sent
