"""Who goes, by which queue, and when: decided in memory, from an account nobody had to read."""

from __future__ import annotations

from typing import Any

import pytest

from callqueue import Concurrency, Rule, SlidingWindow
from callqueue.database import from_us
from callqueue.dispatch import planning
from callqueue.dispatch.next_look import Room, Wait
from callqueue.dispatch.planning import Plan
from callqueue.ledger.account import Account
from callqueue.ledger.holds import Held, InForce
from callqueue.ledger.ready_calls import Candidate
from callqueue.limits.budgets import book_of

NOW = 1_800_000_000_000_000  # microseconds
SECOND = 1_000_000
FREE = Held({})


def account(lead: float = 0.0, **rules: Rule) -> Account:
    """Of rules that nothing was charged to yet."""
    return Account("default", book_of(rules), tuple(sorted(rules)), NOW, NOW + round(lead * SECOND))


def calls(rule: str, *ids: int, **more: Any) -> list[Candidate]:
    fields = {"key": "", "priority": 0, "cost": 1, "method": "get", "last_attempt": 0, **more}
    return [Candidate(pk, rule, **fields) for pk in ids]


def released(made: Plan) -> list[int]:
    return [call.id for call in made.releases]


@pytest.mark.parametrize(("priority", "order"), [(0, [11, 1, 12, 2, 13]), (1, [11, 12, 13, 1, 2])])
def test_higher_priority_goes_first_and_equals_take_turns_from_who_waited_longest(
    priority: int, order: list[int]
) -> None:
    shared = SlidingWindow("5/m", name="account")
    of = account(a=Rule(limits=[shared]), b=Rule(limits=[shared], priority=priority))
    waiting, served = {"a": calls("a", 1, 2, 3), "b": calls("b", 11, 12, 13)}, {"a": 7, "b": 4}
    assert released(planning.plan(of, waiting, FREE, served)) == order


def test_what_an_answer_must_make_room_for_waits_for_it() -> None:
    of = account(r=Rule(limits=[Concurrency(2)]))
    made = planning.plan(of, {"r": calls("r", 1, 2, 3)}, FREE, {})
    assert released(made) == [1, 2]
    assert made.wait == Wait(on_answer=True)


@pytest.mark.parametrize(
    ("rate", "settle", "is_open", "is_waited_for"),
    [
        ("9/2s", str, 1, True),
        ("9/2s", str, 0, False),
        ("9/2s", None, 1, False),
        ("9/m", str, 1, False),
    ],
)
def test_what_an_answer_may_give_back_is_waited_for_where_the_window_is_short(
    rate: str, settle: Any, is_open: int, is_waited_for: bool
) -> None:
    """Its call may have cost less than it was charged: that is seen at once, not at a review."""
    of = account(r=Rule(limits=[SlidingWindow(rate, unit="tokens")], settle=settle))
    ((budget,),) = of.book.budgets.values()
    of.aged[budget.id, ""], of.open[budget.id, ""], of.open_count = [(NOW, 9)], 0, is_open
    made = planning.plan(of, {"r": calls("r", 1, cost={"tokens": 3})}, FREE, {})
    assert made.wait == Wait(NOW + budget.limit.window_us + 1, on_answer=is_waited_for)


def test_a_costly_call_shuts_its_budget_for_those_behind_it() -> None:
    of = account(r=Rule(limits=[SlidingWindow("5/m")]))
    waiting = calls("r", 1, cost=3) + calls("r", 2, cost=4) + calls("r", 3)
    assert released(planning.plan(of, {"r": waiting}, FREE, {})) == [1]
    shared = SlidingWindow("5/m", name="account")
    of = account(a=Rule(limits=[shared], priority=1), b=Rule(limits=[shared]))
    waiting_of = {"a": calls("a", 1, cost=3) + calls("a", 2, cost=4), "b": calls("b", 3)}
    assert released(planning.plan(of, waiting_of, FREE, {})) == [1], "of other rules too"
    of = account(r=Rule(limits=[SlidingWindow("5/m", per="key")]))
    waiting = calls("r", 1, key="a", cost=3) + calls("r", 2, key="a", cost=4)
    waiting += calls("r", 3, key="a") + calls("r", 4, key="b")
    assert released(planning.plan(of, {"r": waiting}, FREE, {})) == [1, 4], "of its key alone"


def test_what_is_held_keeps_nobody_else_back() -> None:
    held = Held({"r": [InForce("r", "key", "a", None, "away")]})
    waiting = calls("r", 1, key="a") + calls("r", 2, key="b")
    assert released(planning.plan(account(r=Rule()), {"r": waiting}, held, {})) == [2]


def test_the_roomier_queue_is_taken_and_a_held_one_is_not() -> None:
    limit = SlidingWindow("2/m", per="queue")
    for limits in ([limit], []):
        of = account(r=Rule(queues=["e1", "e2"], limits=limits))
        made = planning.plan(of, {"r": calls("r", 1, 2, 3, 4)}, FREE, {})
        assert [one.queue for one in made.releases] == ["e1", "e2", "e1", "e2"]
    of = account(r=Rule(queues=["e1", "e2"], limits=[limit]))
    held = Held({"r": [InForce("r", "queue", "e1", None, "away")]})
    made = planning.plan(of, {"r": calls("r", 1, 2, 3)}, held, {})
    assert [one.queue for one in made.releases] == ["e2", "e2"]


