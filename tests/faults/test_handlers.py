"""Handlers that take their worker with them, hooks that hang, and cleanups that are killed half
way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db.models import Exists, OuterRef

from callqueue.models import CallAttempt, CallQueue
from tests.celery_app import app
from tests.faults.stage import Stage, Status, wait_until
from tests.support.verdicts import verdict

Length = Callable[[Any, Any], Any]

DYING = """
import os
from pathlib import Path

def die(params, context):
    with open(params["path"], "a") as file:
        file.write(f"{context.attempt}\\n")
    os._exit(1)
"""


@pytest.mark.parametrize(
    ("on_lost", "status", "times"),
    [("retry", Status.FAILED, 2), pytest.param("auto", Status.UNKNOWN, 1, marks=pytest.mark.slow)],
)
def test_a_handler_that_ends_its_process(
    stage: Stage, tmp_path: Path, on_lost: str, status: Status, times: int
) -> None:
    """Bounded, then FAILED, where the rule says that what was lost may be made again; else made
    once, and UNKNOWN.
    """
    (stage.processes.folder / "dying_handler.py").write_text(DYING, "utf-8")
    stage.rule(
        total=1.0, more=f'on_lost="{on_lost}"', extra='"HANDLERS": {"die": "dying_handler.die"},'
    )
    source = (stage.processes.folder / "settings_with_sabotage.py").read_text("utf-8")
    stage.processes.configure(
        source.replace("max_attempts=60", "max_attempts=2"), name="settings_with_sabotage"
    )
    worker = stage.worker(concurrency=1)
    stage.dispenser()
    said = tmp_path / "said"
    dying = CallQueue.objects.send({"method": "die", "params": {"path": str(said)}}, rule="r")
    assert dying is not None
    stage.wait_for_status(dying, status, seconds=40)
    assert (
        dying.attempts.filter(outcome="lost").count() == times
    )  # what no worker took in time was voided, and does not count
    # A process that has no turn for its whole lease between the fence and the handler has lost its
    # attempt without calling it.
    assert 1 <= len(said.read_text().split()) <= times
    assert worker.is_alive()
    sound = stage.send()[0]
    stage.wait_for_status(sound, Status.DONE)


HANGING = """
import threading

def hang(call):
    threading.Event().wait()

RULES = CALLQUEUE["RULES"]
RULES["hangs"] = Rule(queues=RULES["r"].queues, reconcile=hang)
"""


def test_a_reconcile_hook_that_hangs_keeps_one_slot_of_its_queue(stage: Stage) -> None:
    """However often it is asked: the others make the calls of other rules."""
    stage.add_settings(HANGING)
    for call in stage.send(3):
        lost = {"rule": "hangs", "status": Status.UNKNOWN, "ready": False}
        stage.calls().filter(pk=call.pk).update(**lost, active_key=None)
    stage.worker(concurrency=2)
    stage.dispenser()
    for _ in range(4):
        stage.processes.broker.send(app, "callqueue.recover_lost_calls", queue="one")
    asked = stage.calls().unknown().filter(reconcile_count__gt=0)
    wait_until(asked.exists, 20)
    stage.send(100)
    stage.wait_for_all(40)
    assert stage.judge() == {"DONE": 100, "UNKNOWN": 3}
    with verdict():
        assert asked.count() == 1


def test_a_cleanup_is_killed_half_way_under_load(stage: Stage, length: Length) -> None:
    """Only final calls past their retention are gone; a cleanup after it removes the rest of
    them.
    """
    many = length(20_000, 1_000_000)
    stage.rule(100, extra='"RETENTION": {"done": timedelta(days=1), "failed": None},')
    age_them(many)
    stage.worker(concurrency=2)
    stage.dispenser()
    stage.send(length(100, 1000))
    stage.plant("inside-cleanup", "child")
    killed = stage.processes.manage(
        "callqueue_cleanup", "--batch-size", "2000", "--no-progress", timeout=300
    )
    assert killed.returncode == -9
    left = Counter(CallQueue.objects.filter(error_message="old").values_list("status", flat=True))
    assert left[Status.DONE] == many * 6 // 10 - 2000
    assert left[Status.FAILED] == left[Status.UNKNOWN] == many // 10
    assert left[Status.CANCELLED] == many // 10  # a week of retention, and they are two days old
    again = stage.processes.manage("callqueue_cleanup", "--no-progress", timeout=600)
    assert again.returncode == 0, again.stderr
    left = Counter(CallQueue.objects.filter(error_message="old").values_list("status", flat=True))
    assert left == {
        Status.FAILED: many // 10,
        Status.UNKNOWN: many // 10,
        Status.CANCELLED: many // 10,
        Status.NEW: many // 10,
    }
    orphans = CallAttempt.objects.filter(~Exists(CallQueue.objects.filter(pk=OuterRef("call_id"))))
    assert orphans.count() == 0
    CallQueue.objects.filter(error_message="old").delete()
    stage.wait_for_all(60)
    assert stage.judge(unknown_allowed=False, recovery=20)["DONE"] == length(100, 1000)


def age_them(many: int) -> None:
    """Calls that ended two days ago, six of ten DONE, and one of ten that waits for next year; each
    with an attempt.
    """
    from django.db import connection

    status = "(ARRAY[3, 3, 3, 3, 3, 3, 4, 7, 5, 0])[1 + n %% 10]"
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            INSERT INTO callqueue_callqueue (status, rule, queue, key, priority, cost, due_at_dt, finished_at_dt, call_data,
                method, host, failed_count, throttled_count, last_attempt, error_message, ready, idempotency_key,
                callback_pending)
            SELECT {status}, 'r', '', '', 0, '1', now() + interval '1 year',
                CASE WHEN n %% 10 = 9 THEN NULL ELSE now() - interval '2 days' END,
                '{{"method": "get", "params": {{"url": "http://vendor.example/"}}}}', 'get', 'vendor.example', 0, 0, 1, 'old',
                FALSE, gen_random_uuid(), FALSE
            FROM generate_series(0, %s) AS n
            """,
            [many - 1],
        )
        cursor.execute(
            """
            INSERT INTO callqueue_callattempt (call_id, number, rule, key, queue, cost, calls, released_at, finished_at, outcome,
                response_body, error_message, worker)
            SELECT id, 1, 'r', '', '', '1', 1, now() - interval '2 days', now() - interval '2 days', 'succeeded', '', '', ''
            FROM callqueue_callqueue WHERE error_message = 'old'
            """
        )
        cursor.execute("ANALYZE callqueue_callqueue")
        cursor.execute("ANALYZE callqueue_callattempt")
