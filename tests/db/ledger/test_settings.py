"""Dispensers whose settings differ: what is in force, what is counted, and who is told."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
from django.db import connection
from django.db.models import F
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from callqueue import (
    Concurrency,
    FixedWindow,
    Rule,
    SlidingWindow,
    TokenBucket,
    control,
    events,
    states,
)
from callqueue.dispatch import release_pass
from callqueue.dispatch.release_pass import release
from callqueue.history import audit
from callqueue.ledger import ledger_time, settings
from callqueue.limits.budgets import book_of
from callqueue.limits.in_force import LATE
from callqueue.limits.kinds import SECOND
from callqueue.look import look
from callqueue.look.doctor import Facts, run_check
from callqueue.maintenance import cleanup, recovery
from callqueue.models import CallAttempt, CallQueue, OpinionState, SettingsState
from tests.db.commands import run
from tests.support.dispensers import Process
from tests.support.ledger import CALL

pytestmark = pytest.mark.usefixtures("trusted_workers")

Rules = Callable[..., None]
LOOSE, STRICT = Rule(limits=[SlidingWindow("40/m")]), Rule(limits=[SlidingWindow("2/m")])


def answer_all(seconds_ago: float = 0.0) -> None:
    """Every open attempt has been answered, so long ago."""
    at = ledger_time.now("default") - timedelta(seconds=seconds_ago)
    moved = {"released_at": at} if seconds_ago else {}
    CallAttempt.objects.open().update(
        started_at=at, sent_at=at, finished_at=at, outcome=states.SUCCEEDED, **moved
    )
    CallQueue.objects.dispatched().update(status=states.DONE, finished_at_dt=at)


def test_who_asks_many_times_a_second_has_the_book_read_once(rules: Rules) -> None:
    rules(r=Rule())
    book = settings.book_lately("default")
    with CaptureQueriesContext(connection) as said:
        assert settings.book_lately("default") is book
    assert not said.captured_queries


@pytest.fixture
def waiting(rules: Rules) -> Callable[..., None]:
    """`waiting(a=5)`: so many calls of these rules wait."""

    def apply(**counts: int) -> None:
        rules(**dict.fromkeys(counts, Rule()))
        for rule, count in counts.items():
            CallQueue.objects.send_many([CALL] * count, rule=rule)

    return apply


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Mock:
    heard = Mock(side_effect=events.emit)
    monkeypatch.setattr(events, "emit", heard)
    return heard


def of_settings(told: Mock) -> dict[str, dict[str, Any]]:
    """What was told of settings that differ or agree, by event."""
    calls = {call.args[0]: call.kwargs for call in told.call_args_list}
    return {event: facts for event, facts in calls.items() if event.startswith("settings")}


@pytest.fixture
def two(waiting: Callable[..., None]) -> tuple[Process, Process]:
    """Two with different settings. What the stricter allows has gone, and there is more."""
    waiting(r=100)
    strict, loose = Process("strict", r=STRICT), Process("loose", r=LOOSE)
    strict.joins()
    assert loose.goes() == {"r": 2}
    return strict, loose


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the time is by which processes watch each other."""
    moment = [settings.time.monotonic()]
    monkeypatch.setattr(settings.time, "monotonic", lambda: moment[0])
    return moment


# Two settings at once.


