"""The dispenser's loop: what it notices, whom it waits for, and a database that was away."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import OperationalError
from django.utils import timezone

from callqueue import Concurrency, Rule, SlidingWindow, broker, clocks, tasks
from callqueue.dispatch import chores, publisher
from callqueue.dispatch.dispenser import (
    ANSWERS,
    AWAY,
    SENT,
    Dispenser,
    give_sign_of_life,
    name_of_process,
)
from callqueue.dispatch.next_look import NO_ROOM, NextLook, RuleGroup
from callqueue.dispatch.release_pass import Taker, release
from callqueue.execution import claim
from callqueue.ledger import ledger_time, rule_rows
from callqueue.maintenance import cleanup
from callqueue.models import CallAttempt, CallQueue, DispenserState, Hold, RuleState
from tests.celery_app import app
from tests.support.behaviour import send
from tests.support.ledger import answer
from tests.support.locking import status_of

Rules = Callable[..., None]
Status = CallQueue.Status
WIDE = SlidingWindow("10000/s")


def test_an_answer_that_comes_while_another_is_made_up_for_is_noticed(rules: Rules) -> None:
    """The count of open attempts is then what the dispenser saw last, and is news all the same."""
    rules(r=Rule(limits=[Concurrency(2)]))
    for _ in range(4):
        send("r")
    dispenser = Dispenser(publish=lambda *_: True)
    dispenser.tick()
    group = dispenser.groups[("r",)]
    assert CallAttempt.objects.open().count() == 2
    answer(CallAttempt.objects.open()[:1])
    dispenser.tick()  # sees one open, and releases another
    answer(CallAttempt.objects.open()[:1])  # one open again
    dispenser.tick()
    assert (CallAttempt.objects.count(), CallAttempt.objects.open().count()) == (4, 2)
    assert group.next_look.open_attempts == 2


def test_a_running_dispenser_looks_for_its_beat_before_it_releases_anything(
    rules: Rules, transactional_db: None
) -> None:
    rules(default=Rule(limits=[WIDE]))
    published: list[Any] = []
    dispenser = Dispenser(publish=lambda using, messages: bool(published.extend(messages)) or True)
    dispenser.run(seconds=0.05)
    DispenserState.objects.all().delete()  # as in a backup from before it was started
    dispenser._reconnect(RuntimeError("the connection broke"))
    call = send()
    dispenser.run(seconds=0.3)
    assert not published
    assert status_of(call) == Status.NEW
    assert Hold.objects.filter(rule="default").exists()


def test_a_database_that_is_away_once_is_asked_again_at_once_and_then_now_and_then(
    monkeypatch: pytest.MonkeyPatch, transactional_db: None
) -> None:
    """Once may have been a deadlock."""
    waits: list[float] = []
    stop: Any = SimpleNamespace(is_set=lambda: len(waits) == 3, wait=waits.append)
    dispenser = Dispenser(publish=lambda *_: True)
    monkeypatch.setattr(dispenser, "tick", Mock(side_effect=OperationalError("it is away")))
    dispenser.run(stop=stop)
    assert waits == [0, AWAY, AWAY]


def test_rows_of_rules_that_vanish_under_a_running_dispenser_come_back(
    rules: Rules, transactional_db: None
) -> None:
    """As in a backup from before a rule was added: nothing of the rule could be released."""
    rules(default=Rule(limits=[WIDE]))
    dispenser = Dispenser(publish=lambda using, messages: True)
    dispenser.run(seconds=0.05)
    RuleState.objects.all().delete()
    call = send()
    dispenser.chores.start_over()
    dispenser.run(seconds=1.5)
    assert status_of(call) == Status.DISPATCHED


def test_dispensers_of_one_host_name_and_process_id_are_told_apart() -> None:
    """Two containers may be alike in both: each would take the other's sign of life for its own."""
    assert name_of_process.__wrapped__(7) != name_of_process.__wrapped__(7)
    assert Dispenser().name == Dispenser().name


def test_a_dispenser_waits_for_those_who_saw_a_jump_that_it_did_not(
    settings: Any, monkeypatch: pytest.MonkeyPatch, transactional_db: None
) -> None:
    settings.CALLQUEUE = {"RULES": {"r": Rule(limits=[SlidingWindow("20/m")])}}
    waits: list[float] = []
    stop: Any = SimpleNamespace(wait=waits.append)
    dispenser = Dispenser("default")
    for others, is_new in ((False, True), (True, True), (True, False)):
        if is_new:
            monkeypatch.setattr(ledger_time, "_watches", {})
        else:
            ledger_time.watch("default").since = clocks.monotonic() - 60
        if others:
            give_sign_of_life("default", "another")
        waits.clear()
        dispenser.wait_until_clock_settles(stop)
        assert bool(waits) == (others and is_new)
        assert all(0 < seconds <= 1 for seconds in waits)


