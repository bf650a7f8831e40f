"""callqueue_run: everything in one process, and no broker asked."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import shared_task
from django.db import connection

from callqueue import Rule, SlidingWindow, broker, callbacks, maker
from callqueue.database.connections import kept as kept_connections
from callqueue.dispatch import publisher
from callqueue.execution import process
from callqueue.models import CallAttempt, CallQueue, DispenserState, LedgerState
from callqueue.outcome import RetryLater, Succeeded
from tests.db.commands import run
from tests.support.behaviour import Vendor, send

Rules = Callable[..., None]
Status = CallQueue.Status
pytestmark = [pytest.mark.django_db(transaction=True)]
heard: list[Any] = []
released = threading.Event()


@shared_task(name="tests.hear")
def hear(call_id: int, status: str) -> None:
    heard.append((call_id, status, threading.current_thread().name))


@shared_task(name="tests.hang")
def hang(*_: Any) -> None:
    heard.append("hangs")
    released.wait(20)


@shared_task(name="tests.exit")
def leave(*_: Any) -> None:
    heard.append("exits")
    raise SystemExit(3)


@shared_task(name="tests.add")
def add(a: int, b: int) -> int:
    return a + b


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, announced_here: Any) -> Iterator[None]:
    """A process of its own, whose broker is nowhere: whoever asks it is told so."""
    heard.clear()
    released.clear()
    monkeypatch.setattr(process, "_flights", {})
    monkeypatch.setattr(broker, "send_beside", announced_here)

    def asked(*_: Any, **__: Any) -> None:
        raise AssertionError("the broker was asked")

    for module, name in ((broker, "_within_patience"), (publisher, "publish")):
        monkeypatch.setattr(module, name, asked)
    yield
    released.set()
    for kept in kept_connections.pop((os.getpid(), "default"), []):
        kept.close()


def run_until(done: Callable[[], bool], *arguments: str, seconds: float = 20.0) -> str:
    """Run it in this process until that is so; what it said."""
    end = time.monotonic() + seconds

    def watch() -> None:
        try:
            while not done() and time.monotonic() < end:
                time.sleep(0.02)
        finally:
            from django.db import connections

            connections.close_all()
            os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=watch)
    watcher.start()
    ran = run("run", *arguments, "--for", "60")
    watcher.join()
    assert ran.code == 0
    return ran.out


def ended(count: int) -> Callable[[], bool]:
    return lambda: CallQueue.objects.filter(finished_at_dt__isnull=False).count() == count


def task(name: str, **options: Any) -> CallQueue:
    data = {"method": "celery_task", "params": {"name": name, "args": [1, 2]}}
    call = CallQueue.objects.send(data, rule="r", **options)
    assert call is not None
    return call


def test_it_makes_what_it_releases_and_tells_of_the_end(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule(limits=[SlidingWindow("100/s")]))
    calls = [send("r", callback="tests.hear") for _ in range(5)]
    said = run_until(lambda: len(heard) == 5)
    assert "running all rules as " in said
    assert "ended" in said
    assert len(remote.requests) == 5
    assert set(CallQueue.objects.values_list("status", flat=True)) == {Status.DONE}
    assert sorted(heard)[0][:2] == (calls[0].pk, "done")
    assert not any(thread == "callqueue-flight" for *_, thread in heard)
    assert not CallQueue.objects.filter(callback_pending=True).exists()
    state = DispenserState.objects.get()
    assert (state.kind, state.broker, state.digest) == ("run", "", "")


def test_it_runs_tasks_and_hooks_and_leaves_to_others_what_is_theirs(
    rules: Rules, remote: Vendor
) -> None:
    """A name that nobody has fails its call, a retry that is asked for is had, an unknown call is
    reconciled beside, and a callback that nobody has here is owed.
    """
    limits = [SlidingWindow("100/s")]
    rules(r=Rule(limits=limits, reconcile=lambda call: Succeeded()))
    tried: list[int] = []

    @shared_task(name="tests.try_again")
    def try_again(*_: Any) -> Any:
        tried.append(1)
        return RetryLater("once more", after=0) if len(tried) == 1 else "well"

    known, again = task("tests.add"), task("tests.try_again")
    unknown, lost = task("tests.nobody-has-it"), send("r")
    CallQueue.objects.filter(pk=lost.pk).update(status=Status.UNKNOWN)
    send("r", callback="tests.somebody-elses")
    owed = CallQueue.objects.filter(callback_heard=True, callback_pending=True)
    done = CallQueue.objects.done()
    run_until(lambda: done.count() == 4 and ended(5)() and owed.exists())
    assert (done.count(), owed.count(), len(tried)) == (4, 1, 2)
    assert CallQueue.objects.get(pk=known.pk).answer.json() == 3
    assert done.filter(pk__in=[again.pk, lost.pk]).count() == 2
    unknown.refresh_from_db()
    assert unknown.status == Status.FAILED
    assert "has no task 'tests.nobody-has-it'" in unknown.error_message


def test_only_the_rules_named(rules: Rules, remote: Vendor) -> None:
    rules(a=Rule(), b=Rule())
    send("a"), send("b")
    run_until(ended(1), "--rule", "a")
    assert CallQueue.objects.get(rule="b").status == Status.NEW


def test_a_callback_that_exits_is_run_once_and_keeps_back_no_other(rules: Rules) -> None:
    rules(r=Rule())
    calls = [task("tests.add", callback=f"tests.{name}") for name in ("hear", "exit", "hear")]
    owed = CallQueue.objects.filter(callback_pending=True)
    run_until(lambda: ended(3)() and not owed.exists(), seconds=5)
    assert not owed.exists()
    said = [one if one == "exits" else one[0] for one in heard]
    assert sorted(said, key=str) == sorted([calls[0].pk, "exits", calls[2].pk], key=str)


def test_a_callback_that_hangs_keeps_back_nobody_and_is_not_run_twice(
    rules: Rules, remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "RUNNING", 0.3)
    rules(r=Rule(limits=[SlidingWindow("100/s")]))
    send("r", callback="tests.hang")
    for _ in range(3):
        send("r", callback="tests.hear")
    none_owed = lambda: not CallQueue.objects.filter(callback_pending=True).exists()  # noqa: E731
    run_until(lambda: ended(4)() and none_owed())
    assert none_owed()
    assert heard.count("hangs") == 1
    assert len(heard) == 4


def test_no_more_is_released_than_there_is_room_for(
    rules: Rules, remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have some. One kind does not take the other's."""
    monkeypatch.setattr(maker, "HANDLED", 2)
    rules({"CALLS_PER_SLOT": 1}, r=Rule(limits=[SlidingWindow("1000/s")]))
    remote.answers["/slow"] = lambda: released.wait(20) and 200
    for _ in range(6):
        task("tests.hang")
        send("r", "/slow")
    most: list[int] = []

    def full() -> bool:
        if not released.is_set():  # what has ended then is open until it is recorded
            most.append(CallAttempt.objects.open().count())
        if most.count(4 + 2) == 20:
            released.set()
        return ended(12)()

    run_until(full)
    assert max(most) == 4 + 2
    assert CallQueue.objects.done().count() == 12


