"""Work that is cut, or in conflict, at its first statement, its second, and so on: it goes on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.apps import apps
from django.db import DatabaseError, connection, connections, transaction

from callqueue import (
    Concurrency,
    NotNow,
    Retry,
    Rule,
    Secret,
    SlidingWindow,
    broker,
    callbacks,
    database,
    events,
    permit,
    tasks,
)
from callqueue.database.connections import kept as kept_connections
from callqueue.dispatch.dispenser import Dispenser
from callqueue.dispatch.release_pass import ensure_state_rows
from callqueue.dispatch.release_pass import release as make_pass
from callqueue.execution import executor, process
from callqueue.execution.flight import Flight
from callqueue.ledger.account import Account
from callqueue.maker import Maker
from callqueue.models import CallAttempt, CallQueue, Hold, RuleState
from callqueue.permits.asking import Options
from callqueue.permits.waiting import Waiter
from callqueue.transitions import Job
from tests.support.behaviour import Vendor, release, send
from tests.support.cutting import STRUCK_AFTER, STRUCK_BEFORE, cut, deeds, kill_this_connection
from tests.support.length import AT_LENGTH
from tests.support.locking import fresh
from tests.support.verdicts import Late, wait_until

Status = CallQueue.Status
pytestmark = [pytest.mark.django_db(transaction=True)]
LIMITS = [SlidingWindow("100/s")]


noted: list[list[Any]] = []  # forgotten before each moment


@pytest.fixture(autouse=True)
def _rules(
    rules: Callable[..., None], transactional_db: None, remote: Vendor, told: Any, asked: Any
) -> Iterator[None]:
    """Leases that outlast the test, and no connection kept for what comes after."""
    rules(
        {"LEASE": {"RELEASE": 600, "GRACE": 600}},
        r=Rule(limits=LIMITS, retry=Retry(base=600.0, jitter=False)),
        other=Rule(limits=LIMITS),
        one=Rule(limits=[Concurrency(1)]),
    )
    noted[:] = [remote.requests, told, asked]
    yield
    for kept in kept_connections.pop((os.getpid(), "default"), []):
        kept.close()


@pytest.fixture(params=["before", "after", "conflict"])
def deed(request: pytest.FixtureRequest) -> str:
    """What happens at each moment."""
    if request.param not in deeds():
        pytest.skip("there is no server that could cut, or no conflict but the lock")
    return str(request.param)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is to be announced: by other processes than those that are cut."""
    messages: list[Any] = []
    here = lambda name, args, queue="": messages.append(args)  # noqa: E731
    monkeypatch.setattr(broker, "send_beside", here)
    return messages


def announce(asked: list[Any]) -> None:
    """As workers do, a while later: what was asked for, and what a dispenser finds still owed."""
    past = database.clock("default") - timedelta(hours=1)
    CallQueue.objects.filter(callback_pending=True).update(finished_at_dt=past)
    CallQueue.objects.filter(callback_at__isnull=False).update(callback_at=past)
    CallQueue.objects.update(callback_ask_at=None)
    callbacks.ask_for_owed_ends("default")
    while asked:
        tasks.announce(*asked.pop(0))


@pytest.fixture
def told() -> Iterator[list[tuple[int, str]]]:
    """The ends that `call_finished` told of."""
    heard: list[tuple[int, str]] = []

    def hear(call_id: int, status: str, **_: Any) -> None:
        heard.append((call_id, status))

    events.call_finished.connect(hear)
    yield heard
    events.call_finished.disconnect(hear)


def in_a_worker(work: Callable[..., Any], *given: Any) -> Any:
    """Do this as a worker does a message: in a thread whose connection is kept for the next."""

    def message() -> Any:
        try:
            with database.kept_connection("default"):
                return work(*given)
        finally:
            connections.close_all()  # as Celery does

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(message).result(60)


def at_every_moment(
    deed: str,
    prepare: Callable[[], Any],
    work: Callable[[Any], Any],
    judge: Callable[[Any, str], None],
) -> int:
    """Prepare, work and judge with a cut at each moment of the work; how many there are. In `make
    test`, where each of the deeds has a test, every third moment has one of them, in turn.
    """
    all_deeds, number, step = deeds(), 1, 1
    if deed in all_deeds and not os.environ.get(AT_LENGTH):
        number, step = 1 + 3 * all_deeds.index(deed), 3 * len(all_deeds)
    most = 0
    while True:
        for model in apps.get_app_config("callqueue").get_models():
            model._default_manager.all().delete()
        for notes in noted:
            notes.clear()
        given = prepare()
        with cut(number, deed) as made:
            work(given)
        judge(given, made.story)
        if not made.came:
            return max(most, made.seen)
        number, most = number + step, max(most, made.seen)


