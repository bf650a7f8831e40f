"""A new kind of limit is one class, and its name in KINDS: all else follows from it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from callqueue import Rule
from callqueue.history.audit import tally_of
from callqueue.limits import kinds
from callqueue.limits.budgets import bind
from callqueue.limits.in_force import Stated, digest_of, opinion_of
from callqueue.limits.kinds import Usage
from tests.support.drain_simulation import simulate
from tests.support.new_kind import Spaced
from tests.unit.limits.test_kinds import LEADS, RATES, games, play

NOON = 1_800_014_400 * kinds.SECOND  # 2027-01-15 12:00 UTC


def test_it_is_kept_at_the_provider() -> None:
    for dice, game in games(40, 1500):
        limit = Spaced(dice.choice(RATES), strict=dice.random() < 0.5)
        wires = sorted(one.wire for one in play(limit, game, dice.choice(LEADS)))
        assert all((then - before) * limit.n > limit.period_us for before, then in pairwise(wires))
        tally = tally_of(limit)
        for wire in wires:
            tally.add(wire, 1)
        assert tally.highest == 1


@pytest.mark.parametrize(("n", "calls"), [(1, 1), (1, 40), (7, 7), (7, 200), (50, 400)])
def test_a_backlog_drains_as_the_simulation_says(n: int, calls: int) -> None:
    limit = Spaced(f"{n}/s", jitter=0)
    book = bind({"r": Rule(limits=[limit])})
    made = simulate(book, "r", calls, latency=0, delivery=0, notice=0)
    quick = limit.seconds_until_gone(limit.meter(Usage(), NOON), calls, NOON, 0)
    assert made.last_release == pytest.approx(quick, rel=0.01, abs=0.01)


def test_dispensers_agree_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kinds.KINDS, "Spaced", Spaced)  # type: ignore[arg-type]
    limit = Spaced("4/h", per="key")
    book = bind({"r": Rule(limits=[limit])})
    opinions = {digest_of(opinion_of(book)): opinion_of(book)}
    found = Stated(opinions=opinions).book(bind({}))
    assert [budget.limit for budget in found.budgets["r"]] == [limit]
