"""Permits of many threads beside dispensers, in and out of transactions: none spins or hangs."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from celery import current_app, shared_task
from django.db import OperationalError, connection, connections, transaction

import callqueue
from callqueue import (
    Concurrency,
    NotNow,
    QueuedTask,
    Rule,
    SlidingWindow,
    TokenBucket,
    clocks,
    control,
    database,
)
from callqueue.dispatch import release_pass
from callqueue.dispatch.dispenser import Dispenser, give_sign_of_life
from callqueue.exceptions import CallQueueError
from callqueue.ledger import ledger_time, settings
from callqueue.models import CallAttempt, CallQueue, Hold, KeyTurn
from callqueue.permits import apart, waiting
from callqueue.permits.granted import Permit
from callqueue.testing import run_callqueue
from callqueue.transitions import Job
from tests.support.behaviour import pass_that_commits_late
from tests.support.ledger import answer
from tests.support.locking import beside_a_frozen, waiting_for_nobody
from tests.support.recorder import highest_in_window
from tests.support.verdicts import wait_until
from tests.support.waiters import new_waiter, pass_now, refusal, taken, waiting_rows

Rules = Callable[..., None]
NOT_ON_SQLITE = pytest.mark.skipif(
    "connection.vendor == 'sqlite'", reason="it locks no rows, and gives none in a transaction"
)


def in_a_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_one_of_many_that_wait_neither_spins_nor_is_forgotten(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(1)]))
    with callqueue.permit("r"):
        waiters = [new_waiter() for _ in range(6)]
        for _ in range(3):
            for one in waiters:
                assert not isinstance(one.step(), Job)
        assert pass_now(waiters[-1]) > 0.005, "it has had an answer, and pauses"
    for one in waiters:
        found = pass_now(one)
        assert isinstance(found, Job)
        CallAttempt.objects.filter(pk=found.attempt.id).delete()
    assert not waiting_rows().exists()


def test_permits_of_waiters_that_died_expire_without_a_dispenser(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(1)]))
    with callqueue.permit("r"):
        dead = new_waiter()
        dead.step()
        long_ago = database.clock("default") - timedelta(seconds=61)
        waiting_rows().update(expires_at_dt=long_ago)
        refusal(wait=1.5)
    assert not waiting_rows().exists()
    assert CallQueue.objects.expired().get().pk == dead.pk


@NOT_ON_SQLITE
def test_a_permit_that_somebody_has_locked_keeps_back_no_other(rules: Rules) -> None:
    """A pass has its rules in hand: whose row it waits for would stop all that share them."""
    rules(r=Rule(limits=[Concurrency(2)]))
    control.pause("default", "r")
    waiter = new_waiter()
    waiter.step()
    control.resume("default", "r")
    with transaction.atomic():
        list(CallQueue.objects.select_for_update().filter(pk=waiter.pk))
        passing, found = in_a_thread(
            lambda: (pass_now(waiter), waiter.next_pass_at - waiting.shifted_monotonic())
        )
        passing.join(1)
        other, taken_by_other = in_a_thread(lambda: taken(wait=1.0))
        other.join(10)
    passing.join(10)
    assert isinstance(taken_by_other[0], Permit)
    assert found[0][0] > 0.005 and found[0][1] > 0.005, "it does not spin"
    assert isinstance(pass_now(waiter), Job)


def test_what_operators_do_is_minded_by_who_waits_and_not_asked_for_all_the_time(
    rules: Rules,
) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h", name="l")]))
    taken()
    thread, found = in_a_thread(lambda: taken(wait=60))
    wait_until(lambda: waiting_rows().exists())
    control.pause("default", "r")
    settings.set_rate("default", "l", "2/h")
    waiter = new_waiter()
    waiter.step()
    pass_now(waiter)
    assert waiter.next_pass_at - waiting.shifted_monotonic() > 0.5
    waiter.withdraw()
    assert refusal("held").until is None
    assert not found
    control.resume("default", "r")
    thread.join(60)
    assert isinstance(found[0], Permit), found


def test_a_hold_on_all_queues_is_said(rules: Rules) -> None:
    rules(r=Rule(queues=["a", "b"], limits=[TokenBucket("9/s", burst=9, per="queue")]))
    until = database.clock("default") + timedelta(hours=1)
    for queue in ("a", "b"):
        Hold.objects.create(rule="r", per="queue", value=queue, until=until, source="provider")
    assert refusal("held").until is not None
    Hold.objects.filter(value="a").delete()
    taken(wait=0)


def test_what_a_permit_is_told_in_a_transaction_never_fails_it(rules: Rules) -> None:
    rules(r=Rule())
    with callqueue.permit("r") as permit, transaction.atomic():
        permit.sent()
        permit.settle(2)
        permit.hold(30, "429")
    permit_of = CallAttempt.objects.get(pk=permit.attempt_id)
    assert permit_of.sent_at is not None and permit_of.cost == 2 and Hold.objects.exists()


@NOT_ON_SQLITE
def test_a_permit_whose_end_cannot_be_written_in_a_transaction_says_so_and_fails_nothing(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rules(r=Rule())

    def away(*_: Any, **__: Any) -> None:
        raise OperationalError("the database is away")

    with transaction.atomic(), callqueue.permit("r"):
        monkeypatch.setattr(database, "persist", away)
    assert any("database_away" in message for message in caplog.messages)


def test_a_coroutine_is_granted_what_is_free_at_once_and_may_tell_from_a_thread(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/h")]))
    pauses, real = list[float](), asyncio.sleep

    async def sleep(seconds: float, *more: Any) -> None:
        pauses.append(seconds)
        await real(seconds, *more)

    async def one() -> None:
        async with callqueue.apermit("r", wait=0) as permit:
            await sync_to_async(permit.hold)(30, "429")
            monkeypatch.setattr(asyncio, "sleep", real)
        await sync_to_async(connections.close_all)()

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(one())
    assert sum(pauses) < 1 and Hold.objects.exists()


def test_a_hold_told_where_the_rule_is_locked_is_laid_after_the_transaction(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "PATIENCE", 0.5)
    rules(r=Rule())
    began = time.monotonic()
    with callqueue.permit("r") as permit, transaction.atomic():
        control.pause("default", "r", reason="mine")
        permit.hold(30, "429")
    assert time.monotonic() - began < 30
    wait_until(lambda: Hold.objects.count() == 2, 30)
    assert set(Hold.objects.values_list("source", flat=True)) == {"operator", "provider"}


def test_a_coroutine_cancelled_twice_leaves_nothing(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(1)]))

    async def enter() -> None:
        async with callqueue.apermit("r"):
            pytest.fail("over the limit")

    async def cancelled() -> None:
        async with callqueue.apermit("r"):
            for pause in (0.0, 0.001, 0.02, 0.3):
                waiting = asyncio.ensure_future(enter())
                await asyncio.sleep(pause)
                waiting.cancel()
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            await asyncio.sleep(1.0)
        async with callqueue.apermit("r", wait=0):
            pass
        await sync_to_async(connections.close_all)()

    asyncio.run(cancelled())
    assert not waiting_rows().exists() and not CallAttempt.objects.open().exists()


def test_a_new_process_lets_the_clock_settle_where_a_dispenser_may_have_seen_it_jump(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    ledger_time.forget_readings()
    assert isinstance(new_waiter(wait=0).step(), Job)
    give_sign_of_life("default", "another")
    ledger_time.forget_readings()
    waiter = new_waiter(wait=0)
    pause = waiter.step()
    assert isinstance(pause, float) and 0 < pause <= ledger_time.SETTLED
    since = clocks.monotonic() - ledger_time.SETTLED
    monkeypatch.setattr(ledger_time.watch("default"), "since", since)
    assert isinstance(waiter.step(), Job)


@contextmanager
def in_autocommit_off() -> Iterator[None]:
    transaction.set_autocommit(False)
    try:
        yield
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


@pytest.mark.parametrize("begins", [transaction.atomic, in_autocommit_off])
def test_a_rolled_back_transaction_takes_no_charge_with_it(rules: Rules, begins: Any) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/h")]))
    if connection.vendor == "sqlite":
        with begins(), pytest.raises(CallQueueError, match="SQLite"):
            taken()
        return
    with pytest.raises(ZeroDivisionError), begins():  # noqa: PT012
        CallQueue.objects.count()
        with callqueue.permit("r") as permit:
            permit.sent()
            permit.settle(2)
        raise ZeroDivisionError
    assert CallAttempt.objects.get().cost == 2
    assert CallAttempt.objects.get().finished_at is not None


def test_coroutines_wait_side_by_side(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("4/s")]))
    arrivals: list[float] = []

    async def one(number: int) -> None:
        async with callqueue.apermit("r") as permit:
            permit.sent()
            permit.settle(1)
            arrivals.append(time.monotonic())

    async def all_of_them() -> None:
        await asyncio.gather(*(one(number) for number in range(10)))
        await sync_to_async(connections.close_all)()

    asyncio.run(all_of_them())
    assert len(arrivals) == 10 and highest_in_window(sorted(arrivals), 1.0) <= 4
    assert CallAttempt.objects.filter(sent_at__isnull=False, outcome="succeeded").count() == 10


@pytest.mark.parametrize("end", ["is not waited for", "is withdrawn"])
def test_a_pass_whose_commit_comes_through_after_its_permit_is_charged_for_nobody(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, row_locks: None, end: str
) -> None:
    """The limit would lack that charge until the permit's lease has ended."""
    rules(r=Rule(limits=[Concurrency(1)]))
    one = new_waiter(wait=0)
    monkeypatch.setattr(waiting, "AT_ONCE", 0.1)
    (commit,) = pass_that_commits_late(monkeypatch, one._make_pass)
    comes = threading.Timer(0.5, commit)
    comes.start()
    if end == "is withdrawn":
        one.withdraw()
    else:
        with suppress(NotNow):
            while not isinstance(found := one.step(), Job):
                time.sleep(found)
            one.withdraw()
    comes.join()
    assert not CallAttempt.objects.open().exists()


