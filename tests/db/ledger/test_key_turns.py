"""Keys take turns, whatever keeps others back; and keys that are kept back cost nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from callqueue import Concurrency, Rule, SlidingWindow, TokenBucket, control, database
from callqueue.dispatch.dispenser import Dispenser
from callqueue.dispatch.release_pass import LEAD, ensure_state_rows
from callqueue.dispatch.release_pass import release as make_pass
from callqueue.ledger import holds, ledger_time, ready_calls
from callqueue.limits.kinds import SECOND
from callqueue.maintenance import cleanup
from callqueue.models import CallAttempt, CallQueue, Hold, KeyNews, KeyTurn
from tests.support.behaviour import move_ledger, release, send
from tests.support.ledger import CALL, Later, answer, past_attempts
from tests.support.locking import held_by_a_host

pytestmark = pytest.mark.usefixtures("trusted_workers")

Rules = Callable[..., None]


def passes(count: int, rule: str = "r") -> list[str]:
    """The keys that so many passes release, one after the other."""
    ensure_state_rows("default", [rule])
    keys = []
    for _ in range(count):
        ids = [one.attempt_id for one in make_pass("default", [rule]).released]
        keys += CallAttempt.objects.filter(pk__in=ids).order_by("pk").values_list("key", flat=True)
    return keys


@pytest.mark.parametrize("set_by", [3600, -3600])
def test_news_of_keys_stays_while_a_key_is_held_however_far_the_clock_was_set(
    rules: Rules, set_by: int
) -> None:
    """A hold ends by ledger time, and as long as it lasts the rule's keys take turns."""
    rules(r=Rule())
    move_ledger(set_by)
    holds.lay("default", ["r"], "key", "held", timedelta(minutes=10), "", source="operator")
    send("r", key="one")
    assert passes(1) == ["one"]
    send("r", key="two")
    Dispenser(publish=lambda *_: True).chores._gather_keys()
    assert passes(1) == ["two"]


def blocked_keys(rule: str, count: int, priority: int = 0) -> None:
    """Keys that have used up what they may, with calls waiting."""
    used = [{"call_data": CALL, "key": f"used{i:05}"} for i in range(count)]
    CallQueue.objects.send_many(used * 2, rule=rule, priority=priority)


@pytest.mark.parametrize(
    "limits", [[], [SlidingWindow("100000/s")]], ids=["alone", "with a limit of the rule"]
)
def test_a_new_key_goes_at_once_though_hundreds_have_used_up_their_day(
    rules: Rules, limits: list[Any]
) -> None:
    rules(r=Rule(limits=[*limits, SlidingWindow("1/d", per="key")]))
    blocked_keys("r", 300)
    assert len(passes(6)) == 300
    send("r", key="zz-new")
    assert passes(2) == ["zz-new"]


def test_paused_keys_keep_nobody_back_and_go_on_when_they_are_resumed(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/m", per="key")]))
    for i in range(40):
        control.pause("default", "r", key=f"paused{i:03}")
        send("r", key=f"paused{i:03}", priority=3)
    send("r", key="free")
    assert passes(3) == ["free"]
    send("r", key="free")
    assert passes(1) == ["free"]
    control.resume("default", "r", key="paused007")
    assert passes(2) == ["paused007"]
    control.resume("default", "r")
    assert len(passes(4)) == 39


def test_a_hold_on_a_key_ends_by_itself_or_where_other_code_takes_it_away(
    rules: Rules, later: Later
) -> None:
    rules(r=Rule())
    control.pause("default", "r", key="paused")
    control.pause("default", "r", key="held", seconds=40)
    control.pause("default", "r", key="soon", seconds=5)
    for key in ("paused", "held", "soon", "free"):
        send("r", key=key)
    assert passes(1) == ["free"]
    later(6)
    assert passes(1) == ["soon"]
    Hold.objects.filter(until=None).delete()
    later(ready_calls.LIFTED / 1_000_000)
    assert passes(1) == ["paused"]
    later(41)
    assert passes(1) == ["held"]


def test_a_hold_that_is_laid_anew_may_end_earlier(rules: Rules, later: Later) -> None:
    rules(r=Rule(limits=[SlidingWindow("9/s", per="key")]))
    send("r", key="k")
    for seconds in (60, 2):
        control.pause("default", "r", key="k", seconds=seconds)
        assert passes(1) == []
    later(2.5)
    assert passes(1) == ["k"]


def test_a_hold_on_a_part_of_keys_holds_all_that_have_it(rules: Rules) -> None:
    rules(r=Rule())
    holds.lay("default", ["r"], "channel", "C1", None, "", source="operator")
    for channel in ("C1", "C2", "C1"):
        send("r", key={"key": f"of {channel}", "channel": channel})
    (key,) = passes(1)
    assert "of C2" in key


def test_a_key_that_waits_for_an_answer_goes_when_that_has_come(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(1, per="key")]))
    for key in "ab":
        send("r", key=key), send("r", key=key)
    assert passes(2) == ["a", "b"]
    answer(CallAttempt.objects.filter(key="b"))
    assert passes(1) == ["b"]


