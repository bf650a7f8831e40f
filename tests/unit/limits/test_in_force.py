"""What is in force among processes whose settings differ, and what goes on counting: pure, for any
settings and histories.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow, TokenBucket
from callqueue.limits.budgets import Book, book_of
from callqueue.limits.in_force import (
    LINGERS,
    OF_NOBODY,
    Opinion,
    Stated,
    differences,
    digest_of,
    opinion_of,
)
from callqueue.limits.kinds import DAY, Limit

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
    return book_of(rules)


def opinions_of(*all_books: Book) -> dict[str, Any]:
    """As the database brings them back."""
    return {
        digest_of(opinion_of(book)): json.loads(json.dumps(opinion_of(book))) for book in all_books
    }


@given(books())
def test_alone_a_dispenser_goes_by_its_own_settings(book: Book) -> None:
    found = Stated(opinions=opinions_of(book)).book(book)
    for rule, budgets in book.budgets.items():
        mine, stated = (
            [(b.id, b.limit, sorted(b.rules), b.former) for b in one]
            for one in (budgets, found.budgets[rule])
        )
        assert mine == stated
    assert found.groups == book.groups
    assert found.unreadable == frozenset()


@given(st.lists(books(), min_size=1, max_size=4))
def test_every_limit_of_every_opinion_holds_for_all_that_it_counts(all_books: list[Book]) -> None:
    opinions = opinions_of(*all_books)
    for mine in all_books:
        found = Stated(opinions=opinions).book(mine)
        for book in all_books:
            for rule, budgets in book.budgets.items():
                for budget in budgets:
                    (same,) = [
                        b
                        for b in found.budgets[rule]
                        if (b.known_as, repr(b.limit)) == (budget.id, repr(budget.limit))
                    ]
                    assert set(budget.rules) <= set(same.rules)
                    assert set(budget.rules) <= set(found.groups[rule])


@given(st.lists(books(), min_size=2, max_size=4))
def test_all_that_take_part_find_the_same_budgets_and_groups(all_books: list[Book]) -> None:
    stated = Stated(version=7, opinions=opinions_of(*all_books))
    found = [stated.book(book) for book in all_books]
    assert all(one.groups == found[0].groups for one in found)
    assert all(
        {b.id: b for b in one.all_budgets()} == {b.id: b for b in found[0].all_budgets()}
        for one in found
    )
    assert {one.version for one in found} == {7}


def test_nobody_charges_by_settings_that_are_not_in_force() -> None:
    one, other = (book_of({"r": Rule(limits=[SlidingWindow(f"{n}/m")])}) for n in (1, 2))
    stated = Stated(version=7, opinions=opinions_of(one))
    assert stated.book(one).version == 7
    assert stated.book(other).version == OF_NOBODY
    assert Stated(version=7).book(other).version == 7, "there are no others"


@given(st.lists(st.lists(books(), min_size=1, max_size=2), min_size=2, max_size=6), st.data())
def test_what_was_charged_to_a_named_limit_counts_in_it_from_then_on(
    history: list[list[Book]], data: Any
) -> None:
    """Whatever opinions come and go, and though a pass still goes by those that have just lapsed:
    every release is counted by the limits that it was charged to.
    """
    stated, lapsed, at = Stated(), dict[str, tuple[Opinion, int]](), NOW
    released = list[tuple[str, str, int]]()
    for alive in history:
        book = stated.book(alive[0])  # a pass that is under way while they come and lapse
        at += data.draw(st.sampled_from([1000, LINGERS, DAY // 2]))
        opinions = opinions_of(*alive)
        lapsed |= {d: (stated.opinions[d], at) for d in stated.opinions.keys() - opinions.keys()}
        lapsed = {digest: one for digest, one in lapsed.items() if digest not in opinions}
        charged = book.budgets if book.version != OF_NOBODY and stated.opinions else {}
        stated = Stated(stated.version + 1, opinions, list(lapsed.values()))
        released += [
            (budget.known_as, rule, at + LINGERS)
            for rule, budgets in charged.items()
            for budget in budgets
            if budget.limit.name
        ]
        for budget in stated.book(alive[0]).all_budgets():
            for limit, rule, instant in released:
                assert budget.known_as != limit or budget.counts(rule, instant)


def test_a_rule_that_left_a_limit_counts_until_the_last_pass_that_charged_it() -> None:
    account = SlidingWindow("10/m", name="account")
    both = book_of({"a": Rule(limits=[account]), "b": Rule(limits=[account])})
    one = book_of({"a": Rule(limits=[account]), "b": Rule()})
    lapsed = [(opinion_of(both), NOW), (opinion_of(both), NOW - 500), (opinion_of(one), NOW + 9)]
    stated, until = Stated(opinions=opinions_of(one), lapsed=lapsed), NOW + LINGERS
    book = stated.book(one)
    (budget,) = book.budgets["a"]
    assert budget.former == (("b", until),)
    assert book.may_owe(budget), "what it charged may have been by another cost"
    assert [book.former_rules_under_way("a", at) for at in (until - 1, until)] == [{"b"}, set()]
    assert (budget.counts("b", until), budget.counts("b", until + 1)) == (True, False)
    back = Stated(opinions=opinions_of(both, one), lapsed=lapsed)
    assert back.book(one).budgets["a"][0].former == ()


def test_opinions_are_remembered_for_as_long_as_any_limit_counts() -> None:
    """With the rates that operators gave, and whoever states the limit."""
    short, long = (
        book_of({"r": Rule(limits=[SlidingWindow(r, name="n")])}) for r in ("1/m", "1/w")
    )
    week = SlidingWindow("1/w").window_us
    assert Stated(opinions=opinions_of(book_of({"r": Rule()}))).longest_window == 0
    assert Stated(opinions=opinions_of(short)).longest_window < week
    assert Stated(lapsed=[(opinion_of(long), NOW)]).longest_window == week
    assert Stated(opinions=opinions_of(short), rates={"n": "9/w"}).longest_window == week


@pytest.mark.parametrize("other", [{"kind": "Unheard"}, {"odd": 1}, {"rate": "1/century"}])
def test_rules_of_a_limit_that_this_version_does_not_know_are_unreadable(other: Any) -> None:
    """Whoever states it: no pass may go by what it cannot read."""
    shared = SlidingWindow("1/s", name="n")
    book = book_of({"a": Rule(limits=[shared]), "b": Rule(limits=[shared]), "c": Rule()})
    theirs = {"a": [{**opinion_of(book)["a"][0], **other}]}
    assert Stated(opinions={"theirs": theirs}).book(book).unreadable == {"a", "b"}


def test_differences_name_who_says_what() -> None:
    one = book_of(
        {"a": Rule(limits=[SlidingWindow("5/m"), SlidingWindow("9/m", name="n")]), "only": Rule()}
    )
    two = book_of({"a": Rule(limits=[SlidingWindow("5/m", jitter=1)])})
    found = differences({"p1": opinion_of(one), "p2": opinion_of(two)})
    assert [str(each) for each in found] == [
        "limit a#0: SlidingWindow('5/m') says p1; SlidingWindow('5/m', jitter=1) says p2",
        "limit n: SlidingWindow('9/m') says p1; no limit says p2",
    ]
    assert differences({"p1": opinion_of(one), "p3": opinion_of(one)}) == []
