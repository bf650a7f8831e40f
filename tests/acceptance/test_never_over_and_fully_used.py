"""Never over the limit, and the whole of it used: workers and dispensers as they run, arrivals as
the vendor saw them.

What a noisy machine makes of the use is no failure of the app: the shares asked for here leave it
room, the benchmark of the same scenarios (`python -m tests.benchmarks exact`) prints what a quiet
one gets. Going over is never forgiven.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from callqueue.models import CallAttempt, CallQueue
from tests.support.length import ONLY_AT_LENGTH
from tests.support.processes import Processes
from tests.support.recorder import Recorder, used_share
from tests.support.verdicts import (
    never_over,
    on_a_quiet_machine,
    until_none_is_left,
    verdict,
    wait_until,
)


@dataclass
class Scene:
    """One rule on one queue, a vendor, processes."""

    processes: Processes
    vendor: Recorder
    configure: Callable[[str], None]

    def rule(self, source: str, **others: str) -> None:
        queue = repr(self.processes.broker.queue("one"))
        rules = {"r": source, **others}
        listed = "".join(
            f"{name!r}: {rule.replace('QUEUE', queue)}, " for name, rule in rules.items()
        )
        self.configure(
            f'CALLQUEUE = {{"ALLOWED_NETWORKS": ["127.0.0.0/8"], "RULES": {{{listed}}}}}'
        )

    def send(self, count: int, path: str = "/ok", rule: str = "r", **options: object) -> None:
        data = [
            {"method": "post", "params": {"url": self.vendor.url(path), "json": {"n": n}}}
            for n in range(count)
        ]
        CallQueue.objects.send_many(data, rule=rule, **options)

    def workers(self, count: int, slots: int) -> None:
        for _ in range(count):
            self.processes.worker("one", concurrency=slots, wait=False)
        for worker in self.processes.started[-count:]:
            worker.wait_for_log(" ready.")

    def drain(self, seconds: float) -> list[float]:
        """Wait for the end of all calls; the arrivals' instants."""
        unfinished = CallQueue.objects.filter(status__in=(0, 1, 2))
        until_none_is_left(lambda: Counter(unfinished.values_list("rule", "status")), seconds)
        instants = sorted(arrival.at for arrival in self.vendor.arrivals())
        with verdict():
            assert set(CallQueue.objects.values_list("status", flat=True)) == {
                CallQueue.Status.DONE
            }
            assert len(instants) == CallAttempt.objects.count() == CallQueue.objects.count()
        return instants


@pytest.fixture
def scene(processes: Processes, vendor: Recorder, configure: Callable[[str], None]) -> Scene:
    return Scene(processes, vendor, configure)


# rate, n, window, jitter, latency, workers, slots, count
DRAINS = {
    "20/s": ("20/s", 20, 1.0, 0.05, 0.0, 2, 2, 160),
    "20/s slow API": ("20/s", 20, 1.0, 0.05, 0.2, 2, 4, 160),
    "100/s": ("100/s", 100, 1.0, 0.05, 0.05, 2, 4, 800),
    "20/s small jitter, one slot": ("20/s", 20, 1.0, 0.01, 0.0, 1, 1, 160),
    "60/10s": ("60/10s", 60, 10.0, 0.05, 0.05, 1, 2, 180),
}
SHORT = "20/s slow API"


@pytest.mark.parametrize(
    "drain",
    [pytest.param(name, marks=() if name == SHORT else ONLY_AT_LENGTH) for name in DRAINS],
)
def test_a_backlog_drains_at_the_limit_and_never_above_even_when_workers_come_late(
    scene: Scene, drain: str
) -> None:
    rate, n, window, jitter, latency, workers, slots, count = DRAINS[drain]
    scene.rule(f'Rule(queues=QUEUE, limits=[SlidingWindow("{rate}", jitter={jitter})])')
    scene.send(count, f"/delay?s={latency}" if latency else "/ok")
    dispenser = scene.processes.dispenser()
    wait_until(lambda: CallAttempt.objects.count() >= n, 60, lambda: dispenser.log)
    time.sleep(2 * window)
    with verdict():
        assert CallAttempt.objects.count() == n
    scene.workers(workers, slots)
    instants = scene.drain(60)
    never_over(instants, n, window)
    with on_a_quiet_machine():
        assert used_share(instants, n, window) >= 0.8


@pytest.mark.parametrize(
    "has_others",
    [
        pytest.param(False, id="alone", marks=ONLY_AT_LENGTH),
        pytest.param(True, id="beside workers"),
    ],
)
def test_processes_that_make_their_own_calls_share_a_limit(scene: Scene, has_others: bool) -> None:
    """Two of them, alone or beside a dispenser and its workers: one limit, and all of it."""
    scene.rule('Rule(queues=QUEUE, limits=[SlidingWindow("100/s")])')
    others = [scene.processes.run() for _ in range(2)]
    if has_others:
        others.append(scene.processes.dispenser())
        scene.workers(1, 2)
    for other in others:
        other.wait_for_log(" all rules as ")
    scene.send(500, "/delay?s=0.05")
    instants = scene.drain(60)
    never_over(instants, 100, 1.0)
    with on_a_quiet_machine():
        share = used_share(instants, 100, 1.0)
        assert share >= 0.8, share


def test_four_dispensers_are_no_more_than_one_even_when_one_sleeps_in_a_pass(scene: Scene) -> None:
    scene.rule(
        'Rule(queues=QUEUE, limits=[SlidingWindow("30/s", name="account")])',
        other='Rule(queues=QUEUE, limits=[SlidingWindow("30/s", name="account"), TokenBucket("20/s", burst=3)])',
    )
    scene.send(120)
    scene.send(100, rule="other")
    scene.workers(2, 4)
    dispensers = [scene.processes.dispenser() for _ in range(4)]
    for frozen in (dispensers[0], dispensers[1]):
        time.sleep(1.0)
        frozen.freeze()
        time.sleep(0.5)
    dispensers[0].thaw()
    time.sleep(0.3)
    dispensers[1].thaw()
    never_over(scene.drain(60), 30, 1.0)


def test_a_pause_and_a_resume_act_within_a_second(scene: Scene) -> None:
    scene.rule('Rule(queues=QUEUE, limits=[SlidingWindow("20/s")])')
    scene.send(200)  # the commands take their time to start
    scene.workers(1, 4)
    scene.processes.dispenser()
    scene.vendor.wait_for(30)
    assert scene.processes.manage("callqueue_pause", "r").returncode == 0
    time.sleep(1.0)
    before = scene.vendor.count()
    time.sleep(1.0)
    with on_a_quiet_machine():
        assert scene.vendor.count() == before < 200
    assert scene.processes.manage("callqueue_resume", "r").returncode == 0
    time.sleep(1.0)
    with on_a_quiet_machine():
        assert scene.vendor.count() > before
    never_over(scene.drain(30), 20, 1.0)


def test_beat_and_a_worker_are_enough(scene: Scene) -> None:
    scene.rule('Rule(queues=QUEUE, limits=[SlidingWindow("20/s")])')
    scene.send(60)
    for name in ("dispenser", "one"):
        scene.processes.worker(name, concurrency=2)
    queue = scene.processes.broker.queue("dispenser")
    scene.processes.configure(
        (scene.processes.folder / "settings_of_this_test.py").read_text()
        + f"\nimport callqueue\nCELERY_BEAT_SCHEDULE = callqueue.beat_schedule(queue={queue!r})\n"
    )
    scene.processes.beat()
    never_over(scene.drain(60), 20, 1.0)
