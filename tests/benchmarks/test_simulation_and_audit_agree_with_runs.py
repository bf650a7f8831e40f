"""callqueue_simulate and callqueue_audit, held against workers and a dispenser as they run and the
vendor's own record.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from callqueue.models import CallAttempt, CallQueue
from tests.db.commands import run
from tests.support.processes import Processes
from tests.support.recorder import Recorder, highest_in_window
from tests.support.verdicts import Late, on_a_quiet_machine

LATENCY = 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "calls"),
    [
        ('SlidingWindow("20/s")', 200),
        ("Concurrency(4)", 100),
        ('TokenBucket("20/s", burst=10)', 170),
        ('FixedWindow("30/2s")', 130),
    ],
)
def test_a_run_takes_what_the_simulation_says_and_the_audit_agrees_with_the_vendor(
    limit: str, calls: int, configure: Callable[[str], None], processes: Processes, vendor: Recorder
) -> None:
    queue = processes.broker.queue("one")
    rules = f'{{"r": Rule(queues={queue!r}, limits=[{limit}]), "warm": Rule(queues={queue!r})}}'
    configure(f'CALLQUEUE = {{"ALLOWED_NETWORKS": ["127.0.0.0/8"], "RULES": {rules}}}')
    for _ in range(2):
        processes.worker("one", concurrency=6, wait=False)
    for worker in processes.started:
        worker.wait_for_log(" ready.")
    processes.dispenser()
    data = {"method": "get", "params": {"url": vendor.url(f"/delay?s={LATENCY}")}}
    CallQueue.objects.send_many([data] * 48, rule="warm")
    wait_until_all_ended(30)
    for _ in range(40):  # what a call takes here that waits for no worker
        CallQueue.objects.send(data, rule="warm")
        time.sleep(0.05)
    wait_until_all_ended(30)
    vendor.clear()

    said = run(
        "simulate", "--rule", "r", "--calls", str(calls), "--latency", str(LATENCY), "--json"
    ).document
    began = time.time()
    CallQueue.objects.send_many([data] * calls, rule="r")
    wait_until_all_ended(2 * said["seconds"] + 20)
    arrivals = [arrival.at for arrival in vendor.arrivals()]
    assert len(arrivals) == calls
    took = (
        CallAttempt.objects.filter(rule="r").latest("finished_at").finished_at.timestamp() - began
    )
    print(f"{limit}: {took:.2f} s, simulated {said['seconds']:.2f} s")
    with on_a_quiet_machine():
        assert said["seconds"] == pytest.approx(took, rel=0.05)

    ran = processes.manage("callqueue_audit", "--json")
    assert ran.returncode == 0, ran.stdout
    (found,) = [one for one in json.loads(ran.stdout)["limits"] if one["rule"] == "r"]
    print(found)
    if "Sliding" in limit:
        assert found["highest"] == pytest.approx(highest_in_window(arrivals, 1.0), abs=1)
        assert found["used_share"] > 0.85


def wait_until_all_ended(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while CallQueue.objects.filter(status__in=(0, 1, 2)).exists():
        if time.monotonic() > deadline:
            raise Late(f"not all ended within {seconds:g} s")
        time.sleep(0.05)
