"""Brokers that stop, forget, repeat themselves and refuse."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from callqueue import Rule, tasks
from callqueue.models import CallAttempt, CallQueue, DispenserState
from tests.faults.stage import Stage, Status
from tests.support import behaviour, private
from tests.support.brokers import Broker
from tests.support.fixtures import configured
from tests.support.processes import Processes
from tests.support.recorder import Recorder
from tests.support.verdicts import wait_until

Length = Callable[[Any, Any], Any]


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A broker of the test's own."""
    with {"rabbitmq": private.RabbitMQ, "redis": private.Redis}[request.param]() as started:
        yield started


@pytest.fixture
def staged(
    transactional_db: None, server: Any, vendor: Recorder, settings: Any, tmp_path: Path
) -> Iterator[Stage]:
    """A stage on it."""
    kind = "redis" if isinstance(server, private.Redis) else "rabbitmq"
    processes = Processes(Broker(kind, server.url, f"cq-{tmp_path.name[-12:]}-"))
    yield Stage(processes, vendor, partial(configured, processes, settings), tmp_path)
    print(processes.logs())
    processes.close()


SLOW = pytest.mark.slow


@pytest.mark.parametrize("server", [pytest.param("rabbitmq", marks=SLOW), "redis"], indirect=True)
def test_a_broker_is_killed_with_many_in_flight(
    staged: Stage, server: private.Private, length: Length
) -> None:
    """In flight: charged, in the broker or at the workers, and not answered. RabbitMQ keeps what it
    promised to keep; Redis forgets everything. A Celery 5.7 worker that closes its connection while
    Redis is away ends itself, and whatever runs it starts it again.
    """
    many = length(200, 1000)
    staged.rule(many, release=length(4.0, 8.0), total=4.0)
    is_redis = isinstance(server, private.Redis)
    with staged.keep(lambda: staged.worker(concurrency=2)) as keeper:
        staged.dispenser()
        for method in ("post", "put"):
            staged.send(many // 2, path="/delay?s=0.2", method=method)
        charged = CallAttempt.objects.all()
        wait_until(lambda: charged.count() >= many // 2 and staged.vendor.count() > 10, 30)
        server.kill()
        server.start()
        staged.wait_for_all(90 if is_redis else 120)
        staged.judge(recovery=10 if is_redis else 15)
    assert is_redis or not keeper.restarts


@pytest.mark.django_db(transaction=True)
def test_messages_of_older_and_newer_code(settings: Any, remote: behaviour.Vendor) -> None:
    """One id instead of a list, and an argument that this release does not know."""
    settings.CALLQUEUE = {"RULES": {"default": Rule()}}
    for _ in range(2):
        behaviour.send()
    behaviour.release()
    older, newer = CallAttempt.objects.values_list("pk", flat=True)
    assert tasks.make_api_call.apply((older,)).get() == 1
    assert tasks.make_api_call.apply(([newer],), {"trace": "from a newer release"}).get() == 1
    assert CallQueue.objects.done().count() == 2


@SLOW
@pytest.mark.parametrize("server", ["redis"], indirect=True)
def test_redis_is_frozen(staged: Stage, server: private.Redis) -> None:
    """It takes connections, and says nothing: a message is given up, and the dispenser lives."""
    staged.rule(release=30.0)
    with staged.keep(lambda: staged.worker(concurrency=2)):
        staged.dispenser()
        staged.send(10, method="post")
        staged.vendor.wait_for(10)
        os.killpg(server.process.pid, signal.SIGSTOP)
        try:
            staged.send(30, method="post")
            seen = DispenserState.objects.get(kind="steady").seen_at
            given_up = CallAttempt.objects.filter(outcome="voided")
            wait_until(lambda: given_up.exists(), 20)
            (late,) = staged.send(1, expires_at=timezone.now() + timedelta(seconds=0.2))
            staged.wait_for_status(late, Status.EXPIRED)
            del staged.numbers[late.pk]  # nothing of it is to arrive
            late.delete()
            on = DispenserState.objects.filter(seen_at__gt=seen + timedelta(seconds=6))
            wait_until(lambda: on.exists(), 20)
        finally:
            os.killpg(server.process.pid, signal.SIGCONT)
        staged.wait_for_all(60)
    staged.judge(unknown_allowed=False, recovery=10)
