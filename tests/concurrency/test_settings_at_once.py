"""Dispensers beside one that is slow or frozen, or has other settings, and beside locked rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from callqueue import Rule, SlidingWindow, control, database
from callqueue.dispatch import chores, release_pass
from callqueue.dispatch.dispenser import Dispenser
from callqueue.dispatch.next_look import REVIEW
from callqueue.dispatch.release_pass import release
from callqueue.ledger import holds, ledger_time, ready_calls, rule_rows, settings
from callqueue.ledger.transaction import transaction as timed
from callqueue.models import CallAttempt, CallQueue, LedgerState, RuleState
from tests.support.behaviour import send
from tests.support.dispensers import Process
from tests.support.locking import (
    beside_a_frozen,
    fresh,
    held_by_a_host,
    together,
    until_one_waits_for_a_lock,
    waiting_for_nobody,
)

URL = {"method": "get", "params": {"url": "http://vendor.example/"}}
pytestmark = pytest.mark.usefixtures("row_locks")
Rules = Callable[..., None]
LOOSE, STRICT = Rule(limits=[SlidingWindow("40/s")]), Rule(limits=[SlidingWindow("2/s")])


def has_the_row(freeze: Any) -> None:
    """A pass over rule a."""
    with database.writing("default"):
        assert database.locked(RuleState.objects.filter(rule="a")).get()
        freeze()


def test_a_changed_rate_waits_for_passes_that_go_by_the_old_one_and_not_for_ever(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(a=LOOSE)
    monkeypatch.setattr(settings, "PATIENCE", 0.5)
    with beside_a_frozen(has_the_row) as went_on:
        began = time.monotonic()
        settings.set_rate("default", "a#0", "1/s")
        assert time.monotonic() - began >= 0.5 and not went_on


def test_no_pass_goes_on_with_a_part_of_its_groups_rows(rules: Rules) -> None:
    """What whoever has the others charges is not to be seen yet."""
    shared = Rule(limits=[SlidingWindow("2/h", name="account")])
    rules(a=shared, b=shared)
    send("b")
    with beside_a_frozen(has_the_row) as went_on:
        assert release("default", ["a", "b"]).released == [] and not went_on
    assert len(release("default", ["a", "b"]).released) == 1


def test_a_row_that_a_frozen_pass_holds_keeps_nobody_else_back(rules: Rules) -> None:
    """The others go by the new settings at once; the frozen one's rule, once its row is free."""
    both = {"a": LOOSE, "b": LOOSE}
    rules(**both)
    Process("old", **both).joins()
    CallQueue.objects.send_many([URL] * 10, rule="a")
    CallQueue.objects.send_many([URL] * 10, rule="b")
    strict = Process("strict", a=STRICT, b=STRICT)
    with beside_a_frozen(has_the_row):
        assert strict.goes() == {"b": 2}
    assert strict.goes() == {"a": 2}


def test_the_row_of_a_rule_that_two_make_at_once_is_one(rules: Rules) -> None:
    rules(a=LOOSE)
    made = threading.Event()

    def first() -> None:
        with database.writing("default"):
            rule_rows.ensure("default", ["new"])
            made.set()
            until_one_waits_for_a_lock()

    def second() -> None:
        assert made.wait(60)
        rule_rows.ensure("default", ["new"])

    together(first, second)
    assert RuleState.objects.filter(rule="new").count() == 1


