"""A new kind of limit is one class, and its name in KINDS: all else follows from it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callqueue import Rule
from callqueue.history.audit import tally_of
from callqueue.limits import kinds
from callqueue.limits.budgets import bind
from callqueue.limits.in_force import Stated, digest_of, opinion_of
from callqueue.limits.kinds import Usage
from tests.support.drain_simulation import simulate
from tests.support.length import examples
from tests.support.new_kind import Spaced
from tests.unit.limits.test_kinds import RATES, Move, moves, play

NOON = 1_800_014_400 * kinds.SECOND  # 2027-01-15 12:00 UTC


@settings(max_examples=examples(150, 1500), deadline=None)
@given(rate=RATES, game=moves(1), lead=st.sampled_from([0, 150_000]), strict=st.booleans())
def test_it_is_kept_at_the_provider(rate: str, game: list[Move], lead: int, strict: bool) -> None:
    limit = Spaced(rate, strict=strict)
    wires = sorted(attempt.wire for attempt in play(limit, game, lead))
    assert all((after - before) * limit.n > limit.period_us for before, after in pairwise(wires))
    tally = tally_of(limit)
    for wire in wires:
        tally.add(wire, 1)
    assert tally.highest == 1


@given(n=st.integers(1, 50), calls=st.integers(1, 400))
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
    found = Stated(opinions=opinions).book(bind({}), NOON)
    assert [budget.limit for budget in found.budgets["r"]] == [limit]
