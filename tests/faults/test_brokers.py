"""Brokers that stop, forget, repeat themselves and refuse."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from callqueue import Rule, tasks
from callqueue.dispatch import choosing
from callqueue.models import CallAttempt, CallQueue, DispenserState
from tests.faults.stage import Stage, Status
from tests.support import behaviour, private
from tests.support.brokers import Broker
from tests.support.fixtures import configured
from tests.support.processes import Processes
from tests.support.recorder import Recorder
from tests.support.verdicts import on_a_quiet_machine, wait_until

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
ON_REDIS = pytest.mark.parametrize("server", ["redis"], indirect=True)
ON_RABBITMQ = pytest.mark.parametrize("server", ["rabbitmq"], indirect=True)


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


@SLOW
@ON_REDIS
def test_a_visibility_timeout_shorter_than_a_call(staged: Stage) -> None:
    """Redis hands the message on, and the other worker finds it begun and leaves it."""
    at_once = '"unacked_restore_interval": 1, "unacked_restore_throttle": 1'
    options = f'CELERY_BROKER_TRANSPORT_OPTIONS = {{"visibility_timeout": 1, {at_once}}}'
    staged.rule(total=20.0)
    staged.add_settings(f'{options}\nCALLQUEUE["CALLS_PER_SLOT"] = 1\n')
    workers = [staged.worker(concurrency=1) for _ in range(2)]
    staged.dispenser()
    post = staged.send(path="/hold/v", method="post")[0]
    staged.vendor.wait_for(1)
    wait_until(lambda: any("attempt_refused" in worker.log for worker in workers), 40)
    staged.vendor.release()
    staged.wait_for_status(post, Status.DONE)
    assert staged.judge(unknown_allowed=False) == {"DONE": 1}


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
@ON_RABBITMQ
def test_a_broker_that_takes_no_more_messages(staged: Stage, server: private.RabbitMQ) -> None:
    """Its disk is full: calls wait in the table, and go when there is room again."""
    staged.rule(release=60.0)
    staged.add_settings('CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}')
    staged.worker(concurrency=2)
    dispenser = staged.dispenser()
    staged.send(5)
    staged.vendor.wait_for(5)
    server.control("set_disk_free_limit", "900000GB")
    try:
        staged.send(20)
        dispenser.wait_for_log("broker_away")  # undone at once, long before its lease
        wait_until(lambda: CallAttempt.objects.filter(outcome="voided").exists(), 5)
        assert staged.vendor.count() == 5
    finally:
        server.control("set_disk_free_limit", "1MB")
    staged.wait_for_all(60)
    assert staged.judge(unknown_allowed=False, recovery=15) == {"DONE": 25}


@SLOW
@pytest.mark.parametrize("broker", ["rabbitmq", "redis"], indirect=True)
def test_workers_are_away_for_many_leases(stage: Stage, broker: Any, length: Length) -> None:
    """RabbitMQ drops messages whose attempts were taken back; Redis keeps one a lease."""
    stage.rule(1000, release=1.0)
    stage.send(400, method="get")
    dispenser = stage.dispenser()
    gone = CallAttempt.objects.filter(outcome="voided")
    wait_until(lambda: gone.count() >= choosing.LEAST + length(3, 30), 120)
    if broker.kind == "rabbitmq":
        wait_until(lambda: broker.waiting("one") <= 1, 30)
    assert broker.waiting("one") <= CallAttempt.objects.count() <= gone.count() + 1
    began = time.monotonic()
    stage.worker(concurrency=2)
    stage.wait_for_all(60)
    assert dispenser.process.poll() is None
    assert CallAttempt.objects.exclude(outcome="voided").count() == 400
    with on_a_quiet_machine():
        assert time.monotonic() - began < 20
    assert stage.judge(unknown_allowed=False) == {"DONE": 400}


@SLOW
@ON_REDIS
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