@pytest.mark.fault
def test_begin_and_record_are_struck_at_every_moment(
    deed: str, remote: Vendor, told: list[tuple[int, str]], asked: list[Any]
) -> None:
    remote.answers = {"/bad": 500, "/busy": (429, {"Retry-After": "60"}, b"")}
    ids: list[int] = []
    ends = {
        "/ok": Status.DONE,
        "/bad": Status.ERROR,
        "/busy": Status.ERROR,
        "/gone": Status.CANCELLED,
        "/late": Status.EXPIRED,
    }

    def prepare() -> dict[str, CallQueue]:
        calls = {path: send("r", path, callback="tests.echo") for path in ends}
        release()
        calls["/gone"].cancel()
        past = database.clock("default") - timedelta(seconds=1)
        CallQueue.objects.filter(pk=calls["/late"].pk).update(expires_at_dt=past)
        ids[:] = CallAttempt.objects.order_by("pk").values_list("pk", flat=True)
        return calls

    def work(_: dict[str, CallQueue]) -> None:
        executor.execute("default", ids)

    def judge(calls: dict[str, CallQueue], story: str) -> None:
        assert sorted(remote.paths()) == ["/bad", "/busy", "/ok"], story
        assert {path: fresh(call).status for path, call in calls.items()} == ends, story
        assert not CallAttempt.objects.open().exists(), story
        outcomes = dict(CallAttempt.objects.values_list("call__pk", "outcome"))
        assert outcomes[calls["/ok"].pk] == "succeeded", story
        assert Hold.objects.filter(rule="r").count() == 1, story
        announce(asked)
        heard = [("/ok", "done"), ("/gone", "cancelled"), ("/late", "expired")]
        assert sorted(told) == [(calls[path].pk, status) for path, status in heard], story

    assert at_every_moment(deed, prepare, work, judge) >= 6


@pytest.mark.fault
def test_a_permit_is_struck_at_every_moment(deed: str) -> None:
    """Its block runs once and is charged once; or, where no connection can be had, not at all."""
    entered: list[int] = []

    def prepare() -> None:
        entered.clear()
        ensure_state_rows("default", ["r"])

    def work(_: None) -> None:
        with suppress(DatabaseError), permit("r", wait=30, cost=2) as taken:
            entered.append(taken.attempt_id)
            taken.sent()
            taken.settle(1)

    def judge(_: None, story: str) -> None:
        ended = list(CallQueue.objects.values_list("method", "status"))
        if entered:
            assert ended == [("permit", Status.DONE)], story
            assert CallAttempt.objects.get().pk == entered[0], story
            assert CallAttempt.objects.filter(sent_at__isnull=False, cost=1).exists(), story
        else:
            assert ended == [], story
        assert not CallAttempt.objects.open().exists(), story

    assert at_every_moment(deed, prepare, work, judge) >= 12


@pytest.mark.fault
@pytest.mark.parametrize("is_charged", [True, False])
def test_a_permit_that_waits_is_struck_at_every_moment(deed: str, is_charged: bool) -> None:
    """What another pass has charged is begun; what nobody has is given up, and leaves nothing."""
    found: list[Any] = []

    def prepare() -> Waiter:
        found.clear()
        blocking = permit("one")
        blocking.__enter__()
        waiter = Waiter(Options("one", wait=None if is_charged else 0.01).as_wanted())
        if is_charged:
            waiter.step()
            blocking.__exit__(None, None, None)
            make_pass("default", ["one"])
            assert CallAttempt.objects.unbegun().count() == 1
        return waiter

    def work(waiter: Waiter) -> None:
        end = time.monotonic() + 30
        with suppress(NotNow):
            while not isinstance(step := waiter.step(), Job):
                assert time.monotonic() < end
                time.sleep(min(step, 0.01))
            found.append(step)

    def judge(waiter: Waiter, story: str) -> None:
        under_way = CallAttempt.objects.open().filter(started_at__isnull=False)
        assert under_way.count() == 1, story
        assert len(found) == is_charged, story
        if found:
            assert under_way.get().pk == found[0].attempt.id, story
        assert not CallQueue.objects.waiting().exists(), story
        assert not CallAttempt.objects.unbegun().exists(), story

    assert at_every_moment(deed, prepare, work, judge) >= 3