def test_only_one_that_goes_on_running_holds_everything_for_a_sign_that_is_gone(
    rules: Rules,
) -> None:
    """A process that makes a round now and then cannot know of a backup by its own sign of life."""
    rules(r=Rule())
    membership = Dispenser(publish=lambda *_: True).membership
    for runs in (False, True):
        membership.runs = runs or membership.runs
        membership.heartbeat()
        DispenserState.objects.update(seen_at=ledger_time.now("default") - timedelta(hours=1))
        membership.heartbeat()
        assert Hold.objects.exists() is runs


def test_a_loop_that_waits_for_a_broker_an_answer_or_a_maker_rests_between_two_looks(
    rules: Rules,
) -> None:
    rules(r=Rule(limits=[Concurrency(1)]))
    send("r"), send("r")
    dispenser = Dispenser(publish=lambda *_: True)
    dispenser.tick()

    def pause() -> float:
        """Until the next turn, but for chores and looks for ready calls."""
        dispenser._poll_at = dispenser.chores.next_round_at = time.monotonic() + 60
        return dispenser.tick()

    group = dispenser.groups["r",]
    assert group.waits_for_answer
    assert 0 < pause() < 2 * ANSWERS
    group.sending = SimpleNamespace(done=Event(), error=None)
    group.set_next_look(NextLook(), 0.0)
    assert 0 < pause() < 2 * SENT
    due = RuleGroup(("due",), NextLook())
    others = {(str(number),): replace(group, rules=("r",)) for number in range(publisher.SLOW)}
    dispenser.groups = {**others, due.rules: due}
    assert 0 < pause() < 2 * SENT
    dispenser.groups, dispenser.maker = {due.rules: due}, SimpleNamespace(room=lambda: NO_ROOM)
    assert 0 < pause() < 2 * ANSWERS
    dispenser.maker, due.look_at = None, time.monotonic() + 9
    assert 0 < pause() < 9, "it goes on when the next look is due"


