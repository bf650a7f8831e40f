"""Workers that release, and nothing else: killed and told to go at every moment, beside whoever
else releases.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.faults.stage import Stage, children_of, wait_until

Length = Callable[[Any, Any], Any]
POINTS = ["inside-release", "before-begin", "before-socket", "before-record", "inside-record"]


def test_its_process_is_killed_at_every_point(stage: Stage, length: Length) -> None:
    """Each is followed by another of the same worker."""
    stage.rule(in_workers=8)
    worker = stage.worker(concurrency=3)
    for point in POINTS * length(1, 10):
        for method in ("post", "put"):
            stage.send(10, method=method)
        stage.plant(point, "child")
        stage.wait_until_struck()
    stage.wait_for_all(60)
    assert worker.is_alive()
    stage.judge(recovery=10)


def test_random_kills_of_workers_and_of_their_processes(stage: Stage, length: Length) -> None:
    """Beside a dispenser that comes and goes, and one that makes its calls itself."""
    kills, seed = length((6, 20261126), (100, 20261127))
    dice = random.Random(seed)
    stage.rule(40, in_workers=8)
    worker = lambda: stage.worker(concurrency=2, wait=False)  # noqa: E731
    with stage.keep(worker, worker, stage.dispenser, stage.run) as keeper:
        for running in keeper.running[:2]:
            running.wait_for_log(" ready.")
        for _ in range(kills):
            if stage.calls().filter(status__in=(0, 1, 2)).count() < 60:
                for method in ("post", "put", "get"):
                    stage.send(20, path=dice.choice(["/ok", "/delay?s=0.3"]), method=method)
            seen = stage.vendor.count()
            wanted = seen + dice.randrange(1, 12)
            wait_until(lambda wanted=wanted: stage.vendor.count() >= wanted, 60)
            time.sleep(dice.uniform(0.0, 0.1))
            one = dice.choice(keeper.running)
            with suppress(ProcessLookupError):
                if (children := children_of(one.pid)) and dice.random() < 0.7:
                    os.kill(dice.choice(children), signal.SIGKILL)
                else:
                    os.killpg(one.pid, signal.SIGKILL)
        stage.wait_for_all(60)
    stage.judge(recovery=25)


def test_workers_that_are_told_to_go_leave_the_rest_to_the_next(stage: Stage) -> None:
    stage.rule(20, in_workers=8)
    first = stage.worker(concurrency=2)
    stage.send(60, path="/delay?s=1", method="post")
    stage.vendor.wait_for(10)
    assert first.stop(40) == 0
    begun = stage.attempts().open().filter(started_at__isnull=False)
    assert not begun.exists()
    stage.worker(concurrency=2)
    stage.wait_for_all(30)
    assert stage.judge(unknown_allowed=False, recovery=25) == {"DONE": 60}