@pytest.mark.parametrize("end", ["is withdrawn", "is granted"])
def test_a_sign_of_life_whose_commit_comes_through_late_is_no_second_permit(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, row_locks: None, end: str
) -> None:
    """A row that comes late would be charged, though nobody would begin it."""
    rules(r=Rule(limits=[SlidingWindow("9/h")]))
    one, late = new_waiter(), list[Any]()
    inserted, commits = one._insert_row, pytest.MonkeyPatch()

    def lost() -> None:
        commits.undo()
        late.append(connection.connection)
        connection.connection, connection.closed_in_transaction = None, False
        raise OperationalError("server closed the connection unexpectedly")

    def insert(*given: Any, **more: Any) -> int:
        if not late:
            commits.setattr(connection, "_commit", lost)
        return inserted(*given, **more)

    monkeypatch.setattr(one, "_insert_row", insert)
    with monkeypatch.context() as others:
        others.setattr(release_pass, "_lock", lambda *_: None)
        one.step()
        one.step()
    granted = []
    if end == "is withdrawn":
        one.withdraw()
    else:
        until = time.monotonic() + 20
        while not isinstance(found := one.step(), Job):
            assert time.monotonic() < until
            time.sleep(found)
        granted = [found.attempt.id]
    late[0].commit()
    late[0].close()
    Dispenser(publish=lambda *_: True).run_once()
    assert list(CallAttempt.objects.open().values_list("pk", flat=True)) == granted


