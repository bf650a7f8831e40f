"""Workers that are killed, frozen and told to go, at every moment of a call."""

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
from tests.faults.stage import GRACE, Keeper, Stage, Status, children_of
from tests.support.verdicts import verdict, wait_until

Length = Callable[[Any, Any], Any]
POINTS = ["before-begin", "before-socket", "before-record", "inside-record", "after-record"]


def test_a_pool_child_is_killed_at_every_point_of_a_call(stage: Stage, length: Length) -> None:
    times = length(1, 10)
    for point in POINTS:
        stage.plant(point, *["child"] * times)
    stage.worker(concurrency=4)
    stage.dispenser()
    stage.send(4 * times, method="post")
    stage.send(4 * times, method="put")
    stage.send(4 * times, method="get")
    stage.wait_until_struck(60)
    stage.wait_for_all(60)
    stage.judge()


def test_random_kills_under_load(stage: Stage, length: Length) -> None:
    """Children, whole workers and dispensers, at random; the seed makes the choices, the machine
    the moments.
    """
    kills, seed = length((6, 20261120), (200, 20261121))
    dice = random.Random(seed)
    stage.rule(40 if kills < 50 else 60)
    makers = [lambda: stage.worker(concurrency=3, wait=False)] * 2 + [stage.dispenser]
    with stage.keep(*makers) as keeper:
        for running in keeper.running[:2]:
            running.wait_for_log(" ready.")
        killed = seen = 0
        while killed < kills:
            if stage.calls().filter(status__in=(0, 1, 2)).count() < 60:
                for method in ("post", "put", "get"):
                    stage.send(
                        20, path=dice.choice(["/ok", "/delay?s=0.1", "/delay?s=0.5"]), method=method
                    )
            wanted = seen + dice.randrange(
                1, 12
            )  # calls go on between two kills: what dies while it starts tells nothing
            wait_until(lambda wanted=wanted: stage.vendor.count() >= wanted, 60)
            time.sleep(dice.uniform(0.0, 0.1))
            killed += strike_at_random(dice, keeper)
            seen = stage.vendor.count()
        stage.wait_for_all(60)
    counts = stage.judge(
        recovery=10
    )  # a dispenser that is killed again and again recovers when it is back
    assert counts["DONE"] > 2 * kills


def strike_at_random(dice: random.Random, keeper: Keeper) -> int:
    """Mostly a pool child; one time in ten a whole worker or the dispenser. 0 where there was
    nobody to kill.
    """
    if dice.random() < 0.1:
        victim = dice.choice(keeper.running)
        with suppress(ProcessLookupError):
            os.killpg(victim.pid, signal.SIGKILL)
        return 1
    children = [pid for running in keeper.running[:2] for pid in children_of(running.pid)]
    if not children:
        return 0
    with suppress(ProcessLookupError):
        os.kill(dice.choice(sorted(children)), signal.SIGKILL)
    return 1


FULL = 128  # calls that are released at once, and make a few messages of many


def _unknown_were_sent(stage: Stage) -> None:
    """Nothing is UNKNOWN but what arrived."""
    arrived = {arrival.query["call"] for arrival in stage.vendor.arrivals()}
    with verdict():
        for pk in stage.calls().unknown().values_list("pk", flat=True):
            story = f"call {pk} never arrived, and is UNKNOWN: {list(stage.attempts().filter(call_id=pk).values())}"
            assert str(stage.numbers[pk]) in arrived, story


def test_a_soft_time_limit_in_the_middle_of_a_message(stage: Stage) -> None:
    """It strikes nobody: the tasks have ended, and their calls go on."""
    stage.rule(FULL * 2, total=6.0)
    stage.add_settings("CELERY_TASK_SOFT_TIME_LIMIT = 1")
    stage.send(FULL // 2, path="/delay?s=2.5", method="post")
    stage.send(FULL // 2, path="/ok", method="post")
    worker = stage.worker(concurrency=4)
    stage.dispenser()
    stage.wait_for_all(60)
    assert "SoftTimeLimitExceeded" not in worker.log
    assert stage.judge(unknown_allowed=False) == {"DONE": FULL}


SLOW = pytest.mark.slow  # prefork is what most run; the other pools are for `make faults`
POOLS = ["prefork", *(pytest.param(pool, marks=SLOW) for pool in ("threads", "solo", "gevent"))]


@pytest.mark.parametrize("pool", POOLS)
def test_a_worker_is_told_to_go_at_once_in_the_middle_of_a_message(stage: Stage, pool: str) -> None:
    """Only what was on the wire is UNKNOWN. Told to go politely, it waits: test_calls_in_flight."""
    stage.rule(FULL * 2, total=6.0)
    stage.send(FULL // 2, path="/delay?s=1.5", method="post")
    stage.send(FULL // 2, path="/ok", method="post")
    worker = stage.worker(concurrency=4, pool=pool)
    stage.dispenser()
    stage.vendor.wait_for(20)
    worker.process.send_signal(signal.SIGQUIT)
    worker.wait(30)
    stage.worker(concurrency=4)
    stage.wait_for_all(60)
    stage.judge()
    _unknown_were_sent(stage)


def test_a_pool_child_is_killed_in_the_middle_of_a_message(stage: Stage) -> None:
    """What was answered is recorded; what was on the wire is UNKNOWN, and nothing else."""
    stage.rule(FULL * 2, total=6.0)
    for path in ("/hold/k", "/ok") * (
        FULL // 8
    ):  # some of either in every message, however many it carries
        stage.send(4, path=path, method="post")
    worker = stage.worker(concurrency=1)
    stage.dispenser()
    stage.vendor.wait_for(FULL)  # all that were begun have been sent
    wait_until(lambda: stage.calls().done().exists(), 20)
    for child in children_of(worker.pid):
        os.kill(child, signal.SIGKILL)
    stage.worker(concurrency=4)
    wait_until(
        lambda: (
            stage.vendor.release() >= 0 and not stage.calls().filter(status__in=(0, 1, 2)).exists()
        ),
        60,
    )
    stage.judge()
    _unknown_were_sent(stage)


def test_a_worker_frozen_for_twice_its_lease_is_refused_when_it_wakes(stage: Stage) -> None:
    """Held answers arrive, but the attempts are no longer its own: what it records does not
    count.
    """
    stage.rule(total=1.0)
    stage.dispenser()
    frozen = stage.worker(concurrency=2)
    post, put = (
        stage.send(path="/hold/f", method="post")[0],
        stage.send(path="/hold/f", method="put")[0],
    )
    stage.vendor.wait_for(2)
    frozen.freeze()
    stage.vendor.release()
    stage.worker(concurrency=2)
    time.sleep(
        2 * (stage.total + GRACE)
    )  # twice the lease, as the clock has it: nothing else marks that time
    wait_until(lambda: stage.vendor.release() >= 0 and _status(put) == Status.DONE, 20)
    stage.wait_for_status(post, Status.UNKNOWN)
    frozen.thaw()
    frozen.wait_for_log("attempt_refused")
    assert _status(post) == Status.UNKNOWN
    assert len(stage.arrivals_of(post)) == 1
    assert len(stage.arrivals_of(put)) >= 2
    stage.judge()


def _status(call: CallQueue) -> int:
    call.refresh_from_db()
    return call.status
