"""Workers, dispensers and callqueue_run, killed, frozen and told to go in their work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from callqueue.ledger.rule_rows import SILENT
from callqueue.models import CallAttempt, CallQueue
from tests.celery_app import app
from tests.faults.stage import GRACE, Stage, Status
from tests.support.processes import Running
from tests.support.recorder import most_at_once
from tests.support.verdicts import verdict, wait_until

Length = Callable[[Any, Any], Any]
TALKATIVE = """
LOGGING = {"version": 1, "handlers": {"all": {"class": "logging.StreamHandler"}},
           "loggers": {"callqueue": {"handlers": ["all"], "level": "INFO"}}}
"""
OF_A_CALL = ["before-begin", "before-socket", "before-record", "inside-record", "after-record"]
OF_A_RELEASE = ["inside-release", "before-publish", "inside-publish", "after-publish"]
OF_A_TAKE_OFF = ["inside-release", "before-commit", "before-clearance"]
POINTS = {
    "dispenser": OF_A_RELEASE,
    "run": [*OF_A_TAKE_OFF, *OF_A_CALL],
    "worker": [*OF_A_TAKE_OFF, *OF_A_CALL[:-1]],  # which releases, alone
}


def _status(call: CallQueue) -> int:
    call.refresh_from_db()
    return call.status


# --- Killed


@pytest.mark.parametrize("kind", POINTS)
def test_one_is_killed_at_every_point_of_its_work(stage: Stage, length: Length, kind: str) -> None:
    """What was charged comes back with its lease; what never committed never happened."""
    if kind == "dispenser":
        stage.worker(concurrency=4)
    elif kind == "worker":
        stage.rule(in_workers=8)
    points = POINTS[kind] * length(1, 10)
    with stage.keep(getattr(stage, kind)) as keeper:
        for point in points:
            for method in ("post", "put"):
                stage.send(10, method=method)
            stage.plant(point, "child" if kind == "worker" else "group")
            stage.wait_until_struck()
        stage.wait_for_all(60)
    assert keeper.restarts == (0 if kind == "worker" else len(points))
    if kind == "dispenser":
        assert stage.judge(unknown_allowed=False) == {"DONE": 20 * len(points)}
    else:
        stage.judge(recovery=10)


# --- Told to go


@pytest.mark.parametrize("kind", ["dispenser", "run"])
def test_one_that_is_told_to_go_ends_cleanly_and_another_goes_on(stage: Stage, kind: str) -> None:
    """By SIGTERM and by SIGINT, whatever slots are still to open: nothing is UNKNOWN."""
    stage.rule(20)
    if kind == "dispenser":
        stage.worker(concurrency=2)
    start = getattr(stage, kind)
    first = start()
    stage.send(60, path="/delay?s=1", method="post")
    stage.vendor.wait_for(10)
    assert first.stop() == 0
    if kind == "run":
        wait_until(lambda: not stage.open_attempts(), 1)
    second = start()
    stage.wait_for_all(30)
    second.process.send_signal(signal.SIGINT)
    assert second.wait() == 0
    for running in (first, second):
        assert "ended" in running.log
        assert "Traceback" not in running.log
    assert stage.judge(unknown_allowed=False) == {"DONE": 60}


FULL = 128  # calls that are released at once, and make a few messages of many
SLOW = pytest.mark.slow  # prefork is what most run; the other pools are for `make faults`
ENDS = [("prefork", "is killed"), ("prefork", "is told"), *(pytest.param(pool, "is told", marks=SLOW) for pool in ("threads", "solo", "gevent"))]  # fmt: skip


@pytest.mark.parametrize(("pool", "how"), ENDS)
def test_a_worker_ends_at_once_in_the_middle_of_a_message(
    stage: Stage, pool: str, how: str
) -> None:
    """What was answered is recorded; what was on the wire is UNKNOWN, and nothing else."""
    stage.rule(FULL * 2, total=6.0)
    for path in ("/hold/k", "/ok") * (FULL // 8):  # some of either in every message
        stage.send(4, path=path, method="post")
    worker = stage.worker(concurrency=1, pool=pool)
    stage.dispenser()
    stage.vendor.wait_for(FULL)  # all that were begun have been sent
    wait_until(lambda: CallQueue.objects.done().exists(), 20)
    if how == "is killed":
        for child in worker.children():
            os.kill(child, signal.SIGKILL)
    else:
        worker.process.send_signal(signal.SIGQUIT)
        worker.wait(30)
    stage.worker(concurrency=4)
    stage.release_until_all_have_ended()
    stage.judge()
    with verdict():
        for call in CallQueue.objects.unknown():
            assert stage.arrivals_of(call), f"{call} never arrived: {list(call.attempts.values())}"


# --- Frozen


@pytest.mark.parametrize("kind", ["worker", "run"])
def test_one_frozen_for_twice_its_lease_is_refused_when_it_wakes(stage: Stage, kind: str) -> None:
    """The attempts are no longer its own: what it records does not count."""
    stage.rule(total=1.0)
    start: Callable[[], Running] = getattr(stage, kind)
    if kind == "worker":
        stage.dispenser()
    else:  # Celery's own logging says what a worker says
        stage.add_settings(TALKATIVE)
    frozen = start()
    (post,) = stage.send(path="/hold/f", method="post")
    (put,) = stage.send(path="/hold/f", method="put")
    stage.vendor.wait_for(2)
    frozen.freeze()
    stage.vendor.release()
    other = start()
    # twice the lease, as the clock has it: nothing else marks that time
    time.sleep(2 * (stage.total + GRACE))
    wait_until(lambda: stage.vendor.release() >= 0 and _status(put) == Status.DONE, 20)
    stage.wait_for_status(post, Status.UNKNOWN)
    frozen.thaw()
    frozen.wait_for_log("attempt_refused")
    assert _status(post) == Status.UNKNOWN
    assert len(stage.arrivals_of(post)) == 1
    assert len(stage.arrivals_of(put)) >= 2
    stage.judge(recovery=10)  # by one that starts meanwhile
    assert other.is_alive()


@pytest.mark.slow
def test_one_that_is_frozen_before_its_charge_is_committed_sends_nothing(stage: Stage) -> None:
    """Where the database does not end its transaction, it wakes to a lease that has ended."""
    stage.plant("before-commit", "stop")
    frozen = stage.run()
    (post,) = stage.send(method="post")
    stage.wait_until_struck()
    stage.run()
    # twice the lease, and what the database takes to notice: nothing else marks that time
    time.sleep(max(2 * (stage.total + GRACE), SILENT + 1))
    if connection.vendor == "postgresql":
        stage.wait_for_status(post, Status.DONE)
    frozen.thaw()
    stage.wait_for_all(30)
    (more,) = stage.send(method="post")
    stage.wait_for_status(more, Status.DONE)
    stage.judge(recovery=10)


# --- Calls in flight

LONG = 20.0  # seconds of a total timeout that no test waits for
POOLS = ["prefork", *(pytest.param(pool, marks=SLOW) for pool in ("threads", "solo", "gevent"))]


def _echo(stage: Stage, path: Path) -> None:
    """Send a task that has nothing to do with calls, to the worker's queue."""
    stage.processes.broker.send(app, "tests.echo", str(path), "done", queue="one")


