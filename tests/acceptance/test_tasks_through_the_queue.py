"""Celery tasks and Django's under limits, in workers of their own: released by the dispenser,
chained, retried, exact; and through quorum queues of RabbitMQ.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from amqp.exceptions import PreconditionFailed
from celery import chain, shared_task

import callqueue
from tests.support.brokers import Broker
from tests.support.processes import Processes
from tests.support.verdicts import (
    never_over,
    on_a_quiet_machine,
    until_none_is_left,
    verdict,
    wait_until,
)

SETTINGS = """
CELERY_IMPORTS = ["tests.acceptance.test_tasks_through_the_queue"]
CALLQUEUE = {
    "RULES": {
        "quick": Rule(queues=TASKS, retry=Retry(base=0.1, jitter=False)),
        "ten": Rule(queues=TASKS, limits=[SlidingWindow("10/s")]),
    },
}
"""


def write(task: Any, path: str, word: str) -> str:
    """Append when it ran, and as what."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{time.time()} {word} {task.request.id} {task.request.retries}\n")
    return word


@shared_task(base=callqueue.QueuedTask, rule="ten", name="tests.acceptance.stamp", bind=True)
def stamp(self: Any, path: str, word: str) -> str:
    return write(self, path, word)


@shared_task(base=callqueue.QueuedTask, rule="quick", name="tests.acceptance.second", bind=True)
def second_time(self: Any, path: str, word: str) -> str:
    write(self, path, word)
    if not self.request.retries:
        raise self.retry(countdown=0.2)
    return word


@shared_task(base=callqueue.QueuedTask, rule="quick", name="tests.acceptance.joined", bind=True)
def joined(self: Any, before: str, path: str) -> str:
    write(self, path, f"after-{before}")
    return before


@pytest.fixture
def record(configure: Callable[[str], None], processes: Processes, tmp_path: Path) -> Path:
    configure(SETTINGS.replace("TASKS", repr(processes.broker.queue("tasks"))))
    for _ in range(2):
        processes.worker("tasks", concurrency=2)
    processes.dispenser()
    path = tmp_path / "record"
    path.touch()
    return path


def lines(path: Path) -> list[tuple[float, str, str, int]]:
    split = [line.split() for line in path.read_text().splitlines()]
    return [(float(at), word, task_id, int(retries)) for at, word, task_id, retries in split]


def test_a_limit_holds_over_all_workers_beside_a_retry_and_a_chain(record: Path) -> None:
    from callqueue.models import CallAttempt, CallQueue

    unfinished = CallQueue.objects.exclude(status=CallQueue.Status.DONE)
    results = [stamp.delay(str(record), "limited") for _ in range(35)]
    chained = record.with_name("chained")
    chained.touch()
    first = chain(
        second_time.s(str(chained), "a"), joined.s(str(chained)), joined.s(str(chained))
    ).apply_async()
    until_none_is_left(lambda: 4 - len(lines(chained)), 40)
    until_none_is_left(lambda: list(unfinished.values_list("pk", "status", "error_message")), 40)
    ran = lines(record)
    with verdict():
        assert sorted(one[2] for one in ran) == sorted(result.id for result in results)
    never_over([at for at, *_ in ran], 10, 1.0)
    with on_a_quiet_machine():
        assert max(ran)[0] - min(ran)[0] < 6
    ran = lines(chained)
    told = [(word, retries) for _, word, _, retries in ran]
    assert told == [("a", 0), ("a", 1), ("after-a", 0), ("after-a", 0)]
    assert ran[0][2] == ran[1][2] == first.parent.parent.id
    assert ran[1][0] - ran[0][0] >= 0.2
    of_chain = CallAttempt.objects.filter(call__in=CallQueue.objects.filter(rule="quick"))
    assert list(of_chain.order_by("pk").values_list("number", flat=True)) == [1, 2, 1, 1]


QUORUM = """
CELERY_TASK_DEFAULT_QUEUE_TYPE = "quorum"
CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}
"""


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_calls_go_through_quorum_queues(
    broker: Broker, processes: Processes, tmp_path: Path
) -> None:
    from callqueue.models import CallAttempt, CallQueue

    processes.configure(QUORUM)
    said = tmp_path / "said"
    processes.worker(concurrency=2)
    calls = CallQueue.objects.send_many(
        [
            {"method": "celery_task", "params": {"name": "tests.echo", "args": [str(said), str(n)]}}
            for n in range(5)
        ]
    )
    processes.dispenser()
    wait_until(lambda: CallQueue.objects.done().count() == len(calls), 60, processes.logs)
    assert sorted(said.read_text().split()) == ["0", "1", "2", "3", "4"]
    assert CallAttempt.objects.count() == len(calls)
    with broker.connection() as connection, pytest.raises(PreconditionFailed, match="quorum"):
        connection.channel().queue_declare(
            broker.queue(), durable=True, auto_delete=False, arguments={"x-queue-type": "classic"}
        )
