"""Permits as people hold them wrong, and as requests, loops and frameworks end them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from asgiref.sync import async_to_sync, sync_to_async

import callqueue
from callqueue import Breaker, Concurrency, Rule
from callqueue.exceptions import InvalidCall, UnknownRule
from callqueue.models import CallAttempt, Hold
from callqueue.permits.asking import Options
from callqueue.permits.waiting import Waiter
from tests.support.waiters import pass_now
from tests.support.waiters import waiting as waiting_rows

Rules = Callable[..., None]


def test_one_permit_object_entered_twice_ends_what_each_entered(rules: Rules) -> None:
    rules(r=Rule())
    shared = callqueue.permit("r")

    async def one(number: int, entered: asyncio.Event, leave: asyncio.Event) -> int:
        async with both as permit:
            entered.set()
            await leave.wait()
            permit.settle(number)
            return permit.attempt_id

    both = callqueue.apermit("r")

    async def crossed() -> tuple[int, int]:
        entered, leave = [asyncio.Event() for _ in "12"], [asyncio.Event() for _ in "12"]
        tasks = []
        for n in (0, 1):
            tasks.append(asyncio.ensure_future(one(n + 1, entered[n], leave[n])))
            await entered[n].wait()
        leave[0].set()
        first = await tasks[0]
        open_now = await sync_to_async(
            CallAttempt.objects.open().values_list("pk", flat=True).get
        )()
        assert open_now != first
        leave[1].set()
        return first, await tasks[1]

    first, second = async_to_sync(crossed)()
    assert CallAttempt.objects.get(pk=first).cost == 1
    assert CallAttempt.objects.get(pk=second).cost == 2
    with shared as outer, shared as inner:
        assert outer.attempt_id != inner.attempt_id
    assert not CallAttempt.objects.open().exists()


def test_a_permit_is_left_once_and_by_any_thread(rules: Rules) -> None:
    rules(r=Rule())
    shared = callqueue.permit("r")
    shared.__enter__()
    shared._entered[:] = [("another thread", permit) for _, permit in shared._entered]
    shared.__exit__(None, None, None)
    assert not CallAttempt.objects.open().exists()
    with pytest.raises(RuntimeError, match="more often"):
        shared.__exit__(None, None, None)


def test_what_cannot_be_decorated_is_refused_at_once() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    for function in (generator, async_generator, classmethod(lambda cls: 1), 5):
        with pytest.raises(TypeError, match="permitted"):
            callqueue.permitted("r")(function)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="permitted"):
        callqueue.permitted(lambda: 1)  # type: ignore[arg-type]


def test_what_is_decorated_is_in_the_block_whatever_it_is(rules: Rules) -> None:
    rules(r=Rule())

    class Client:
        @classmethod
        @callqueue.permitted("r", label="class")
        def of_class(cls) -> int:
            return CallAttempt.objects.open().count()

        @staticmethod
        @callqueue.permitted("r")
        def static() -> int:
            return CallAttempt.objects.open().count()

        @callqueue.permitted("r", key=lambda self: self.name)
        async def method(self) -> int:
            return await sync_to_async(CallAttempt.objects.open().count)()

        async def __call__(self, _: int) -> int:
            return await self.method()

        name = "a"

    assert Client.of_class() == Client.static() == 1
    assert async_to_sync(Client().method)() == 1
    partial = callqueue.permitted("r")(functools.partial(Client().__call__, 1))
    assert async_to_sync(partial)() == async_to_sync(callqueue.permitted("r")(Client()))(1) == 2
    with pytest.raises(TypeError, match="permitted"):
        callqueue.permitted("r")(lambda: Client().method())()
    assert not CallAttempt.objects.open().exists()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError]
)
def test_who_leaves_the_block_for_a_reason_of_his_own_tells_nothing_of_the_provider(
    rules: Rules, error: type[BaseException]
) -> None:
    rules(r=Rule(breaker=Breaker(failures=2)))
    for _ in range(3):
        with pytest.raises(error), callqueue.permit("r"):
            raise error
    assert set(CallAttempt.objects.values_list("outcome", "error_message")) == {
        ("gave up", error.__name__)
    }
    assert not Hold.objects.exists()


def test_a_hold_is_laid_whatever_its_words_are_and_lasts_no_longer_than_the_rule_allows(
    rules: Rules,
) -> None:
    rules(r=Rule())
    with callqueue.permit("r", label="\0\ud800" + "x" * 300) as permit:
        permit.hold(30, "why\0 \ud800" + "x" * 5000)
    assert Hold.objects.get().reason.startswith("why ")
    row = CallAttempt.objects.get()
    assert row.outcome == "throttled" and len(row.call.path) == 100
    Hold.objects.all().delete()
    with callqueue.permit("r") as permit:
        permit.hold(60, ValueError("out of credit"))  # type: ignore[arg-type]
        permit.hold(90, None)  # type: ignore[arg-type]
    assert Hold.objects.filter(reason="").exists()
    for wrong in (-1, "30", float("nan"), None, True):
        with pytest.raises(ValueError, match="hold"):
            permit.hold(wrong)  # type: ignore[arg-type]
    for until in (float("inf"), 1e300, 10**30):
        Hold.objects.all().delete()
        with callqueue.permit("r") as permit:
            permit.hold(until, "for ever")
        hold = Hold.objects.get()
        assert hold.until is not None and (hold.until - hold.began_at).total_seconds() < 21700


def test_a_rule_that_is_gone_by_the_time_of_the_block_is_named(rules: Rules) -> None:
    """Settings that were changed in a running process, as tests do."""
    rules(r=Rule(limits=[Concurrency(1)]), s=Rule())
    before = callqueue.permit("r")
    with before:
        waiter = Waiter(Options("r").wanted())
        waiter.step()
        rules(s=Rule())
        with pytest.raises(UnknownRule, match="'s'"):
            pass_now(waiter)
        waiter.withdraw()
    with pytest.raises(UnknownRule, match="'s'"), before:
        pytest.fail("without a rule")
    assert not waiting_rows().exists() and not CallAttempt.objects.open().exists()


def test_told_twice_or_too_late_changes_nothing(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(1)]))
    with callqueue.permit("r") as permit:
        permit.sent()
        permit.sent()
    permit.sent()
    row = CallAttempt.objects.get()
    assert row.sent_at is not None and row.finished_at is not None
    assert row.sent_at <= row.finished_at
    with pytest.raises(InvalidCall):
        permit.settle(-1)


def test_an_interrupted_wait_leaves_nothing_charged(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule(limits=[Concurrency(1)]))
    with monkeypatch.context() as patch:
        patch.setattr(Waiter, "_taken_up", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), callqueue.permit("r"):
            pytest.fail("interrupted")
    with callqueue.permit("r", wait=0):
        pass
    assert not waiting_rows().exists()


def test_a_process_that_stood_still_past_its_lease_takes_another_permit(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    real, lost = Waiter._taken_up, iter([1000.0, 0.0])

    def stood_still(self: Waiter, begun: Any) -> Any:
        job = real(self, begun)
        job.lease_ends -= next(lost)
        return job

    monkeypatch.setattr(Waiter, "_taken_up", stood_still)
    with callqueue.permit("r") as permit:
        assert CallAttempt.objects.count() == 2
    assert CallAttempt.objects.latest("pk").pk == permit.attempt_id