@pytest.mark.parametrize("period", [2, 20])
def test_a_key_goes_when_its_window_has_room_again(rules: Rules, period: int, later: Later) -> None:
    """It waits for the limit that keeps it back, and for no other, which has room."""
    rates = f"1/{period}s", f"5/{period}s"
    rules(r=Rule(limits=[SlidingWindow(rate, per="key") for rate in rates]))
    for key in "abab":
        send("r", key=key)
    assert passes(2) == ["a", "b"]
    answer()
    assert make_pass("default", ["r"]).opens_in == pytest.approx(period, abs=0.5)
    later(period - 0.5)
    assert passes(1) == []
    later(period + 0.5)
    assert passes(1) == ["a", "b"]


@pytest.mark.parametrize("window", ["2s", "1h"])
@pytest.mark.parametrize("behind", ["a", "b"])
def test_a_key_waits_for_as_long_as_the_costly_call_that_goes_first(
    rules: Rules, window: str, behind: str
) -> None:
    """Else what stands behind it, of this key or another, is looked at pass after pass."""
    rules(r=Rule(limits=[SlidingWindow(f"8/{window}", per="account", unit="tokens")]))

    def cost(tokens: int, part: str = "a") -> None:
        send("r", key={"account": "x", "part": part}, cost={"tokens": tokens})

    cost(4)
    assert len(passes(1)) == 1
    answer()
    cost(7), cost(2, behind)
    for _ in range(2):
        done = make_pass("default", ["r"])
        assert not done.released and done.next_look.after >= 0.3
        assert not done.next_look.on_answer, "nothing is open, and it would look every 5 ms"


@pytest.mark.parametrize(
    "columns",
    [{"priority": 7}, {"key": "b"}, {"key": ""}, {"rule": "other"}, "put back", "saved", "made"],
    ids=str,
)
def test_what_other_code_changes_through_the_orm_has_its_turn(columns: Any, rules: Rules) -> None:
    keyed = Rule(limits=[SlidingWindow("5/m", per="key")])
    rules(r=keyed, other=keyed)
    passes(1)
    call, calls = send("r", key="a"), CallQueue.objects.all()
    if columns == "put back":
        calls.update(status=CallQueue.Status.CANCELLED)
        assert passes(2) == []
        calls.update(status=CallQueue.Status.NEW)
    elif columns == "saved":
        call.key = "c"
        call.save()
    elif columns == "made":
        calls.delete()
        calls.bulk_create([CallQueue(rule="r", key="d", ready=True, call_data=CALL)])
    else:
        calls.update(**columns)
    assert len(release()) == 1


def test_all_news_that_no_pass_takes_is_forgotten_of_rules_that_are_gone_too(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_calls, "TAKEN", 2)
    rules(
        r=Rule(limits=[SlidingWindow("5/m")]), gone=Rule(limits=[SlidingWindow("5/m", per="key")])
    )
    for key in "abcdefg":
        send("r", key=key), send("gone", key=key)
    rules(r=Rule(limits=[SlidingWindow("5/m")]))
    assert len(release()) == 5
    assert not KeyNews.objects.exists()