def test_a_sign_of_life_that_is_frozen_keeps_no_pass_waiting(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, row_locks: None
) -> None:
    """It lets passes look at its key again. They would wait for it with the rule's row in hand."""
    rules(r=Rule(limits=[SlidingWindow("1/s", per="key")]))
    assert isinstance(new_waiter(key="k").step(), Job)
    answer()
    one = new_waiter(key="k")
    assert isinstance(one.step(), float)
    assert KeyTurn.objects.exclude(blocked_on="").exists()
    kept = one._keep_alive

    def beats(freeze: Any) -> None:
        monkeypatch.setattr(one, "_keep_alive", lambda *given: (freeze(), kept(*given))[1])
        one._give_sign_of_life()

    with beside_a_frozen(beats), waiting_for_nobody():
        time.sleep(1)
        release_pass.release("default", ["r"])
    assert not KeyTurn.objects.exclude(blocked_on="").exists()


# --- In tasks that run in their caller, and in a task that itself has been admitted


@pytest.fixture
def eager() -> Iterator[None]:
    before = current_app.conf.task_always_eager, current_app.conf.task_eager_propagates
    current_app.conf.task_always_eager = current_app.conf.task_eager_propagates = True
    yield
    current_app.conf.task_always_eager, current_app.conf.task_eager_propagates = before


@shared_task
def refund(wait: float | None = 0) -> int:
    with callqueue.permit("r", wait=wait, label="refund") as permit:
        return permit.attempt_id


@shared_task(base=QueuedTask, rule="r")
def queued_refund() -> int:
    return int(refund.delay().get())


@pytest.mark.usefixtures("eager")
def test_an_eager_task_takes_a_permit_in_its_callers_thread_and_after_its_transaction(
    rules: Rules,
) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h"), Concurrency(1)]))
    with transaction.atomic():
        transaction.on_commit(refund.delay)
        assert not CallAttempt.objects.exists()
    row = CallAttempt.objects.get()
    assert row.outcome == "succeeded" and row.call.path == "refund"
    with pytest.raises(NotNow):
        refund.delay()
    rules(r=Rule(limits=[Concurrency(1)]))
    with callqueue.permit("r"), pytest.raises(NotNow, match="used up"):
        refund.delay(wait=0.2)  # not without an end for itself
    assert not waiting_rows().exists()


