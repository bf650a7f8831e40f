"""Dispensers that are killed inside a release, between its commit and its message, and after it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from callqueue.history.sums import counters
from callqueue.models import CallAttempt
from tests.faults.stage import Stage, Status
from tests.support.verdicts import on_a_quiet_machine, wait_until

Length = Callable[[Any, Any], Any]
POINTS = ["inside-release", "before-publish", "inside-publish", "after-publish"]


def test_a_dispenser_is_killed_at_every_point_of_a_release(stage: Stage, length: Length) -> None:
    """What was charged and never published comes back when its lease is over; what never committed
    never happened.
    """
    stage.worker(concurrency=4)
    rounds = length(1, 10)
    with stage.keep(stage.dispenser) as keeper:
        for point in POINTS * rounds:
            stage.send(10, method="post")
            stage.send(10, method="put")
            stage.plant(point, "group")
            stage.wait_until_struck()
        stage.wait_for_all(40)
    assert keeper.restarts == len(POINTS) * rounds
    assert stage.judge(unknown_allowed=False) == {"DONE": 20 * len(POINTS) * rounds}


def test_a_dispenser_that_is_told_to_go_ends_cleanly_and_another_goes_on(stage: Stage) -> None:
    stage.rule(20)
    stage.worker(concurrency=2)
    first = stage.dispenser()
    stage.send(60)
    stage.vendor.wait_for(10)
    assert first.stop() == 0
    second = stage.dispenser()
    second.wait_for_log("dispensing")
    second.process.send_signal(signal.SIGINT)
    assert second.wait() == 0
    stage.dispenser()
    stage.wait_for_all(30)
    assert stage.judge(unknown_allowed=False) == {"DONE": 60}


@pytest.mark.slow
def test_a_frozen_dispenser_holds_up_nobody(stage: Stage) -> None:
    """Frozen inside its transaction, it holds its rule's lock until the database ends the
    transaction.
    """
    stage.plant("inside-release", "stop")
    stage.worker(concurrency=2)
    frozen = stage.dispenser()
    calls = stage.send(20)
    stage.wait_until_struck()
    began = time.monotonic()
    stage.dispenser()
    stage.wait_for_all(30)
    with on_a_quiet_machine():
        assert time.monotonic() - began < 20
    frozen.thaw()
    more = stage.send(20)
    wait_until(lambda: all(_status(call) == Status.DONE for call in more), 20)
    assert len(calls) == 20
    assert stage.judge(unknown_allowed=False) == {"DONE": 40}


@pytest.mark.slow
def test_sums_go_on_after_a_kill(stage: Stage) -> None:
    """Under load: what the last dispenser had added up stays, and the next one adds what it had
    not, each attempt once.
    """
    stage.rule(60)
    stage.worker(concurrency=4)
    first = stage.dispenser()
    stage.send(480)
    wait_until(lambda: _summed() > 0, 20)
    first.kill()
    summed, made = _summed(), CallAttempt.objects.filter(finished_at__isnull=False).count()
    stage.dispenser()
    began = time.monotonic()
    wait_until(lambda: _summed() > max(summed, made), 60)
    print(f"sums went on {time.monotonic() - began:.1f} s after the restart")
    stage.wait_for_all(60)
    stage.judge(unknown_allowed=False)
    wait_until(
        lambda: _summed() == CallAttempt.objects.filter(finished_at__isnull=False).count(), 30
    )


def _summed() -> int:
    """How many attempts the sums have since ever."""
    return counters("default", ["r"])["r"].done


def _status(call: Any) -> int:
    call.refresh_from_db()
    return int(call.status)
