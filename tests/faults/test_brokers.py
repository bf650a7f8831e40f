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

from callqueue.dispatch import choosing
from callqueue.models import CallAttempt, CallQueue, DispenserState
from tests.faults.stage import Stage, Status
from tests.support import private
from tests.support.brokers import Broker
from tests.support.fixtures import configured
from tests.support.processes import Processes
from tests.support.recorder import Recorder
from tests.support.verdicts import on_a_quiet_machine, wait_until

Length = Callable[[Any, Any], Any]


@pytest.fixture(scope="module")
def rabbitmq_node() -> Iterator[private.RabbitMQ]:
    with private.RabbitMQ() as server:
        yield server


@pytest.fixture(scope="module")
def redis_server() -> Iterator[private.Redis]:
    with private.Redis() as server:
        yield server


@pytest.fixture
def staged(
    transactional_db: None, vendor: Recorder, settings: Any, tmp_path: Path
) -> Iterator[Callable[[private.RabbitMQ | private.Redis], Stage]]:
    """A stage on a broker of the test's own."""
    started: list[Processes] = []

    def on(server: private.RabbitMQ | private.Redis) -> Stage:
        kind = "redis" if isinstance(server, private.Redis) else "rabbitmq"
        processes = Processes(Broker(kind, server.url, f"cq-{tmp_path.name[-12:]}-"))
        started.append(processes)
        return Stage(processes, vendor, partial(configured, processes, settings), tmp_path)

    yield on
    for processes in started:
        print(processes.logs())
        processes.close()


@pytest.mark.slow
def test_rabbitmq_is_killed_with_many_in_flight(
    staged: Any, rabbitmq_node: private.RabbitMQ, length: Length
) -> None:
    """In flight: charged, in the broker or at the workers, and not answered."""
    stage = staged(rabbitmq_node)
    many = length(200, 1000)
    stage.rule(many, release=length(4.0, 8.0), total=4.0)
    stage.worker(concurrency=2)
    stage.dispenser()
    stage.send(many // 2, path="/delay?s=0.2", method="post")
    stage.send(many // 2, path="/delay?s=0.2", method="put")
    wait_until(lambda: CallAttempt.objects.count() >= many // 2 and stage.vendor.count() > 10, 30)
    rabbitmq_node.kill()
    rabbitmq_node.start()
    stage.wait_for_all(120)
    stage.judge(recovery=15)


def test_redis_is_killed_and_forgets_everything(staged: Any, redis_server: private.Redis) -> None:
    """A Celery 5.7 worker that closes its connection while Redis is away ends itself, and whatever
    runs it starts it again.
    """
    stage = staged(redis_server)
    with stage.keep(lambda: stage.worker(concurrency=2)):
        stage.dispenser()
        stage.send(100, path="/delay?s=0.1", method="post")
        stage.send(100, path="/delay?s=0.1", method="put")
        wait_until(lambda: stage.vendor.count() > 10, 30)
        redis_server.kill()
        redis_server.start()
        stage.wait_for_all(90)
        stage.judge(recovery=10)


@pytest.mark.slow
def test_a_visibility_timeout_shorter_than_a_call(staged: Any, redis_server: private.Redis) -> None:
    """Redis hands the message of a call under way, whose task waits for a free slot, to another
    worker, which finds it begun and leaves it.
    """
    stage = staged(redis_server)
    at_once = '"unacked_restore_interval": 1, "unacked_restore_throttle": 1'
    options = f'CELERY_BROKER_TRANSPORT_OPTIONS = {{"visibility_timeout": 1, {at_once}}}'
    stage.rule(total=20.0)
    stage.add_settings(f'{options}\nCALLQUEUE["CALLS_PER_SLOT"] = 1\n')
    workers = [stage.worker(concurrency=1) for _ in range(2)]
    stage.dispenser()
    post = stage.send(path="/hold/v", method="post")[0]
    stage.vendor.wait_for(1)
    wait_until(lambda: any("attempt_refused" in worker.log for worker in workers), 40)
    stage.vendor.release()
    stage.wait_for_status(post, Status.DONE)
    assert stage.judge(unknown_allowed=False) == {"DONE": 1}


def test_messages_of_older_and_newer_code(
    transactional_db: None, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One id instead of a list, and an argument that this release does not know, as others deploy
    it.
    """
    from callqueue import Rule, tasks
    from callqueue.execution import wire
    from tests.support import behaviour

    settings.CALLQUEUE = {"RULES": {"default": Rule()}}
    monkeypatch.setattr(wire, "request", behaviour.Vendor().request)
    for _ in range(2):
        behaviour.send()
    behaviour.release()
    older, newer = CallAttempt.objects.values_list("pk", flat=True)
    assert tasks.make_api_call.apply((older,)).get() == 1
    assert tasks.make_api_call.apply(([newer],), {"trace": "from a newer release"}).get() == 1
    assert CallQueue.objects.done().count() == 2


@pytest.mark.slow
def test_a_broker_that_takes_no_more_messages(staged: Any, rabbitmq_node: private.RabbitMQ) -> None:
    """Its disk is full, so it blocks whoever publishes: calls wait in the table, and go when there
    is room again.
    """
    stage = staged(rabbitmq_node)
    stage.rule(release=60.0)
    stage.add_settings('CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}')
    stage.worker(concurrency=2)
    dispenser = stage.dispenser()
    stage.send(5)
    stage.vendor.wait_for(5)
    rabbitmq_node.control("set_disk_free_limit", "900000GB")
    try:
        stage.send(20)
        dispenser.wait_for_log("broker_away")  # undone at once, long before its lease
        wait_until(lambda: CallAttempt.objects.filter(outcome="voided").exists(), 5)
        assert stage.vendor.count() == 5
    finally:
        rabbitmq_node.control("set_disk_free_limit", "1MB")
    stage.wait_for_all(60)
    assert stage.judge(unknown_allowed=False, recovery=15) == {"DONE": 25}


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["rabbitmq", "redis"], indirect=True)
def test_workers_are_away_for_many_leases(stage: Stage, broker: Any, length: Length) -> None:
    """RabbitMQ drops messages whose attempts were taken back; Redis keeps one a lease. Whoever
    comes back has it all at once.
    """
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


@pytest.mark.slow
def test_redis_is_frozen(staged: Any, redis_server: private.Redis) -> None:
    """It takes connections, and says nothing. A message is given up; the dispenser gives signs of
    life and lets calls expire meanwhile, and all goes on when Redis does.
    """
    stage = staged(redis_server)
    stage.rule(release=30.0)
    with stage.keep(lambda: stage.worker(concurrency=2)):
        stage.dispenser()
        stage.send(10, method="post")
        stage.vendor.wait_for(10)
        os.killpg(redis_server.process.pid, signal.SIGSTOP)
        try:
            stage.send(30, method="post")
            seen = DispenserState.objects.get(kind="steady").seen_at
            given_up = CallAttempt.objects.filter(outcome="voided")
            wait_until(lambda: given_up.exists(), 20)
            (late,) = stage.send(1, expires_at=timezone.now() + timedelta(seconds=0.2))
            stage.wait_for_status(late, Status.EXPIRED)
            del stage.numbers[late.pk]  # nothing of it is to arrive
            late.delete()
            on = DispenserState.objects.filter(seen_at__gt=seen + timedelta(seconds=6))
            wait_until(lambda: on.exists(), 20)
        finally:
            os.killpg(redis_server.process.pid, signal.SIGCONT)
        stage.wait_for_all(60)
    stage.judge(unknown_allowed=False, recovery=10)
