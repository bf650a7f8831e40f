"""For how long an attempt counts after its end: nothing that counts may be deleted."""

from __future__ import annotations

from callqueue.ledger.tallies import is_tallied
from callqueue.ledger.tally import longest_gap
from callqueue.limits.budgets import Book
from callqueue.limits.kinds import SECOND, Limit

MARGIN = 60 * SECOND  # that an attempt is kept beyond that


def counted_for(book: Book) -> dict[str, int]:
    """By rule: microseconds after its end in which a limit may count an attempt, and a minute."""
    longest = dict.fromkeys(book.budgets, 0)
    for budget in book.all_budgets():
        for rule in (*budget.rules, *(name for name, _ in budget.former)):
            longest[rule] = max(longest.get(rule, 0), _counted_by(budget.limit))
    return {rule: window + MARGIN for rule, window in longest.items()}


def longest_window(book: Book) -> int:
    """The longest of these times: that of attempts whose rule is not in the book any more."""
    return max(counted_for(book).values(), default=MARGIN)


def _counted_by(limit: Limit) -> int:
    return limit.window_us + (longest_gap(limit) if is_tallied(limit) else 0)
