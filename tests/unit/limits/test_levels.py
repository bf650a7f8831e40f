"""The level that is kept of a bucket, and what is counted after it: together, all that was charged."""

from __future__ import annotations

import pytest

from callqueue import Rule, TokenBucket
from callqueue.ledger.memo import Memo, brought_up, forget_other_levels, kept_level
from callqueue.limits.budgets import bind
from callqueue.limits.kinds import Usage

SECOND = 1_000_000


@pytest.mark.parametrize("ended", [9 * SECOND, 10 * SECOND, 10 * SECOND + 1])
def test_no_charge_is_lost_between_a_level_and_what_is_newer(ended: int) -> None:
    """Whether it ended before the level's instant, after it, or at it."""
    budget = bind({"r": Rule(limits=[TokenBucket("1/s", burst=3)])}).budgets["r"][0]
    memo, now = Memo(), 11 * SECOND
    usage = Usage(aged=[(ended, 3)])
    brought_up(memo, budget, "", usage, 10 * SECOND, now)
    later = brought_up(memo, budget, "", usage, 0, now)
    assert later.since == 10 * SECOND
    assert budget.limit.meter(later, now).used == budget.limit.meter(usage, now).used


def test_levels_of_other_budgets_are_forgotten() -> None:
    limits = [TokenBucket("1/s", burst=3)]
    budgets = bind({"r": Rule(limits=limits), "s": Rule(limits=limits)}).budgets
    memo, now = Memo(), 11 * SECOND
    for rule in "rs":
        brought_up(memo, budgets[rule][0], "", Usage(), 10 * SECOND, now)
    forget_other_levels(memo, {"r#0"})
    assert kept_level(memo, budgets["r"][0], "", 0, now)
    assert kept_level(memo, budgets["s"][0], "", 0, now) is None
