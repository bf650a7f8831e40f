"""The ground of the acceptance tests: real workers on every broker there is."""

from __future__ import annotations

from pathlib import Path

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
