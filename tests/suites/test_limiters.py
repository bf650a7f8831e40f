"""Limiters that others have published judge when calls arrived at a provider: none refuses one.

tests/acceptance/test_judges.py has two of them answer the calls themselves.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from callqueue.models import CallQueue
from tests.suites import published
from tests.support.processes import Processes
from tests.support.recorder import Recorder
from tests.support.verdicts import until_none_is_left, verdict

LIMITERS = ("limits==5.8.0", "pyrate-limiter==4.5.1", "aiolimiter==1.3.0", "throttled-py==3.5.0", "token-bucket==0.4.0")  # fmt: skip
ALLOWED, CALLS = 20, 160
SETTINGS = """
CALLQUEUE = {{
    "ALLOWED_NETWORKS": ["127.0.0.0/8"],
    "RULES": {{"r": Rule(queues={queue!r}, limits=[SlidingWindow("{allowed}/s")])}},
}}
"""


def refusals(instants: list[float], packages: Path) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("limiters.py")), str(ALLOWED)],
        input=json.dumps(instants), capture_output=True, text=True, timeout=60,
        env=published.environment(packages),
    )  # fmt: skip
    assert not done.returncode, done.stderr[-3000:]
    refused: dict[str, int] = json.loads(done.stdout)
    return refused


@pytest.fixture
def packages() -> Path:
    return published.packages("limiters", *LIMITERS)


def test_they_refuse_what_is_over(packages: Path) -> None:
    instants = [number / (ALLOWED * 1.25) for number in range(CALLS)]
    refused = refusals(instants, packages)
    assert len(refused) == len(LIMITERS)
    assert min(refused.values()) > 0, refused


def test_five_limiters_refuse_none(
    packages: Path, vendor: Recorder, configure: Callable[[str], None], processes: Processes
) -> None:
    configure(SETTINGS.format(queue=processes.broker.queue("one"), allowed=ALLOWED))
    processes.worker("one")
    call = {"method": "get", "params": {"url": vendor.url("/ok")}}
    CallQueue.objects.send_many([call] * CALLS, rule="r")
    processes.dispenser()
    unfinished = CallQueue.objects.filter(status__in=(0, 1, 2))
    until_none_is_left(unfinished.count, 40)
    instants = sorted(arrival.at for arrival in vendor.arrivals())
    assert len(instants) == CALLS
    with verdict():
        refused = refusals(instants, packages)
        print(f"{CALLS} calls in {instants[-1] - instants[0]:.2f} s: refused {refused}")
        assert not any(refused.values())
