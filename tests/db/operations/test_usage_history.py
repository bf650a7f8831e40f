"""The use of limits over their last windows: what the plots show, against instants that are
known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.core.cache import cache
from django.db import connection
from django.test.utils import CaptureQueriesContext

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow, TokenBucket, conf, database
from callqueue.limits.kinds import PARTS, SHOWN
from callqueue.models import CallAttempt
from callqueue.operations import ledger_view, usage_history
from callqueue.operations.attempt_sums import AttemptSums
from callqueue.operations.usage_history import Scope, Use

Rules = Callable[..., None]
NOW = database.EPOCH + timedelta(days=20_000, hours=12, microseconds=1)


@pytest.fixture(autouse=True)
def _noon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The database's clock stands at noon, UTC."""
    cache.clear()
    monkeypatch.setattr(database, "clock", lambda using: NOW)


def answered(
    *ago: float, rule: str = "pay", key: str = "", took: float = 0.0, **columns: Any
) -> None:
    """Attempts sent so many seconds ago, and answered `took` seconds later."""
    CallAttempt.objects.bulk_create(
        CallAttempt(
            call_id=1, number=1, rule=rule, key=key, outcome="succeeded", released_at=NOW - timedelta(seconds=one),
            sent_at=NOW - timedelta(seconds=one), finished_at=NOW - timedelta(seconds=one - took), **columns,
        )
        for one in ago
    )  # fmt: skip


def scope(
    index: int = 0, *, rule: str = "pay", value: str = "", used: int = 0, many: int = 1
) -> Scope:
    budget = conf.current().book.budgets[rule][index]
    return Scope(budget, value, budget.limit.capacity * many, used)


def use(index: int = 0, *, seconds: float = 60, **options: Any) -> Use:
    (found,) = usage_history.look(
        "default", [scope(index, **options)], until=time.monotonic() + seconds
    )
    return found


def before_now(use: Use) -> Sequence[int | None]:
    return use.levels[:-1]


def test_a_sliding_window_rises_with_each_call_and_falls_a_window_later(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("10/20s")]))
    answered(50.5, 50.4, 40.5)
    levels = use(used=0).levels
    assert len(levels) == SHOWN * PARTS
    # A slot is a second, and a level is at its end: all three are seen from 40 s ago until the
    # first leaves, 30 s ago.
    assert [
        levels.index(3),
        max(filter(None, levels)),
        levels.count(3),
        levels.count(2),
        levels.count(1),
    ] == [18, 3, 10, 10, 10]


def test_no_level_is_above_what_callqueue_audit_would_count(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("20/s")]))
    answered(*(3.9 - i / 20 for i in range(70)), took=0.3)
    assert max(filter(None, use().levels)) == 20


def test_the_present_is_what_the_ledger_charges(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("10/h")]))
    assert use(used=7).levels[-1] == 7


def test_a_calendar_window_begins_at_nothing(rules: Rules) -> None:
    rules(pay=Rule(limits=[FixedWindow("10/d")]))
    answered(3600 * 12.5, 3600 * 11.5, 3600 * 11.4)  # half an hour before midnight, and after
    levels = before_now(use())
    assert levels == [*[0] * 47, 1, *[2] * 12]


def test_a_calendar_window_is_that_of_its_time_zone(rules: Rules) -> None:
    rules(pay=Rule(limits=[FixedWindow("10/d", timezone="America/Los_Angeles")]))
    answered(3600 * 5.5, 3600 * 2.5)
    levels = before_now(use())
    begun = round(
        (NOW - database.from_us(scope().budget.limit.window(database.to_us(NOW))[0]))
        / timedelta(hours=1)
    )
    assert levels[-begun:].count(0) + levels[-begun:].count(1) == begun


def test_a_bucket_is_full_again_a_window_after_a_burst(rules: Rules) -> None:
    rules(pay=Rule(limits=[TokenBucket("1/s", burst=20)]))
    answered(*[30.5] * 20)
    levels = before_now(use())
    assert levels == [*[0] * 28, *range(19, 0, -1), *[0] * 12]


def test_what_is_in_flight_is_counted_from_release_to_answer(rules: Rules) -> None:
    rules(pay=Rule(limits=[Concurrency(4)]))
    answered(40.0, 35.0, took=12.0)
    levels = before_now(use())
    assert levels == [0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 1, 1, *[0] * 7]


