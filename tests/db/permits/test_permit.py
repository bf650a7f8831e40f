"""A permit is a call that its block makes: charged, shown and ended as calls are."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.urls import reverse
from django.utils import timezone

import callqueue
from callqueue import Breaker, Concurrency, NotNow, Rule, SlidingWindow, TokenBucket, control
from callqueue.dispatch import release_pass
from callqueue.exceptions import CallQueueError, IllegalTransition, InvalidCall, UnknownRule
from callqueue.history import audit
from callqueue.ledger import settings
from callqueue.look import look
from callqueue.maintenance import cleanup, recovery
from callqueue.models import CallAttempt, CallQueue, Hold, KeyNews, OpinionState
from callqueue.permits import waiting
from callqueue.permits.waiting import Waiter
from callqueue.testing import assert_call_sent, run_callqueue, travel
from callqueue.transitions import Job
from tests.support.behaviour import Vendor, release, send
from tests.support.dispensers import Process
from tests.support.waiters import new_waiter, pass_now, refusal, taken, waiting_rows

Rules = Callable[..., None]
SECOND = timedelta(seconds=1)


def test_a_permit_is_a_call_of_its_own_method_and_ends_as_its_block_does(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/h")], priority=3))
    with callqueue.permit("r", label="refund") as permit:
        row = CallAttempt.objects.get(pk=permit.attempt_id)
        assert row.finished_at is None and row.started_at is not None and row.number == 1
        call = row.call
        assert call.status == CallQueue.Status.DISPATCHED and call.dispatched_at_dt is not None
        assert call.call_data == {"method": "permit", "params": {"label": "refund"}}
        assert (call.method, call.path, call.priority) == ("permit", "refund", 4)
    row.refresh_from_db()
    call.refresh_from_db()
    assert row.outcome == CallAttempt.Outcome.SUCCEEDED and row.finished_at is not None
    assert call.status == CallQueue.Status.DONE and call.finished_at_dt is not None
    with pytest.raises(ValueError, match="secret"), callqueue.permit("r"):
        raise ValueError("the secret")
    row = CallAttempt.objects.latest("pk")
    assert row.outcome == CallAttempt.Outcome.ERRORED and row.error_message == "ValueError"
    assert row.call.status == CallQueue.Status.FAILED and row.call.error_message == "ValueError"


def test_permits_and_calls_are_charged_to_the_same_limit(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/h")]))
    taken()
    send("r")
    send("r")
    with travel():
        run_callqueue()
        assert len(remote.requests) == 1
        refused = refusal()
    assert "2/h" in refused.reason and isinstance(refused, CallQueueError)


def test_a_permit_waits_by_the_clock_of_the_test(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h")]))
    with travel() as clock:
        taken()
        before = clock.now()
        with callqueue.permit("r"):
            waited = clock.now() - before
        assert timedelta(minutes=59) < waited < timedelta(minutes=63)
        refusal(wait=60)
    assert CallQueue.objects.count() == 2


def test_a_permit_lays_a_hold_that_calls_and_permits_mind(rules: Rules, remote: Vendor) -> None:
    """On its key, or on all of its rule."""
    rules(r=Rule(limits=[SlidingWindow("9/s", per="key")]))
    for scope, is_held in ((None, False), ("rule", True)):
        with callqueue.permit("r", key="a" if scope is None else "c") as permit:
            permit.hold(30, "429", scope=scope)
        send("r", key="a")
        with travel():
            assert run_callqueue() == 0
        refused = refusal("held", key="a")
        assert refused.until > timezone.now() + 25 * SECOND
        refusal("held", key="b") if is_held else taken(key="b", wait=0)
    assert set(Hold.objects.values_list("source", flat=True)) == {"provider"}
    assert CallAttempt.objects.filter(outcome=CallAttempt.Outcome.THROTTLED).count() == 2


def test_in_flight_is_what_is_in_the_block(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(1)]))
    with callqueue.permit("r"):
        assert refusal().until is None
    taken(wait=0)


def test_higher_priority_goes_first_and_equals_by_due_time(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h")]))
    send("r")
    assert refusal(priority=0).reason, "a call was due before"
    taken(wait=0)  # one above the rule's
    assert not remote.requests


@pytest.mark.parametrize("own", ["3/h", "1/h"])
@pytest.mark.usefixtures("trusted_workers")
def test_permits_go_on_while_dispensers_have_other_settings(rules: Rules, own: str) -> None:
    """In a deploy the processes that take permits are older than the dispensers, or newer."""
    rules(r=Rule(limits=[SlidingWindow(own)]))
    other = Process("other", r=Rule(limits=[SlidingWindow("2/h")]))
    other.joins()
    for _ in range(min(2, int(own[0]))):
        taken(wait=0)
    assert "is used up" in refusal().reason
    send("r")
    assert other.goes() == {}, "the stricter holds for both"


ACCOUNT = SlidingWindow("1/h", name="account")
TOGETHER = {"a": Rule(limits=[ACCOUNT]), "b": Rule(limits=[ACCOUNT])}
APART = {"a": Rule(limits=[ACCOUNT]), "b": Rule()}


@pytest.mark.usefixtures("trusted_workers")
def test_dispensers_end_what_only_such_a_process_charged_and_it_comes_again(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(**TOGETHER)
    monkeypatch.setattr(settings, "SILENCE", 0.0)
    apart = Process("apart", **APART)
    apart.joins()
    first = new_waiter("b", wait=0)
    assert isinstance(first.step(), Job)
    CallAttempt.objects.all().delete()
    for _ in range(3):  # one is to hear of it, one to see that it has fallen silent
        assert apart.goes() == {}
    assert OpinionState.objects.filter(lapsed_at=None).count() == 1
    again = new_waiter("b", wait=0)
    assert not isinstance(again.step(), Job), "its settings do not count any more"
    assert isinstance(pass_now(again), Job)
    assert OpinionState.objects.filter(lapsed_at=None).count() == 2
    send("a")
    assert apart.goes() == {}


def test_settings_of_the_past_are_forgotten_without_any_dispenser(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SILENCE", 0.0)
    for number in range(3):
        rules(a=Rule(limits=[SlidingWindow(f"{number + 50}/h", name="account")]))
        monkeypatch.setattr(waiting, "_parties", {})  # another process
        for _ in range(3):
            monkeypatch.setattr(settings, "SIGN", 0.0)
            waiter = new_waiter("a", wait=0)
            waiter.step()
        assert OpinionState.objects.filter(lapsed_at=None).count() == 1


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_permit_that_was_taken_for_dead_waits_on(rules: Rules, is_deleted: bool) -> None:
    """A clock that was set a day forward makes every waiter seem dead."""
    rules(r=Rule(limits=[Concurrency(1)]))
    with callqueue.permit("r"):
        waiter = new_waiter()
        assert not isinstance(waiter.step(), Job)
        due = waiting_rows().get().due_at_dt
        if is_deleted:
            waiting_rows().delete()
        else:
            waiting_rows().update(expires_at_dt=due)
            assert recovery.expire("default") == 1
        pass_now(waiter)
        pass_now(waiter)
        assert waiting_rows().get().due_at_dt == due
    assert isinstance(pass_now(waiter), Job)


@pytest.mark.parametrize("lives", [False, True])
def test_a_permit_that_was_charged_and_not_begun_waits_on_if_its_waiter_says_so(
    rules: Rules, lives: bool
) -> None:
    """The clock was set back meanwhile: it would be charged again and again for a dead waiter."""
    rules(r=Rule(limits=[Concurrency(1)]))
    with callqueue.permit("r"):
        waiter = new_waiter()
        assert not isinstance(waiter.step(), Job)
    release()
    (charged,) = CallQueue.objects.dispatched()
    CallQueue.objects.update(expires_at_dt=timezone.now() + timedelta(hours=2))
    with travel() as clock:
        clock.forward(301)
        if lives:
            assert recovery.void_unbegun("default") == 1
            assert isinstance(pass_now(waiter), Job)
        else:
            release()
            assert not CallAttempt.objects.open().exists()
            charged.refresh_from_db()
            assert charged.status == CallQueue.Status.EXPIRED


def test_permits_in_flight_are_lost_with_their_lease(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(1)], on_lost="retry"))
    context = callqueue.permit("r", lease=5)
    context.__enter__()
    with travel() as clock:
        clock.forward(6)
        taken(wait=10)
    for end in (lambda: None, lambda: context.__exit__(None, None, None)):
        end()
        said = CallAttempt.objects.order_by("pk").values_list("outcome", "call__status")[0]
        assert said == ("lost", CallQueue.Status.UNKNOWN), "perhaps its request has left"


def test_no_news_is_left_of_keys_that_take_no_turns(rules: Rules) -> None:
    """Where no dispenser runs nobody takes it. A hold on a key has all of its rule take turns."""
    rules(r=Rule(limits=[SlidingWindow("10/s")]))
    for key in ("a", "b"):
        taken(key=key, wait=0)
    assert not KeyNews.objects.exists()
    control.pause("default", "r", key="held")
    for key in ("c", "", "d", ""):
        taken(key=key, wait=0)
    refusal(key="held")
    assert not KeyNews.objects.exists()


def test_who_waits_ends_what_died_in_its_block_or_unbegun_though_other_slots_open(
    rules: Rules,
) -> None:
    """Perhaps no dispenser does so, and the limit would be the smaller by it for ever."""
    rules({"LEASE": {"RELEASE": 1}}, r=Rule(limits=[SlidingWindow("4/s")]))
    with travel() as clock:
        send("r")
        release()
        for _ in range(2):
            assert isinstance(new_waiter(lease=0.5).step(), Job)
        clock.forward(5)
        for _ in range(8):
            taken()
    assert not CallAttempt.objects.open().exists()


def test_what_is_wrong_is_said_at_once(rules: Rules) -> None:
    rules(r=Rule(hosts=["api.example.com"], limits=[SlidingWindow("5/s")]))
    with pytest.raises(UnknownRule, match="'r'"):
        callqueue.permit("rr")
    wrong = {"cost": 6, "lease": 0, "priority": 1e9, "label": 1}
    for field, value in [*wrong.items(), ("wait", -1), ("wait", "1")]:
        with pytest.raises(InvalidCall) as refused:
            callqueue.permit("r", **{field: value})  # type: ignore[arg-type]
        assert refused.value.field == field
    with pytest.raises(InvalidCall, match="url: names no host"):
        callqueue.permit(url="api.example.com/x")
    for host, rule in (("api.example.com", "r"), ("else.example.com", "default")):
        assert taken(None, url=f"https://{host}/x").job.attempt.rule == rule


def test_a_function_takes_a_permit_each_time(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/h", per="key")]))

    @callqueue.permitted("r", key=lambda order, **_: order, cost=lambda order, n=1: n, wait=0)
    def refund(order: str, n: int = 1) -> str:
        return order * n

    assert refund("a", n=2) == "aa" and refund("b") == "b"
    with pytest.raises(NotNow):
        refund("a")
    (label,) = set(CallQueue.objects.values_list("path", flat=True))
    assert "refund" in label


def test_a_waiting_permit_is_granted_by_whoever_makes_a_pass(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h")]))
    with travel() as clock:
        taken()
        waiter = new_waiter()
        assert not isinstance(waiter.step(), Job)
        send("r")
        clock.forward(hours=1.1)
        waiting_rows().update(expires_at_dt=clock.now() + 60 * SECOND)
        run_callqueue()
        assert not remote.requests, "the permit was there before the call"
        granted = CallAttempt.objects.latest("pk")
        assert granted.started_at is None
        assert waiter.step().attempt.id == granted.pk
        assert CallQueue.objects.new().count() == 1


def test_the_kit_says_which_permits_were_taken(rules: Rules) -> None:
    rules(r=Rule(), s=Rule())
    sent = partial(assert_call_sent, method="permit")
    sent(count=0)
    with callqueue.permit("r", key={"a": "1"}, label="refund", cost=2):
        sent(rule="r", status="dispatched")
    sent(rule="r", key={"a": "1"}, label="refund", cost=2, status="done", count=1)
    assert_call_sent(count=0)
    with pytest.raises(AssertionError, match="label='refund'"):
        sent(label="other")
    with pytest.raises(AssertionError, match="2 times, but 1"):
        sent(count=2)


def test_permits_are_shown_audited_and_kept_as_calls_and_forecasts_know_them(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h")]))
    with callqueue.permit("r", label="refund"):
        call = send("r")
        waiters = [new_waiter(priority=n) for n in (0, 1)]
        for one in waiters:
            one.step()
        seen = look("default")
        shown = seen.rule("r")
        assert call.forecast().position == 2
        for one in waiters:
            one.withdraw()
        assert call.forecast().position == 1
    assert (shown.flight.count, shown.waits.ready, shown.limits[0].used) == (1, 3, 1)
    assert not seen.workers, "who takes permits is no worker of a queue"
    limits = audit.audit("default", since=timedelta(hours=1)).findings
    assert [one.highest for one in limits if one.rule == "r"] == [1]
    with travel(days=6):
        assert cleanup.clean("default").calls == 0
    with travel(days=8):
        cleaned = cleanup.clean("default")
        assert (cleaned.calls, cleaned.attempts) == (1, 1)


def test_a_permit_is_not_sent_and_not_requeued_nor_does_its_page_offer_it(
    rules: Rules, admin_client: Any
) -> None:
    rules(r=Rule())
    with pytest.raises(InvalidCall, match="permit"):
        CallQueue.objects.send({"method": "Permit", "params": {}}, rule="r")
    with pytest.raises(ValueError, match="x"), callqueue.permit("r", label="refund"):
        raise ValueError("x")
    call = CallQueue.objects.get()
    with pytest.raises(IllegalTransition, match="permit"):
        call.requeue()
    assert CallQueue.objects.all().requeue(again=True) == 0
    page = admin_client.get(reverse("admin:callqueue_callqueue_change", args=[call.pk]))
    text = page.content.decode()
    assert "refund" in text and "ValueError" in text
    assert f"{call.pk}/requeue/" not in text and f"{call.pk}/edit" not in text
    listed = admin_client.get(reverse("admin:callqueue_callqueue_changelist"))
    assert b"permit refund" in listed.content


@pytest.mark.parametrize("is_charged", [False, True])
def test_a_permit_that_waits_may_be_cancelled_and_gives_its_charge_back(
    rules: Rules, is_charged: bool
) -> None:
    rules(r=Rule(limits=[Concurrency(1)]))
    with callqueue.permit("r"):
        waiter = new_waiter()
        waiter.step()
        if not is_charged:
            waiting_rows().get().cancel()
    if is_charged:
        release_pass.release("default", ["r"])
        CallQueue.objects.dispatched().get().cancel()
    taken(wait=0)
    with pytest.raises(NotNow, match="cancelled") as refused:
        pass_now(waiter)
    assert refused.value.until is None
    assert CallQueue.objects.cancelled().count() == 1


# --- Held wrong, and ended as requests, loops and frameworks end them


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
        assert (await sync_to_async(CallAttempt.objects.open().get)()).pk != first
        leave[1].set()
        return first, await tasks[1]

    assert [CallAttempt.objects.get(pk=pk).cost for pk in async_to_sync(crossed)()] == [1, 2]
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
        waiter = new_waiter()
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
        patch.setattr(Waiter, "_accept_begun", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), callqueue.permit("r"):
            pytest.fail("interrupted")
    taken(wait=0)
    assert not waiting_rows().exists()


def test_a_process_that_stood_still_past_its_lease_takes_another_permit(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    real, lost = Waiter._accept_begun, iter([1000.0, 0.0])

    def stood_still(self: Waiter, begun: Any) -> Any:
        job = real(self, begun)
        job.lease_ends_at -= next(lost)
        return job

    monkeypatch.setattr(Waiter, "_accept_begun", stood_still)
    with callqueue.permit("r") as permit:
        assert CallAttempt.objects.count() == 2
    assert CallAttempt.objects.latest("pk").pk == permit.attempt_id


# --- What it costs after all: never less is charged than was spent

TOKENS = {
    "window": SlidingWindow("100/h", unit="tokens"),
    "bucket": TokenBucket("100/h", burst=100, unit="tokens"),
    "tallied window": SlidingWindow("100/h", unit="tokens", per="key"),
    "tallied bucket": TokenBucket("100/h", burst=100, unit="tokens", per="key"),
}
LIMITS = pytest.mark.parametrize("limit", TOKENS.values(), ids=TOKENS.keys())


def tokens(count: int) -> Any:
    return callqueue.permit("r", key="a", cost={"tokens": count}, wait=0)


def free(least: int, most: int) -> bool:
    """Whether so many tokens are free: `least` go now, and not `most`."""
    with pytest.raises(NotNow), tokens(most):
        pytest.fail("over the limit")
    with tokens(least) as permit:
        permit.settle({"tokens": 0})
    return True


@LIMITS
def test_a_cost_told_again_and_again_is_charged_as_it_was_told_last_however_late(
    rules: Rules, limit: Any
) -> None:
    rules(r=Rule(limits=[limit]))
    with travel() as clock:
        with tokens(10) as permit:
            permit.settle({"tokens": 90})
        for told in (20, 60, 30):
            permit.settle({"tokens": told})
        assert free(least=70, most=72)
        for told in (80, 30, 80):  # above the charge, and what is charged
            permit.settle({"tokens": told})
        assert free(least=20, most=22)
        permit.settle({"tokens": 0})
        # in a block that outlives its lease
        context = callqueue.permit("r", key="a", cost={"tokens": 10}, lease=1)
        permit = context.__enter__()
        clock.forward(2)
        recovery.recover("default")
        assert CallAttempt.objects.get(pk=permit.attempt_id).outcome == "lost"
        permit.settle({"tokens": 80})
        context.__exit__(None, None, None)
        assert free(least=20, most=23)
        permit.settle({"tokens": 50})
        assert free(least=50, most=53)


def test_what_the_answer_adds_ages_from_the_answer(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("100/m", unit="tokens")]))
    with travel() as clock:
        with tokens(10) as permit:
            permit.sent()
            clock.forward(50)
            permit.settle({"tokens": 90})
        clock.forward(15)
        assert free(least=20, most=25)  # what was sent has aged, what the answer added has not
        permit.settle({"tokens": 95})
        assert free(least=5, most=25)
        clock.forward(50)
        with tokens(100):
            pass
