"""In the process of Celery's integration suite: its tasks become QueuedTasks.

Loaded by `pytest -p`, before the suite's own conftest. What the suite asks of a task's options that
callqueue refuses for good (time limits) is left to a plain task.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import celery
import django
import pytest
from celery.contrib.testing.manager import ManagerMixin
from celery.result import AsyncResult, ResultSet

django.setup()

from callqueue import QueuedTask  # noqa: E402
from callqueue.models import CallQueue  # noqa: E402

REDIS = os.environ["CALLQUEUE_SUITE_REDIS"]
TIMEOUT, LARGE = 20, 60  # seconds that a test waits for a result; the second, for a thousand calls
patience = TIMEOUT


class Queued(QueuedTask):
    """A task of theirs: under one of two rules, the one for those that retry."""

    abstract = True
    rule = "once"

    @classmethod
    def bind(cls, app: Any) -> Any:
        name = str(cls.name or cls.__name__).rpartition(".")[2]
        if name.startswith("retry") or name == "auto_retry_class_task":
            cls.rule = "retried"
        return super().bind(app)


def shared_task(*arguments: Any, **options: Any) -> Any:
    if arguments and callable(arguments[0]):
        return _shared_task(base=Queued)(arguments[0])
    return _shared_task(*arguments, **{"base": Queued, **options})


def redis_connection() -> Any:
    """Theirs. They wait for 10 seconds and more; since redis-py 8 a socket gives up before that."""
    from redis import Redis

    return Redis.from_url(REDIS, socket_timeout=None)


_shared_task, _task = celery.shared_task, celery.Task
celery.shared_task, celery.Task = shared_task, Queued
try:
    tasks = importlib.import_module("t.integration.tasks")
finally:
    celery.shared_task, celery.Task = _shared_task, _task
tasks.get_redis_connection = redis_connection
importlib.import_module("t.integration.conftest").get_redis_connection = redis_connection


def bounded(kind: Any) -> None:
    """No wait for a result lasts longer than what the tests allow."""
    unbounded = kind.get

    def get(self: Any, timeout: float | None = None, **options: Any) -> Any:
        return unbounded(self, patience if timeout is None else min(timeout, patience), **options)

    kind.get = get


bounded(AsyncResult)
bounded(ResultSet)


def wait_until_idle(self: ManagerMixin) -> None:
    """They purge the broker of what waits; here these are calls, and would go again."""
    _wait_until_idle(self)
    CallQueue.objects.all().cancel()


_wait_until_idle = ManagerMixin.wait_until_idle
ManagerMixin.wait_until_idle = wait_until_idle


@pytest.fixture(scope="session")
def celery_worker_parameters() -> dict[str, Any]:
    return {"perform_ping_check": False, "shutdown_timeout": 30}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tried once, and for no longer than what they wait for."""
    for item in items:
        item.own_markers[:] = [
            mark for mark in item.own_markers if mark.name not in ("flaky", "timeout")
        ]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Their waits are shorter, so that what never comes is soon known."""
    global patience
    patience = LARGE if "large" in item.name else TIMEOUT
    if hasattr(item.module, "TIMEOUT"):
        item.module.TIMEOUT = patience
