"""`celery worker` and nothing else: no dispenser, no beat."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path

import pytest

from callqueue.models import CallAttempt, CallQueue, DispenserState
from tests.celery_app import app
from tests.support.brokers import Broker
from tests.support.length import ONLY_AT_LENGTH
from tests.support.processes import Processes
from tests.support.recorder import Recorder, used_share
from tests.support.verdicts import (
    Late,
    never_over,
    on_a_quiet_machine,
    until_none_is_left,
    verdict,
    wait_until,
)

Status = CallQueue.Status
SETTINGS = """
CALLQUEUE = {
    "ALLOWED_NETWORKS": ["127.0.0.0/8"],
    "LEASE": {"RELEASE": 5, "GRACE": 0.5},
    "RULES": {
        "r": Rule(queues=ONE, limits=[SlidingWindow("50/s")], total_timeout=5),
        "elsewhere": Rule(queues=OTHER, total_timeout=5),
    },
}
"""


@pytest.fixture
def send(
    processes: Processes, vendor: Recorder, configure: Callable[[str], None]
) -> Callable[..., list[CallQueue]]:
    """Send POSTs to the vendor, each with a number of its own."""
    one, other = (repr(processes.broker.queue(name)) for name in ("one", "other"))
    configure(SETTINGS.replace("ONE", one).replace("OTHER", other))
    numbers = count()

    def send(many: int, path: str = "/ok", rule: str = "r") -> list[CallQueue]:
        joint = "&" if "?" in path else "?"
        urls = [vendor.url(f"{path}{joint}n={next(numbers)}") for _ in range(many)]
        data = [{"method": "post", "params": {"url": url}} for url in urls]
        return CallQueue.objects.send_many(data, rule=rule)

    return send


def wait_for_all(seconds: float) -> None:
    unfinished = CallQueue.objects.filter(status__in=(0, 1, 2))
    until_none_is_left(lambda: Counter(unfinished.values_list("rule", "status")), seconds)


def releasing() -> list[DispenserState]:
    return [one for one in DispenserState.objects.all() if one.digest]


def made_by(call: CallQueue) -> int:
    """The process that made it: the one that releases, where the call is alone."""
    wait_until(lambda: CallQueue.objects.get(pk=call.pk).status == Status.DONE, 30)
    return int(CallAttempt.objects.get(call=call).worker.split(":")[1])


def pid_that_releases(send: Callable[..., list[CallQueue]]) -> int:
    return made_by(send(1)[0])


@pytest.mark.parametrize(
    "pool",
    [
        "prefork",
        *(pytest.param(one, marks=ONLY_AT_LENGTH) for one in ("threads", "solo", "gevent")),
    ],
)
def test_all_calls_are_made_and_no_limit_is_exceeded(
    processes: Processes, vendor: Recorder, send: Callable[..., list[CallQueue]], pool: str
) -> None:
    send(300)
    processes.worker("one", pool=pool)
    wait_for_all(60)
    instants = sorted(arrival.at for arrival in vendor.arrivals())
    with verdict():
        assert set(CallQueue.objects.values_list("status", flat=True)) == {Status.DONE}
        assert len(instants) == CallAttempt.objects.count() == 300
        assert [one.kind for one in releasing()] == ["worker"]
    never_over(instants, 50, 1.0)
    with on_a_quiet_machine():
        assert used_share(instants, 50, 1.0) >= 0.8
    assert processes.started[0].stop(60) == 0
    assert not releasing()


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_what_another_worker_consumes_is_published_to_it(
    broker: Broker, processes: Processes, send: Callable[..., list[CallQueue]]
) -> None:
    first = processes.worker("one")
    (own,) = send(1)
    made_by(own)
    processes.worker("other")
    (theirs,) = send(1, rule="elsewhere")
    (mine,) = send(1)
    assert made_by(theirs) not in first.children()
    assert made_by(mine) in first.children()
    assert not CallAttempt.objects.filter(started_at=None).exists()


def test_a_process_that_computes_leaves_it_to_another_and_all_to_a_dispenser(
    processes: Processes, send: Callable[..., list[CallQueue]], tmp_path: Path
) -> None:
    """To one of the same worker; and once all of them compute, to one of another worker."""
    first = processes.worker("one", "computing", concurrency=2)
    path = tmp_path / "computes"
    computes = [pid_that_releases(send)]
    keep_busy(processes, path, computes[0])
    wait_until(lambda: pid_that_releases(send) != computes[0], 10)
    other = pid_that_releases(send)
    assert other in first.children()
    keep_busy(processes, path, other)
    wait_until(lambda: [one.kind for one in releasing()] == ["busy"], 10)
    assert pid_that_releases(send) in first.children()  # it does not stop for that
    second = processes.worker("one")
    wait_until(lambda: [one.kind for one in releasing()] == ["worker"], 20)
    wait_until(lambda: pid_that_releases(send) in second.children(), 10)
    path.unlink()  # they may stop
    dispenser = processes.dispenser()
    wait_until(lambda: [one.kind for one in releasing()] == ["steady"], 20)
    (call,) = send(1)
    assert made_by(call) in {*first.children(), *second.children()}
    attempt = CallAttempt.objects.get(call=call)
    assert attempt.started_at > attempt.released_at
    assert dispenser.stop() == 0
    wait_until(lambda: [one.kind for one in releasing()] == ["worker"], 20)


def test_a_process_that_can_say_nothing_or_is_killed_leaves_it_to_another_of_its_worker(
    processes: Processes, vendor: Recorder, send: Callable[..., list[CallQueue]], tmp_path: Path
) -> None:
    """It is stopped; none of its threads may run; it is killed, with calls of its own in flight."""
    worker = processes.worker("one", "computing", concurrency=3)
    stopped = pid_that_releases(send)
    os.kill(stopped, signal.SIGSTOP)
    held = pid_that_releases(send)
    assert held != stopped
    os.kill(stopped, signal.SIGCONT)
    keep_busy(processes, tmp_path / "holds", held, "tests.hold")
    killed, seat = pid_that_releases(send), releasing()[0].name
    assert killed != held
    before = vendor.count()
    send(150, "/delay?s=0.1")
    wait_until(lambda: vendor.count() >= before + 40, 30)
    os.kill(killed, signal.SIGKILL)
    died = time.monotonic()
    assert pid_that_releases(send) != killed
    wait_for_all(60)
    arrivals = [arrival.at for arrival in vendor.arrivals()]
    with verdict():
        arrived = Counter(arrival.query["n"] for arrival in vendor.arrivals())
        assert set(arrived.values()) == {1}, "made twice"
        ended = Counter(CallQueue.objects.values_list("status", flat=True))
        assert set(ended) <= {Status.DONE, Status.UNKNOWN}
        assert ended[Status.UNKNOWN] <= 8 + 32, "only what was in flight in that process"
        assert [one.name for one in releasing()] == [seat], "the worker goes on releasing"
    never_over(arrivals, 50, 1.0)
    with on_a_quiet_machine():
        after = sorted(at for at in arrivals if at > died - 1)
        assert max(later - earlier for earlier, later in pairwise(after)) < 5
    assert worker.is_alive()


def test_processes_that_are_replaced_and_told_to_go_leave_nothing_unknown(
    processes: Processes, vendor: Recorder, send: Callable[..., list[CallQueue]]
) -> None:
    once = ["--max-tasks-per-child", "3"]
    first = processes.worker("one", "echo", concurrency=2, arguments=once)
    calls = send(200, "/delay?s=0.3")
    for n in range(30):
        processes.broker.send(app, "tests.echo", "/dev/null", str(n), queue="echo")
    wait_until(lambda: vendor.count() >= 100, 60)
    assert first.stop(60) == 0
    assert not CallAttempt.objects.open().filter(started_at__isnull=False).exists()
    assert not releasing()
    processes.worker("one")
    wait_for_all(60)
    with verdict():
        assert Counter(CallQueue.objects.values_list("status", flat=True)) == {Status.DONE: 200}
        assert len(vendor.arrivals()) == len(calls)
    never_over([arrival.at for arrival in vendor.arrivals()], 50, 1.0)


def keep_busy(processes: Processes, path: Path, pid: int, task: str = "tests.compute") -> None:
    """Have this process of the pool compute for as long as the file is there."""
    path.touch()
    end = time.monotonic() + 30
    while str(pid) not in path.read_text().split():
        if time.monotonic() > end:
            raise Late(f"process {pid} got no task")
        processes.broker.send(app, task, str(path), pid, queue="computing")
        time.sleep(0.2)
