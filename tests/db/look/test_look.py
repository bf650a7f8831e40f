"""Where every rule stands: what is counted, how far limits are used, and how long it will last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow, TokenBucket
from callqueue.execution import claim
from callqueue.ledger import account, ledger_time, ready_calls, settings, tallies, tally_rows
from callqueue.limits.budgets import book_of
from callqueue.limits.kinds import Limit
from callqueue.look import LimitLook, RuleLook, limits, look
from callqueue.models import CallAttempt, CallQueue
from callqueue.testing import run_callqueue, travel
from tests.support.behaviour import Vendor, release, run, send

Rules = Callable[..., None]
CALL = {"method": "get", "params": {"url": "http://vendor.example/"}}


def of(name: str) -> RuleLook:
    return look("default").rule(name)


def test_the_oldest_due_is_found_in_whatever_priority(rules: Rules) -> None:
    rules(pay=Rule())
    send("pay", not_before=timezone.now() + timedelta(hours=1))
    assert of("pay").oldest_due_s is None, "all is scheduled for later"
    for priority, seconds in ((5, 10), (0, 300), (-5, 20)):
        call = send("pay", priority=priority)
        CallQueue.objects.filter(pk=call.pk).update(
            due_at_dt=timezone.now() - timedelta(seconds=seconds), ready=True
        )
    assert of("pay").oldest_due_s == pytest.approx(300, abs=10)


def test_without_limits_the_drain_is_told_by_the_pace_of_the_last_minute(
    rules: Rules, remote: Vendor
) -> None:
    rules(pay=Rule())
    send("pay")
    assert of("pay").drain_s() is None
    assert run() == 1
    send("pay")
    assert of("pay").drain_s() == pytest.approx(0, abs=1), "as many as went may go at once"
    calls = [send("pay"), send("pay")]
    assert of("pay").drain_s() == pytest.approx(120, abs=1)
    due = timezone.now() - timedelta(minutes=1)
    CallQueue.objects.filter(pk=calls[0].pk).update(due_at_dt=due, ready=True)
    assert of("pay").drain_s() == pytest.approx(180, abs=1), (
        "they went no faster, though they waited"
    )


def test_the_fullest_key_is_found_behind_those_that_have_left(
    rules: Rules, remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tallies, "FULLEST", 2)
    rules(pay=Rule(limits=[SlidingWindow("10/h", per="key")]))
    for key in ("a", "b", "c"):
        for _ in range(4):
            send("pay", key=key)
    assert run() == 12
    with travel(minutes=50):
        for _ in range(2):
            send("pay", key="late")
        run_callqueue()
    with travel(minutes=61):
        (shown,) = of("pay").limits
        assert (shown.used, shown.value) == (2, "late")


def figures(limit: LimitLook) -> Any:
    return replace(limit, meter=None, emptiest=None), limit.meter.known_free_at(3)  # type: ignore[arg-type]


def test_rules_that_are_read_together_have_the_use_that_each_has_alone(
    rules: Rules, remote: Vendor
) -> None:
    shared = SlidingWindow("40/m", name="account")
    of_kinds = {
        "keyed": Rule(limits=[SlidingWindow("3/m", per="key"), TokenBucket("20/m", burst=6)]),
        "tallied": Rule(limits=[SlidingWindow("5000/d"), FixedWindow("9000/d"), shared]),
        "by_part": Rule(
            limits=[SlidingWindow("7/h", per="user"), TokenBucket("50/h", burst=5, per="key")]
        ),
        "in_flight": Rule(limits=[Concurrency(6), SlidingWindow("900/h", unit="tokens")]),
        "by_queue": Rule(
            limits=[
                SlidingWindow("9/m", per="queue"),
                SlidingWindow("5000/h", per="queue"),
                shared,
            ],
            queues=["q1", "q2"],
        ),
        "strict": Rule(limits=[SlidingWindow("8/m", strict=True), SlidingWindow("2/s")]),
        "free": Rule(),
    }
    rules(**of_kinds)
    for make in (run, release):
        for name in of_kinds:
            for number in range(4):
                cost = {"calls": 1, "tokens": 30 + number}
                send(name, key={"user": f"u{number % 2}"}, cost=cost)
        make()
    names, reading = [*of_kinds, "default"], ledger_time.read("default")
    at = reading.at, reading.moved
    book = settings.book_in_force("default")
    backlog = dict.fromkeys(names, 10_000)
    together, _ = limits.read("default", book, names, *at, backlog)
    for name in names:
        alone = limits.read("default", book, [name], *at, backlog)[0][name]
        assert list(map(figures, alone)) == list(map(figures, together[name]))
    assert [limit.used for limit in together["tallied"]] == [8, 8, 16]
    assert [limit.used for limit in together["in_flight"]] == [4, 252]
    assert [limit.used for limit in together["by_queue"]] == [8, 8, 16]


def test_more_rules_share_a_limit_than_a_statement_joins(rules: Rules) -> None:
    """SQLite joins 500 SELECTs: beyond, a rule's page and the dispenser that waits would stand."""
    names = [f"p{n}" for n in range(501)]
    rules(**dict.fromkeys(names, Rule(limits=[SlidingWindow("5000/m", name="all")])))
    send("p500")
    assert ready_calls.rules_with_ready("default", names) == {"p500"}
    release()
    assert look("default", rules=["p1"]).rule("p1").limits[0].used == 1
    assert account.glances("default", names)["p500"].open == 1
    assert ready_calls.next_wake_of_keys("default", names) is None
    (budget,) = book_of(
        {name: Rule(limits=[SlidingWindow("9/m", name="all")]) for name in names}
    ).budgets["p1"]
    assert tally_rows.first_end_after("default", budget, 0) is None


