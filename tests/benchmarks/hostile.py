"""Beside a server that keeps a worker's process busy: how long the calls of other threads take, and
the CPU of a hostile one.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from callqueue.execution import wire
from tests.benchmarks.report import say
from tests.support.busy import BUSY, serving

THREADS = 4  # that make normal calls
PAUSE = 0.01  # seconds between the calls of one
POLICY = wire.Policy(allowed_networks=("127.0.0.0/8",))
TIMEOUTS = wire.Timeouts(connect=5, read=5, total=10)


def measure(seconds: float) -> dict[str, dict[str, Any]]:
    """By what the server does: p95 of normal calls alone and beside it, in turns, and the most CPU
    that one hostile call took.
    """
    found = {}
    with serving() as address:
        _beside(address, None, 1.0)  # warm
        for number, name in enumerate(BUSY):
            alone, beside, cpu = list[float](), list[float](), list[float]()
            for _ in range(4):
                alone += _beside(address, None, seconds / 8)[0]
                times, spent = _beside(address, number, seconds / 8)
                beside, cpu = beside + times, cpu + spent
            say(f"hostile: {name}, {len(cpu)} calls")
            before, meanwhile = _p95(alone), _p95(beside)
            found[name] = {
                "alone_ms": before,
                "beside_ms": meanwhile,
                "ratio": meanwhile / before,
                "cpu_s": max(cpu),
            }
    return found


def _beside(address: str, number: int | None, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds that normal calls took, and CPU seconds of the hostile ones, made one after the other
    by one thread more.
    """
    times, cpu, until = list[float](), list[float](), time.monotonic() + seconds

    def normal() -> None:
        while time.monotonic() < until:
            began = time.monotonic()
            assert _call(f"{address}/normal").response is not None
            times.append(time.monotonic() - began)
            time.sleep(PAUSE)
        wire.close_idle()

    def hostile() -> None:
        while time.monotonic() < until:
            began = time.thread_time()
            _call(f"{address}/{number}")
            cpu.append(time.thread_time() - began)

    threads = [threading.Thread(target=normal) for _ in range(THREADS)]
    threads += [threading.Thread(target=hostile)] if number is not None else []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times, cpu


def _call(url: str) -> wire.Answer:
    return wire.request("get", {"url": url}, policy=POLICY, timeouts=TIMEOUTS)


def _p95(times: list[float]) -> float:
    return sorted(times)[len(times) * 95 // 100] * 1000
