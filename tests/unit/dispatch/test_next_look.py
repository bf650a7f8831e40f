"""When a group of rules is looked at again, and how patience grows."""

from __future__ import annotations

from typing import Any

import pytest

from callqueue.dispatch.next_look import (
    AGREE,
    BUSY,
    LOCKED,
    NO_STREAK,
    REVIEW,
    TOGETHER,
    TRIES,
    NextLook,
    Room,
    RuleGroup,
    Streak,
    Wait,
    when_not_locked,
    when_outdated,
    when_passed,
)
from callqueue.ledger.account import GLANCED, Glance

POLL = 0.05
UNFINISHED = Wait(is_unfinished=True)


def passed(wait: Wait | None = None, last: Streak = NO_STREAK, **more: Any) -> NextLook:
    facts = {"opens_in": None, "has_released": False, "poll": POLL}
    facts |= {"open_attempts": 0, "untold_attempts": 0}
    return when_passed(wait or Wait(), last=last, **(facts | more))


def test_what_waits_for_room_goes_on_soon_after_there_is_more() -> None:
    look = passed(UNFINISHED | Wait(on_room=True))
    assert (look.goes_on, look.on_room, look.after) == (False, True, REVIEW)
    group = RuleGroup(("r",))
    group.set_next_look(look, now=5.0)
    group.want_pass_soon()
    assert group.look_at == 5.0 + TOGETHER
    group.set_next_look(passed(opens_in=TOGETHER / 2), now=6.0)
    group.want_pass_soon()
    assert group.look_at == 6.0 + TOGETHER / 2, "no later than it was to be"


def test_attempts_that_are_too_many_to_count_are_no_news() -> None:
    look = passed(Wait(on_answer=True), open_attempts=GLANCED, untold_attempts=GLANCED - 1)
    assert (look.open_attempts, look.untold_attempts) == (None, GLANCED - 1)
    group = RuleGroup(("r",))
    group.set_next_look(look, now=5.0)
    group.notice_answers({"r": Glance(GLANCED - 7, GLANCED - 1, 0)})
    group.notice_answers({"r": Glance(GLANCED, GLANCED - 1, 70)})
    assert not group.is_due(now=5.0), "of ends before the first none is known"
    group.notice_answers({"r": Glance(GLANCED, GLANCED - 2, 70)})
    assert (group.is_due(now=5.0), group.next_look.untold_attempts) == (True, GLANCED - 2)


def test_rules_that_are_locked_are_tried_ever_less_often() -> None:
    look, pauses = when_not_locked(NO_STREAK), []
    for _ in range(TRIES + 1):
        pauses.append(look.after)
        look = when_not_locked(look.streak)
    assert pauses[:3] == [LOCKED, 2 * LOCKED, 4 * LOCKED]
    assert max(pauses[:-1]) == BUSY, "it has its turn among passes, however many make one"
    assert pauses[-1] == REVIEW
    assert passed(last=look.streak).streak.locked == 0


def test_where_dispensers_do_not_agree_yet_nothing_goes_on_at_once_that_bears_no_fruit() -> None:
    look = when_outdated(Streak(locked=3))
    assert (look.after, look.joins, look.streak) == (AGREE, True, Streak(fruitless=1))
    assert not passed(UNFINISHED, look.streak, opens_in=9.0).goes_on


def test_what_was_not_looked_at_is_looked_at_at_once_while_that_bears_fruit() -> None:
    """And a round of keys is gone through to its end."""
    assert passed(UNFINISHED, has_released=True, opens_in=9.0).goes_on
    first = passed(UNFINISHED, opens_in=9.0)
    second = passed(UNFINISHED, first.streak, opens_in=9.0)
    assert (first.goes_on, second.goes_on, second.after) == (True, False, REVIEW)
    assert not passed(UNFINISHED, when_not_locked(NO_STREAK).streak, opens_in=9.0).goes_on
    look = when_not_locked(when_not_locked(NO_STREAK).streak)
    for _ in range(50):
        look = passed(UNFINISHED | Wait(is_mid_round=True), look.streak)
        assert look.goes_on


def test_what_seems_ready_and_is_not_is_looked_at_ever_less_often() -> None:
    """It is locked, or for other processes."""
    look, pauses = passed(), []
    for _ in range(6):
        pauses.append(look.after)
        look = passed(last=look.streak)
    assert pauses == [0.0, 2 * POLL, 4 * POLL, 8 * POLL, REVIEW, REVIEW]
    assert passed(last=look.streak, has_released=True).streak.in_vain == 0


def test_room_of_either_kind_is_news() -> None:
    assert Room(0, 2).is_more_than(Room(0, 1)) and Room(2, 0).is_more_than(Room(1, 0))
    assert not Room(1, 1).is_more_than(Room(1, 1)) and not Room(0, 0).is_more_than(Room(-1, -1))
    only = [Room(1, 1).only_http, Room(1, 0).only_http, Room(0, 1).only_http]
    assert only == [None, True, False]


@pytest.mark.parametrize(
    ("opens_in", "on_answer", "after"),
    [(0.2, False, 0.2), (60.0, False, REVIEW), (None, True, REVIEW), (0.1, True, 0.1)],
)
def test_what_is_blocked_is_looked_at_when_it_may_go(
    opens_in: float | None, on_answer: bool, after: float
) -> None:
    look = passed(Wait(on_answer=on_answer), opens_in=opens_in, open_attempts=3)
    assert (look.after, look.on_ready, look.on_answer) == (after, False, on_answer)
    assert look.open_attempts == 3


@pytest.mark.parametrize(
    "news",
    [Glance(1, 2, 80), Glance(2, 1, 70), Glance(2, 2, 80)],
    ids=["an end", "the ledger is told", "an end that a release made up for"],
)
def test_a_group_that_waits_is_due_once_there_is_news_of_an_attempt(news: Glance) -> None:
    group, other = RuleGroup(("a", "b")), Glance(1, 0, 60)
    group.set_next_look(passed(Wait(on_answer=True), open_attempts=3, untold_attempts=2), now=5.0)
    assert group.waits_for_answer
    group.notice_answers({"a": Glance(2, 2, 70), "b": other})
    assert not group.is_due(now=5.0)
    group.notice_answers({"a": news, "b": other})
    assert group.is_due(now=5.0)


def test_trouble_puts_off_a_pass_but_wakes_nobody_from_rest() -> None:
    resting, waiting = RuleGroup(("a",)), RuleGroup(("b",))
    waiting.set_next_look(passed(opens_in=0.0), now=5.0)
    for group in (resting, waiting):
        group.put_off(6.0)
    assert not waiting.is_due(now=5.5)
    assert waiting.is_due(now=6.0)
    waiting.unpublished_from = 1.0
    assert not waiting.is_due(now=6.0), "nobody knows what became of its last pass"
    assert not resting.is_due(now=6.0)
