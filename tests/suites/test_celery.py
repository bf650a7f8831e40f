"""Celery's integration suite, with QueuedTask as the base of its tasks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.suites import published
from tests.support import brokers, servers
from tests.support.processes import ROOT, Processes

VERSION = "5.6.3"
LEAST = 190  # docs/how-to/limit-a-celery-task.md says in what the others differ
SECONDS = 2700
# Takes minutes to say that stamps are the workers' own, which a shorter one says too.
LEFT_OUT = [
    "--deselect",
    "t/integration/test_tasks.py::test_tasks::test_revoked_by_headers_complex_canvas",
]
FILES = ["t/integration/test_tasks.py", "t/integration/test_canvas.py"]
OPTIONS = ["celery.contrib.pytest", "tests.suites.celery_plugin", "no:django", "no:callqueue.testing",
           "no:cacheprovider"]  # fmt: skip
SETTINGS = """
CELERY_TASK_IGNORE_RESULT = False
CELERY_RESULT_BACKEND = {results!r}
CALLQUEUE = {{
    "RULES": {{
        "once": Rule(queues={queue!r}, limits=[SlidingWindow("1000/s")], retry=Retry(max_attempts=1)),
        "retried": Rule(queues={queue!r}, retry=Retry(max_attempts=10, base=0.5)),
    }},
    "DISPENSER": {{"INTERVAL": 1.0, "POLL": 0.01}},
}}
"""


@pytest.mark.server("redis")
def test_celerys_integration_suite(
    processes: Processes, configure: Callable[[str], None], tmp_path: Path
) -> None:
    if refusal := servers.refusal("redis"):
        pytest.skip(f"redis: {refusal}")
    suite = published.source("celery", VERSION)
    beside = published.packages("celery", "pydantic>=2")
    for name in ("celery", "t"):
        shutil.copytree(suite / name, tmp_path / name)
    shutil.copy(suite / "pyproject.toml", tmp_path)
    with brokers.broker("redis") as results:
        configure(SETTINGS.format(queue=processes.broker.queue(), results=results.url))
        report = run(processes, tmp_path, beside, results.url)
    assert published.passed(report, f"Celery {VERSION}") >= LEAST


def run(processes: Processes, folder: Path, beside: Path, redis: str) -> Path:
    """Run the suite; its report in JUnit's form."""
    config = {
        "broker_url": processes.broker.url,
        "broker_transport_options": processes.broker.transport_options(),
        "result_backend": redis,
        "task_default_queue": processes.broker.queue(),
        "broker_connection_retry_on_startup": True,
    }
    (folder / "integration-tests-config.json").write_text(json.dumps(config))
    processes.environment |= {
        "PYTHONPATH": f"{folder}:{ROOT}:{processes.folder}:{beside}",
        "CALLQUEUE_SUITE_REDIS": redis,
    }
    processes.dispenser()
    report = folder / "report.xml"
    plugins = [part for name in OPTIONS for part in ("-p", name)]
    options = ["-o", "junit_family=xunit1", f"--junit-xml={report}", *LEFT_OUT]
    command = [sys.executable, "-m", "pytest", *plugins, *options, *FILES]
    subprocess.run(command, cwd=folder, env=processes.environment, timeout=SECONDS)
    return report
