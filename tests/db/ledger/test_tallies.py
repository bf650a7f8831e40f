"""Budgets with long windows: what is kept of them is what counting anew would give, whatever
happens in between.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from callqueue import (
    Concurrency,
    FixedWindow,
    Rule,
    SlidingWindow,
    TokenBucket,
    database,
    transitions,
)
from callqueue.dispatch.dispenser import Dispenser
from callqueue.dispatch.release_pass import ensure_states
from callqueue.dispatch.release_pass import release as make_pass
from callqueue.ledger import ledger_time, tallies
from callqueue.limits.budgets import bind
from callqueue.limits.kinds import Limit
from callqueue.managers import CallAttemptQuerySet
from callqueue.models import CallAttempt, CallQueue, RuleState, Tally
from tests.support.behaviour import release, send
from tests.support.ledger import CALL, Later, answer

pytestmark = pytest.mark.usefixtures("trusted_workers")

Rules = Callable[..., None]
# Tallied and not. Nothing leaves them while a slow machine is at it.
LIMITS_OF_FIVE = [
    SlidingWindow("5/5s", per="key"),
    SlidingWindow("5/h", per="key"),
    FixedWindow("5/d", per="key"),
    TokenBucket("1/h", burst=5, per="key"),
    TokenBucket("1/3s", burst=5, per="key"),
    Concurrency(5, per="key"),
]


# --- keys with parts


@pytest.mark.parametrize("limit", LIMITS_OF_FIVE, ids=repr)
def test_a_key_is_counted_whatever_other_parts_its_text_has(rules: Rules, limit: Limit) -> None:
    rules(r=Rule(limits=[limit, SlidingWindow("900/h", per="channel")]))
    keys: list[Any] = [
        {"key": "T1", "channel": "C1"},
        {"key": "T1", "channel": "C2"},
        "T1",
        {"key": "T1"},
    ]
    for key in keys:
        for _ in range(5):
            CallQueue.objects.send(CALL, rule="r", key=key)
        released = release()
        assert len(released) == (5 if key == keys[0] else 0)
        answer()
        if isinstance(limit, Concurrency):
            return
        assert not any(CallQueue.objects.under_threshold("r", key) for key in keys)
    assert CallQueue.objects.under_threshold("r", "T2")


# --- what passes remember


def test_what_was_remembered_of_a_group_is_not_believed_after_another_group_released(
    rules: Rules, thousand: int
) -> None:
    """A rule joins the budget, releases, and leaves again: a deployment that is rolled back."""
    account = SlidingWindow(f"{4 * thousand}/d", name="account")
    alone, both = (
        {"b": Rule(limits=[account])},
        {"a": Rule(limits=[account]), "b": Rule(limits=[account])},
    )
    for first, then in ((alone, both), (both, alone)):
        (
            CallAttempt.objects.all().delete(),
            RuleState.objects.all().delete(),
            CallQueue.objects.all().delete(),
        )
        for settings in (first, then, first, then):
            rules(**settings)
            waiting_calls("b", 3 * thousand // 2)
            release_all("b")
        assert CallAttempt.objects.filter(rule="b").count() == 4 * thousand


def test_what_a_linked_rule_alone_had_taken_away_is_not_taken_away_twice(
    rules: Rules, later: Later
) -> None:
    """While they were linked nothing of the limited rule was released; but what left its window was
    told to its tallies.
    """
    link, hourly = SlidingWindow("100000/h", name="link"), SlidingWindow("10/h", per="key")
    apart = {"a": Rule(), "b": Rule(limits=[hourly])}
    rules(**apart)
    ensure_states("default", ["a", "b"])
    past_attempts("b", "T", minutes=[58] * 5 + [30] * 5)
    send("b", key="other")
    release_all("b")
    later(180)
    rules(a=Rule(limits=[link]), b=Rule(limits=[hourly, link]))
    send("a")
    release_all("a")
    later(240)
    rules(**apart)
    for _ in range(10):
        send("b", key="T")
    release_all("b")
    assert CallAttempt.objects.filter(rule="b", key="T").count() == 15  # 5 of them left the window


@pytest.mark.parametrize(
    ("names", "thousands", "per"), [("bcbc", 2.1, "d"), ("abcabca", 2.5, "30d")]
)
def test_a_rule_that_is_renamed_to_and_fro_by_short_lived_dispensers_is_counted_whole(
    rules: Rules, names: str, thousands: float, per: str, thousand: int
) -> None:
    """Its two names share no row, and a dispenser that makes one round hears of no other."""
    account = SlidingWindow(f"{int(thousands * thousand)}/{per}", name="account")
    for name in names:
        rules(**{name: Rule(limits=[account])})
        waiting_calls(name, 7 * thousand // 10)
        Dispenser(name="short-lived", publish=lambda using, messages: True).run_once()
        answer()
    assert CallAttempt.objects.count() <= account.n


def test_a_changed_unit_or_scope_is_counted_anew(rules: Rules) -> None:
    for limit, allowed in (
        (SlidingWindow("6/h", per="key"), 6),
        (SlidingWindow("8/h", per="who"), 8),
        (SlidingWindow("90/h", per="key", unit="tokens"), 9),
        (FixedWindow("12/d", per="who"), 12),
    ):
        rules(r=Rule(limits=[limit]))
        for _ in range(5):
            CallQueue.objects.send(
                CALL, rule="r", key={"key": "T", "who": "W"}, cost={"calls": 1, "tokens": 10}
            )
        for _ in range(4):
            release()
        assert CallAttempt.objects.count() == allowed or limit.rate == "6/h"
        assert CallAttempt.objects.count() <= allowed


def test_a_bucket_whose_burst_has_changed_does_not_begin_full(rules: Rules) -> None:
    for burst in (5, 6, 5, 7):
        rules(r=Rule(limits=[TokenBucket("1/h", burst=burst)]))
        for _ in range(8):
            send("r")
        release()
        answer()
    assert CallAttempt.objects.count() <= 7


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (TokenBucket("1/m", burst=5, per="key"), 2),  # 1 two minutes ago, 1 of 2 one minute ago
        (TokenBucket("1/h", burst=5, per="key", unit="tokens"), 5),
        (SlidingWindow("7/h", per="key"), 2),
        (SlidingWindow("5/h", per="key", unit="tokens"), 5),
    ],
    ids=repr,
)
def test_keys_are_counted_from_what_ended_minutes_ago(
    rules: Rules, limit: Limit, left: int
) -> None:
    """What had no tokens charges none."""
    rules(r=Rule(limits=[limit]))
    ensure_states("default", ["r"])
    past_attempts("r", "T", minutes=[2] * 4 + [1])
    for key in "TU":
        for _ in range(5):
            send("r", key=key, cost={"tokens": 1})
    released = make_pass("default", ["r"]).released
    assert Counter(one.key for one in released) == {"T": left, "U": 5}


# --- what comes back


def test_attempts_are_wanted_for_little_longer_than_their_window() -> None:
    """By a dispenser that was away: it takes away what has left meanwhile, or counts anew."""
    for per, longest in (("rule", 1.01), ("key", 1.5)):
        limit = SlidingWindow("5/30d", per=per)
        counted = tallies.counted_for(bind({"r": Rule(limits=[limit])}))["r"]
        assert limit.window_us < counted <= longest * limit.window_us


def test_of_keys_that_are_not_known_the_fullest_are_loaded(rules: Rules) -> None:
    limit = SlidingWindow("5/h", per="key")
    rules(r=Rule(limits=[limit]))
    for key in "abaa":
        send("r", key=key)
    release_all("r", answered=False)
    at = database.to_us(ledger_time.now("default"))
    kept = RuleState.objects.get(rule="r").memo["tallies"]["r#0"]
    budget = bind({"r": Rule(limits=[limit])}).budgets["r"][0]
    (one,) = tallies.tallies_of("default", [(budget, kept)], at, at)
    assert not one.by_value
    tallies.load_fullest("default", [one])
    assert {value: tally.used for value, tally in one.by_value.items()} == {"a": 3, "b": 1}
    assert one.loaded_fullest() == ["b", "a"]


# --- whatever happens


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "limit",
    [
        SlidingWindow("7/m", per="key"),
        SlidingWindow("7/m", per="part"),
        SlidingWindow("70/m", per="key", unit="tokens"),
        FixedWindow("7/2m", per="key"),
    ],
    ids=repr,
)
def test_the_tallies_are_what_counting_anew_gives(
    rules: Rules, later: Later, limit: Limit, seed: int
) -> None:
    """Sends, passes, answers, undone releases, settled costs and time, in any order."""
    chance = random.Random(seed)
    rules(
        r=Rule(limits=[limit, SlidingWindow("3000/h")]),
        s=Rule(limits=[SlidingWindow("4/m", per="key")]),
    )
    ensure_states("default", ["r", "s"])
    now = 0.0
    for _ in range(60):
        step = chance.random()
        if step < 0.3:
            key = {"key": chance.choice("AB"), "part": chance.choice("XY")}
            CallQueue.objects.send(
                CALL, rule=chance.choice("rrrs"), key=key, cost={"calls": 1, "tokens": 10}
            )
        elif step < 0.55:
            released = make_pass("default", [chance.choice("rrrs")]).released
            judge(limit)
            undo_some(released, chance)
        elif step < 0.75:
            answer_some(chance.randint(1, 3), tokens=chance.choice([None, 4]))
        else:
            now += chance.choice([0.3, 5, 31, 59.9, 61, 400])
            later(now)
    assert CallAttempt.objects.filter(rule="r").count() > 5


def judge(limit: Limit) -> None:
    """What is kept is what is counted."""
    limit = limit.moved_by(ledger_time.moved("default"))
    at = database.to_us(ledger_time.now("default"))
    kept = {tally.value: tally.used for tally in Tally.objects.filter(budget="r#0") if tally.used}
    pending = CallAttempt.objects.filter(rule="r", correction_pending=True).exists()
    if kept and not pending:
        book = bind({"r": Rule(limits=[limit])})
        (counted,) = tallies.tallies_of("default", [(book.budgets["r"][0], None)], at, at)
        fresh = {value: tally.used for value, tally in counted.by_value.items() if tally.used}
        assert all(kept.get(value, 0) >= used for value, used in fresh.items())
        assert all(used - fresh.get(value, 0) <= limit.capacity for value, used in kept.items())


# --- cost


def test_passes_read_no_more_rows_however_many_attempts_the_window_has(rules: Rules) -> None:
    """Counted from the plans: rows that statements read, with 20 times the attempts and the
    values in the window. Nor does the rule's row remember more.
    """
    if connection.vendor != "postgresql":
        pytest.skip("reads PostgreSQL's plans")
    limits = {
        "day": [SlidingWindow("1000/d", per="workspace")],
        "tokens": [SlidingWindow("900000000/d", unit="tokens")],
        "keys": [TokenBucket("1000/d", burst=100, per="key")],
        "calls": [SlidingWindow("1000000/d")],
    }
    read, kept = {}, {}
    for size in (200, 4_000):
        (
            CallAttempt.objects.all().delete(),
            RuleState.objects.all().delete(),
            Tally.objects.all().delete(),
        )
        rules(**{name: Rule(limits=listed) for name, listed in limits.items()})
        ensure_states("default", list(limits))
        for name in limits:
            answered_attempts(name, size)
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE callqueue_callattempt")
        for name in limits:
            for _ in range(40):
                CallQueue.objects.send(
                    CALL, rule=name, key=a_key(name, 1), cost={"calls": 1, "tokens": 5}
                )
            make_pass("default", [name], batch=10)  # counts, and remembers
            read[name, size] = rows_read(lambda name=name: make_pass("default", [name], batch=10))
            kept[name, size] = len(json.dumps(RuleState.objects.get(rule=name).memo))
    for name in limits:
        assert read[name, 4_000] <= 2 * read[name, 200] + 50, (name, read)
        assert kept[name, 4_000] <= kept[name, 200] + 200, (name, kept)


def rows_read(doing: Callable[[], Any]) -> int:
    """The rows that statements on attempts and tallies read, by their plans."""
    statements: list[tuple[str, Any]] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.lstrip().upper().startswith(("SELECT", "WITH")) and "callqueue_" in sql:
            with connection.cursor() as cursor:
                cursor.cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", params)
                statements.append((sql, cursor.cursor.fetchone()[0][0]["Plan"]))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        doing()
    assert statements
    return sum(rows_of(plan) for _, plan in statements)


def rows_of(plan: dict[str, Any]) -> int:
    own = (
        plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
        if "Relation Name" in plan
        else 0
    )
    return int(own * plan["Actual Loops"]) + sum(rows_of(part) for part in plan.get("Plans", ()))


# --- making things


def a_key(name: str, number: int) -> Any:
    return {"day": {"workspace": f"w{number}"}, "keys": f"k{number}"}.get(name, "")


def waiting_calls(rule: str, count: int) -> None:
    CallQueue.objects.send_many([CALL] * count, rule=rule)


def release_all(rule: str, *, answered: bool = True) -> None:
    """Passes over the rule's group until there is nothing more to release."""
    from callqueue import conf

    group = conf.current().book.groups[rule]
    ensure_states("default", group)
    while make_pass("default", group).released:
        pass
    if answered:
        answer()


