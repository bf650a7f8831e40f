"""A process that has no room for a part of a message hands it on, and keeps its slot until it has."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from callqueue import Rule, SlidingWindow
from callqueue.database.connections import kept as kept_connections
from callqueue.execution import claim, in_flight
from callqueue.models import CallAttempt, CallQueue
from callqueue.tasks import make_api_call
from tests.support.behaviour import Vendor, release, send

Status = CallQueue.Status
pytestmark = [pytest.mark.django_db(transaction=True)]
ROOM = 3


@pytest.fixture(autouse=True)
def _process(
    rules: Callable[..., None], transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A process that may have three calls in flight."""
    rules(
        {"LEASE": {"RELEASE": 600, "GRACE": 600}},
        r=Rule(queues="q", limits=[SlidingWindow("100/s")]),
    )
    monkeypatch.setattr(in_flight, "_flights", {})
    monkeypatch.setattr(in_flight, "most", lambda: ROOM)
    yield
    in_flight.land(seconds=20)
    for kept in kept_connections.pop((os.getpid(), "default"), []):
        kept.close()


class Slow:
    """An API that answers when the test says so."""

    def __init__(self, remote: Vendor) -> None:
        self.answers = threading.Event()
        remote.answers["/"] = lambda: self.answers.wait(20) and 200


def _released(count: int) -> list[int]:
    for _ in range(count):
        send("r")
    release()
    return list(CallAttempt.objects.order_by("pk").values_list("pk", flat=True))


def test_what_there_is_no_room_for_goes_on_to_another_process(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is charged for as long as the answers take that this process waits for."""
    slow, ids = Slow(remote), _released(5)
    sent: list[tuple[Any, ...]] = []
    gone = threading.Event()

    def note(task: Any, args: Any, kwargs: Any, *, queue: str, lasts: float) -> None:
        sent.append((task, *args, kwargs, queue, lasts))
        gone.set()

    monkeypatch.setattr(in_flight.broker, "send", note)
    with ThreadPoolExecutor() as pool:
        slot = pool.submit(in_flight.take, "default", ids, make_api_call)
        try:
            assert gone.wait(20)
            (task, left, kwargs, queue, lasts) = sent[0]
            assert (task, kwargs, queue, lasts) == (make_api_call, {}, "q", 600)
            unbegun = CallAttempt.objects.filter(started_at=None, finished_at=None)
            assert sorted(left) == sorted(unbegun.values_list("pk", flat=True))
            assert len(left) == 2
            assert not slot.done()  # a slot is busy while its process is full
        finally:
            slow.answers.set()
        assert slot.result(20) == ROOM
    assert len(sent) == 1


def test_what_no_broker_takes_is_given_back(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level("INFO")
    slow, ids = Slow(remote), _released(5)
    voided = CallAttempt.objects.filter(outcome="voided")

    def refuse(*_: Any, **__: Any) -> None:
        slow.answers.set()
        raise OSError("away")

    monkeypatch.setattr(in_flight.broker, "send", refuse)
    with ThreadPoolExecutor() as pool:
        assert pool.submit(in_flight.take, "default", ids, make_api_call).result(20) == ROOM
    assert voided.count() == 2
    assert CallQueue.objects.new().count() == 2
    assert "publish_failed" in caplog.text


def test_what_room_is_soon_found_for_stays(remote: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where answers are quick nothing is handed on: a message costs more than a moment."""
    ids = _released(40)
    monkeypatch.setattr(in_flight.broker, "send", lambda *_, **__: pytest.fail("handed on"))
    with ThreadPoolExecutor() as pool:
        assert pool.submit(in_flight.take, "default", ids, make_api_call).result(20) == 40
    in_flight.land(seconds=20)
    assert CallQueue.objects.done().count() == 40


def test_jobs_that_are_begun_already_take_off(remote: Vendor) -> None:
    """A process that releases calls may make them itself; what cannot be made is recorded too."""
    slow, ids = Slow(remote), _released(2)
    jobs = claim.begin("default", ids)
    jobs[1].unfit = "no more"
    flight = in_flight.flight_of("default")
    assert flight.room() == ROOM
    flight.take_off(jobs)(True)
    while not CallQueue.objects.failed().exists():
        threading.Event().wait(0.01)
    assert flight.room() == ROOM - 1
    slow.answers.set()
    in_flight.land(seconds=20)
    assert CallQueue.objects.done().count() == 1
    assert flight.room() == ROOM


def test_what_a_task_makes_itself_is_made_when_it_returns_or_goes_to_another_worker(
    rules: Callable[..., None], remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> int:
        with ThreadPoolExecutor() as pool:
            ids = _released(1)[-1:]
            return pool.submit(in_flight.make_here, "default", ids, make_api_call).result(20)

    assert make() == 1
    assert CallQueue.objects.done().count() == 1
    monkeypatch.setattr(in_flight, "most", lambda: 0)  # it was told to go
    assert make() == 0
    assert CallQueue.objects.new().count() == 1
