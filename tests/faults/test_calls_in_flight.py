"""A worker with calls in flight takes more, is told to go, and replaces its processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from callqueue.models import CallAttempt, CallQueue
from tests.celery_app import app
from tests.faults.stage import Stage, Status
from tests.support.recorder import most_at_once
from tests.support.verdicts import verdict, wait_until

LONG = 20.0  # seconds of a total timeout that no test waits for
SLOW = pytest.mark.slow  # prefork is what most run; the other pools are for `make faults`
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