@pytest.mark.fault
def test_an_announcement_is_struck_at_every_moment(
    deed: str, told: list[tuple[int, str]], asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever listens may hear twice, and nobody never hears."""
    sent: list[int] = []
    monkeypatch.setattr(broker, "send_by_name", lambda app, name, args: sent.append(args[0]))

    noted.append(sent)

    def prepare() -> list[int]:
        calls = [send("r", callback="tests.echo") for _ in range(3)]
        assert CallQueue.objects.all().cancel() == 3
        asked.clear()
        return [call.pk for call in calls]

    def work(pks: list[int]) -> None:
        with suppress(DatabaseError):
            tasks.announce(pks)

    def judge(pks: list[int], story: str) -> None:
        announce(asked)
        assert {pk for pk, _ in told} == set(sent) == set(pks), story
        assert not CallQueue.objects.filter(callback_pending=True).exists(), story

    assert at_every_moment(deed, prepare, work, judge) >= 3


@pytest.mark.parametrize("deed", [STRUCK_BEFORE, STRUCK_AFTER])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.fault
def test_a_soft_time_limit_strikes_at_every_moment(
    deed: str, count: int, remote: Vendor, told: list[tuple[int, str]], asked: list[Any]
) -> None:
    """What was sent is recorded, and what was not waits again; nothing is left to a lease."""
    ids: list[int] = []

    def prepare() -> list[CallQueue]:
        calls = [send("r", f"/{n}") for n in range(count)]
        release()
        ids[:] = CallAttempt.objects.order_by("pk").values_list("pk", flat=True)
        return calls

    def work(_: list[CallQueue]) -> None:
        with suppress(SoftTimeLimitExceeded):
            executor.execute("default", ids)

    def judge(calls: list[CallQueue], story: str) -> None:
        begun = CallAttempt.objects.filter(started_at__isnull=False)
        assert not begun.filter(finished_at__isnull=True).exists(), story
        done = [call.pk for n, call in enumerate(calls) if f"/{n}" in remote.paths()]
        for call in calls:
            wanted = {Status.DONE} if call.pk in done else {Status.NEW, Status.DISPATCHED}
            assert fresh(call).status in wanted, story
        assert len(remote.paths()) == len(done), story
        announce(asked)
        assert sorted(told) == [(pk, "done") for pk in sorted(done)], story
        if not story:
            assert len(done) == count

    assert at_every_moment(deed, prepare, work, judge) >= 3


OTHERS = {
    "postgresql": "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()",
    "mysql": "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()",
}


def _others() -> int:
    """How many connections there are to this database beside this thread's."""
    return int(database.rows("default", OTHERS[connection.vendor])[0][0])


def _reads_the_database(_: Any) -> None:
    assert RuleState.objects.count() >= 0


@pytest.mark.parametrize("hook", ["classify", "settle", "SECRETS"])
@pytest.mark.skipif(
    "connection.vendor == 'sqlite'", reason="its connections are no one's but the process's"
)
def test_hooks_that_use_the_orm_leave_no_connection_open(
    rules: Callable[..., None], remote: Vendor, hook: str
) -> None:
    """Nor do they meet one that died since the last message."""
    own = {hook: _reads_the_database} if hook != "SECRETS" else {}
    secret = lambda: f"s3cret-{RuleState.objects.count()}"  # noqa: E731
    rules({"SECRETS": {"KEY": secret}}, r=Rule(limits=LIMITS, **own))
    for message in range(3):
        for n in range(8):
            headers = {"Authorization": Secret("KEY")}
            params = {"url": f"http://vendor.example/{message}/{n}", "headers": headers}
            CallQueue.objects.send({"method": "post", "params": params}, rule="r")
        release()
        ids = list(CallAttempt.objects.open().values_list("pk", flat=True))
        if message == 1:
            in_a_worker(kill_this_connection)
        flight = Flight("default", lambda: 100)
        flight.board(ids, 20)
        flight.land(seconds=20)
        wait_until(lambda: _others() == 1, 10)  # that of the flight, kept for the next
    assert set(CallQueue.objects.values_list("status", flat=True)) == {Status.DONE}
    assert not CallAttempt.objects.exclude(error_message="").exists()
    assert len(remote.requests) == 24


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="keeps no connection")
def test_the_first_message_after_a_restart_of_the_database_is_begun(remote: Vendor) -> None:
    """The connection that a worker has kept is dead, and nobody told it."""
    send("r", "/first")
    release()
    in_a_worker(tasks.make_api_call, list(CallAttempt.objects.values_list("pk", flat=True)))
    call = send("r", "/second")
    release()
    ids = list(call.attempts.values_list("pk", flat=True))
    (kept,) = kept_connections[os.getpid(), "default"]
    in_a_worker(kill_this_connection)
    assert kept_connections[os.getpid(), "default"] == [kept]
    in_a_worker(tasks.make_api_call, ids)
    assert fresh(call).status == Status.DONE


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="there is no server that could cut")
def test_a_hold_is_laid_though_the_connection_died_while_its_answer_was_awaited(
    rules: Callable[..., None], remote: Vendor
) -> None:
    """It is read for in no transaction, with whose end Django would drop what has died."""
    rules({"LEASE": {"GRACE": 5}}, r=Rule(limits=LIMITS, total_timeout=5))

    def busy() -> Any:
        kill_this_connection()
        return 429, {"Retry-After": "60"}, b""

    remote.answers["/"] = busy
    call = send("r")
    release()
    executor.execute("default", [call.attempts.get().pk])
    assert fresh(call).status == Status.ERROR
    assert Hold.objects.filter(rule="r").count() == 1


