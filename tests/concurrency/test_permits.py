"""Permits of many threads, each with a connection of its own, beside dispensers: never over the
limit, in their turn, and none left behind.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction

import callqueue
from callqueue import Concurrency, NotNow, Rule, SlidingWindow, TokenBucket
from callqueue.dispatch.dispenser import Dispenser
from callqueue.exceptions import CallQueueError
from callqueue.execution import executor
from callqueue.models import CallAttempt, CallQueue
from callqueue.permits.asking import Options
from callqueue.permits.waiting import Waiter
from callqueue.transitions import Job
from tests.support.behaviour import Vendor, send
from tests.support.recorder import highest_in_window
from tests.support.waiters import waiting as waiting_rows

Rules = Callable[..., None]


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """The work of so many threads at once."""

    def one(number: int) -> Any:
        try:
            return work(number)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


@pytest.mark.parametrize(
    ("limit", "n", "window"),
    [(SlidingWindow("5/s"), 5, 1.0), (TokenBucket("5/s", burst=5), 10, 1.0)],
    ids=["window", "bucket"],
)
def test_no_window_has_more_than_the_limit(rules: Rules, limit: Any, n: int, window: float) -> None:
    rules(r=Rule(limits=[limit]))
    arrivals: list[float] = []

    def work(number: int) -> None:
        for _ in range(3):
            with callqueue.permit("r", label=f"thread {number}"):
                arrivals.append(time.monotonic())

    together(5, work)
    assert len(arrivals) == CallAttempt.objects.count() == 15
    assert highest_in_window(sorted(arrivals), window) <= n
    assert not waiting_rows().exists()
    assert not CallAttempt.objects.open().exists()


def test_never_more_in_flight_than_the_limit(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(2)]))
    inside, most, lock = [0], [0], threading.Lock()

    def work(_: int) -> None:
        for _ in range(2):
            with callqueue.permit("r"):
                with lock:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                time.sleep(0.02)
                with lock:
                    inside[0] -= 1

    together(4, work)
    assert most[0] <= 2 and CallAttempt.objects.count() == 8


def test_permits_and_queued_calls_share_the_limit_and_both_go_on(
    rules: Rules, remote: Vendor
) -> None:
    rules(r=Rule(limits=[SlidingWindow("10/s")]))
    arrivals: list[float] = []
    remote.answers["/"] = lambda: arrivals.append(time.monotonic()) or 200
    for _ in range(20):
        send("r")

    def execute(using: str, messages: Any) -> bool:
        for _, ids in messages:
            executor.execute(using, ids)
        return True

    stop = threading.Event()

    def dispense() -> None:
        try:
            Dispenser(publish=execute).run(stop=stop, seconds=60)
        finally:
            connections.close_all()

    dispenser = threading.Thread(target=dispense)
    dispenser.start()

    def work(_: int) -> None:
        for _ in range(5):
            with callqueue.permit("r"):
                arrivals.append(time.monotonic())

    try:
        together(4, work)
        until = time.monotonic() + 60
        while (
            CallQueue.objects.done().filter(method="get").count() < 20 and time.monotonic() < until
        ):
            time.sleep(0.05)
    finally:
        stop.set()
        dispenser.join()
    assert len(arrivals) == CallAttempt.objects.count() == 40
    assert highest_in_window(sorted(arrivals), 1.0) <= 10


def test_an_urgent_permit_goes_before_the_backlog_and_an_equal_one_after_it(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1000/h")]))
    CallQueue.objects.send_many(
        [{"method": "get", "params": {"url": "https://api.example.com/"}}] * 1200, rule="r"
    )
    with callqueue.permit("r", wait=0):
        pass
    with pytest.raises(NotNow), callqueue.permit("r", wait=0, priority=0):
        pytest.fail("before the backlog")


def test_a_rolled_back_transaction_takes_no_charge_with_it(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/h")]))
    if connection.vendor == "sqlite":
        with (
            transaction.atomic(),
            pytest.raises(CallQueueError, match="SQLite"),
            callqueue.permit("r"),
        ):
            pytest.fail("on SQLite")
        return
    with pytest.raises(ZeroDivisionError), transaction.atomic():  # noqa: PT012
        CallQueue.objects.count()
        with callqueue.permit("r") as permit:
            permit.sent()
            permit.settle(2)
        raise ZeroDivisionError
    assert CallAttempt.objects.get().cost == 2
    assert CallAttempt.objects.get().finished_at is not None


def test_a_waiter_that_dies_is_granted_no_more_than_one_slot(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(1)]))
    with callqueue.permit("r"):
        dead = Waiter(Options("r").wanted())
        assert not isinstance(dead.step(), Job)
    waiting_rows().update(expires_at_dt=CallAttempt.objects.get().released_at)
    with callqueue.permit("r", wait=30):
        pass
    dead.withdraw()
    assert not waiting_rows().exists()


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


def test_a_coroutine_that_is_cancelled_while_it_waits_leaves_nothing(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h")]))

    async def cancelled() -> None:
        async with callqueue.apermit("r"):
            pass
        waiting = asyncio.ensure_future(_enter())
        await asyncio.sleep(0.3)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await sync_to_async(connections.close_all)()

    async def _enter() -> None:
        async with callqueue.apermit("r"):
            pytest.fail("over the limit")

    asyncio.run(cancelled())
    assert not waiting_rows().exists() and CallAttempt.objects.count() == 1
