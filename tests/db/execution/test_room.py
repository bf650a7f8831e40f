"""A process takes no more calls than it has room and means for. What it cannot make goes on to another
or back, which is no failure of the call and costs nothing, and the slot is kept meanwhile.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from callqueue import Rule, Secret, SlidingWindow, handler
from callqueue.database.connections import kept as kept_connections
from callqueue.execution import executor, flight, in_flight, recorder, starvation, wire
from callqueue.ledger import ready_calls
from callqueue.models import CallAttempt, CallQueue
from callqueue.tasks import make_api_call
from tests.support.behaviour import Vendor, release, run, send
from tests.support.starving import few_threads, no_descriptors

Status = CallQueue.Status
pytestmark = [pytest.mark.django_db(transaction=True)]
ROOM = 3


@pytest.fixture(autouse=True)
def _process(
    rules: Callable[..., None], transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A process of a worker, with nothing in flight yet."""
    rules(
        {"LEASE": {"RELEASE": 600, "GRACE": 600}},
        r=Rule(queues="q", limits=[SlidingWindow("100/s")]),
    )
    monkeypatch.setattr(in_flight, "_flights", {})
    yield
    in_flight.land(seconds=20)
    for kept in kept_connections.pop((os.getpid(), "default"), []):
        kept.close()


@pytest.fixture
def three_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have so many calls in flight."""
    monkeypatch.setattr(in_flight, "most", lambda: ROOM)


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


@pytest.mark.usefixtures("three_at_once")
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


@pytest.mark.usefixtures("three_at_once")
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


@pytest.mark.usefixtures("three_at_once")
def test_what_room_is_soon_found_for_stays(remote: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where answers are quick nothing is handed on: a message costs more than a moment."""
    ids = _released(40)
    monkeypatch.setattr(in_flight.broker, "send", lambda *_, **__: pytest.fail("handed on"))
    with ThreadPoolExecutor() as pool:
        assert pool.submit(in_flight.take, "default", ids, make_api_call).result(20) == 40
    in_flight.land(seconds=20)
    assert CallQueue.objects.done().count() == 40


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


Rules = Callable[..., None]
NEARBY = {"ALLOWED_NETWORKS": ["127.0.0.0/8"], "ALLOWED_HOSTS": ["*"]}
called: list[str] = []


@handler("starving")
def _note(params: Any, context: Any) -> None:
    called.append(context.rule)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    called.clear()
    wire._context.cache_clear()
    monkeypatch.setattr(starvation, "pause", starvation.Pause())


def _send(url: str, **more: Any) -> CallQueue:
    call = CallQueue.objects.send({"method": "post", "params": {"url": url, **more}}, rule="r")
    assert call is not None
    return call


def _read_secret() -> str:
    return Path(__file__).read_text("utf-8")


SCENES: dict[str, Callable[[], CallQueue]] = {
    "a socket": lambda: _send("http://127.0.0.1:1/"),
    "a name": lambda: _send("http://localhost:1/"),
    "certificates": lambda: _send("https://127.0.0.1:1/"),
    "a secret's file": lambda: _send("http://127.0.0.1:1/", headers={"X": Secret("FILE")}),
    "a handler": lambda: send_to_handler(),
    "classify's module": lambda: _send("http://127.0.0.1:1/"),
}


def send_to_handler() -> CallQueue:
    call = CallQueue.objects.send({"method": "starving", "params": {}}, rule="r")
    assert call is not None
    return call


