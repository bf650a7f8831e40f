"""Permits of many threads beside dispensers, and while what they wait for changes under them: in
their turn, in and out of their callers' transactions, and none spins, hangs, or is left behind.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

import callqueue
from callqueue import (
    Concurrency,
    NotNow,
    Rule,
    SlidingWindow,
    TokenBucket,
    clocks,
    control,
    database,
)
from callqueue.dispatch import release_pass
from callqueue.dispatch.dispenser import Dispenser
from callqueue.exceptions import CallQueueError
from callqueue.ledger import ledger_time, settings
from callqueue.maintenance import recovery
from callqueue.models import CallAttempt, CallQueue, Hold
from callqueue.permits import apart, waiting
from callqueue.permits.asking import Options
from callqueue.permits.waiting import Waiter
from callqueue.transitions import Job
from tests.support.behaviour import pass_that_commits_late
from tests.support.recorder import highest_in_window
from tests.support.waiters import pass_now
from tests.support.waiters import waiting as waiting_rows

Rules = Callable[..., None]


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


def wait_until_it_waits() -> None:
    end = time.monotonic() + 30
    while not waiting_rows().exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def taken(**options: Any) -> int:
    with callqueue.permit("r", **options) as permit:
        return permit.attempt_id


def test_one_of_many_that_wait_neither_spins_nor_is_forgotten(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(1)]))
    with callqueue.permit("r"):
        waiters = [Waiter(Options("r").wanted()) for _ in range(6)]
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
        dead = Waiter(Options("r").wanted())
        dead.step()
        long_ago = database.clock("default") - timedelta(seconds=61)
        waiting_rows().update(expires_at_dt=long_ago)
        with pytest.raises(NotNow):
            taken(wait=1.5)
    assert not waiting_rows().exists()
    assert CallQueue.objects.expired().get().pk == dead.pk


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="it locks no rows")
def test_a_permit_that_somebody_has_locked_keeps_back_no_other(rules: Rules) -> None:
    """A pass has its rules in hand: whose row it waits for would stop all that share them."""
    rules(r=Rule(limits=[Concurrency(2)]))
    control.pause("default", "r")
    waiter = Waiter(Options("r").wanted())
    waiter.step()
    control.resume("default", "r")
    with transaction.atomic():
        list(CallQueue.objects.select_for_update().filter(pk=waiter.pk))
        passing, found = in_a_thread(lambda: (pass_now(waiter), waiter.pass_at - waiting.now()))
        passing.join(1)
        other, taken_by_other = in_a_thread(lambda: taken(wait=1.0))
        other.join(10)
    passing.join(10)
    assert isinstance(taken_by_other[0], int)
    assert found[0][0] > 0.005 and found[0][1] > 0.005, "it does not spin"
    assert isinstance(pass_now(waiter), Job)


def test_a_paused_rule_is_not_asked_all_the_time(rules: Rules) -> None:
    rules(r=Rule())
    control.pause("default", "r")
    waiter = Waiter(Options("r").wanted())
    waiter.step()
    pass_now(waiter)
    assert waiter.pass_at - waiting.now() > 0.5
    waiter.withdraw()
    with pytest.raises(NotNow, match="held") as refused:
        taken(wait=0)
    assert refused.value.until is None


def test_what_operators_do_is_minded_by_who_waits(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h", name="l")]))
    taken()
    thread, found = in_a_thread(lambda: taken(wait=60))
    wait_until_it_waits()
    control.pause("default", "r")
    settings.set_rate("default", "l", "2/h")
    time.sleep(0.5)
    assert not found
    control.resume("default", "r")
    thread.join(60)
    assert isinstance(found[0], int), found


def test_a_hold_on_all_queues_is_said(rules: Rules) -> None:
    rules(r=Rule(queues=["a", "b"], limits=[TokenBucket("9/s", burst=9, per="queue")]))
    for queue in ("a", "b"):
        now = database.clock("default")
        Hold.objects.create(
            rule="r", per="queue", value=queue, until=now + timedelta(hours=1), source="provider"
        )
    with pytest.raises(NotNow, match="held") as refused:
        taken(wait=0)
    assert refused.value.until is not None
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


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="it gives none in a transaction")
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
    while Hold.objects.count() < 2 and time.monotonic() - began < 30:
        time.sleep(0.05)
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
        from asgiref.sync import sync_to_async

        await sync_to_async(connections.close_all)()

    asyncio.run(cancelled())
    assert not waiting_rows().exists() and not CallAttempt.objects.open().exists()


def test_an_admitted_permit_makes_few_statements(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/h")]))
    taken()
    with CaptureQueriesContext(connection) as asked:
        taken(wait=0)
    # One asks whether a key is held. MariaDB asks for the version by itself, and SQLite how many rows
    # each update changed.
    most = {"mysql": 18, "sqlite": 20}.get(connection.vendor, 17)
    assert len(asked) <= most, "a permit that is admitted at once costs so many statements"


def test_a_new_process_lets_the_clock_settle_where_a_dispenser_may_have_seen_it_jump(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    ledger_time.forget_readings()
    assert isinstance(Waiter(Options("r", wait=0).wanted()).step(), Job)
    recovery.beat("default", "another")
    ledger_time.forget_readings()
    waiter = Waiter(Options("r", wait=0).wanted())
    pause = waiter.step()
    assert isinstance(pause, float) and 0 < pause <= ledger_time.SETTLED
    later = clocks.monotonic() + ledger_time.SETTLED
    monkeypatch.setattr(ledger_time.watch("default"), "since", later - 2 * ledger_time.SETTLED)
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
    one = Waiter(Options("r", wait=0).wanted())
    monkeypatch.setattr(waiting, "AT_ONCE", 0.1)
    (commit,) = pass_that_commits_late(monkeypatch, one._made_pass)
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
    """It inserts the permit's row while another pass has the rules. A row that comes late would be
    charged, though nobody would begin it.
    """
    rules(r=Rule(limits=[SlidingWindow("9/h")]))
    one, late = Waiter(Options("r").wanted()), list[Any]()
    inserted, commits = one._inserted, pytest.MonkeyPatch()

    def lost() -> None:
        commits.undo()
        late.append(connection.connection)
        connection.connection, connection.closed_in_transaction = None, False
        raise OperationalError("server closed the connection unexpectedly")

    def insert(*given: Any, **more: Any) -> int:
        if not late:
            commits.setattr(connection, "_commit", lost)
        return inserted(*given, **more)

    monkeypatch.setattr(one, "_inserted", insert)
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
