"""What following redirects is charged: in advance, for as many as may be followed."""

from __future__ import annotations

from typing import Any

import pytest

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow, TokenBucket
from callqueue.limits.budgets import Budget, bind, redirects_in, with_redirects
from callqueue.limits.kinds import Limit


@pytest.mark.parametrize(
    ("follow", "limits", "cost", "charge"),
    [
        (False, ["100/h"], 1, 1),
        (2, ["100/h"], 1, {"calls": 3, "redirects": 2}),
        (True, ["100/h"], 5, {"calls": 20, "redirects": 3}),
        (True, [], 1, {"calls": 4, "redirects": 3}),
        (2, ["100/h", "2/s"], 1, {"calls": 2, "redirects": 1}),
        (2, ["1/s"], 1, 1),
        (2, ["5/s"], 4, 4),
        (2, ["100/h"], {"tokens": 9}, {"tokens": 9, "calls": 3, "redirects": 2}),
        (2, ["100/h"], {"calls": 0, "tokens": 9}, {"calls": 0, "tokens": 9}),
    ],
)
def test_a_call_is_charged_for_as_many_redirects_as_its_limits_could_admit(
    follow: bool | int, limits: list[str], cost: Any, charge: Any
) -> None:
    book = bind(
        {"r": Rule(follow_redirects=follow, limits=[SlidingWindow(rate) for rate in limits])}
    )
    assert book.charge_of("r", cost) == charge


def test_only_limits_of_calls_bound_them() -> None:
    tokens, few = FixedWindow("1/d", unit="tokens"), TokenBucket("9/s", burst=2)
    book = bind({"r": Rule(follow_redirects=True, limits=[Concurrency(1), tokens, few])})
    assert book.charge_of("r", 1) == {"calls": 2, "redirects": 1}


def test_a_call_in_flight_is_one_whatever_it_follows() -> None:
    charge = with_redirects({"calls": 2, "tokens": 7}, 3)
    assert redirects_in(charge) == 3

    def charged_on(limit: Limit) -> int:
        return Budget("b", limit, ("r",)).charge_of(charge)

    assert charged_on(Concurrency(9)) == 2
    assert charged_on(SlidingWindow("9/s")) == 8
    assert charged_on(Concurrency(9, unit="tokens")) == 7


def test_hosts_whose_limits_would_not_see_a_redirect_are_closed() -> None:
    account = SlidingWindow("9/s", name="account")
    book = bind(
        {
            "own": Rule(hosts=["a.example"], limits=[account, SlidingWindow("5/s")]),
            "sharing": Rule(hosts=["b.example"], limits=[account]),
            "other": Rule(hosts=["a.example", "c.example"], limits=[SlidingWindow("1/s")]),
            "unlimited": Rule(hosts=["d.example"]),
        }
    )
    assert set(book.closed_hosts("own")) == {"c.example"}
    assert set(book.closed_hosts("sharing")) == {"a.example", "c.example"}