@pytest.mark.parametrize("scene", SCENES)
def test_without_descriptors_a_call_waits_again_as_it_did_before(
    rules: Rules, scene: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    own = {}
    if scene == "classify's module":
        (tmp_path / "unread_classify.py").write_text("def own(answer): return None", "utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        own = {"classify": "unread_classify.own"}
    rules({**NEARBY, "SECRETS": {"FILE": _read_secret}}, r=Rule(**own))
    call = SCENES[scene]()
    release()
    attempt = CallAttempt.objects.get()
    with no_descriptors():
        executor.execute("default", [attempt.pk])
    ready_calls.promote("default")
    attempt.refresh_from_db()
    call.refresh_from_db()
    assert (attempt.outcome, attempt.sent_at) == ("voided", None)
    assert attempt.error_message.startswith("nothing was sent: this worker's process may have no")
    assert (call.status, call.failed_count, call.ready) == (CallQueue.Status.NEW, 0, True)
    assert starvation.pause.is_on
    assert caplog.text.count("worker_starved") == 1
    assert called == []


def test_a_process_that_pauses_takes_no_call_and_keeps_its_slot(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that others have its messages; and goes on by itself."""
    over, looks = threading.Event(), threading.Semaphore(0)

    class Paused(starvation.Pause):
        @property
        def is_on(self) -> bool:
            looks.release()
            return not over.is_set()

    monkeypatch.setattr(starvation, "pause", Paused())
    send("r")
    release()
    ids = list(CallAttempt.objects.values_list("pk", flat=True))
    with ThreadPoolExecutor() as pool:
        slot = pool.submit(in_flight.take, "default", ids, make_api_call)
        try:
            for _ in range(6):
                assert looks.acquire(timeout=20)
            assert not slot.done()
            assert CallAttempt.objects.unbegun().count() == 1
        finally:
            over.set()
        assert slot.result(20) == 1
    in_flight.land(seconds=20)
    assert CallQueue.objects.done().count() == 1


def test_calls_that_no_thread_is_to_be_had_for_go_back_and_are_not_unknown(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their leases run: whoever waits for a thread until they end was never sent, and taken for
    lost.
    """
    monkeypatch.setattr(flight, "UNSERVED_S", 0.05)
    for _ in range(3):
        send("r")
    release()
    ids = list(CallAttempt.objects.values_list("pk", flat=True))
    with ThreadPoolExecutor() as pool, few_threads(flight.NAME):
        pool.submit(in_flight.take, "default", ids, make_api_call).result(20)
        in_flight.land(seconds=20)
    assert set(CallAttempt.objects.values_list("outcome", flat=True)) == {"voided"}
    assert CallQueue.objects.new().count() == 3
    assert remote.requests == []
    assert in_flight.flight_of("default").crew.most() == 1


def test_a_process_that_has_no_thread_for_its_calls_gives_them_back_and_keeps_its_slot(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it takes message after message, and each is charged until its lease ends."""
    rested = list[float | None]()
    monkeypatch.setattr(starvation.pause, "rest", rested.append, raising=False)
    send("r")
    release()
    ids = list(CallAttempt.objects.values_list("pk", flat=True))
    with few_threads("callqueue-flight"), ThreadPoolExecutor() as pool:
        assert pool.submit(in_flight.take, "default", ids, make_api_call).result(20) == 0
    assert list(CallAttempt.objects.values_list("outcome", flat=True)) == ["voided"]
    assert CallQueue.objects.new().count() == 1
    assert starvation.pause.is_on
    assert rested == [None]


def test_an_answer_is_kept_until_there_are_descriptors_to_record_it(
    rules: Rules, transactional_db: None, remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it was that wanted one: a connection, or a module that was not read yet."""
    rules(r=Rule())
    write, tries = recorder.write, []

    def write_the_third_time(*given: Any) -> int:
        tries.append(given)
        if len(tries) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return write(*given)

    monkeypatch.setattr(recorder, "write", write_the_third_time)
    call = send("r")
    run()
    call.refresh_from_db()
    assert call.status == CallQueue.Status.DONE
    assert len(tries) == 3


def test_a_process_has_no_more_in_flight_than_it_has_descriptors_for(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules({"CALLS_PER_SLOT": 100})
    monkeypatch.setattr(starvation, "most", lambda: 40)
    assert in_flight.most() == 40
    monkeypatch.setattr(starvation, "most", lambda: 4000)
    assert in_flight.most() == 100


def test_a_child_of_the_prefork_pool_is_one_slot_and_another_process_has_them_all(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules({"CALLS_PER_SLOT": 10})
    monkeypatch.setattr(starvation, "most", lambda: 4000)
    worker = SimpleNamespace(concurrency=3)
    try:
        in_flight.know_worker(worker)
        assert in_flight.most() == 30
        monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a child
        assert in_flight.most() == 10
    finally:
        in_flight.know_worker(None)
