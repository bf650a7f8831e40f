"""One tally, what is kept of a budget's, and by what a budget is known there."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from callqueue.limits.budgets import Budget
from callqueue.limits.kinds import SECOND, Limit


@dataclass
class Tally:
    """What is charged for one value; `full_at`: when the bucket would be full again, open charges
    apart (microseconds).
    """

    used: int = 0
    full_at: int = 0
    pk: int | None = None
    is_changed: bool = False

    def is_idle(self, now: int) -> bool:
        """Whether nothing is charged, so that nothing is to be kept."""
        return self.used == 0 and self.full_at <= now


@dataclass
class Kept:
    """What the rules' locked row remembers of a budget's tallies.

    `print`: of what budget they are. `left`: the instant until whose end attempts have been taken
    away. `has_former`: whether attempts of former rules are among them. `values`: the tallies
    themselves, of a budget that is not per key.
    """

    print: str
    left: int
    counted: int
    has_former: bool = False
    values: dict[str, int] = field(default_factory=dict)


def fingerprint(budget: Budget) -> str:
    """Of what budget a tally is: the limit as it is in force, and the rules that it counts."""
    text = repr((budget.limit, budget.rules, budget.former))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def longest_gap(limit: Limit) -> int:
    """How long after it left an attempt may still be wanted, to be taken away; a tally that is
    further behind is counted anew.
    """
    return max(60 * SECOND, limit.window_us // 4)


def stored_name(budget: Budget) -> str:
    """The budget's id as a column holds it."""
    digest = hashlib.sha256(budget.id.encode()).hexdigest()[:16]
    return budget.id if len(budget.id) <= 120 else f"{budget.id[:120]}:{digest}"