def test_a_call_that_went_before_goes_by_the_next_queue() -> None:
    of = account(r=Rule(queues=["e1", "e2", "e3"]))
    (release,) = planning.plan(of, {"r": calls("r", 1, queue="e2")}, FREE, {}).releases
    assert release.queue == "e3"


def test_workers_are_sent_no_more_than_they_have_room_for() -> None:
    of, rooms = account(r=Rule(queues=["e1", "e2"])), {("r", "e1"): 1, ("r", "e2"): 2}
    waiting = calls("r", 1, 2, 3, 4) + calls("r", 5, method="permit")
    made = planning.plan(of, {"r": waiting}, FREE, {}, room_of_workers=rooms)
    assert sorted(one.queue for one in made.releases[:3]) == ["e1", "e2", "e2"]
    assert released(made)[3:] == [5], "it has its maker"


def test_whoever_makes_calls_has_no_more_of_a_kind_than_there_is_room_for() -> None:
    waiting = calls("r", 1, 2, 3) + calls("r", 4, 5, method="celery_task")
    waiting += calls("r", 6, method="permit")
    made = planning.plan(account(r=Rule()), {"r": waiting}, FREE, {}, Room(http=2, handled=1))
    assert (released(made), made.wait) == ([1, 2, 4, 6], Wait(on_room=True))


@pytest.mark.parametrize(
    ("first", "releases", "kept_back"), [("permit", [1], [2]), ("get", [], [])]
)
def test_a_key_waits_for_nothing_that_a_waiter_leaves_to_workers(
    first: str, releases: list[int], kept_back: list[int]
) -> None:
    """Its room is not taken after all, so nobody may be kept back by it."""
    of = account(r=Rule(limits=[SlidingWindow("1/m", per="key")]))
    waiting = calls("r", 1, key="a", method=first) + calls("r", 2, key="a", method="permit")
    made = planning.plan(of, {"r": waiting}, FREE, {})
    made.drop_workers_calls()
    assert (released(made), [call.id for call, _ in made.kept_back]) == (releases, kept_back)


@pytest.mark.parametrize(
    ("lead", "expires_in", "send_in"),
    [(250_001, None, 250_001), (250_000, None, None), (500_000, 250_001, 250_001), (500_000, 250_000, None)],
)  # fmt: skip
def test_a_call_goes_ahead_of_its_slot_by_the_lead_and_not_past_its_end(
    lead: int, expires_in: int | None, send_in: int | None
) -> None:
    of = account(lead / SECOND, r=Rule(limits=[SlidingWindow("1/m", jitter=0)]))
    ((budget,),) = of.book.budgets.values()
    of.aged[budget.id, ""] = [(NOW - 60 * SECOND + 250_000, 1)]
    of.moved = 7 * SECOND
    expires_at = None if expires_in is None else from_us(NOW + of.moved + expires_in)
    made = planning.plan(of, {"r": calls("r", 1, expires_at=expires_at)}, FREE, {})
    sent = [one.send_at for one in made.releases]
    assert sent == ([] if send_in is None else [NOW + send_in])
    assert made.binding == ({} if sent else {"r": budget.id})


def test_a_rule_opens_by_the_queue_that_is_free_first_and_says_which_limit_comes_last() -> None:
    limits = [SlidingWindow("9/m"), SlidingWindow("1/m", per="queue")]
    of = account(r=Rule(queues=["e1", "e2"], limits=limits))
    of_rule, of_queue = of.book.budgets["r"]
    of.aged[of_queue.id, "e1"] = [(NOW - 10 * SECOND, 1)]
    of.aged[of_queue.id, "e2"] = [(NOW - 30 * SECOND, 1)]
    assert planning.next_opening(of, "r", ["e1", "e2"]) == (NOW + 30 * SECOND + 1, of_queue)
    assert planning.next_opening(of, "r", ["e1"]) == (NOW + 50 * SECOND + 1, of_queue)
    assert planning.next_opening(of, "r", []) == (None, None), "all are held"
    full = account(r=Rule(queues=["e1", "e2"], limits=limits))
    full.open[of_rule.id, ""] = 9
    assert planning.next_opening(full, "r", ["e1", "e2"]) == (None, of_rule)


@pytest.mark.parametrize(("lead", "room"), [(0, 0), (250_000, 0), (250_001, 1), (60_000_001, 5)])
def test_as_many_calls_are_read_as_fit_by_the_lead(lead: int, room: int) -> None:
    limits = [SlidingWindow("5/m", jitter=0), SlidingWindow("20/m", unit="tokens", jitter=0)]
    of = account(lead / SECOND, r=Rule(limits=limits))
    for budget, cost in zip(of.book.budgets["r"], (1, 4), strict=True):
        ages = [NOW - 60 * SECOND + 250_000, *[NOW] * 4]
        of.aged[budget.id, ""] = [(at, cost) for at in ages]
    (call,) = calls("r", 1, cost={"tokens": 4})
    assert (
        planning.room_of_rule(of, "r", 99, [""]) == planning.room_for_similar(of, call, 99) == room
    )
    assert planning.room_of_rule(of, "r", 3, [""]) == min(3, room)


def test_of_limits_per_queue_as_many_fit_as_by_all_queues_that_are_free() -> None:
    of = account(r=Rule(queues=["e1", "e2"], limits=[SlidingWindow("2/m", per="queue")]))
    assert [
        planning.room_of_rule(of, "r", 99, queues) for queues in (["e1", "e2"], ["e1"], [])
    ] == [
        4,
        2,
        0,
    ]
