"""What it costs to send, against what Django's own `create` and `bulk_create` of the same rows
cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks import contestants
from tests.benchmarks.report import say
from tests.benchmarks.stage import open_stage

ROUNDS, SINGLE, MANY = 9, 200, 5000


def measure() -> dict[str, Any]:
    """Milliseconds a call, the medians of rounds that take turns."""
    with open_stage(contestants.SETTINGS) as stage:
        from callqueue.models import CallQueue

        data = {"method": "post", "params": {"url": stage.api.url("/"), "data": "x" * 200}}
        columns = {
            "rule": "bench",
            "call_data": data,
            "method": "post",
            "host": "127.0.0.1",
            "ready": True,
        }
        calls = CallQueue.objects
        work: dict[str, tuple[int, Callable[[], Any]]] = {
            "create": (SINGLE, lambda: [calls.create(**columns) for _ in range(SINGLE)]),
            "send": (SINGLE, lambda: [calls.send(data, rule="bench") for _ in range(SINGLE)]),
            "bulk_create": (
                MANY,
                lambda: calls.bulk_create(
                    [CallQueue(**columns) for _ in range(MANY)], batch_size=1000
                ),
            ),
            "send_many": (MANY, lambda: calls.send_many([data] * MANY, rule="bench")),
        }
        taken: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(ROUNDS):
            for name, (count, do) in work.items():
                began = time.perf_counter()
                do()
                taken[name].append((time.perf_counter() - began) * 1000 / count)
    found = {name: statistics.median(one) for name, one in taken.items()}
    say("sending: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in found.items()))
    return found
