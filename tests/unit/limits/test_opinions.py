"""What is in force among dispensers whose settings differ, and what goes on counting: pure, for any
settings and histories.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow, TokenBucket
from callqueue.limits.agreements import LATE, Agreement, in_force, is_settled, renewed
from callqueue.limits.budgets import Book, bind
from callqueue.limits.kinds import DAY, Limit
from callqueue.limits.opinions import differences, digest_of, kinds_of, opinion_of

NOW = 2_000_000 * 1_000_000
LIMITS: list[Limit] = [
    SlidingWindow("5/s"),
    SlidingWindow("9/s", strict=True, jitter=0.2),
    SlidingWindow("100/h", per="key", unit="tokens"),
    FixedWindow("7/d", timezone="Asia/Kathmandu", per="queue"),
    TokenBucket("3/m", burst=4),
    Concurrency(6, per="workspace"),
]
NAMED = {name: [SlidingWindow(f"{n}/m", name=name) for n in (1, 2)] for name in ("x", "y")}


@st.composite
def books(draw: Any) -> Book:
    """Rules of some names, with limits of their own and some that they share."""
    of_name = {name: draw(st.sampled_from(variants)) for name, variants in NAMED.items()}
    rules = {}
    for name in draw(st.sets(st.sampled_from("abcd"), min_size=1)):
        own = draw(st.lists(st.sampled_from(LIMITS), max_size=2))
        rules[name] = Rule(
            limits=[*own, *(of_name[one] for one in sorted(draw(st.sets(st.sampled_from("xy")))))]
        )
    return bind(rules)


def opinions_of(*all_books: Book) -> dict[str, Any]:
    """As the database brings them back."""
    return {
        digest_of(opinion_of(book)): json.loads(json.dumps(opinion_of(book))) for book in all_books
    }


def plain(limit: Limit) -> str:
    return repr(limit)


@given(books())
def test_alone_a_dispenser_goes_by_its_own_settings(book: Book) -> None:
    found = in_force(book, Agreement(), opinions_of(book), NOW)
    for rule, budgets in book.budgets.items():
        assert [(b.id, b.limit, sorted(b.rules), b.former) for b in budgets] == [
            (b.id, b.limit, sorted(b.rules), b.former) for b in found.budgets[rule]
        ]
    assert found.groups == book.groups
    assert found.unreadable == frozenset()


@given(st.lists(books(), min_size=1, max_size=4))
def test_every_limit_of_every_opinion_holds_for_all_that_it_counts(all_books: list[Book]) -> None:
    opinions = opinions_of(*all_books)
    for mine in all_books:
        found = in_force(mine, Agreement(), opinions, NOW)
        for book in all_books:
            for rule, budgets in book.budgets.items():
                for budget in budgets:
                    (same,) = [
                        b
                        for b in found.budgets[rule]
                        if (b.known_as, plain(b.limit)) == (budget.id, plain(budget.limit))
                    ]
                    assert set(budget.rules) <= set(same.rules)
                    assert set(budget.rules) <= set(found.groups[rule])


@given(st.lists(books(), min_size=2, max_size=4))
def test_all_that_take_part_find_the_same_budgets_and_groups(all_books: list[Book]) -> None:
    agreement = renewed(Agreement(token="t"), opinions_of(*all_books))
    found = [in_force(book, agreement, opinions_of(*all_books), NOW) for book in all_books]
    assert all(one.groups == found[0].groups for one in found)
    assert all(
        {b.id: b for b in one.all_budgets()} == {b.id: b for b in found[0].all_budgets()}
        for one in found
    )
    assert {one.agreement for one in found} == {"t"}


@given(st.lists(st.lists(books(), min_size=1, max_size=2), min_size=2, max_size=6), st.data())
def test_what_was_charged_to_a_named_limit_counts_in_it_from_then_on(
    history: list[list[Book]], data: Any
) -> None:
    """Whatever opinions come and go: every release is still counted by the limits that it was
    charged to.
    """
    agreement, released = Agreement(), list[tuple[str, str, int]]()
    for step, alive in enumerate(history):
        at, opinions = NOW + step * 1000, opinions_of(*alive)
        settled_at = (
            at if data.draw(st.booleans()) and set(opinions) == set(agreement.digests) else None
        )
        agreement = renewed(agreement, opinions, kinds_of(alive[0]), settled_at)
        book = in_force(alive[0], agreement, opinions, at)
        released += [
            (budget.known_as, rule, at + 1)
            for rule in book.rules
            for budget in book.budgets[rule]
            if budget.limit.name
        ]
        if data.draw(st.booleans()):
            agreement = renewed(agreement, opinions, None, at + 2)
            book = in_force(alive[0], agreement, opinions, at + 2)
        for budget in book.all_budgets():
            for limit, rule, instant in released:
                assert budget.known_as != limit or budget.counts(rule, instant)


def test_a_rule_that_left_a_limit_counts_until_the_last_pass_that_charged_it() -> None:
    account = SlidingWindow("10/m", name="account")
    both, one = (
        bind({"a": Rule(limits=[account]), "b": Rule(limits=[account])}),
        bind({"a": Rule(limits=[account]), "b": Rule()}),
    )
    agreement = renewed(Agreement(), opinions_of(both))
    agreement = renewed(agreement, opinions_of(one))
    assert not is_settled(agreement, opinions_of(one))
    assert former(one, agreement) == (("b", None),)
    agreement = renewed(agreement, opinions_of(one), None, NOW)
    assert is_settled(agreement, opinions_of(one))
    assert former(one, agreement) == (("b", NOW),)
    (budget,) = in_force(one, agreement, opinions_of(one), NOW).budgets["a"]
    assert (budget.counts("b", NOW), budget.counts("b", NOW + 1)) == (True, False)
    assert former(one, agreement, NOW + LATE + DAY) == (), "forgotten when nothing of it can count"
    back = renewed(agreement, opinions_of(both))
    assert former(both, back) == ()


def former(book: Book, agreement: Agreement, now: int = NOW) -> tuple[Any, ...]:
    return in_force(book, agreement, opinions_of(book), now).budgets["a"][0].former


def test_a_rule_is_renamed_where_all_else_is_equal() -> None:
    def verdict(response: Any) -> None:
        return None

    rule = Rule(hosts=["h.example"], limits=[SlidingWindow("5/m")], classify=verdict)
    old, new = bind({"old": rule}), bind({"new": rule})
    changed = bind(
        {
            "new": Rule(
                hosts=["h.example"], limits=[SlidingWindow("5/m")], classify=verdict, priority=1
            )
        }
    )
    agreement = renewed(Agreement(), opinions_of(old), kinds_of(old))
    assert renewed(agreement, opinions_of(new), kinds_of(new)).names == {
        "old": {"new": None},
        "new": {"old": None},
    }
    assert renewed(agreement, opinions_of(changed), kinds_of(changed)).names == {}
    both = bind({"old": rule, "new": rule})
    assert renewed(agreement, opinions_of(both), kinds_of(both)).names == {}


def test_an_agreement_is_kept_as_json() -> None:
    book = bind({"a": Rule(limits=[SlidingWindow("5/m"), SlidingWindow("9/m", name="n")])})
    agreement = renewed(
        Agreement(token="t", rates={"n": "3/m"}), opinions_of(book), kinds_of(book), NOW
    )
    kept = json.loads(json.dumps(agreement.as_memo()))
    assert Agreement.of("t", {**kept, "of a later version": 1}, {"n": "3/m"}) == agreement


@pytest.mark.parametrize(
    "data",
    [{"kind": "LeakyBucket", "rate": "1/s"}, {"kind": "SlidingWindow", "rate": "1/s", "colour": 1}],
)
def test_a_limit_of_another_version_is_not_read_as_none(data: dict[str, Any]) -> None:
    book = bind({"a": Rule(limits=[SlidingWindow("5/m")]), "b": Rule()})
    found = in_force(book, Agreement(), {"other": {"a": [data], "b": []}}, NOW)
    assert found.unreadable == {"a"}
    assert [b.limit for b in found.budgets["a"]] == [SlidingWindow("5/m")]


def test_differences_name_who_says_what() -> None:
    one = bind(
        {"a": Rule(limits=[SlidingWindow("5/m"), SlidingWindow("9/m", name="n")]), "only": Rule()}
    )
    two = bind({"a": Rule(limits=[SlidingWindow("5/m", jitter=1)])})
    found = differences({"p1": opinion_of(one), "p2": opinion_of(two)})
    assert [str(each) for each in found] == [
        "limit a#0: SlidingWindow('5/m') says p1; SlidingWindow('5/m', jitter=1) says p2",
        "limit n: SlidingWindow('9/m') says p1; no limit says p2",
    ]
    assert differences({"p1": opinion_of(one), "p3": opinion_of(one)}) == []