def test_news_is_taken_by_priority(rules: Rules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready_calls, "TAKEN", 3)
    keyed = [SlidingWindow("9/m", per="key"), SlidingWindow("2/m", name="all")]
    rules(q=Rule(limits=keyed), r=Rule(limits=keyed))
    for key in "abcdefg":
        send("q", key=key), send("r", key=key)
    urgent = send("r", key="h", priority=1)
    ensure_state_rows("default", ["q", "r"])
    make_pass("default", ["q", "r"])
    assert CallAttempt.objects.get(rule="r").call_id == urgent.pk


def test_keys_with_a_backlog_take_turns_from_one_pass_to_the_next(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1000/s")]))
    passes(1)
    for key in ("a", "b", "a", ""):
        send("r", key=key)
    KeyNews.objects.all().delete()
    control.pause("default", "r", key="a")
    assert sorted(passes(1)) == ["", "b"]
    rules(r=Rule(limits=[SlidingWindow("1000/s"), SlidingWindow("1/m", per="key")]))
    control.resume("default", "r")
    assert passes(1) == ["a"]


def test_a_bucket_of_a_key_is_looked_at_once_its_oldest_charge_is_forgotten(rules: Rules) -> None:
    """It counts as empty before that; without it, there may be a token half a second sooner."""
    rules(r=Rule(limits=[TokenBucket("2/s", burst=1, per="key", jitter=0.01)]))
    now = past_attempts("r", ["a"] * 4, minutes=[ago / 60 for ago in (1.7, 1.19, 0.68, 0.17)])
    send("r", key="a")
    assert passes(1) == []
    turn = KeyTurn.objects.get()
    assert 0.2 < (database.from_us(turn.blocked_until) - now).total_seconds() < 0.31


def test_keys_that_go_in_one_pass_go_in_the_same_order_in_later_ones(
    rules: Rules, later: Later
) -> None:
    """There is room for two of three keys at a time: none of them goes at each."""
    rules(r=Rule(limits=[SlidingWindow("2/s"), SlidingWindow("100/s", per="key")]))
    for key in "abc" * 3:
        send("r", key=key)
    gone = []
    for seconds in (0, 2, 4, 6):
        later(seconds)
        gone += passes(1)
        answer()
    assert "".join(gone) == "abcabcab"


def test_a_pass_goes_on_behind_as_many_blocked_keys_as_one_looks_at(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("16/s"), SlidingWindow("1/d", per="key")]))
    keys = [f"used{i:03}" for i in range(40)]
    past_attempts("r", keys, minutes=[60] * len(keys))
    for key in [*keys, "zz-new"]:
        send("r", key=key)
    ensure_state_rows("default", ["r"])
    made = make_pass("default", ["r"])
    assert (made.released, made.next_look.goes_on) == ([], True)
    assert passes(1) == ["zz-new"]


def test_a_pass_goes_on_where_a_key_has_more_though_another_ones_call_is_kept_back(
    rules: Rules,
) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/h", per="key", unit="tokens")]))
    for key, cost in [*[("a", {})] * 4, *[("b", {"tokens": 2})] * 2]:
        send("r", key=key, cost=cost or None)
    ensure_state_rows("default", ["r"])
    made = make_pass("default", ["r"], batch=4)
    assert [one.key for one in made.released] == ["a", "b", "a"]
    assert made.next_look.goes_on


