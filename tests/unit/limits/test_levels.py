"""The level that is kept of a bucket, and what is counted after it: together, all that was charged."""

from __future__ import annotations

import pytest

from callqueue import Rule, TokenBucket
from callqueue.ledger.memo import Memo, brought_up
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
