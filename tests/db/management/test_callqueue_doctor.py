"""callqueue_doctor: what it prints, for machines and for people."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from callqueue import Rule
from tests.db.commands import run
from tests.support.processes import Processes

Rules = Callable[..., None]


@pytest.fixture(autouse=True)
def one_rule(rules: Rules, no_queued_tasks: None) -> None:
    rules(r=Rule(queues="egress"))


def test_json_has_a_remedy_for_everything_that_is_wrong_and_people_get_a_line_for_each() -> None:
    ran = run("doctor", "--json")
    assert ran.code == 1
    document = ran.document
    assert document["ok"] is False
    assert all(set(check) == {"name", "ok", "detail", "todo"} for check in document["checks"])
    assert all(bool(check["todo"]) != check["ok"] for check in document["checks"])
    well = {check["name"] for check in document["checks"] if check["ok"]}
    assert well >= {"settings", "database", "migrations", "clock"}
    assert not well & {"dispenser", "workers"}
    said = run("doctor")
    assert "dispenser: no dispenser has ever run" in said.out
    assert "do: run `manage.py callqueue_run`" in said.out
    assert "checks found something" in said.error


def test_wrong_settings_are_told_and_what_depends_on_them_is_left_out(settings: Any) -> None:
    settings.CALLQUEUE = {"RULS": {}}
    ran = run("doctor", "--json")
    assert ran.code == 1
    first, *others = ran.document["checks"]
    assert (first["name"], first["ok"]) == ("settings", False)
    assert [one["name"] for one in others] == ["broker"]
    assert "did you mean 'RULES'" in first["detail"]


def test_a_real_worker_and_a_real_dispenser_are_found(
    processes: Processes, configure: Callable[[str], None]
) -> None:
    queue = processes.broker.queue("one")
    configure(f"""
CALLQUEUE = {{"RULES": {{"r": Rule(queues={queue!r})}}}}
CELERY_BROKER_TRANSPORT_OPTIONS = {{"confirm_publish": True}}
""")
    processes.worker("one")
    dispenser = processes.dispenser()
    dispenser.wait_for_log("dispensing")
    deadline = time.monotonic() + 60
    while True:  # a busy machine may keep a worker from answering in time
        document = json.loads(processes.manage("callqueue_doctor", "--json").stdout)
        wrong = [check for check in document["checks"] if not check["ok"]]
        if not wrong or time.monotonic() > deadline:
            break
    assert not wrong
    workers = next(check for check in document["checks"] if check["name"] == "workers")
    assert queue in workers["detail"]
