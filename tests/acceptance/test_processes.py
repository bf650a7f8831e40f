"""The ground of the acceptance tests: real workers on every broker there is, and nothing of them
left.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.celery_app import app
from tests.support.brokers import Broker
from tests.support.processes import Processes


def test_a_worker_runs_what_is_sent_to_its_queue(
    broker: Broker, processes: Processes, tmp_path: Path
) -> None:
    worker = processes.worker("one", "two", concurrency=1)
    for queue in ("one", "two"):
        broker.send(app, "tests.echo", str(tmp_path / "said"), queue, queue=queue)
    worker.wait_for_log("succeeded", times=2)
    # A process of a pool that is told to go at this very moment waits 30 s for its parent to take
    # what it said last (billiard).
    assert worker.stop(45) == 0
    assert sorted((tmp_path / "said").read_text().split()) == ["one", "two"]


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"], indirect=True)
def test_queues_of_a_broker_can_be_counted(broker: Broker) -> None:
    broker.send(app, "tests.echo", "nowhere", "text", queue="idle")
    assert broker.waiting("idle") == 1


def test_a_command_shares_the_database_and_the_settings_of_the_test(processes: Processes) -> None:
    processes.configure('TIME_ZONE = "Asia/Kathmandu"')
    shell = "from django.conf import settings; from django.db import connection; "
    done = processes.manage(
        "shell", "-c", shell + 'print(settings.TIME_ZONE, connection.settings_dict["NAME"])'
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == [
        "Asia/Kathmandu",
        processes.environment["CALLQUEUE_TEST_DB_NAME"],
    ]


def test_killing_a_worker_kills_its_children(processes: Processes) -> None:
    worker = processes.worker(concurrency=2)
    worker.freeze()
    worker.kill()
    assert worker.process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        wait_until_group_is_gone(worker.pid)


def wait_until_group_is_gone(group: int) -> None:
    """The children are reaped by whoever inherits them, which takes a moment."""
    while True:
        os.killpg(group, 0)
        if all_are_zombies(group):
            raise ProcessLookupError


def all_are_zombies(group: int) -> bool:
    states = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            states.append(fields[0])
    return all(state == "Z" for state in states)
