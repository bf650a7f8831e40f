"""What a process has no room or means for goes to another or back, and that is no failure."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from django.utils import timezone

from callqueue import Rule, Secret, SlidingWindow, handler
from callqueue.database.connections import kept as kept_connections
from callqueue.execution import executor, flight, process, recorder, starvation, wire
from callqueue.ledger import ready_calls
from callqueue.models import CallAttempt, CallQueue
from callqueue.tasks import make_api_call
from tests.support.behaviour import Vendor, release, run, send
from tests.support.starving import few_threads, no_descriptors
from tests.support.verdicts import on_a_quiet_machine

Status = CallQueue.Status
pytestmark = [pytest.mark.django_db(transaction=True)]
Rules = Callable[..., None]
ROOM = 3
NEARBY = {"ALLOWED_NETWORKS": ["127.0.0.0/8"], "ALLOWED_HOSTS": ["*"]}
called: list[str] = []


@pytest.fixture(autouse=True)
def _process(
    rules: Rules, transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A process of a worker, with nothing in flight yet."""
    own = Rule(queues="q", limits=[SlidingWindow("100/s")])
    rules({"LEASE": {"RELEASE": 600, "GRACE": 600}}, r=own)
    monkeypatch.setattr(process, "_flights", {})
    monkeypatch.setattr(starvation, "shortage", starvation.Shortage())
    called.clear()
    wire._tls_context.cache_clear()
    yield
    process.land(seconds=20)
    for kept in kept_connections.pop((os.getpid(), "default"), []):
        kept.close()


@contextmanager
def taking(ids: list[int], take: Any = process.take_attempts) -> Iterator[Future[int]]:
    """A slot takes a message with these attempts; how many of their calls it has begun."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit(take, "default", ids, make_api_call)


def _released(count: int) -> list[int]:
    for _ in range(count):
        send("r")
    release()
    return list(CallAttempt.objects.order_by("pk").values_list("pk", flat=True))


@pytest.mark.parametrize("is_taken", [True, False])
def test_what_there_is_no_room_for_goes_on_to_another_process_or_back(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch, caplog: Any, is_taken: bool
) -> None:
    """Else it is charged for as long as the answers take. A slot is busy while its process is full."""
    caplog.set_level("INFO")
    monkeypatch.setattr(process, "max_in_flight", lambda: ROOM)
    answers, gone, ids = threading.Event(), threading.Event(), _released(5)
    remote.answers["/"] = lambda: answers.wait(20) and 200
    sent: list[tuple[Any, ...]] = []

    def note(task: Any, args: Any, kwargs: Any, *, queue: str, lasts: float) -> None:
        sent.append((task, *args, kwargs, queue, lasts))
        gone.set()
        if not is_taken:
            raise OSError("away")

    monkeypatch.setattr(process.broker, "send", note)
    with taking(ids) as slot:
        try:
            assert gone.wait(20)
            (task, left, kwargs, queue, lasts) = sent[0]
            assert (task, kwargs, queue, lasts, len(left)) == (make_api_call, {}, "q", 600, 2)
            assert not slot.done()
            began = CallAttempt.objects.exclude(started_at=None).values_list("pk", flat=True)
            assert {*began, *left} == set(ids) and len(began) == ROOM
        finally:
            answers.set()
        assert slot.result(20) == ROOM
    assert len(sent) == 1
    assert CallAttempt.objects.filter(outcome="voided").count() == (0 if is_taken else 2)
    assert CallQueue.objects.new().count() == (0 if is_taken else 2)
    assert ("publish_failed" in caplog.text) is not is_taken


@pytest.mark.parametrize("why", ["out of date", "told to go", "no room in time", "away"])
def test_what_is_not_begun_is_given_back_at_once(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Else it is charged until its release lease ends."""
    first, second = _released(2)
    answers, taken = threading.Event(), [second]
    remote.answers["/"] = lambda: answers.wait(20) and 200
    if why == "out of date":
        CallQueue.objects.filter(attempts=second).update(due_at_dt=timezone.now() + timedelta(1))
    elif why == "told to go":
        monkeypatch.setattr(process, "max_in_flight", lambda: 0)
    elif why == "no room in time":
        monkeypatch.setattr(process, "max_in_flight", lambda: 1)
        monkeypatch.setattr(process, "patience", lambda task: 0.2)
        taken = [first, second]
    else:
        monkeypatch.setattr(flight.claim, "begin", Mock(side_effect=ValueError("odd")))
    try:
        for one in taken:
            with taking([one]) as slot:
                if why == "away":
                    with pytest.raises(ValueError, match="odd"):
                        slot.result(20)
                    return
                assert slot.result(20) == (one == first)
        assert CallAttempt.objects.get(pk=second).outcome == "voided"
    finally:
        answers.set()