def answer_some(count: int, tokens: int | None) -> None:
    """Answers that were recorded as executors record them."""
    now = ledger_time.now("default")
    for attempt in CallAttempt.objects.open().order_by("pk")[:count] if tokens is not None else ():
        cost = {**attempt.cost, "tokens": tokens}
        CallAttempt.objects.filter(pk=attempt.pk).update(
            charged=attempt.cost,
            correction_pending=True,
            cost=cost,
            started_at=now,
            sent_at=now,
            finished_at=now,
            outcome="succeeded",
        )
    if tokens is None:
        answer(CallAttempt.objects.open().order_by("pk")[:count])


def undo_some(released: Iterable[Any], chance: random.Random) -> None:
    ids = [one.attempt_id for one in released if chance.random() < 0.2]
    if ids:
        transitions.undo("default", ids)


def past_attempts(rule: str, key: str, *, minutes: list[int]) -> None:
    """Answered attempts that ended so many minutes ago."""
    now = ledger_time.now("default")
    for number, ago in enumerate(minutes):
        at = now - timedelta(minutes=ago)
        instants = dict.fromkeys(["released_at", "started_at", "sent_at", "finished_at"], at)
        CallAttempt.objects.create(
            call_id=10**9 + number,
            number=1,
            rule=rule,
            key=key,
            cost=1,
            outcome="succeeded",
            **instants,
        )


def answered_attempts(rule: str, count: int) -> None:
    """Answered attempts spread over twenty hours, ten of each key."""
    assert isinstance(CallAttempt.objects.all(), CallAttemptQuerySet)
    now = ledger_time.now("default")
    from callqueue.sending.validation import check_key

    CallAttempt.objects.bulk_create(
        [
            CallAttempt(
                call_id=10**9 + i, number=1, rule=rule, key=check_key(a_key(rule, i % (count // 10))), cost={"calls": 1, "tokens": 5},
                released_at=(at := now - timedelta(hours=20) * (i + 1) / count), started_at=at, sent_at=at, finished_at=at,
                outcome="succeeded",
            )
            for i in range(count)
        ],
        batch_size=2000,
    )  # fmt: skip
