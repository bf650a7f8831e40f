"""How a permit waits: who makes a pass and when, and what a slot means that opens early."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from asgiref.sync import async_to_sync
from django.db import OperationalError, connection
from django.db.models import F
from django.test.utils import CaptureQueriesContext

import callqueue
from callqueue import Concurrency, NotNow, Rule, SlidingWindow, control
from callqueue.dispatch import release_pass
from callqueue.dispatch.next_look import NO_STREAK, when_not_locked
from callqueue.models import CallAttempt, CallQueue
from callqueue.permits import permit, waiting
from callqueue.permits.waiting import LOOK, PART, REST, REVIEW, Waiter, shifted_monotonic
from callqueue.testing import travel
from callqueue.transitions import Job
from tests.support.behaviour import send
from tests.support.waiters import new_waiter, pass_now, refusal, taken, waiting_rows

Rules = Callable[..., None]


def waiter(**options: Any) -> Waiter:
    """One that has made its first pass in vain, and has looked at its row."""
    made = new_waiter(**options)
    assert not isinstance(made.step(), Job)
    made.passed_at = shifted_monotonic() + 100
    assert not isinstance(made.step(), Job)
    made.passed_at = shifted_monotonic()
    return made


def until_next_pass(one: Waiter) -> float:
    return one.next_pass_at - shifted_monotonic()


@pytest.mark.parametrize("per", ["rule", "key"])
def test_who_becomes_the_first_makes_a_pass_at_once(rules: Rules, per: str) -> None:
    rules(r=Rule(limits=[Concurrency(1), SlidingWindow("50/h", per=per)]))
    with callqueue.permit("r"):
        first, other_key, second = waiter(), waiter(key="k"), waiter()
        of_other_keys = 0 if per == "key" else 1
        assert (first.ahead, other_key.ahead, second.ahead) == (0, of_other_keys, 1 + of_other_keys)
        passes = second.passes
        second.step()
        assert second.passes == passes, "it only looks"
        first.withdraw()
        other_key.withdraw()
        second.step()
        second.passed_at = -1e9
        second.step()
        assert second.passes == passes + 1 and second.ahead == 0
        third = waiter()
        CallQueue.objects.filter(pk=second.pk).update(expires_at_dt=F("created_dt"))
        third.step()
        assert third.ahead == 0, "one that died keeps nobody from being the first"


def test_who_gives_up_is_told_when_its_own_call_would_have_gone(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h")]), another=Rule())
    taken()
    one = waiter()
    send("another")
    with pytest.raises(NotNow, match="1/h"):
        one._give_up()


def test_a_row_lives_for_as_long_before_it_is_in_line(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    one = new_waiter()
    monkeypatch.setattr(one, "_get_in_line", lambda at: None)
    one._give_sign_of_life()
    row = waiting_rows().get()
    assert row.expires_at_dt - one.due_at == timedelta(seconds=waiting.ALIVE)


def test_who_has_made_no_pass_withdraws_whoever_has_the_rules_row(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    monkeypatch.setattr(waiting.rule_rows, "try_lock", lambda *_: False)
    new_waiter().withdraw()


def test_who_waits_long_looks_seldom_and_all_together_make_few_passes(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h")]))
    taken()
    waiters = [waiter() for _ in range(8)]
    for one in waiters:
        pause = one.step()
        assert isinstance(pause, float) and pause >= REST[0]
    last = waiters[-1]
    assert last.ahead == 7
    assert 0.75 * 8 * REVIEW[0] < until_next_pass(last) < 8 * 1.25 * REVIEW[1]
    with CaptureQueriesContext(connection) as asked:
        last.step()
    assert len(asked) == 1, "a look is one statement"
    last._opens_at, last._pause_of_pass = last.passed_at + 40, 0.0
    assert last.next_pass_at == pytest.approx(last.passed_at + 8 * 40 / PART)


@pytest.mark.parametrize(("ahead", "looks"), [(0, 1), (7, 1), (16, 2), (64, 8)])
def test_where_a_slot_is_about_to_open_a_few_before_one_make_it_look_no_less_often(
    rules: Rules, ahead: int, looks: int
) -> None:
    rules(r=Rule())
    one = new_waiter()
    one.passes, one.ahead, one.passed_at, one._opens_at = (
        1,
        ahead,
        shifted_monotonic(),
        shifted_monotonic(),
    )
    one._pause_of_pass = 1.0
    assert one._seconds_until_step() == pytest.approx(looks * LOOK)


def test_the_first_of_its_key_goes_by_its_own_slot(rules: Rules) -> None:
    """Those of another key before it are blocked by that, and take nothing of the limit of all."""
    rules(r=Rule(limits=[SlidingWindow("3/10s"), SlidingWindow("1/h", per="key")]))
    with travel() as clock:
        taken(key="a")
        clock.forward(9)
        taken(key="b")
        waiters = [waiter(key="a") for _ in range(3)]
        taken(key="c", wait=0)
        one = waiter(key="d")
        assert until_next_pass(one) < 2
        for other in waiters:
            other.withdraw()


def test_a_pass_that_a_permit_makes_releases_none_that_goes_behind_it(rules: Rules) -> None:
    """Whose code may look at its row a while later: its attempt would be open for nothing."""
    rules(r=Rule(limits=[SlidingWindow("2/5s")]))
    with travel() as clock:
        taken(), taken()
        behind = waiter(priority=4)
        clock.forward(6)
        assert isinstance(pass_now(new_waiter(priority=5)), Job)
        assert waiting_rows().get().pk == behind.pk
        assert isinstance(pass_now(behind), Job)


@pytest.mark.parametrize("how", ["settled", "resumed", "cancelled ahead"])
def test_a_slot_that_opens_early_is_found_soon(rules: Rules, how: str) -> None:
    """Somebody of those who wait makes a pass every few seconds, though the slot is an hour off."""
    rules(r=Rule(limits=[SlidingWindow("10/h", unit="tokens")]))
    before = taken(cost={"tokens": 9})
    ahead = waiter(cost={"tokens": 2}) if how == "cancelled ahead" else None
    if how == "resumed":
        control.pause("default", "r")
    one = waiter(cost={"tokens": 1 if how != "settled" else 2})
    assert until_next_pass(one) <= 2 * 1.25 * REVIEW[1]
    if ahead is not None:
        ahead.withdraw()
        one.passed_at = shifted_monotonic() + 100
        one.step()
        assert until_next_pass(one) <= 101.25 * REVIEW[1], "it is the first now"
    control.resume("default", "r")
    before.settle({"tokens": 1})
    assert isinstance(pass_now(one), Job)


def test_not_now_counts_what_the_permit_costs(rules: Rules) -> None:
    """Behind one that costs little, what costs all of the limit has its turn a window later."""
    rules(r=Rule(limits=[SlidingWindow("4/h", unit="tokens")]))
    with travel() as clock:
        at = clock.now()
        taken(cost={"tokens": 4})
        ahead, until = waiter(cost={"tokens": 1}), {}
        for tokens in (1, 4):
            until[tokens] = refusal(cost={"tokens": tokens}).until - at
        ahead.withdraw()
    assert timedelta(hours=1) <= until[1] < timedelta(hours=1.1)
    assert timedelta(hours=2) <= until[4] < timedelta(hours=2.2)


def locked_out(*_: Any, **__: Any) -> release_pass.Pass:
    return release_pass.Pass(next_look=when_not_locked(NO_STREAK))


def test_one_that_does_not_wait_has_a_slot_from_the_pass_that_was_in_its_way_or_gives_up_soon(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule(limits=[SlidingWindow("9/h")]))
    with monkeypatch.context() as patch:
        patch.setattr(release_pass, "release", locked_out)
        one = new_waiter(wait=0)
        assert not isinstance(one.step(), Job)
    taken(wait=0)
    one.passed_at = shifted_monotonic() + 100
    assert isinstance(one.step(), Job)
    monkeypatch.setattr(release_pass, "release", locked_out)
    with travel() as clock:
        before = clock.now()
        refusal("in the way")
        assert clock.now() - before < timedelta(seconds=1.5)
    assert not waiting_rows().exists()


@pytest.mark.parametrize("waits", ["permits", "calls", "both"])
def test_not_now_counts_what_waits_for_the_same_key(rules: Rules, waits: str) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h", per="key"), SlidingWindow("50/h")]))
    with travel() as clock:
        at = clock.now()
        taken(key="a")
        ahead = [waiter(key="a")] if waits != "calls" else []
        if waits != "permits":
            send("r", key="a")
        until, hours = refusal(key="a", priority=0).until, 3 if waits == "both" else 2
        assert timedelta(hours=hours) < until - at < timedelta(hours=1.05 * hours)
        taken(key="b", wait=0)
        for one in ahead:
            one.withdraw()


def waiter_whose_pass_lost_its_answer(monkeypatch: pytest.MonkeyPatch) -> Waiter:
    one, release = new_waiter(), release_pass.release

    def with_its_answer_lost(*given: Any, **how: Any) -> None:
        release(*given, **how)
        raise OperationalError("the connection was cut")

    with monkeypatch.context() as cut:
        cut.setattr(release_pass, "release", with_its_answer_lost)
        with pytest.raises(OperationalError):
            one._make_pass()
    return one


@pytest.mark.parametrize(
    "when", ["before its next pass", "in its next pass", "in one that is undone"]
)
def test_a_pass_whose_commit_comes_through_late_is_no_second_permit(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A permit that stood anew as soon as the rows are free would wait for its own charge."""
    rules(r=Rule(limits=[Concurrency(1)]))
    is_undone = when == "in one that is undone"
    with callqueue.permit("r") if is_undone else nullcontext():
        one = waiter_whose_pass_lost_its_answer(monkeypatch)
        found, unseen = one._find_pk, [None, None] if when == "in its next pass" else [None]
        monkeypatch.setattr(one, "_find_pk", lambda: unseen.pop() if unseen else found())
        with monkeypatch.context() as patch:
            if is_undone:
                patch.setattr(release_pass, "remember", Mock(side_effect=release_pass.Outdated))
            else:
                patch.setattr(release_pass, "_lock", lambda *_: None)
            one._make_pass()
        if is_undone:
            pass_now(one)
            pass_now(one)
            assert waiting_rows().count() == 1
        else:
            one._give_sign_of_life()
            assert isinstance(pass_now(one), Job)
            assert CallQueue.objects.count() == 1
    if is_undone:
        assert isinstance(pass_now(one), Job)