def test_handlers_that_hang_past_their_time_take_no_room(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps its thread; the others go on."""
    monkeypatch.setattr(maker, "HANDLED", 2)
    lease = {"LEASE": {"RELEASE": 300, "GRACE": 0.1}}
    rules(lease, r=Rule(limits=[SlidingWindow("100/s")], total_timeout=0.3))
    hanging = [task("tests.hang") for _ in range(2)]
    added = [task("tests.add") for _ in range(3)]
    is_done = CallQueue.objects.done().filter(pk__in=[call.pk for call in added])
    run_until(lambda: is_done.count() == 3, seconds=10)
    assert is_done.count() == 3
    assert heard.count("hangs") == 2
    assert not CallQueue.objects.done().filter(pk__in=[call.pk for call in hanging]).exists()
    released.set()
    process.land(seconds=5)


def test_a_signal_lets_what_is_in_flight_end_and_releases_no_more(
    rules: Rules, remote: Vendor
) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/m")]))
    remote.answers["/"] = lambda: released.wait(20) and 200
    for _ in range(3):
        send("r")
    threading.Timer(1.0, released.set).start()
    run_until(lambda: len(remote.requests) == 2)
    states = list(CallQueue.objects.order_by("pk").values_list("status", flat=True))
    assert states == [Status.DONE, Status.DONE, Status.NEW]


@pytest.mark.parametrize("command", ["run", "dispenser"])
def test_a_database_without_the_tables_is_not_waited_for(command: str) -> None:
    table = LedgerState._meta.db_table
    with connection.schema_editor() as editor:
        editor.alter_db_table(LedgerState, table, "elsewhere")
    try:
        said = run(command, "--for", "1")
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(LedgerState, "elsewhere", table)
    assert (said.code, "migrations" in said.error) == (1, True)