@pytest.mark.usefixtures("eager")
def test_an_admitted_task_takes_a_permit_of_its_own(rules: Rules) -> None:
    """Eagerly it runs at once and is not charged; from the queue it is, and the permit besides."""
    rules(r=Rule(limits=[SlidingWindow("2/h")]))
    queued_refund.delay()
    assert CallQueue.objects.get().method == "permit" and CallAttempt.objects.count() == 1
    current_app.conf.task_always_eager = False
    queued_refund.delay()
    current_app.conf.task_always_eager = True
    run_callqueue()
    call = CallQueue.objects.exclude(method="permit").get()
    assert CallAttempt.objects.count() == 2, "one more attempt than that would be over the limit"
    assert call.status != CallQueue.Status.DONE
    assert "NotNow" in call.error_message


# --- In transactions of their callers: all share one connection more

THREADS, EACH = 20, 5


def connected() -> int:
    """How many connections this process has to the database, by the server's word."""
    [(count,)] = database.rows(
        "default",
        "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend'"
        if connection.vendor == "postgresql"
        else "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE()",
    )
    return int(count)


@NOT_ON_SQLITE
def test_all_that_wait_in_transactions_share_one_connection(rules: Rules) -> None:
    """A hundred permits, of twenty threads: each has its own connection, and one more is there."""
    rules(r=Rule(limits=[Concurrency(1)]))
    granted: list[int] = []

    def take() -> None:
        for number in range(EACH):
            with transaction.atomic():
                CallAttempt.objects.first()
                try:
                    with callqueue.permit("r", wait=None if number % 2 else 0.2) as one:
                        granted.append(one.attempt_id)
                except NotNow:
                    pass

    before, most = connected(), 0
    takers = [in_a_thread(take) for _ in range(THREADS)]
    while any(thread.is_alive() for thread, _ in takers):
        most = max(most, connected() - before)
        time.sleep(0.02)
    assert all(found == [None] for _, found in takers) and most <= THREADS + 1
    assert len(granted) >= THREADS * (EACH // 2)
    assert not waiting_rows().exists()
    assert not CallAttempt.objects.open().exists()
    wait_until(lambda: connected() == before)
    wait_until(lambda: "callqueue-permits" not in {one.name for one in threading.enumerate()})


@NOT_ON_SQLITE
def test_one_that_waits_for_its_callers_own_rows_keeps_no_other_waiting(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "PATIENCE", 1.0)
    monkeypatch.setattr(apart, "STUCK", 0.1)
    rules(r=Rule(), s=Rule())
    is_held, others_done = threading.Event(), threading.Event()

    def hold() -> None:
        with callqueue.permit("r") as permit, transaction.atomic():
            control.pause("default", "r", reason="mine")
            is_held.set()
            permit.hold(30, "429")
            assert others_done.wait(30)

    holder, held = in_a_thread(hold)
    assert is_held.wait(30)
    wait_until(lambda: "default" in apart._keepers and apart._keepers["default"].is_stuck)
    of_keepers = [one for one in threading.enumerate() if one.name == "callqueue-permits"]
    with transaction.atomic(), callqueue.permit("s"):
        pass
    others_done.set()
    holder.join(30)
    assert held == [None]
    assert of_keepers and all(one.daemon for one in of_keepers), "nor this process from ending"
    wait_until(lambda: not apart._keepers)


@NOT_ON_SQLITE
def test_a_keeper_whose_connection_was_cut_takes_another(rules: Rules) -> None:
    rules(r=Rule())
    is_postgresql = connection.vendor == "postgresql"
    pid = "pg_backend_pid()" if is_postgresql else "CONNECTION_ID()"
    cut = apart._hand_to_keeper("default", lambda: database.rows("default", f"SELECT {pid}"))
    [(own,)] = cut.result(30)
    database.run(
        "default", f"SELECT pg_terminate_backend({own})" if is_postgresql else f"KILL {own}"
    )
    with transaction.atomic(), callqueue.permit("r"):
        pass
    assert CallAttempt.objects.filter(finished_at__isnull=False).count() == 1


@NOT_ON_SQLITE
def test_a_forked_child_has_a_keeper_of_its_own(rules: Rules) -> None:
    rules(r=Rule())
    with transaction.atomic(), callqueue.permit("r"):
        child = os.fork()
        if not child:
            status = 1
            try:
                assert not apart._keepers
                with apart._lock:
                    status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    with transaction.atomic(), callqueue.permit("r"):
        pass
    assert CallAttempt.objects.filter(finished_at__isnull=False).count() == 2
