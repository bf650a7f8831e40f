"""Celery tasks and Django's under limits, in workers of their own: released by the dispenser,
chained, retried, exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import chain, shared_task

import callqueue
from tests.support.processes import Processes
from tests.support.verdicts import never_over, on_a_quiet_machine, until_none_is_left, verdict

SETTINGS = """
CELERY_IMPORTS = ["tests.acceptance.test_tasks_through_the_queue"]
CALLQUEUE = {
    "RULES": {
        "quick": Rule(queues=TASKS, retry=Retry(base=0.1, jitter=False)),
        "ten": Rule(queues=TASKS, limits=[SlidingWindow("10/s")]),
    },
}
"""


@shared_task(base=callqueue.QueuedTask, rule="ten", name="tests.acceptance.stamp", bind=True)
def stamp(self: Any, path: str, word: str) -> str:
    """Append when it ran, and as what."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{time.time()} {word} {self.request.id} {self.request.retries}\n")
    return word


@shared_task(
    base=callqueue.QueuedTask, rule="quick", name="tests.acceptance.second_time", bind=True
)
def second_time(self: Any, path: str, word: str) -> str:
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{time.time()} {word} {self.request.id} {self.request.retries}\n")
    if not self.request.retries:
        raise self.retry(countdown=0.2)
    return word


@shared_task(base=callqueue.QueuedTask, rule="quick", name="tests.acceptance.joined")
def joined(before: str, path: str) -> str:
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{time.time()} after-{before} - 0\n")
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


def wait_until_all_are_done(seconds: float) -> None:
    from callqueue.models import CallQueue

    unfinished = CallQueue.objects.exclude(status=CallQueue.Status.DONE)
    until_none_is_left(
        lambda: list(unfinished.values_list("pk", "status", "error_message")), seconds
    )


def test_a_limit_holds_over_all_workers_beside_a_retry_and_a_chain(record: Path) -> None:
    from callqueue.models import CallAttempt, CallQueue

    results = [stamp.delay(str(record), "limited") for _ in range(35)]
    chained = record.with_name("chained")
    chained.touch()
    first = chain(
        second_time.s(str(chained), "a"), joined.s(str(chained)), joined.s(str(chained))
    ).apply_async()
    until_none_is_left(lambda: 4 - len(lines(chained)), 40)
    wait_until_all_are_done(40)
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
