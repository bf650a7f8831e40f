"""What a pass left free is taken without counting, and is never more than counting finds."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

import callqueue
from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow, TokenBucket, control, states
from callqueue.conf import current
from callqueue.database import to_us
from callqueue.dispatch import choosing
from callqueue.dispatch.release_pass import ensure_state_rows, release
from callqueue.ledger import holds, ledger_time, settings
from callqueue.ledger.account import Account
from callqueue.ledger.memo import Memo
from callqueue.ledger.rule_rows import passes_and_memos
from callqueue.models import CallAttempt, RuleState
from callqueue.testing import travel
from tests.support.behaviour import move_ledger, send
from tests.support.dispensers import Process
from tests.support.ledger import answer

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("trusted_workers")]
Rules = Callable[..., None]


@pytest.fixture(autouse=True)
def _own_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tests move the ledger: no other judges the clock by what they read."""
    monkeypatch.setattr(ledger_time, "_watches", {})


def counts(of: Callable[[], Any] = lambda: a_pass()) -> bool:
    """Whether a pass reads what is charged."""
    with CaptureQueriesContext(connection) as said:
        of()
    sums = [one["sql"] for one in said.captured_queries if "MIN(released_at)" in one["sql"]]
    return bool(sums)


def a_pass(rule: str = "r") -> int:
    """Make a pass; how many it releases."""
    group = current().book.groups[rule]
    ensure_state_rows("default", group)
    return len(release("default", group).released)


def let_go(count: int, rule: str = "r", **options: Any) -> int:
    """Send so many, and make a pass."""
    for _ in range(count):
        send(rule, **options)
    return a_pass(rule)


def known(rule: str = "r") -> Any:
    """What is known to be free, by budget."""
    return RuleState.objects.get(rule=rule).memo["room"].get("free")


# --- what it saves


def test_a_pass_of_one_call_makes_five_statements(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("20/s")]))
    let_go(1)
    send("r")
    with CaptureQueriesContext(connection) as said:
        release("default", ["r"], settings.book_in_force("default"))
    made = [one["sql"] for one in said.captured_queries if "SAVEPOINT" not in one["sql"]]
    read_version = sum("settingsstate" in sql.lower() and "rulestate" not in sql for sql in made)
    assert len(made) - read_version <= 5 + (connection.vendor != "postgresql"), made


def test_the_whole_of_the_limit_is_used_and_no_more(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("9/m")]))
    assert [let_go(1) for _ in range(4)] == [1] * 4
    assert known() == {"r#0": 5}
    assert let_go(9) == 5
    assert known() == {"r#0": 0}
    assert let_go(1) == 0
    with travel(61):
        answer()
        assert a_pass() == 0
    with travel(130):
        assert a_pass() == 5


