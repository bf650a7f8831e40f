"""Tallies: what budgets with long windows are charged with, kept as it changes instead of counted
anew at every pass.

A release adds its cost, under the lock of the budget's rules. An attempt that leaves the window
takes it away: each pass reads those that left since the last one. What turned out to cost something
else (voided, settled, redirected) says so by itself. Attempts stay the truth: where what is kept is
not known to be of the same budget, rules and clock, it is counted anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from callqueue import database, states
from callqueue.database import loaded, places, quoted, rows
from callqueue.ledger import tally_rows
from callqueue.ledger.bucket_tallies import BucketTallies
from callqueue.ledger.window_tallies import CalendarTallies, Tallies
from callqueue.limits.budgets import Book, Budget, cost_of, costs_more
from callqueue.limits.kinds import FixedWindow, Limit, SlidingWindow, TokenBucket

CORRECTIONS = 1000  # corrections that one pass takes in
# A kind that is not named here is read attempt by attempt, however many its window holds.
OF_KINDS: Mapping[type[Limit], type[Tallies]] = {
    SlidingWindow: Tallies,
    FixedWindow: CalendarTallies,
    TokenBucket: BucketTallies,
}

Scope = tuple[str, str]  # a budget's id, and the value of its `per` ("" for per="rule")


def is_tallied(limit: Limit) -> bool:
    """Whether the limit's window may hold so many attempts that they are not read at every pass."""
    kind = OF_KINDS.get(type(limit))
    return kind is not None and kind.suits(limit)


def tallies_of(
    using: str, budget: Budget, now: int, kept: Mapping[str, Any] | None, until: int
) -> Tallies:
    """A budget's tallies at `now`, from what was kept; a pass releases up to `until`."""
    return OF_KINDS[type(budget.limit)](using, budget, now, kept, until)


def tallied_rules(book: Book) -> frozenset[str]:
    """The rules of tallied budgets: the tallies are told what their attempts cost after all."""
    return frozenset(
        rule for budget in book.all_budgets() if is_tallied(budget.limit) for rule in budget.rules
    )


def advance(using: str, tallies: Iterable[Tallies]) -> None:
    """Take away from each what has left it since the last pass: see `Tallies.advance`. One
    statement for most of them together.
    """
    behind = [one for one in tallies if one.is_behind]
    found = tally_rows.left(using, [one.leaving() for one in behind])
    for one, left in zip(behind, found, strict=True):
        one.let_leave(left)


def take_corrections(using: str, group: Sequence[str], tallies: Iterable[Tallies]) -> None:
    """Tell the tallies what attempts of these rules cost less than they were charged. One
    statement, and one if there are any.

    To be called after recounts: those count what is still to be corrected as it was charged.
    """
    table, key = tally_rows.attempts_table(using), quoted(using, "key")
    found = rows(
        using,
        f"SELECT id, rule, {key}, queue, cost, charged, outcome FROM {table} "
        f"WHERE correction_pending AND rule IN ({places(group)}) "
        f"ORDER BY id LIMIT {CORRECTIONS}{database.skip_locked(using)}",
        list(group),
    )
    if not found:
        return
    corrections = [
        _Correction(pk, rule, text, queue, loaded(cost), loaded(charged), outcome)
        for pk, rule, text, queue, cost, charged, outcome in found
    ]
    _mark_as_taken(using, corrections)
    for one in tallies:
        for correction in corrections:
            if correction.rule in one.budget.rules:
                value = one.budget.value_of(correction.key, correction.queue)
                one.correct(value, correction.less(one.limit.unit))


class _Correction(NamedTuple):
    """An attempt that cost something else than it was charged at its release."""

    id: int
    rule: str
    key: str
    queue: str
    cost: Any
    charged: Any
    outcome: str

    def less(self, unit: str) -> int:
        """By how much it cost less in a unit."""
        final = 0 if self.outcome == states.VOIDED else cost_of(self.cost, unit)
        return cost_of(self.charged, unit) - final


def _mark_as_taken(using: str, corrections: Sequence[_Correction]) -> None:
    """Say in the rows that the tallies know. What was charged stays known where the answer added to
    it: that is of another instant.
    """
    more = [
        one.id
        for one in corrections
        if one.outcome != states.VOIDED and costs_more(one.cost, one.charged)
    ]
    kept = f"CASE WHEN id IN ({database.listed(more)}) THEN charged END" if more else "NULL"
    ids = database.listed(one.id for one in corrections)
    table = tally_rows.attempts_table(using)
    database.run(
        using,
        f"UPDATE {table} SET correction_pending = FALSE, charged = {kept} WHERE id IN ({ids})",
    )