def test_each_key_has_its_own(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("10/m", per="key"), SlidingWindow("10/m", per="shop")]))
    answered(100, key='{"key":"a","shop":"s1"}')
    answered(100, 100, key='{"key":"b","shop":"s1"}')
    answered(100, 100, 100, key="a")
    highest = [
        max(filter(None, use(i, value=value).levels))
        for i, value in ((0, "a"), (0, "b"), (1, "s1"))
    ]
    assert highest == [4, 2, 3]


def test_queues_are_taken_together_and_voided_attempts_left_out(rules: Rules) -> None:
    rules(pay=Rule(queues=["a", "b"], limits=[SlidingWindow("10/m", per="queue")]))
    answered(100, 100, queue="a")
    answered(100, queue="b")
    CallAttempt.objects.create(
        call_id=1, number=2, rule="pay", released_at=NOW - timedelta(seconds=100), outcome="voided",
        finished_at=NOW - timedelta(seconds=100),
    )  # fmt: skip
    found = use(many=2)
    assert (max(filter(None, found.levels)), found.capacity) == (3, 20)


def test_other_units_are_summed_from_the_cost(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("900/m", unit="tokens")]))
    answered(100, cost={"tokens": 150})
    assert max(filter(None, use().levels)) == 150


def test_what_is_over_is_counted_once(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("1000/d")]))
    answered(3600 * 30)
    first = use()
    with CaptureQueriesContext(connection) as again:
        assert use().levels == first.levels
    assert len(again) == 0
    assert max(filter(None, first.levels)) == 1


def test_what_there_is_no_time_for_is_left_for_the_next_look(rules: Rules) -> None:
    rules(
        pay=Rule(limits=[SlidingWindow("1000000/d")]),
        read=Rule(limits=[SlidingWindow("1000000/d")]),
    )
    assert before_now(use(seconds=0)) == [None] * (SHOWN * PARTS - 1)
    looks = [
        usage_history.look("default", [scope(), scope(rule="read")], until=time.monotonic() + 60)
        for _ in range(2)
    ]
    assert [None in one.levels for look in looks for one in look] == [False] * 4


def test_a_slot_that_was_not_over_when_it_was_counted_is_counted_again(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much later: what was seen of it may be a part."""
    rules(pay=Rule(limits=[SlidingWindow("1000/h")]))
    answered(200, 20)
    assert (
        max(filter(None, before_now(use()))) == 2
    )  # of a slot that ended just now: answers may still be recorded
    answered(10, 5)
    later = NOW + timedelta(minutes=30)
    monkeypatch.setattr(database, "clock", lambda using: later)
    assert max(filter(None, before_now(use()))) == 4


def test_the_plot_of_a_large_window_is_made_of_what_the_ledger_counts(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100000/d")]))
    answered(3600 * 30, 3600 * 20, 3600 * 10, 3600 * 10)
    levels = before_now(use())
    assert (levels[0], max(filter(None, levels)), levels[-1]) == (0, 4, 3)
    account = ledger_view.look(
        "default",
        conf.current().book,
        ("pay",),
        database.to_us(NOW),
        sums=AttemptSums("default", database.to_us(NOW)),
    )
    with CaptureQueriesContext(connection) as counted:
        (budget,) = conf.current().book.budgets["pay"]
        assert account.meter(budget).used == 3
    assert len(counted) == 1, "all but the slot that is not over is known"


def test_what_is_counted_together_spans_nothing_that_is_known(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(pay=Rule(limits=[SlidingWindow("1000/d")]))
    monkeypatch.setattr("callqueue.operations.attempt_sums.CHUNK", 10**6)
    series, width = scope().series, scope().series.width
    starts = [database.to_us(NOW) - (100 - i) * width for i in range(100)]
    AttemptSums("default", database.to_us(NOW)).sums(series, starts[20:90])
    answered(
        99.5 * width / 1e6, 50.5 * width / 1e6
    )  # the second one is not seen: that slot is known
    with CaptureQueriesContext(connection) as again:
        sums = AttemptSums("default", database.to_us(NOW)).sums(series, starts)
    assert (len(again), sum(sums.values()), len(sums)) == (2, 1, 100)
