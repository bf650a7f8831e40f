"""Handlers that take their worker with them, and hooks that hang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from callqueue.models import CallQueue
from tests.celery_app import app
from tests.faults.stage import Stage, Status
from tests.support.verdicts import verdict, wait_until

Length = Callable[[Any, Any], Any]

DYING = """
import os
from pathlib import Path

def die(params, context):
    with open(params["path"], "a") as file:
        file.write(f"{context.attempt}\\n")
    os._exit(1)
"""


def test_a_handler_that_ends_its_process(stage: Stage, tmp_path: Path) -> None:
    """Bounded, then FAILED, where the rule says that what was lost may be made again."""
    (stage.processes.folder / "dying_handler.py").write_text(DYING, "utf-8")
    stage.rule(total=1.0, more='on_lost="retry"', extra='"HANDLERS": {"die": "dying_handler.die"},')
    source = (stage.processes.folder / "settings_with_sabotage.py").read_text("utf-8")
    stage.processes.configure(
        source.replace("max_attempts=60", "max_attempts=2"), name="settings_with_sabotage"
    )
    worker = stage.worker(concurrency=1)
    stage.dispenser()
    said = tmp_path / "said"
    dying = CallQueue.objects.send({"method": "die", "params": {"path": str(said)}}, rule="r")
    assert dying is not None
    stage.wait_for_status(dying, Status.FAILED, seconds=40)
    assert (
        dying.attempts.filter(outcome="lost").count() == 2
    )  # what no worker took in time was voided, and does not count
    # A process that has no turn for its whole lease between the fence and the handler has lost its
    # attempt without calling it.
    assert 1 <= len(said.read_text().split()) <= 2
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
        CallQueue.objects.filter(pk=call.pk).update(**lost, active_key=None)
    stage.worker(concurrency=2)
    stage.dispenser()
    for _ in range(4):
        stage.processes.broker.send(app, "callqueue.recover_lost_calls", queue="one")
    asked = CallQueue.objects.unknown().filter(reconcile_count__gt=0)
    wait_until(asked.exists, 20)
    stage.send(100)
    stage.wait_for_all(40)
    assert stage.judge() == {"DONE": 100, "UNKNOWN": 3}
    with verdict():
        assert asked.count() == 1