def test_a_backlog_of_more_keys_than_one_pass_looks_at_has_all_its_turns(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as its keys take turns. To step over all keys in each pass would take too long."""
    monkeypatch.setattr(ready_calls, "TAKEN", 4)
    rules(r=Rule(limits=[SlidingWindow("1000/s")]))
    for priority, key in enumerate(
        ["", "a", "a ", "A", "a", "b", "ä", "z", "z" * 255, "\U0001f511"]
    ):
        send("r", key=key, priority=priority)
    KeyNews.objects.all().delete()
    control.pause("default", "r", key="b")
    with CaptureQueriesContext(connection) as made:
        assert len(passes(3)) == 9
    assert sum("order by v.a" in one["sql"].lower() for one in made) == 3
    with CaptureQueriesContext(connection) as made:
        assert passes(1) == []
    assert not any("order by v.a" in one["sql"].lower() for one in made)


def test_a_key_whose_room_comes_within_a_pass_is_released_ahead_by_it(
    rules: Rules, later: Later
) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/10s", per="key")]))
    send("r", key="a"), send("r", key="a")
    assert passes(1) == ["a"]
    answer()
    done = make_pass("default", ["r"])
    assert done.opens_in is not None
    later(done.opens_in + LEAD / 2 - 0.6 * LEAD)
    assert passes(1) == ["a"]


def test_a_call_that_somebody_has_locked_is_not_its_keys_last_and_keeps_back_no_other_key(
    rules: Rules, transactional_db: None
) -> None:
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("one writer at a time")
    rules(r=Rule(limits=[SlidingWindow("5/m", per="key")]))
    locked = send("r", key="a")
    send("r", key="a")
    with held_by_a_host(locked.pk):
        assert passes(1) == ["a"]
        send("r", key="b")
        assert passes(2) == ["b"]
        assert KeyTurn.objects.get(key="a").blocked_on == ready_calls.LOCK


def test_a_call_that_somebody_has_locked_keeps_back_no_other_of_a_key_that_lets_one_go(
    rules: Rules, transactional_db: None
) -> None:
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("one writer at a time")
    rules(r=Rule(limits=[SlidingWindow("1/s", per="key")]))
    locked = [send("r", key="a") for _ in range(3)]
    with held_by_a_host(*[one.pk for one in locked]):
        free = send("r", key="a")
        assert passes(1) == ["a"]
        assert CallQueue.objects.dispatched().get() == free
        for _ in range(2):
            send("r", key="b")
        assert passes(3) == ["b"]


def test_blocked_keys_are_not_looked_at_again(rules: Rules) -> None:
    """With ten times as many, a pass makes the same statements and reads no more turns."""
    seen = {}
    rules(r=Rule(limits=[SlidingWindow("1/d", per="key")]))
    for count in (20, 200):
        for model in (KeyTurn, CallQueue, CallAttempt):
            model.objects.all().delete()
        blocked_keys("r", count)
        passes(20)
        assert KeyTurn.objects.filter(blocked_on="").count() == 0
        with CaptureQueriesContext(connection) as made:
            assert passes(1) == []
        seen[count] = len(made)
        assert ready_calls.next_turns("default", "r", 256) == []
    assert seen[200] == seen[20]
    control.change_limit("default", "r", "r#0", "2/d")
    assert len(set(passes(4))) == 200


@pytest.mark.parametrize(
    "limit", [SlidingWindow("1/m", per="key"), TokenBucket("1/20s", burst=1, per="key")]
)
def test_keys_of_a_short_window_that_wait_for_answers_keep_nobody_back(
    rules: Rules, limit: Any
) -> None:
    """They wait for room without knowing until when, so that they wait for longer than a window."""
    rules(r=Rule(limits=[SlidingWindow("1000/s"), limit]))
    blocked_keys("r", 300, priority=5)
    assert len(passes(5)) == 300
    send("r", key="zz-new")
    assert passes(3) == ["zz-new"]
    waits = dict(KeyTurn.objects.values_list("key", "blocked_until"))
    passes(1)
    assert dict(KeyTurn.objects.values_list("key", "blocked_until")) == waits


def test_a_dispenser_rests_while_more_keys_are_blocked_than_one_look_sees(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/d", per="key")]))
    blocked_keys("r", 700)
    passes(30)
    dispenser = Dispenser(publish=lambda *_: True)
    for _ in range(40):
        dispenser.tick()
    assert dispenser.groups[("r",)].look_at > time.monotonic()
    with CaptureQueriesContext(connection) as made:
        dispenser.tick()
    assert not any("keyturn" in one["sql"] for one in made)


@pytest.mark.parametrize("ends", ["cancelled", "expired"])
def test_keys_whose_calls_have_ended_together_keep_nobody_back(rules: Rules, ends: str) -> None:
    rules(r=Rule(limits=[Concurrency(5), SlidingWindow("9/s", per="key")]))
    CallQueue.objects.send_many([{"call_data": CALL, "key": f"k{i}"} for i in range(300)], rule="r")
    passes(1)
    answer()
    if ends == "cancelled":
        CallQueue.objects.new().cancel()
    CallQueue.objects.new().update(expires_at_dt=database.EPOCH)
    send("r", key="z")
    assert passes(2) == ["z"]
    assert not KeyTurn.objects.exists()


def test_cleanup_takes_away_turns_that_nobody_looks_at_any_more(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few in a transaction: passes wait for it."""
    rules(r=Rule(limits=[SlidingWindow("1/d", per="key")]))
    gone = [f"gone{i}" for i in range(5)]
    for key in ("waits", *gone):
        send("r", key=key), send("r", key=key)
    passes(1)
    CallQueue.objects.new().filter(key__in=gone).delete()
    assert KeyTurn.objects.count() == 6
    deletes = Mock(side_effect=database.delete_each)
    monkeypatch.setattr(database, "delete_each", deletes)
    monkeypatch.setattr(cleanup, "TURNS", 2)
    cleanup.clean("default")
    turns = [one.args[2] for one in deletes.call_args_list if one.args[0] is KeyTurn]
    assert list(map(len, turns)) == [2, 2, 1, 0]
    assert list(KeyTurn.objects.values_list("key", flat=True)) == ["waits"]


@pytest.mark.parametrize("behind", ["a", "b"])
@pytest.mark.parametrize("end", ["cancel", "delete", "postpone", "expire"])
def test_a_key_goes_soon_once_the_costly_call_before_it_is_gone(
    rules: Rules, later: Later, behind: str, end: str
) -> None:
    """It waited for as long as that one, though its limit had room for it."""
    rules(r=Rule(limits=[SlidingWindow("8/h", per="account", unit="tokens")]))

    def cost(tokens: int, part: str = "a") -> CallQueue:
        return send("r", key={"account": "x", "part": part}, cost={"tokens": tokens})

    cost(4)
    assert len(passes(1)) == 1
    answer()
    costly, cheap = cost(7), cost(2, behind)
    assert not passes(2)
    for seconds in (2, 4, 6):
        later(seconds)
        assert not passes(1), "a cheaper one overtakes it"
    row = CallQueue.objects.filter(pk=costly.pk)
    if end == "cancel":
        row.cancel()
    elif end == "delete":
        row.delete()
    elif end == "postpone":
        row.update(due_at_dt=costly.due_at_dt + timedelta(days=1))
    else:
        row.update(expires_at_dt=costly.due_at_dt + timedelta(milliseconds=1))
    later(8)
    assert passes(2) == [cheap.key]


def test_who_waits_behind_calls_that_cost_as_much_is_not_looked_at_sooner(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h", per="account")]))
    for part in "abc":
        send("r", key={"account": "x", "part": part})
    assert len(passes(2)) == 1
    answer()
    passes(2)
    now = ledger_time.watch("default").last.at
    waits = [until - now for until in KeyTurn.objects.values_list("blocked_until", flat=True)]
    assert waits and min(waits) > 60 * SECOND


def test_how_many_keys_are_without_calls_is_looked_at_where_one_is_and_keys_are_left(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = Mock(return_value=[])
    monkeypatch.setattr(ready_calls, "spent_turns", looked)
    rules(r=Rule(limits=[SlidingWindow("4/h"), SlidingWindow("9/h", per="key")]))
    for number in range(50):
        send("r", key=f"k{number}")
    assert len(passes(2)) == 4
    assert not looked.called
    CallQueue.objects.filter(key__in=["k4", "k5"]).delete()
    control.change_limit("default", "r", "r#0", "6/h")
    assert len(passes(1)) and looked.called
