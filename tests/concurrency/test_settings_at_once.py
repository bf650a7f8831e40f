"""Dispensers beside one that is slow or frozen, or has other settings, and beside locked rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, connection
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
    fresh,
    held_by_a_host,
    together,
    until_one_waits_for_a_lock,
    waiting_for_nobody,
)

URL = {"method": "get", "params": {"url": "http://vendor.example/"}}
pytestmark = pytest.mark.usefixtures("row_locks")
LOOSE, STRICT = Rule(limits=[SlidingWindow("40/s")]), Rule(limits=[SlidingWindow("2/s")])


@contextmanager
def at_work(*tasks: Callable[[threading.Event], None]) -> Iterator[None]:
    """These run in threads of their own until the block is left."""
    stop = threading.Event()

    def run(task: Callable[[threading.Event], None]) -> None:
        try:
            task(stop)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_row_that_a_frozen_pass_holds_keeps_nobody_else_back(rules: Any) -> None:
    """The others go by the new settings at once; the frozen one's rule, once its row is free."""
    both = {"a": LOOSE, "b": LOOSE}
    rules(**both)
    Process("old", **both).joins()
    CallQueue.objects.send_many([URL] * 10, rule="a")
    CallQueue.objects.send_many([URL] * 10, rule="b")
    inside, thaw = threading.Event(), threading.Event()

    def frozen(stop: threading.Event) -> None:
        with database.writing("default"):
            assert database.locked(RuleState.objects.filter(rule="a")).get()
            inside.set()
            thaw.wait(60)

    strict = Process("strict", a=STRICT, b=STRICT)
    with at_work(frozen):
        try:
            assert inside.wait(60)
            assert strict.goes() == {"b": 2}
        finally:
            thaw.set()
    assert strict.goes() == {"a": 2}


def test_the_row_of_a_rule_that_two_make_at_once_is_one(rules: Any) -> None:
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
    rules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is to be committed when its opinion has lapsed, and shares no row with the others."""
    shared = Rule(limits=[SlidingWindow("2/h", name="account")])
    rules(a=shared, b=shared)
    CallQueue.objects.send_many([URL] * 5, rule="a")
    CallQueue.objects.send_many([URL] * 5, rule="b")
    before, after = Process("before", a=shared), Process("after", b=shared)
    before.joins()
    inside, thaw = threading.Event(), threading.Event()
    has_thawed: list[bool] = []
    real = release_pass.remember

    def remember(account: Any, *args: Any) -> None:
        real(account, *args)
        if account.rules == ("a",):
            inside.set()
            has_thawed.append(thaw.wait(15))

    monkeypatch.setattr(release_pass, "remember", remember)
    book = before.membership.book

    def slow(stop: threading.Event) -> None:
        release("default", ["a"], book)

    with at_work(slow):
        try:
            assert inside.wait(60)
            after.joins()
            before.leave()
            found = after.goes()
            assert not has_thawed, "nobody who changes the settings waits for it"
        finally:
            thaw.set()
    assert found == {}
    assert CallAttempt.objects.count() == 2
    assert after.goes() == {}


def test_who_is_frozen_while_he_states_his_opinion_keeps_nobody_else_back(rules: Any) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("no other server ends what a silent client has begun")
    rules(r=LOOSE)
    inside, thaw = threading.Event(), threading.Event()

    def frozen(stop: threading.Event) -> None:
        with suppress(DatabaseError), database.writing("default"):
            settings._locked("default")
            inside.set()
            has_thawed.append(thaw.wait(15))

    has_thawed: list[bool] = []
    with at_work(frozen):
        try:
            assert inside.wait(60)
            Process("other", r=STRICT).joins()
            assert not has_thawed
        finally:
            thaw.set()


@pytest.mark.parametrize("at_work_on", ["a record", "a hold", "a hold that he lifts"])
def test_who_is_frozen_within_a_transaction_keeps_passes_and_the_clock_back_for_a_moment(
    rules: Any, monkeypatch: pytest.MonkeyPatch, at_work_on: str
) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("no other server ends what a silent client has begun")
    rules(r=LOOSE)
    for module in (ledger_time, rule_rows):
        monkeypatch.setattr(module, "SILENT", 1)
    release_pass.ensure_states("default", ["r"])
    control.pause("default", "r", key="k")
    send("r")
    inside, thaw = threading.Event(), threading.Event()
    has_thawed: list[bool] = []

    def freeze(*_: Any) -> None:
        inside.set()
        has_thawed.append(thaw.wait(15))
        raise DatabaseError

    def frozen(stop: threading.Event) -> None:
        with suppress(DatabaseError):
            if at_work_on == "a record":
                timed("default", freeze)
            elif at_work_on == "a hold":
                holds.lay("default", ["r"], "key", "x", None, "", source="provider")
            else:
                holds.lift("default", "r")

    def wake(*given: Any) -> None:
        wake_all(*given)
        if threading.current_thread() is not threading.main_thread():
            freeze()

    wake_all = ready_calls.wake_all
    monkeypatch.setattr(ready_calls, "wake_all", wake)
    monkeypatch.setattr(holds, "_lay", freeze)
    with at_work(frozen):
        try:
            assert inside.wait(60)
            with database.writing("default"):
                assert list(database.locked(LedgerState.objects.order_by("pk"), wait=True))
            while not release("default", ["r"]).released:
                assert not has_thawed
                time.sleep(0.1)
            assert not has_thawed
        finally:
            thaw.set()


# --- A dispenser rests beside rows that somebody has locked, and minds the others

Rules = Callable[..., None]
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
