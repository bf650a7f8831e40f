"""Calls through quorum queues of RabbitMQ: released, made once, and confirmed."""

from __future__ import annotations

from pathlib import Path

import pytest
from amqp.exceptions import PreconditionFailed

from callqueue.models import CallAttempt, CallQueue
from tests.support.brokers import Broker
from tests.support.processes import Processes
from tests.support.verdicts import wait_until

SETTINGS = """
CELERY_TASK_DEFAULT_QUEUE_TYPE = "quorum"
CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}
"""


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_calls_go_through_quorum_queues(
    broker: Broker, processes: Processes, tmp_path: Path
) -> None:
    processes.configure(SETTINGS)
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
