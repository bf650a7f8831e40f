"""After a clock was set forward, what was answered is moved along some at a time: whatever one rule's
windows hold, others wait for none of it, and nothing is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from callqueue import Rule, SlidingWindow, conf, database
from callqueue.dispatch.release_pass import ensure_states, release
from callqueue.history import sums
from callqueue.ledger import clock_jumps
from callqueue.maintenance import cleanup
from callqueue.models import CallAttempt, CallQueue, RuleState, Sum
from tests.db.ledger.test_clock_jumps import Clocks, two_clocks  # noqa: F401

AT_ONCE, MANY = 50, 420
HOUR = timedelta(hours=1)
CALL = {"method": "get", "params": {"url": "http://vendor.example/"}}


@pytest.fixture
def full(two_clocks: Clocks, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Clocks:  # noqa: F811
    """A rule whose window of an hour is full, and one that knows seconds only."""
    monkeypatch.setattr(clock_jumps, "AT_ONCE", AT_ONCE)
    full_hour = Rule(limits=[SlidingWindow(f"{MANY}/h", jitter=0.05)])
    settings.CALLQUEUE = {"RULES": {"r": full_hour, "s": Rule(limits=[SlidingWindow("20/s")])}}
    ensure_states("default", ["r", "s"])
    CallQueue.objects.send_many([CALL] * 40, rule="s")
    CallQueue.objects.update(due_at_dt=two_clocks.wall)
    answered(two_clocks, "r", MANY)
    clock_jumps.watch("default").look()
    two_clocks.pass_by(1)
    return two_clocks


def answered(clock: Clocks, rule: str, count: int) -> None:
    """So many attempts, answered every seven seconds until now; the last five at one instant."""
    ends = [clock.wall - timedelta(seconds=7 * max(5, i)) for i in range(count)]
    CallAttempt.objects.bulk_create(
        CallAttempt(
            number=1,
            rule=rule,
            released_at=at,
            started_at=at,
            sent_at=at,
            finished_at=at,
            outcome="succeeded",
        )
        for at in ends
    )


@contextmanager
def rows_changed() -> Iterator[list[int]]:
    """How many rows of attempts each statement changes."""
    counts: list[int] = []
    begins = f"UPDATE {database.quoted('default', CallAttempt._meta.db_table)}"

    def count(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        done = execute(sql, params, many, context)
        if sql.startswith(begins):
            counts.append(context["cursor"].rowcount)
        return done

    with connection.execute_wrapper(count):
        yield counts


def released(clock: Clocks, rule: str) -> int:
    """By the one pass after the one that meets the jump."""
    release("default", [rule])
    clock_jumps.watch("default").look()
    clock.pass_by(0.01)
    return len(release("default", [rule]).released)


def waiting() -> set[str]:
    """The rules with attempts that are still to be moved, for all that is known."""
    return set(RuleState.objects.get(rule="\nmoving").memo)


def test_a_rule_waits_for_no_attempts_but_its_own(full: Clocks) -> None:
    full.jump(5)
    with rows_changed() as counts:
        assert released(full, "s") == 20
    assert max(counts) == 0
    assert waiting() == {"r", "default"}  # no pass went over these


def test_each_is_moved_once_however_many_there_are_and_no_more_in_a_pass_than_some(
    full: Clocks,
) -> None:
    before = dict(CallAttempt.objects.values_list("pk", "finished_at"))
    full.jump(5)
    with rows_changed() as counts:
        released(full, "r")
        while "r" in waiting():
            released(full, "r")
        assert max(counts) == AT_ONCE
        assert sum(counts) == MANY
    after = dict(CallAttempt.objects.values_list("pk", "finished_at"))
    assert {after[pk] - before[pk] for pk in before} == {timedelta(seconds=5)}
    released(full, "r")
    assert dict(CallAttempt.objects.values_list("pk", "finished_at")) == after


@pytest.mark.parametrize("jump", [0.02, 1, 60, 1800, 3600, 86400])
def test_nothing_goes_for_which_some_may_count_that_are_still_to_be_moved(
    full: Clocks, jump: float
) -> None:
    full.jump(jump)
    assert not release("default", ["r"]).released
    clock_jumps.watch("default").look()
    for _ in range(MANY // AT_ONCE):
        assert not release("default", ["r"]).released
        assert clock_jumps.lag("default") == pytest.approx(jump * 1_000_000, rel=0.02)
        assert "r" in waiting()
    release("default", ["r"])
    assert "r" not in waiting()


@pytest.mark.parametrize("jumps", [(60, 30), (60, -60), (60, -30), (30, -60), (3600, -3600)])
def test_a_clock_that_is_set_again_meanwhile(full: Clocks, jumps: tuple[float, float]) -> None:
    """No instant is before its own time in the end, and none is past now."""
    before = dict(CallAttempt.objects.values_list("pk", "finished_at"))
    full.jump(jumps[0])
    released(full, "r")
    full.pass_by(0.5)
    full.jump(jumps[1])
    released(full, "r")
    while "r" in waiting():
        released(full, "r")
    after = dict(CallAttempt.objects.values_list("pk", "finished_at"))
    own = {pk: at + timedelta(seconds=sum(jumps)) for pk, at in before.items()}
    assert all(own[pk] <= at <= full.wall for pk, at in after.items())


def test_a_former_rules_attempts_are_waited_for_too(full: Clocks) -> None:
    """What another rule was charged to the same limit is counted, though no pass has its row."""
    own = conf.current().book
    budgets = tuple(
        replace(one, former=(("r", 4_000_000_000 * 1_000_000),)) for one in own.budgets["s"]
    )
    book = replace(own, budgets={**own.budgets, "s": budgets})
    full.jump(60)
    assert not release("default", ["s"], book).released
    clock_jumps.watch("default").look()
    full.pass_by(0.01)
    for _ in range(MANY // AT_ONCE):
        assert not release("default", ["s"], book).released
    assert len(release("default", ["s"], book).released) == 20


def test_cleanup_deletes_nothing_that_counts_while_some_are_to_be_moved(full: Clocks) -> None:
    full.jump(86400)
    clock_jumps.watch("default").look()
    cleanup.clean("default", older_than=timedelta(0))
    assert CallAttempt.objects.count() == MANY


def test_history_counts_none_twice_and_misses_none(full: Clocks) -> None:
    sums.keep("default")
    full.pass_by(30)
    full.jump(60)
    clock_jumps.watch("default").look()
    assert clock_jumps.lag("default") > 0
    for _ in range(2 * MANY // AT_ONCE):
        sums.add_up("default")
    assert clock_jumps.lag("default") == 0
    full.pass_by(30)
    sums.keep("default")
    sent = Sum.objects.filter(width=sums.EVER).values_list("sent", flat=True)
    assert sum(sent) == MANY
