"""The audit's arithmetic, held against counting by brute force."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from callqueue.history.audit import Finding, Seen, judge, new_use
from callqueue.limits.budgets import book_of
from callqueue.limits.kinds import (
    SECOND,
    Concurrency,
    FixedWindow,
    Limit,
    SlidingWindow,
    TokenBucket,
)
from callqueue.limits.rules import Rule

SINCE = datetime(2026, 1, 1, tzinfo=UTC)
NOW = 10_000 * SECOND


def drawn(number: int = 60) -> Iterator[list[tuple[int, int]]]:
    """Instants within ten seconds, in order, each with a cost; often several at once."""
    for seed in range(number):
        dice = random.Random(seed)
        step = dice.choice((1, SECOND // 10, SECOND // 2))
        most = 10 * SECOND // step
        yield sorted(
            (dice.randint(0, most) * step, dice.randint(1, 3)) for _ in range(dice.randint(0, 40))
        )


def tally(limit: Limit, counted: Any) -> Any:
    tallied = new_use(limit)
    for instant, cost in counted:
        tallied.add(instant, cost)
    return tallied


def test_the_highest_use_of_windows_is_exact() -> None:
    for counted in drawn():
        sliding = (sum(c for at, c in counted if end - SECOND < at <= end) for end, _ in counted)
        assert tally(SlidingWindow("5/s"), counted).highest == max(sliding, default=0)
        calendar = (sum(c for at, c in counted if at // SECOND == n) for n in range(11))
        assert tally(FixedWindow("5/s"), counted).highest == max(calendar)


def test_a_bucket_was_exceeded_where_any_stretch_took_more_than_burst_and_rate() -> None:
    limit = TokenBucket("5/s", burst=4)
    for counted in drawn():
        brute = any(
            sum(cost for _, cost in counted[i : j + 1]) * SECOND
            > 4 * SECOND + 5 * (counted[j][0] - counted[i][0])
            for j in range(len(counted))
            for i in range(j + 1)
        )
        assert (tally(limit, counted).highest > 4) == brute


def test_the_highest_number_in_flight_is_exact() -> None:
    for counted in drawn():
        spans = [(at, 1 + at * cost % SECOND) for at, cost in counted]
        attempts = [seen(began, finished=began + length) for began, length in spans]
        attempts.sort(key=lambda one: one.finished_at)
        at_once = (sum(b <= at < b + length for b, length in spans) for at, _ in spans)
        assert judged(Concurrency(3), attempts).highest == max(at_once, default=0)


DAY = [(round(n // 20 * 1.05 * SECOND), 1) for n in range(400)]
NEXT_DAY = [(at + 8 * 3600 * SECOND, cost) for at, cost in DAY]


@pytest.mark.parametrize(
    ("limit", "counted", "highest", "share"),
    [
        (SlidingWindow("20/s"), DAY, 20, 1 / 1.05),
        (SlidingWindow("20/s"), DAY + NEXT_DAY, 20, 1 / 1.05),  # a night is no lack of use
        (SlidingWindow("100/h"), [(n, 1) for n in range(100)], 100, 1),
        (TokenBucket("10/s", burst=10), [(0, 10)] + [(n * SECOND // 10, 1) for n in range(1, 300)], 10, 1),
        (FixedWindow("10/s"), [(0, 10), (SECOND, 5), (2 * SECOND, 1)], 10, 0.75),  # of those that are over
    ],
)  # fmt: skip
def test_a_limit_is_used_to_its_share_of_the_time_in_which_it_was(
    limit: Limit, counted: Any, highest: int, share: float
) -> None:
    tallied = tally(limit, counted)
    assert tallied.highest == highest
    assert tallied.average_share() == pytest.approx(share, abs=0.01)


def test_the_worst_key_is_named() -> None:
    attempts = [seen(n, key="a") for n in range(3)] + [seen(10 + n, key="b") for n in range(5)]
    found = judged(SlidingWindow("4/s", per="key"), attempts)
    assert (found.value, found.highest, found.exceeded, found.counted) == ("b", 5, True, 8)


def test_a_budget_of_two_rules_counts_both_and_is_found_under_each() -> None:
    shared = SlidingWindow("5/s", name="shared")
    book = book_of({"one": Rule(limits=[shared]), "two": Rule(limits=[shared])})
    result = judge(book, iter([seen(1, rule="one"), seen(2, rule="two")]), NOW, SINCE)
    assert [(f.rule, f.name, f.highest) for f in result.findings] == [
        ("one", "shared", 2),
        ("two", "shared", 2),
    ]
    assert not result.over_limit


def test_attempts_that_were_answered_out_of_order_are_counted_in_order() -> None:
    slow = seen(0, finished=30 * SECOND)
    quick = [seen(SECOND + n, finished=2 * SECOND + n) for n in range(5)]
    assert judged(SlidingWindow("5/s"), [*quick, slow]).highest == 5
    assert judged(SlidingWindow("5/2s"), [*quick, slow]).highest == 6


def test_costs_are_counted_in_the_limits_unit() -> None:
    attempts = [seen(1, cost={"tokens": 1500}), seen(2, cost={"tokens": 500})]
    assert judged(SlidingWindow("9000/m", unit="tokens"), attempts).highest == 2000


def seen(
    counted: int, *, finished: int | None = None, rule: str = "r", key: str = "", cost: Any = 1
) -> Seen:
    return Seen(rule, key, "", cost, counted, counted, counted if finished is None else finished)


def judged(limit: Limit, attempts: list[Seen]) -> Finding:
    (found,) = judge(book_of({"r": Rule(limits=[limit])}), iter(attempts), NOW, SINCE).findings
    return found
