"""Tallies: what budgets with long windows are charged with, kept as it changes instead of counted
anew at every pass.

A release adds its cost, under the lock of the budget's rules. An attempt that leaves the window
takes it away: each pass reads those that left since the last one. What turned out to cost something
else (voided, settled), or was recorded late, is marked by whoever writes it, whatever
limits that process knows: only a pass knows which are tallied. Attempts stay the truth: where what
is kept is not known to be of the same budget, rules and clock, it is counted anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from callqueue import database, states
from callqueue.database import instant_us, loaded, places, quoted, rows
from callqueue.ledger import tally_rows
from callqueue.ledger.bucket_tallies import BucketTallies
from callqueue.ledger.tally import stored_name
from callqueue.ledger.window_tallies import FULLEST, CalendarTallies, Tallies
from callqueue.limits.budgets import Budget, cost_of, costs_more
from callqueue.limits.kinds import FixedWindow, Limit, SlidingWindow, TokenBucket

CORRECTIONS = 1000  # corrections that one statement takes in
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


def advance(using: str, tallies: Iterable[Tallies]) -> None:
    """Take away from each what has left it since the last pass: see `Tallies.advance`. Two
    statements for most of them together.
    """
    behind = [one for one in tallies if one.is_behind]
    found = tally_rows.left(using, [one.leaving() for one in behind])
    wanted = {
        stored_name(one.budget): values
        for one, left in zip(behind, found, strict=True)
        if one.limit.is_keyed and (values := one.unknown(value for value, _, _ in left))
    }
    stored = tally_rows.stored(using, wanted)
    for one, left in zip(behind, found, strict=True):
        name = stored_name(one.budget)
        if name in wanted:
            one.know(stored.get(name, ()), wanted[name])
        one.let_leave(left)


def load_fullest(using: str, tallies: Iterable[Tallies]) -> None:
    """Read the values that are charged most of each budget per key. One statement for many of them
    together.
    """
    keyed = [one for one in tallies if one.limit.is_keyed and not one.is_anew]
    found = tally_rows.fullest(using, [stored_name(one.budget) for one in keyed], FULLEST)
    for one in keyed:
        one.know(found.get(stored_name(one.budget), ()))


def take_corrections(using: str, group: Sequence[str], tallies: Collection[Tallies]) -> None:
    """Tell the tallies what attempts of these rules cost after all, and take the marks from their
    rows, also where there are no tallies. Two statements for CORRECTIONS of them.

    All of them: the next release must not be decided by less than is known. To be called after
    recounts: those count what is still to be corrected as it was charged.
    """
    while _take_some(using, group, tallies) == CORRECTIONS:
        pass


def _take_some(using: str, group: Sequence[str], tallies: Collection[Tallies]) -> int:
    table, key = tally_rows.attempts_table(using), quoted(using, "key")
    found = rows(
        using,
        f"SELECT id, call_id, rule, {key}, queue, cost, charged, finished_at, outcome FROM {table} "
        f"WHERE correction_pending AND rule IN ({places(group)}) "
        f"ORDER BY id LIMIT {CORRECTIONS}{database.skip_locked(using)}",
        list(group),
    )
    if not found:
        return 0
    corrections = [
        _Correction(
            pk, call is None, rule, text, queue,
            0 if outcome == states.VOIDED else loaded(cost),
            loaded(charged), instant_us(ended),
        )
        for pk, call, rule, text, queue, cost, charged, ended, outcome in found
    ]  # fmt: skip
    _mark_as_taken(using, corrections)
    for one in tallies:
        for correction in corrections:
            if correction.rule in one.budget.rules:
                value, unit = one.budget.value_of(correction.key, correction.queue), one.limit.unit
                charged, cost = cost_of(correction.charged, unit), cost_of(correction.cost, unit)
                correct = one.settle_ended if correction.is_permit else one.correct
                correct(value, correction.ended, charged, cost)
    return len(found)


class _Correction(NamedTuple):
    """An attempt that cost something else than it was charged at its release, or that ended long
    before that was recorded. Instants are microseconds.
    """

    id: int
    is_permit: bool
    rule: str
    key: str
    queue: str
    cost: Any
    charged: Any
    ended: int


def _mark_as_taken(using: str, corrections: Sequence[_Correction]) -> None:
    """Say in the rows that the tallies know. What was charged stays known where the answer added to
    it: that is of another instant.
    """
    more = [one.id for one in corrections if costs_more(one.cost, one.charged)]
    kept = f"CASE WHEN id IN ({database.listed(more)}) THEN charged END" if more else "NULL"
    ids = database.listed(one.id for one in corrections)
    table = tally_rows.attempts_table(using)
    database.run(
        using,
        f"UPDATE {table} SET correction_pending = FALSE, charged = {kept} WHERE id IN ({ids})",
    )