def _send_one_by_one(stage: Stage, count: int, path: str, **how: str) -> None:
    """Each is sent when the one before has arrived, so that no two share a message."""
    before = stage.vendor.count()
    for number in range(1, count + 1):
        stage.send(path=path, **how)
        stage.vendor.wait_for(before + number)


@pytest.mark.parametrize("pool", POOLS[:3])
def test_a_slot_takes_calls_and_other_tasks_while_answers_are_waited_for_and_no_more_than_it_may(
    stage: Stage, tmp_path: Path, pool: str
) -> None:
    stage.rule(total=LONG, extra='"CALLS_PER_SLOT": 5,')
    worker = stage.worker(concurrency=1, pool=pool)
    stage.dispenser()
    _send_one_by_one(stage, 4, "/hold/s", method="post")
    _echo(stage, tmp_path / "said")
    wait_until((tmp_path / "said").exists, 20)
    stage.send(4, path="/hold/s", method="post")
    stage.vendor.wait_for(5)
    wait_until(lambda: CallAttempt.objects.filter(started_at=None).count() == 3, 20)
    with verdict():
        assert not CallQueue.objects.done().exists()
    stage.release_until_all_have_ended()
    with verdict():
        assert most_at_once(stage.vendor.arrivals()) == 5
    assert worker.stop() == 0
    assert stage.judge(unknown_allowed=False) == {"DONE": 8}