def test_a_chore_that_has_no_thread_says_so_and_has_its_turn_later(
    db: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(chores, "Errand", refuse)
    monkeypatch.setattr(chores, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    rounds = chores.Chores("default", lambda: None)
    rounds.is_loop = True
    with caplog.at_level("ERROR", logger="callqueue"):
        rounds.maintain()
    aside = [one for one in rounds.table if one.aside]
    assert {one.due_at for one in aside} == {1000.0 + chores.AGAIN}
    said = " ".join(record.getMessage() for record in caplog.records)
    assert all(f"chore={one.name} " in said for one in aside)


def test_the_next_round_is_when_the_next_call_is_due(rules: Rules) -> None:
    rules(r=Rule())
    rounds = chores.Chores("default", lambda: None)
    assert rounds.maintain() == chores.ROUND
    now = timezone.now()
    send("r", not_before=now + timedelta(seconds=60))
    assert rounds.maintain() == chores.ROUND
    send("r", not_before=now + timedelta(seconds=chores.ROUND - 0.1))
    assert rounds.maintain() < chores.ROUND


def test_who_cleans_up_does_so_once_a_day_or_where_something_is_a_day_overdue(
    db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, overdue, clean = [1e6], [timedelta(hours=23)], Mock()
    monkeypatch.setattr(chores, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(cleanup, "longest_overdue", lambda using: overdue[0])
    monkeypatch.setattr(cleanup, "clean", clean)
    table = {one.name: one for one in chores.Chores("default", lambda: None, cleans=True).table}
    for seconds, hours, count in ((0, 23, 0), (86400, 23, 1), (9, 23, 1), (9, 24, 2)):
        now[0] += seconds
        overdue[0] = timedelta(hours=hours)
        table["cleanup"].do()
        assert clean.call_count == count


def test_the_next_turn_notices_that_all_is_published_and_asks_for_no_group_that_is_let_be(
    rules: Rules,
) -> None:
    rules(r=Rule())
    dispenser = Dispenser(publish=lambda *_: True)
    dispenser.tick()
    group = dispenser.groups["r",]
    dispenser._listener = listener = Mock()
    dispenser._wake_groups({"r"})
    assert listener.note_useful_wake.called, "it was no word for nothing"
    dispenser.tick()
    send("r")
    group.look_at, dispenser._poll_at = time.monotonic() + 60, 0.0
    dispenser.tick()
    assert (group.rests, CallAttempt.objects.count()) == (True, 0)
    done = Event()
    group.sending = SimpleNamespace(done=done, error=None)
    group.unpublished_from = time.monotonic()
    group.look_at = dispenser._poll_at = 0.0
    dispenser.tick()
    assert CallAttempt.objects.count() == 0
    done.set()
    dispenser.tick()
    assert (group.sending, CallAttempt.objects.count()) == (None, 1)


@pytest.mark.parametrize("is_made_here", [True, False], ids=["made here", "published"])
def test_what_is_not_certain_is_undone_though_its_rules_are_no_group_any_more(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, is_made_here: bool
) -> None:
    """Its lease would end, and a call that nobody has sent would be unknown."""
    rules(r=Rule(limits=[WIDE]), other=Rule())
    dispenser = Dispenser(publish=lambda *_: True)
    dispenser.tick()
    group, call, done = dispenser.groups[("r",)], send("r"), Event()
    group.unpublished_from = clocks.monotonic()
    if is_made_here:
        group.doubtful_worker, taker = "me", Taker("me", claim.READS)
        monkeypatch.setattr(rule_rows, "try_lock", lambda *_: done.is_set())
    else:
        taker = None
        group.sending = SimpleNamespace(done=done, error=OperationalError("it is away"))
    assert len(release("default", ["r"], taker=taker).released) == 1
    rules(other=Rule())
    assert dispenser.tick() > 0, "it asks again, and not at once"
    assert ("r",) not in dispenser.groups
    assert status_of(call) == Status.DISPATCHED
    done.set()
    for _ in range(2):
        with suppress(OperationalError):
            dispenser.tick()
    assert status_of(call) == Status.NEW
    assert not CallAttempt.objects.open().exists()


# --- What a message carries, and for how long


def test_a_message_lasts_as_long_as_its_release_by_the_brokers_own_clock(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`expires` is compared with the worker's clock: one that is off drops all or nothing."""
    rules({"LEASE": {"RELEASE": 2, "GRACE": 30}}, r=Rule())
    sent = Mock()
    monkeypatch.setattr(tasks.make_api_call, "apply_async", sent)
    publisher.publish("default", [("q", [1])])
    options = sent.call_args.kwargs
    assert (options["expiration"], options.get("expires")) == (2.0, None)


def test_the_task_of_a_message_knows_whether_it_makes_the_call_itself(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no HTTP call is made in the task: its time limits may strike, and it may use the ORM."""
    rules(r=Rule())
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(broker, "send", lambda task, args, given, **_: sent.append(given))
    send("r")
    email = {"subject": "s", "message": "b", "to": ["a@example.com"]}
    CallQueue.objects.send({"method": "send_email", "params": email}, rule="r")
    Dispenser().run_once()
    assert sorted(sent, key=len) == [{}, {"here": True}]


def test_a_broker_that_refuses_is_named_with_its_address_and_what_it_said(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rules(r=Rule())
    call = send("r")
    assert app.conf.broker_url  # it is read by now
    monkeypatch.setitem(app.conf.changes, "broker_url", "amqp://me:secret@127.0.0.1:1//")
    monkeypatch.setattr(broker, "send", Mock(side_effect=ConnectionRefusedError("it refuses")))
    with caplog.at_level("ERROR", logger="callqueue"):
        Dispenser().run_once()
    (line,) = (r.getMessage() for r in caplog.records if r.getMessage().startswith("broker_away"))
    assert "it refuses" in line and "127.0.0.1:1" in line and "secret" not in line
    assert status_of(call) == Status.NEW


def test_who_ends_undoes_for_no_longer_than_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    persist = Mock()
    monkeypatch.setattr(publisher.database, "persist", persist)
    publisher.Outbox("default", lambda *_: True, Mock()).end([], within=3.0)
    (asked,) = persist.mock_calls
    assert asked.kwargs["seconds"] == 3.0


def test_a_chore_in_whose_way_another_transaction_was_is_done_once_more_at_once(
    rules: Rules, transactional_db: None
) -> None:
    rules(r=Rule())
    assert not CallQueue.objects.exists()  # it is connected
    done = Mock(side_effect=[OperationalError("deadlock"), None, *[OperationalError("again")] * 2])
    rounds, one = chores.Chores("default", lambda: None), chores.Chore("one", 60.0, done)
    rounds.table = (one,)
    for count, put_off_s in ((2, 60.0), (4, chores.AGAIN)):
        one.due_at = 0.0
        rounds.maintain()
        assert done.call_count == count
        assert put_off_s - 1 < one.due_at - time.monotonic() <= put_off_s