def test_what_room_is_soon_found_for_stays(remote: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where answers are quick nothing is handed on: a message costs more than a moment."""
    monkeypatch.setattr(process, "max_in_flight", lambda: ROOM)
    handed_on = Mock()
    monkeypatch.setattr(process.broker, "send", handed_on)
    with taking(_released(40)) as slot:
        count = slot.result(20)
    with on_a_quiet_machine():
        assert not handed_on.called
    assert count == 40
    process.land(seconds=20)
    assert CallQueue.objects.done().count() == 40


def test_what_a_task_makes_itself_is_made_when_it_returns_or_goes_to_another_worker(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, made in ((None, 1), (0, 0)):
        if most is not None:
            monkeypatch.setattr(process, "max_in_flight", lambda: 0)  # it was told to go
        with taking(_released(1)[-1:], process.make_calls_here) as slot:
            assert slot.result(20) == made
        assert CallQueue.objects.done().count() == 1
    assert CallQueue.objects.new().count() == 1


@handler("starving")
def _note(params: Any, context: Any) -> None:
    called.append(context.rule)


def _read_secret() -> str:
    return Path(__file__).read_text("utf-8")


SCENES: dict[str, tuple[str, dict[str, Any]]] = {
    "a socket": ("post", {"url": "http://127.0.0.1:1/"}),
    "a name": ("post", {"url": "http://localhost:1/"}),
    "certificates": ("post", {"url": "https://127.0.0.1:1/"}),
    "a secret's file": ("post", {"url": "http://127.0.0.1:1/", "headers": {"X": Secret("FILE")}}),
    "a handler": ("starving", {}),
    "classify's module": ("post", {"url": "http://127.0.0.1:1/"}),
}


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
    method, params = SCENES[scene]
    call = CallQueue.objects.send({"method": method, "params": params}, rule="r")
    release()
    attempt = CallAttempt.objects.get()
    with no_descriptors():
        executor.execute("default", [attempt.pk])
    ready_calls.promote_due("default")
    attempt.refresh_from_db()
    call.refresh_from_db()
    assert (attempt.outcome, attempt.sent_at) == ("voided", None)
    assert attempt.error_message.startswith("nothing was sent: this worker's process may have no")
    assert (call.status, call.failed_count, call.ready) == (CallQueue.Status.NEW, 0, True)
    assert starvation.shortage.is_on
    assert caplog.text.count("worker_starved") == 1
    assert called == []


def test_a_process_that_pauses_takes_no_call_and_keeps_its_slot(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that others have its messages; and goes on by itself."""
    over, looks = threading.Event(), threading.Semaphore(0)

    class Paused(starvation.Shortage):
        @property
        def is_on(self) -> bool:
            looks.release()
            return not over.is_set()

    monkeypatch.setattr(starvation, "shortage", Paused())
    with taking(_released(1)) as slot:
        try:
            for _ in range(6):
                assert looks.acquire(timeout=20)
            assert not slot.done()
            assert CallAttempt.objects.unbegun().count() == 1
        finally:
            over.set()
        assert slot.result(20) == 1
    process.land(seconds=20)
    assert CallQueue.objects.done().count() == 1


@pytest.mark.parametrize(("name", "began"), [(flight.NAME, 3), ("callqueue-flight", 0)])
def test_calls_that_no_thread_is_to_be_had_for_go_back_and_are_not_unknown(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch, name: str, began: int
) -> None:
    """Whoever waits for a thread until its lease ends was never sent, and is taken for lost."""
    rested = list[float | None]()
    monkeypatch.setattr(flight, "UNSERVED_S", 0.05)
    monkeypatch.setattr(starvation.shortage, "wait_out", rested.append, raising=False)
    with few_threads(name), taking(_released(3)) as slot:
        assert slot.result(20) == began
        process.land(seconds=20)
    assert set(CallAttempt.objects.values_list("outcome", flat=True)) == {"voided"}
    assert CallQueue.objects.new().count() == 3
    assert remote.requests == []
    if began:
        assert process.flight_of("default").room() == 1
    else:
        assert starvation.shortage.is_on and rested == [None]


def test_an_answer_is_kept_until_there_are_descriptors_to_record_it(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it was that wanted one: a connection, or a module that was not read yet."""
    none = OSError(errno.EMFILE, "Too many open files")
    writes = Mock(wraps=recorder.record_once, side_effect=[none, none, DEFAULT])
    slept = list[float]()
    monkeypatch.setattr(recorder, "record_once", writes)
    monkeypatch.setattr(recorder, "time", SimpleNamespace(sleep=slept.append))
    send("r")
    run()
    assert CallQueue.objects.get().status == Status.DONE
    assert writes.call_count == 3
    assert slept == [0.05, 0.1], "soon at first: limits wait for it"


def test_a_process_has_no_more_in_flight_than_its_slots_and_descriptors_allow(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child of the prefork pool is one slot, and another process has them all."""
    rules({"CALLS_PER_SLOT": 100})
    monkeypatch.setattr(starvation, "descriptors_for_calls", lambda: 40)
    assert process.max_in_flight() == 40
    monkeypatch.setattr(starvation, "descriptors_for_calls", lambda: 4000)
    assert process.max_in_flight() == 100
    try:
        process.note_worker(SimpleNamespace(concurrency=3))
        assert process.max_in_flight() == 300
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            assert process.max_in_flight() == 100
            process.tell_to_go()  # it shares what its worker is told
            assert process.max_in_flight() == 0
    finally:
        process.note_worker(None)