def test_what_a_slow_pass_of_a_rule_that_has_left_the_limit_charges_is_waited_for(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is to be committed when its opinion has lapsed, and shares no row with the others."""
    shared = Rule(limits=[SlidingWindow("2/h", name="account")])
    rules(a=shared, b=shared)
    CallQueue.objects.send_many([URL] * 5, rule="a")
    CallQueue.objects.send_many([URL] * 5, rule="b")
    before, after = Process("before", a=shared), Process("after", b=shared)
    before.joins()
    book, real = before.membership.book, release_pass.remember

    def slow(freeze: Any) -> None:
        def remember(account: Any, *args: Any) -> None:
            real(account, *args)
            if account.rules == ("a",):
                freeze()

        monkeypatch.setattr(release_pass, "remember", remember)
        release("default", ["a"], book)

    with beside_a_frozen(slow) as went_on:
        after.joins()
        before.leave()
        found = after.goes()
        assert not went_on, "nobody who changes the settings waits for it"
    assert found == {}
    assert CallAttempt.objects.count() == 2
    assert after.goes() == {}


def test_who_is_frozen_while_he_states_his_opinion_keeps_nobody_else_back(rules: Rules) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("no other server ends what a silent client has begun")
    rules(r=LOOSE)

    def states(freeze: Any) -> None:
        with database.writing("default"):
            settings._lock_stated("default")
            freeze()

    with beside_a_frozen(states) as went_on:
        Process("other", r=STRICT).joins()
        assert not went_on


@pytest.mark.parametrize("at_work_on", ["a record", "a hold", "a hold that he lifts"])
def test_who_is_frozen_within_a_transaction_keeps_passes_and_the_clock_back_for_a_moment(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, at_work_on: str
) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("no other server ends what a silent client has begun")
    rules(r=LOOSE)
    for module in (ledger_time, rule_rows):
        monkeypatch.setattr(module, "SILENT", 1)
    release_pass.ensure_state_rows("default", ["r"])
    control.pause("default", "r", key="k")
    send("r")
    wake_all_keys = ready_calls.wake_all_keys

    def frozen(freeze: Any) -> None:
        def wake(*given: Any) -> None:
            wake_all_keys(*given)
            if threading.current_thread() is not threading.main_thread():
                freeze()

        monkeypatch.setattr(ready_calls, "wake_all_keys", wake)
        monkeypatch.setattr(holds, "_lay_one", freeze)
        if at_work_on == "a record":
            timed("default", freeze)
        elif at_work_on == "a hold":
            holds.lay("default", ["r"], "key", "x", None, "", source="provider")
        else:
            holds.lift("default", "r")

    with beside_a_frozen(frozen) as went_on:
        with database.writing("default"):
            assert list(database.locked(LedgerState.objects.order_by("pk"), wait=True))
        while not release("default", ["r"]).released:
            assert not went_on
            time.sleep(0.1)
        assert not went_on


# --- A dispenser rests beside rows that somebody has locked, and minds the others

PAST = timedelta(seconds=60)


def test_a_dispenser_rests_beside_a_due_call_that_is_locked_and_minds_the_others(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    locked = send("r", not_before=timezone.now() + timedelta(hours=1))
    CallQueue.objects.update(due_at_dt=timezone.now() - PAST)
    running = Dispenser()
    running.run_once(maintain=False)
    with held_by_a_host(locked.pk), waiting_for_nobody():
        assert running.chores.maintain() == chores.ROUND
        send("r", not_before=timezone.now() + timedelta(seconds=0.3))
        assert 0 < running.chores.maintain() < chores.ROUND
    monkeypatch.setattr(ready_calls, "PROMOTED", 1)
    assert running.chores.maintain() == 0, "a full promotion is followed by the next at once"
    assert fresh(locked).ready


def test_a_dispenser_looks_ever_less_often_for_a_ready_call_that_is_locked(rules: Rules) -> None:
    rules(r=Rule(), other=Rule())
    locked = send("r")
    made: list[Any] = []
    running = Dispenser(publish=lambda using, messages: bool(made.extend(messages)) or True)
    running._follow_settings()
    group = running.groups[("r",)]
    with held_by_a_host(locked.pk), waiting_for_nobody():
        for _ in range(8):
            group.look_at = running._poll_at = 0.0
            running.tick()
        assert group.look_at > time.monotonic() + REVIEW / 2
        assert not made
        running._on_notify({"r"})
        assert not group.rests, "what a sender says is heard at once"
        send("other")
        running._poll_at = 0.0
        running.tick()
        assert len(made) == 1
    group.look_at = running._poll_at = 0.0
    running.tick()
    assert len(made) == 2
    assert group.next_look.streak.in_vain == 0