def test_a_row_that_somebody_had_locked_at_first_has_its_keys_turn_all_the_same(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No dispenser may be there to look for keys that nobody gave news of."""
    rules(r=Rule(limits=[SlidingWindow("9/h", per="key")]))
    with callqueue.permit("r", key="other"):
        one, is_kept_alive = new_waiter(key="k"), Waiter._keep_alive
    with monkeypatch.context() as others:
        others.setattr(release_pass, "_lock", lambda *_: None)
        others.setattr(one, "_keep_alive", lambda *_: False)
        one.step()
        others.setattr(one, "_keep_alive", lambda *given: is_kept_alive(one, *given))
        one._next_sign_at = 0.0
        one.step()
    release_pass.release("default", ["r"])
    assert CallAttempt.objects.filter(call_id=one.pk).exists()
    one.withdraw()


def test_who_is_charged_just_as_he_gives_up_has_his_permit(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h")]))
    taken()
    one, charged = waiter(), Mock()
    monkeypatch.setattr(one, "_delete_row", lambda pk: False)
    monkeypatch.setattr(one, "_look_at_row", lambda: charged)
    assert one._give_up() is charged


def test_a_coroutine_sleeps_until_its_slot(rules: Rules, monkeypatch: pytest.MonkeyPatch) -> None:
    rules(r=Rule())
    slept, left = list[float](), iter([0.5, 0.2, 0.0])

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def take() -> None:
        async with callqueue.apermit("r"):
            pass

    monkeypatch.setattr(Waiter, "seconds_until_slot", lambda _: next(left))
    monkeypatch.setattr(permit, "_sleep", sleep)
    async_to_sync(take)()
    assert slept[-2:] == [0.5, 0.2]