def test_a_pass_that_counts_but_releases_nothing_writes_nothing(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/m")]))
    let_go(2)
    a_pass()
    before = RuleState.objects.get(rule="r").memo
    assert counts()
    assert RuleState.objects.get(rule="r").memo == before


def test_rules_that_share_a_limit_take_from_the_same_room(rules: Rules) -> None:
    shared = SlidingWindow("5/m", name="account")
    rules(a=Rule(limits=[shared]), b=Rule(limits=[shared, SlidingWindow("3/m")]))
    assert let_go(1, "a") == let_go(1, "b") == let_go(1, "a") == 1
    assert known("a") == {"account": 2, "b#1": 2}
    assert not counts(lambda: let_go(1, "b"))
    assert let_go(3, "b") == 1
    assert let_go(3, "a") == 0


# --- where it is not believed


@pytest.mark.parametrize(
    "rule",
    [
        Rule(limits=[SlidingWindow("9/s", per="key")]),
        Rule(limits=[SlidingWindow("9/s", per="queue")]),
        Rule(limits=[SlidingWindow("9/s")], queues=["a", "b"]),
        Rule(limits=[SlidingWindow("9/s")], settle="tests.db.ledger.test_tallies.five_times"),
    ],
    ids=["keys", "a queue", "queues", "settles"],
)
def test_passes_count_where_room_is_not_known(rules: Rules, rule: Rule) -> None:
    rules(r=rule)
    let_go(1)
    assert counts()
    assert not known()


def test_what_another_group_released_is_counted(rules: Rules) -> None:
    """By the old settings the rule was alone, and shares a limit by the new: each releases."""
    rule = Rule(limits=[SlidingWindow("5/m", name="account")])
    one, two = Process("one", a=rule), Process("two", a=rule, b=rule)
    rules(a=Rule(), b=Rule())
    for _ in range(4):
        send("a"), send("b")
    released = 0
    for process in (one, two, one, two, one, two):
        process.joins()
        passed = release("default", process.group_of("a"), process.membership.book, batch=2)
        released += len(passed.released)
    assert released == 5


def test_what_a_permit_cost_more_is_taken_off(rules: Rules) -> None:
    """It says so once it has ended, and its rule does not settle."""
    rules(r=Rule(limits=[SlidingWindow("100/m", unit="tokens")]))
    with callqueue.permit("r", cost={"tokens": 10}, wait=0) as permit:
        pass
    assert let_go(1, cost={"tokens": 10}) == 1
    assert known() == {"r#0": 80}
    permit.settle({"tokens": 70})
    assert counts()  # and takes the mark away
    assert known() == {"r#0": 20}
    assert let_go(5, cost={"tokens": 10}) == 2


def test_what_a_permit_costs_once_more_as_before_is_taken_off(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass has seen it cost less, and had looked for marks just before."""
    rules(r=Rule(limits=[SlidingWindow("100/m", unit="tokens")]))
    with callqueue.permit("r", cost={"calls": 1, "tokens": 70}, wait=0) as permit:
        pass
    read = Account.read

    def read_later(account: Account, **options: Any) -> None:
        permit.settle({"tokens": 10})
        read(account, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Account, "read", read_later)
        assert let_go(1, cost={"tokens": 35}) == 1
    assert known() == {"r#0": 55}
    permit.settle({"tokens": 70})
    assert let_go(1, cost={"tokens": 10}) == 0


@pytest.mark.parametrize("by", ["a clock set back", "a clock set forward", "a later reading"])
def test_room_of_another_clock_is_counted_anew(rules: Rules, by: str) -> None:
    """Another process reads the clock a little later: what is free then may not be free yet."""
    rules(r=Rule(limits=[SlidingWindow("9/m")]))
    let_go(1)
    assert not counts()
    if by == "a later reading":
        state = RuleState.objects.get(rule="r")
        state.memo["room"]["at"] += 60_000_000
        state.save()
    else:
        move_ledger({"a clock set back": -5.0, "a clock set forward": 5.0}[by])
        ledger_time.forget_readings()
    assert counts()


def test_room_of_another_limit_or_of_a_row_that_is_gone_or_empty_is_none(rules: Rules) -> None:
    """A limit before one without a name makes it another one, though it allows the same."""
    rules(r=Rule(limits=[SlidingWindow("9/m")]))
    let_go(1)
    rules(r=Rule(limits=[SlidingWindow("5000/h"), SlidingWindow("9/m")]))
    assert counts(lambda: let_go(1))
    RuleState.objects.filter(rule="r").delete()
    assert counts(lambda: let_go(1))
    RuleState.objects.update(memo={})
    assert counts(lambda: let_go(1))
    control.change_limit("default", "r", "r#1", "6/m")
    assert let_go(9) == 2


@pytest.mark.parametrize("per", ["rule", "key"])
@pytest.mark.parametrize("first", ["a", "r", "z"])
def test_what_is_held_stays(rules: Rules, per: str, first: str) -> None:
    """Whichever of the rules that share a limit has the row in which room is kept."""
    shared = SlidingWindow("9/m", name="account")
    rules(**{name: Rule(limits=[shared]) for name in {first, "r"}})
    let_go(1, key="k")
    held = {"rule": "", "key": "k"}[per]
    for lasts in timedelta(seconds=1), None:  # while it is in force, a longer one
        holds.lay("default", ["r"], per, held, lasts, "test", source="operator")
    if first != "r":
        send(first)
    assert (let_go(1, key="k"), a_pass()) == (first != "r", 0)
    control.resume("default", "r")
    assert a_pass() == 1
    assert not counts()


def test_it_is_counted_where_workers_may_be_behind(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "trusted_count", lambda lease: 5)
    rules(r=Rule(limits=[SlidingWindow("900/m")]))
    assert [let_go(1) for _ in range(5)] == [1] * 5
    assert counts(lambda: send("r") and a_pass())
    assert CallAttempt.objects.count() == 5  # nobody has begun any


# --- never more than counting finds

LIMITS = {
    "window": [SlidingWindow("6/2s")],
    "strict": [SlidingWindow("6/2s", strict=True)],
    "bucket": [TokenBucket("3/s", burst=6)],
    "calendar": [FixedWindow("6/3s", jitter=0.2)],
    "once": [Concurrency(5)],
    "tokens": [SlidingWindow("20/2s", unit="tokens"), TokenBucket("9/s", burst=9)],
}


@pytest.mark.parametrize("kind", LIMITS)
def test_known_room_is_never_more_than_counting_finds(rules: Rules, kind: str) -> None:
    """Whatever happens to attempts, and however much time goes by."""
    rules(r=Rule(limits=LIMITS[kind]), s=Rule())
    rand, seen = random.Random(kind), 0
    with travel() as clock:
        for _ in range(80):
            clock.forward(rand.choice([0.0, 0.01, 0.06, 0.4, 1.1]))
            for _ in range(rand.choice([0, 1, 1, 3])):
                send("r", cost={"tokens": rand.randint(1, 4)} if kind == "tokens" else 1)
            a_pass()
            seen += not_more_than_counted()
            happen(rand)
            not_more_than_counted()
    assert seen > 5


def happen(rand: random.Random) -> None:
    """Something happens to some of the open attempts."""
    now = ledger_time.now("default")
    for attempt in CallAttempt.objects.open():
        told = {"started_at": now, "sent_at": attempt.sent_at or now}
        ended = {**told, "finished_at": now}
        columns = rand.choice([
            {}, {}, {"started_at": now}, told, {**ended, "outcome": states.SUCCEEDED},
            {**ended, "outcome": states.LOST}, {**ended, "outcome": states.VOIDED},
        ])  # fmt: skip
        CallAttempt.objects.filter(pk=attempt.pk).update(**columns)


def not_more_than_counted() -> bool:
    """Compare what is kept with a count of when all that is told of has left; was there any?"""
    book, group = current().book, ("r",)
    memo = Memo.load(group, passes_and_memos("default", group), 0, ledger_time.moved("default"))
    free = memo.room.get("free", {})
    now = to_us(ledger_time.now("default")) + 60_000
    found = Account("default", book, group, now, now, Memo(levels=memo.levels))
    found.read()
    for budget in book.budgets["r"]:
        assert free.get(budget.id, 0) <= found.meter(budget).free, (free, memo.room)
    return any(free.values())