@pytest.mark.parametrize("pool", POOLS)
def test_a_worker_that_is_told_to_go_waits_for_calls_in_flight(stage: Stage, pool: str) -> None:
    """Nothing new is begun. So does a process of its pool; the next one takes what comes."""
    stage.rule(total=LONG)
    worker = stage.worker(concurrency=1, pool=pool)
    stage.dispenser()
    sent = 3
    if pool == "prefork":
        _send_one_by_one(stage, 2, "/hold/c", method="post")
        os.kill(worker.children()[0], signal.SIGTERM)
        stage.send(path="/hold/c", method="post")
        wait_until(lambda: CallAttempt.objects.count() >= 3, 20)
        stage.release_until_all_have_ended()
        sent += 3
    _send_one_by_one(stage, 3, "/hold/t", method="post")
    worker.process.terminate()
    worker.wait_for_log("Warm shutdown")
    attempts = CallAttempt.objects.count()
    stage.send(path="/hold/t", method="post")
    wait_until(lambda: CallAttempt.objects.count() > attempts, 20)  # those given back go again
    with verdict():
        assert worker.is_alive()
        assert stage.vendor.count() == sent
    stage.vendor.release()
    assert worker.wait(30) == 0
    stage.worker(concurrency=1)
    stage.release_until_all_have_ended()
    assert stage.judge(unknown_allowed=False) == {"DONE": sent + 1}


@pytest.mark.parametrize(
    "option", ["--max-tasks-per-child=3", pytest.param("--max-memory-per-child=1", marks=SLOW)]
)
def test_a_process_that_has_run_its_last_task_takes_no_other_while_calls_are_in_flight(
    stage: Stage, tmp_path: Path, option: str
) -> None:
    """The next tasks go to the other process. Under the second option every task is the last."""
    stage.rule(total=LONG)
    worker = stage.worker(concurrency=2, arguments=[option])
    stage.dispenser()
    for child in range(2, 5):
        _send_one_by_one(stage, 1, "/hold/m", method="post")
        _echo(stage, tmp_path / f"said-{child}")
        wait_until((tmp_path / f"said-{child}").exists, 20)
        stage.vendor.release()
    stage.send(20, path="/delay?s=0.3", method="post")
    stage.release_until_all_have_ended()
    assert stage.judge(unknown_allowed=False) == {"DONE": 23}
    assert worker.stop() == 0


@pytest.mark.slow
def test_a_full_slot_lets_go_of_its_task_before_a_time_limit_kills_the_process(
    stage: Stage,
) -> None:
    stage.rule(total=LONG, extra='"CALLS_PER_SLOT": 1,')
    stage.add_settings("CELERY_TASK_TIME_LIMIT = 3")
    worker = stage.worker(concurrency=1)
    stage.dispenser()
    calls = stage.send(3, path="/delay?s=8", method="post")
    stage.wait_for_all(60)
    assert "TimeLimitExceeded" not in worker.log
    assert stage.judge(unknown_allowed=False) == {"DONE": len(calls)}
    assert {call.status for call in CallQueue.objects.all()} == {Status.DONE}