def test_a_pass_that_locks_after_others_went_by_newer_settings_is_undone(
    waiting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others charged meanwhile may count in limits that it does not know."""
    waiting(r=10)
    one = Process("one", r=LOOSE)
    one.joins()
    real = release_pass.choose

    def choose(*args: Any) -> Any:
        settings.set_rate("default", "r#0", "2/m")
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(release_pass, "choose", choose)
        done = release("default", ["r"], one.membership.book)
    assert (done.released, done.next_look.joins) == ([], True)
    assert not CallAttempt.objects.exists()
    assert one.goes() == {"r": 10}, "what that pass saw was its own change, and is undone as well"


def test_a_rolling_deployment_passes_through(waiting: Any, told: Any) -> None:
    waiting(r=300)
    old = [Process("old1", r=STRICT), Process("old2", r=STRICT)]
    new = [Process("new1", r=LOOSE), Process("new2", r=LOOSE)]
    assert [one.goes() for one in old] == [{"r": 2}, {}]
    for before, after in zip(old, new, strict=True):
        assert after.goes() == {}
        before.leave()
        if before is not old[-1]:
            assert after.goes() == {}
    assert new[0].goes() == {"r": 38}, "the new limit holds, and counts what went before it"
    assert new[1].goes() == {}
    assert list(of_settings(told)) == ["settings_differ", "settings_agree"]
    facts = of_settings(told)["settings_differ"]
    assert {"old1", "new1"} <= set(re.findall(r"\w+", facts["dispensers"]))
    assert {"r#0", "2/m", "40/m"} <= set(re.findall(r"[\w#/]+", facts["limits"]))


def test_an_opinion_that_has_fallen_silent_counts_no_more(two: Any, moment: list[float]) -> None:
    strict, loose = two
    for _ in range(10):
        moment[0] += 5
        strict.membership.heartbeat()
        assert loose.goes() == {}
    for seconds in (5, 5, 5, settings.SILENCE - 16):
        moment[0] += seconds
        assert loose.goes() == {}
    moment[0] += 2
    assert loose.goes() == {"r": 38}
    assert strict.goes() == {}, "it comes back, and finds more than it would have allowed"
    answer_all(seconds_ago=61)
    assert loose.goes() == {"r": 2}


def test_who_joins_an_opinion_that_has_fallen_silent_holds_it(waiting: Any) -> None:
    waiting(r=9)
    dead, one = Process("dead", r=STRICT), Process("one", r=STRICT)
    dead.joins()
    OpinionState.objects.update(seen_at=F("seen_at") - timedelta(hours=1))
    one.joins()
    assert OpinionState.objects.get().lapsed_at is None


def test_a_sign_of_life_has_who_gives_it_join_anew_once_its_opinion_is_not_held(
    waiting: Any,
) -> None:
    waiting(r=9)
    one = Process("one", r=STRICT)
    one.joins()
    assert not one.membership.party.heartbeat()
    OpinionState.objects.update(lapsed_at=ledger_time.now("default"))
    assert one.membership.party.heartbeat()


def test_no_version_comes_twice_though_a_backup_was_restored(two: Any) -> None:
    """A pass that began before would go by its book."""
    before = SettingsState.objects.get()
    settings.set_rate("default", "r#0", "3/m")
    used = settings.version("default")
    before.save()
    settings.set_rate("default", "r#0", "4/m")
    assert settings.version("default") > used


def test_a_process_whose_database_was_away_calls_nobody_silent(
    two: Any, moment: list[float]
) -> None:
    """It was away for the others too, which perhaps come back a moment later."""
    strict, loose = two
    assert loose.goes() == {}
    moment[0] += 200
    assert loose.goes() == {}
    strict.membership.heartbeat()
    moment[0] += 5
    assert loose.goes() == {}


def test_who_was_heard_is_not_called_silent_after_all_were_suspended(two: Any) -> None:
    """Which the database's clock counts, and those do not by which processes are watched."""
    strict, loose = two
    now, digest = ledger_time.now("default"), strict.membership.party.digest
    loose.membership.party._look_for_silent(now)
    strict.membership.heartbeat()
    loose.membership.party._look_for_silent(now)
    assert digest not in loose.membership.party._look_for_silent(now + timedelta(hours=1))


def test_the_same_settings_change_nothing(waiting: Any, told: Any) -> None:
    waiting(r=100)
    first, second = (
        Process("first", r=LOOSE),
        Process("second", r=Rule(limits=[SlidingWindow("40/m")], read_timeout=9)),
    )
    first.joins()
    version = settings.version("default")
    second.joins()
    first.leave()
    assert second.goes() == {"r": 40}
    assert settings.version("default") == version
    assert not of_settings(told)
    first.joins()
    assert first.membership.book is not None, "it goes on after all"


def test_who_has_other_settings_now_takes_its_own_opinion_back_at_once(waiting: Any) -> None:
    waiting(r=100)
    one = Process("one", r=STRICT)
    assert one.goes() == {"r": 2}
    one.book = book_of({"r": LOOSE})
    assert one.goes() == {"r": 38}


@pytest.mark.parametrize("odd", [{"kind": "LeakyBucket"}, {"kind": "SlidingWindow", "colour": 1}])
def test_a_limit_that_this_version_does_not_know_stops_its_rules_alone(
    waiting: Any, odd: dict[str, Any]
) -> None:
    waiting(a=5, b=5)
    newer, older = Process("newer", a=LOOSE, b=LOOSE), Process("older", a=LOOSE, b=LOOSE)
    newer.joins()
    row = OpinionState.objects.get()
    row.limits["a"][0] = {"rate": "1/m", **odd}
    row.digest = "f" * 16
    row.save()
    assert older.goes() == {"b": 5}
    assert release("default", ["a"], older.membership.book).released == []


def test_calls_of_a_rule_that_another_dispenser_knows_are_left_alone(waiting: Any) -> None:
    """Two projects in one database, or an old dispenser beside a new one."""
    waiting(a=1, b=1)
    theirs, ours = Process("theirs", b=Rule()), Process("ours", a=Rule())
    theirs.joins()
    rules_gone = CallQueue.objects.filter(rule="b")
    rules_gone.update(due_at_dt=timezone.now() - timedelta(minutes=1), ready=True)
    with override_settings(CALLQUEUE={"RULES": {"a": Rule()}}):
        assert ours.goes() == {"a": 1}
        recovery.recover("default")
        assert rules_gone.get().status == states.NEW
        theirs.leave()
        recovery.recover("default")
    assert rules_gone.get().status == states.FAILED


def test_opinions_outlive_the_row_of_the_settings(two: Any) -> None:
    """Whoever makes it anew gives it a version: 0 says that nobody has ever stated anything."""
    _, loose = two
    SettingsState.objects.all().delete()
    assert loose.goes() == {}
    book = settings.book_in_force("default", book_of({"r": LOOSE}))
    assert len(book.budgets["r"]) == 2


# What counts goes on counting.


def shared(rate: str = "10/m") -> SlidingWindow:
    return SlidingWindow(rate, name="account")


def test_what_has_lapsed_is_forgotten_once_no_limit_counts_it(waiting: Any) -> None:
    waiting(a=1)
    before = Process("before", a=Rule(limits=[shared()]), b=Rule(limits=[shared()]))
    after = Process("after", a=Rule(limits=[shared()]))
    before.joins()
    after.joins()
    before.leave()
    lapsed = OpinionState.objects.filter(lapsed_at__isnull=False)
    for ago, left in ((LATE, ["b"]), (50 * SECOND, ["b"]), (70 * SECOND, [])):
        lapsed.update(lapsed_at=F("lapsed_at") - timedelta(microseconds=ago))
        cleanup.clean("default")
        (budget,) = settings.book_in_force("default", after.book).budgets["a"]
        assert [rule for rule, _ in budget.former] == left
    assert not lapsed.exists()


def test_what_is_open_of_a_rule_that_left_a_limit_is_charged_once_to_those_it_has(
    waiting: Any,
) -> None:
    waiting(a=50, b=50)
    link = SlidingWindow("999/m", name="link")
    both = Rule(limits=[shared(), link])
    before = Process("before", a=both, b=Rule(limits=both.limits, priority=5))
    assert before.goes() == {"b": 10}
    before.leave()
    after = Process("after", a=both, b=Rule(limits=[link, SlidingWindow("20/m")]))
    assert after.goes() == {"b": 10}


TEN = [
    SlidingWindow("10/4s", name="n"),
    SlidingWindow("10/h", name="n", per="key"),
    SlidingWindow("2010/d", name="n"),
    FixedWindow("10/d", name="n", per="key"),
    TokenBucket("10/w", burst=10, name="n", per="key", unit="tokens"),
    Concurrency(10, name="n", per="key"),
]


@pytest.mark.parametrize("is_removed", [True, False], ids=["removed", "unlinked"])
@pytest.mark.parametrize("is_answered", [True, False], ids=["answered", "open"])
@pytest.mark.parametrize("limit", TEN, ids=repr)
def test_every_kind_of_limit_counts_its_former_rules(
    rules: Rules, limit: Any, is_answered: bool, is_removed: bool, thousand: int
) -> None:
    """Seven of ten were used by b, which is without the limit now: a gets three."""
    if limit.capacity > 10:
        limit = SlidingWindow(f"{2 * thousand + 10}/d", name="n")
    rules(a=Rule(), b=Rule())
    most = limit.capacity
    url = {"call_data": CALL, "cost": {"tokens": 1}, "key": "K"}
    before = Process("before", a=Rule(limits=[limit]), b=Rule(limits=[limit]))
    after = Process("after", a=Rule(limits=[limit]), **({} if is_removed else {"b": Rule()}))
    with mock.patch.object(release_pass, "LEAD", 0.0):
        CallQueue.objects.send_many([url] * (most - 3), rule="b")
        assert before.goes() == {"b": most - 3}
        CallQueue.objects.send_many([url] * (most + 9), rule="a")
        if is_answered:
            answer_all()
        after.joins()
        before.leave()
        assert after.goes() == {"a": most if isinstance(limit, Concurrency) and is_answered else 3}
        assert after.goes() == {}
        if not is_removed:
            CallQueue.objects.send_many([url] * 5, rule="b")
            assert after.goes() == {"b": 5}
        assert after.goes() == {}
        answer_all()
        assert after.goes() == (
            {"a": 9 if is_answered else most} if isinstance(limit, Concurrency) else {}
        )


def test_views_count_what_former_rules_used(waiting: Any, rules: Rules) -> None:
    waiting(a=50, b=50)
    before = Process("before", a=Rule(limits=[shared()]), b=Rule(limits=[shared()], priority=5))
    assert before.goes() == {"b": 10}
    answer_all(seconds_ago=30)
    before.leave()
    after = Process("after", a=Rule(limits=[shared()]))
    after.joins()
    rules(a=Rule(limits=[shared()]))
    assert not CallQueue.objects.under_threshold("a")
    (limit,) = look("default").rule("a").limits
    assert (limit.used, limit.free) == (10, 0)
    assert CallQueue.objects.filter(rule="a")[0].forecast().release_at is not None
    (found,) = [
        one for one in audit.audit("default", since=timedelta(hours=1)).findings if one.rule == "a"
    ]
    assert (found.highest, found.exceeded) == (10, False)


def test_a_new_rule_that_is_like_others_is_not_taken_for_them(waiting: Any) -> None:
    waiting(a=50, b=50, c=50)
    rule = Rule(limits=[SlidingWindow("10/m")])
    before = Process("before", a=rule, b=rule)
    assert before.goes() == {"a": 10, "b": 10}
    after = Process("after", a=rule, b=rule, c=rule)
    assert after.goes() == {"c": 10}


# What an operator changed stays.


def test_a_changed_limit_stays_in_force_whatever_becomes_of_its_rules(
    waiting: Any, rules: Rules
) -> None:
    waiting(a=0, b=300)
    both = {"a": Rule(limits=[shared("100/h")]), "b": Rule(limits=[shared("100/h")])}
    first = Process("first", **both)
    first.joins()
    rules(**both)
    control.change_limit("default", "b", "account", "20/h")
    assert first.goes() == {"b": 20}
    first.leave()
    second = Process("second", b=Rule(limits=[shared("100/h")]))
    assert second.goes() == {}
    second.leave()
    third = Process("third", b=Rule(limits=[shared("100/h")]), aa=Rule(limits=[shared("100/h")]))
    assert third.goes() == {}
    control.change_limit("default", "b", "account", None)
    assert third.goes() == {"b": 80}
    control.change_limit("default", "b", "account", "999/h")
    third.leave()
    fourth = Process("fourth", b=Rule(limits=[Concurrency(150, name="account")]))
    assert fourth.goes() == {"b": 50}, "a rate that the limit of today cannot have is passed over"


# Who is told.


def test_status_doctor_and_dashboard_name_the_processes_and_the_limit(
    two: Any, rules: Rules, admin_client: Any
) -> None:
    strict, _ = two
    rules(r=STRICT)
    words = ("r#0", "strict", "loose", "2/m", "40/m")
    (found,) = run("status", "--json").document["disagreements"]
    assert found == {
        "limit": "r#0",
        "rules": ["r"],
        "said": {"SlidingWindow('2/m')": ["strict"], "SlidingWindow('40/m')": ["loose"]},
    }
    check = run_check("agreement", Facts("default"))
    page = admin_client.get(reverse("admin:callqueue_dashboard")).content.decode()
    for text in (run("status").out, check.detail, html.unescape(page)):
        assert [word for word in words if word not in text] == []
    assert (check.ok, bool(check.todo)) == (False, True)
    strict.leave()
    assert run("status", "--json").document["disagreements"] == []
    assert "this process" in run_check("agreement", Facts("default")).detail
    rules(r=LOOSE)
    assert run_check("agreement", Facts("default")).ok