def test_calls_are_spread_over_the_values_of_a_part_of_their_keys(rules: Rules) -> None:
    """By the database, whatever the keys are; and few rows come back for many of them."""
    rules(r=Rule(limits=[SlidingWindow("5/m", per="user"), SlidingWindow("9/m", per="team")]))
    for key, count in (
        ({"user": "ada", "team": "x"}, 3),
        ({"user": "ada", "team": "y"}, 2),
        ({"user": 'b"o\\b', "team": "ÄÖ"}, 4),
        ({"user": "c", "team": "z"}, 1),
    ):
        CallQueue.objects.send_many([CALL] * count, rule="r", key=key)
    CallQueue.objects.filter(key__contains='"team":"y"').update(key="plain")
    by_user, by_team = look("default").rule("r").gates
    assert by_user.sizes == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert by_team.sizes == [(1, 1), (2, 1), (3, 1), (4, 1)]


def test_of_many_keys_few_rows_are_read(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/m", per="user"), SlidingWindow("9/m", per="key")]))
    for n in range(60):
        CallQueue.objects.send_many([CALL] * (1 + n % 2), rule="r", key={"user": f"u{n}"})
    read: list[int] = []

    def counted(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        found = execute(sql, params, many, context)
        read.append(context["cursor"].rowcount)
        return found

    with connection.execute_wrapper(counted):
        look("default")
    if connection.vendor != "sqlite":  # which does not say how many
        assert max(read) < 20


# --- where answers are slow


def answered(count: int, seconds: float, *, is_stamped: bool = True) -> None:
    """So many attempts of the rule were answered just now, each after so many seconds."""
    now = ledger_time.now("default")
    begun = now - timedelta(seconds=seconds)
    CallAttempt.objects.bulk_create(
        CallAttempt(
            call_id=10_000 + i, number=1, rule="r", queue="q", released_at=begun, started_at=begun,
            sent_at=begun if is_stamped else None, outcome=CallAttempt.Outcome.SUCCEEDED,
            finished_at=now - timedelta(milliseconds=i),
        )
        for i in range(count)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "is_stamped", "least", "most"),
    [
        (SlidingWindow("10/s"), True, 18, 22),  # it ages when it was sent
        (SlidingWindow("10/s", strict=True), True, 50, 135),
        (SlidingWindow("10/s"), False, 50, 135),
        (Concurrency(10), True, 50, 135),
        (TokenBucket("10/s", burst=10), False, 50, 135),
    ],
    ids=["stamped", "strict", "no HTTP", "in flight", "bucket, no HTTP"],
)
def test_where_calls_wait_for_answers_the_drain_time_knows_how_long_those_take(
    rules: Rules, limit: Limit, is_stamped: bool, least: float, most: float
) -> None:
    rules(r=Rule(limits=[limit]))
    answered(10, 10.0, is_stamped=is_stamped)
    CallQueue.objects.send_many([CALL] * 100, rule="r")
    seconds = look("default").rule("r").drain_s()
    assert seconds is not None and least <= seconds <= most


def test_a_call_that_is_out_says_where_since_when_and_until_when(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(2)], queues="q", total_timeout=60))
    call = send("r")
    release()
    call.refresh_from_db()
    reason = call.forecast().reason
    assert reason.startswith("it was dispatched to q ")
    assert "no worker has begun it; it is taken back in " in reason
    claim.begin("default", list(CallAttempt.objects.values_list("pk", flat=True)))
    reason = call.forecast().reason
    assert reason.startswith("it is under way: a worker of q began it ")
    assert "without an answer it is given up in " in reason