@pytest.mark.parametrize("is_eager", [True, False])
def test_whoever_makes_calls_in_his_own_process_keeps_his_connection(
    remote: Vendor, is_eager: bool
) -> None:
    """A test, or a shell. Another in its place would be open when the test's database is to go."""
    send("r", "/first")
    release()
    ids, before = list(CallAttempt.objects.values_list("pk", flat=True)), connections["default"]
    for task, *given in [(tasks.make_api_call, ids), (tasks.dispense, 0.05)]:
        task.apply(given) if is_eager else task(*given)
    assert connections["default"] is before
    assert remote.paths() == ["/first"]


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="no other has the setting")
def test_the_dispensers_patience_is_that_of_its_passes_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection goes to whatever runs next; and a pass in another's transaction sets none."""

    def shown() -> str:
        return str(database.rows("default", "SHOW idle_in_transaction_session_timeout")[0][0])

    usual, inside, read = shown(), [], Account.read
    monkeypatch.setattr(
        Account, "read", lambda *given, **named: inside.append(shown()) or read(*given, **named)
    )
    send("r")
    assert in_a_worker(lambda: (tasks.dispense(0.1), shown())) == (0, usual)
    assert in_a_worker(shown) == usual
    assert set(inside) == {"5s"}
    with transaction.atomic():
        make_pass("default", ["r"])
        assert shown() == "0"


@pytest.mark.fault
def test_a_dispenser_is_struck_at_every_moment(deed: str) -> None:
    made: dict[str, Any] = {}

    def prepare() -> set[int]:
        pks = {send("r").pk, send("other").pk}
        ids, stop = made["ids"], made["stop"] = list[int](), threading.Event()

        def publish(using: str, messages: Any) -> bool:
            """Until each call has a message of an attempt that is open."""
            ids.extend(pk for _, some in messages for pk in some)
            unbegun = CallAttempt.objects.unbegun().filter(pk__in=ids)
            if set(unbegun.values_list("call", flat=True)) == pks:
                stop.set()
            return True

        made["dispenser"] = Dispenser(publish=publish)
        return pks

    def work(_: set[int]) -> None:
        made["dispenser"].run(stop=made["stop"], seconds=20)

    def judge(pks: set[int], story: str) -> None:
        assert made["stop"].is_set(), f"{story}: {list(CallAttempt.objects.values())}"
        open_now = set(CallAttempt.objects.open().values_list("pk", flat=True))
        assert open_now <= set(made["ids"]) and len(open_now) == len(pks), story
        assert len(made["ids"]) == len(set(made["ids"])), story

    assert at_every_moment(deed, prepare, work, judge) >= 10


@pytest.mark.fault
def test_one_that_makes_its_calls_is_struck_at_every_moment(
    deed: str, remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each goes out once, whatever becomes of the commit, and nothing undone stays behind."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(process, "_flights", {})

    def prepare() -> set[int]:
        pks = {send("r", "/1").pk, send("r", "/2").pk, send("other", "/3").pk}
        made["dispenser"], made["stop"] = Dispenser(maker=Maker("default")), threading.Event()
        return pks

    def work(pks: set[int]) -> None:
        def watch() -> None:
            with suppress(Late):
                wait_until(lambda: CallQueue.objects.done().count() == len(pks), 20)
            connections.close_all()
            made["stop"].set()

        watching = threading.Thread(target=watch)
        watching.start()
        made["dispenser"].run(stop=made["stop"], seconds=20)
        watching.join()

    def judge(pks: set[int], story: str) -> None:
        process.land(seconds=20)
        assert not process.flight_of("default").under_way, story
        assert sorted(remote.paths()) == ["/1", "/2", "/3"], story
        assert CallQueue.objects.done().count() == len(pks), story
        outcomes = sorted(CallAttempt.objects.values_list("outcome", flat=True))
        assert set(outcomes) <= {"succeeded", "voided"}, story
        assert outcomes.count("succeeded") == len(pks), story

    try:
        assert at_every_moment(deed, prepare, work, judge) >= 10
    finally:
        process.note_worker(None)
