"""Processes that release calls and make them themselves (callqueue_run): killed, frozen and told to
go at every moment, alone and beside dispensers and workers.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from callqueue.models import CallQueue
from tests.faults.stage import GRACE, Stage, Status, wait_until

Length = Callable[[Any, Any], Any]
TALKATIVE = """
LOGGING = {"version": 1, "handlers": {"all": {"class": "logging.StreamHandler"}},
           "loggers": {"callqueue": {"handlers": ["all"], "level": "INFO"}}}
"""
POINTS = [
    "inside-release",
    "before-begin",
    "before-socket",
    "before-record",
    "inside-record",
    "after-record",
]


def test_one_is_killed_at_every_point(stage: Stage, length: Length) -> None:
    rounds = length(1, 10)
    with stage.keep(stage.run) as keeper:
        for point in POINTS * rounds:
            for method in ("post", "put"):
                stage.send(10, method=method)
            stage.plant(point, "group")
            stage.wait_until_struck()
        stage.wait_for_all(60)
    assert keeper.restarts == len(POINTS) * rounds
    stage.judge(recovery=10)


def test_random_kills_beside_a_dispenser_and_a_worker(stage: Stage, length: Length) -> None:
    """Two that make calls themselves, and others: whoever dies, the rest goes on."""
    kills, seed = length((5, 20261125), (100, 20261126))
    dice = random.Random(seed)
    stage.rule(40)
    worker = lambda: stage.worker(concurrency=2, wait=False)  # noqa: E731
    with stage.keep(stage.run, stage.run, stage.dispenser, worker) as keeper:
        for running in keeper.running[:2]:
            running.wait_for_log("running all rules")
        for _ in range(kills):
            if stage.calls().filter(status__in=(0, 1, 2)).count() < 60:
                for method in ("post", "put", "get"):
                    stage.send(20, path=dice.choice(["/ok", "/delay?s=0.3"]), method=method)
            seen = stage.vendor.count()
            wanted = seen + dice.randrange(1, 12)
            wait_until(lambda wanted=wanted: stage.vendor.count() >= wanted, 60)
            time.sleep(dice.uniform(0.0, 0.1))
            with suppress(ProcessLookupError):
                os.killpg(dice.choice(keeper.running[:3]).pid, signal.SIGKILL)
        stage.wait_for_all(60)
    stage.judge(recovery=10)


def test_one_that_is_told_to_go_ends_what_it_has_and_another_goes_on(stage: Stage) -> None:
    """Within the calls' own time, whatever slots are still to open: nothing is UNKNOWN."""
    stage.rule(20)
    first = stage.run()
    stage.send(60, path="/delay?s=1", method="post")
    stage.vendor.wait_for(10)
    assert first.stop() == 0
    assert "ended" in first.log
    wait_until(lambda: not stage.open_attempts(), 1)
    second = stage.run()
    stage.wait_for_all(30)
    second.process.send_signal(signal.SIGINT)
    assert second.wait() == 0
    assert stage.judge(unknown_allowed=False) == {"DONE": 60}


def test_one_that_is_frozen_for_twice_its_lease_is_refused_when_it_wakes(stage: Stage) -> None:
    stage.rule(total=1.0)
    stage.add_settings(TALKATIVE)
    frozen = stage.run()
    (post,) = stage.send(path="/hold/f", method="post")
    (put,) = stage.send(path="/hold/f", method="put")
    stage.vendor.wait_for(2)
    frozen.freeze()
    stage.vendor.release()
    other = stage.run()
    time.sleep(2 * (stage.total + GRACE))
    wait_until(lambda: stage.vendor.release() >= 0 and _status(put) == Status.DONE, 20)
    stage.wait_for_status(post, Status.UNKNOWN)
    frozen.thaw()
    frozen.wait_for_log("attempt_refused")
    assert len(stage.arrivals_of(post)) == 1
    stage.judge(recovery=10)  # by one that starts meanwhile
    assert other.is_alive()


@pytest.mark.slow
def test_one_that_is_frozen_between_charge_and_socket_sends_nothing_late(stage: Stage) -> None:
    stage.add_settings(TALKATIVE)
    stage.plant("before-begin", "stop")
    frozen = stage.run()
    (post,) = stage.send(method="post")
    stage.wait_until_struck()
    stage.run()
    stage.wait_for_status(post, Status.UNKNOWN)
    frozen.thaw()
    frozen.wait_for_log("attempt_refused", timeout=20)
    assert stage.arrivals_of(post) == []
    stage.judge(recovery=10)  # by one that starts meanwhile


def _status(call: CallQueue) -> int:
    call.refresh_from_db()
    return call.status
