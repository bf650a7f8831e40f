"""How much of each limit was used over its last windows, for plots against the limit. Reads, and
changes nothing.

In: budgets, each with one value of its `per`. Out: the use at evenly spaced instants, the present
last; None where it has not been counted yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from callqueue import database
from callqueue.database import from_us, to_us
from callqueue.ledger.tallies import is_tallied
from callqueue.limits.budgets import Budget, cost_of
from callqueue.limits.kinds import PARTS, SECOND
from callqueue.operations.attempt_sums import AttemptSums, Series, attempts
from callqueue.operations.ledger_view import SLICES, sliced

FLIGHT = 60 * SECOND  # what is shown of a limit on what is in flight, which has no window
NEWEST = 5000  # attempts that are read to see what was in flight
FEW = 500  # the same where there is no time


@dataclass(frozen=True)
class Scope:
    """A budget, for one value of its `per` ("" for all of it: per="rule", and all queues together).
    `capacity` is its limit.
    """

    budget: Budget
    value: str
    capacity: int
    used: int

    @property
    def series(self) -> Series:
        """What is summed for it."""
        limit = self.budget.limit
        if self.slices > 1:
            return sliced(self.budget, self.value)
        return Series.of(self.budget, self.value, limit.slot_us, self.capacity // PARTS)

    @property
    def slices(self) -> int:
        """How many slots of the series are one of the plot: those of a large sliding window are
        what the ledger counts too.
        """
        limit = self.budget.limit
        is_coarse = is_tallied(limit) and not limit.is_keyed and not limit.is_calendar
        return SLICES // PARTS if is_coarse else 1


@dataclass(frozen=True)
class Use:
    """The use of a limit at evenly spaced instants, `step` microseconds apart, the present last;
    None: not counted yet.
    """

    levels: Sequence[int | None]
    step: int
    capacity: int


def look(using: str, scopes: Sequence[Scope], *, until: float) -> list[Use]:
    """The use of each scope's last windows, in the same order. Counts until then (monotonic), and
    one statement at least.
    """
    sums = AttemptSums(using, to_us(database.clock(using)), until)
    found: dict[int, Use] = {}
    for i in sums.turns([scope.series for scope in scopes]):
        found[i] = _use(sums, scopes[i])
    return [found[i] for i in range(len(scopes))]


def _use(sums: AttemptSums, scope: Scope) -> Use:
    limit, now = scope.budget.limit, sums.now
    if limit.counts_in_flight:
        return Use([*_in_flight(sums, scope), scope.used], FLIGHT // PARTS, scope.capacity)
    series, slices = scope.series, scope.slices
    step = slices * series.width
    starts = range(limit.plotted_from(now, step), now + 1, step)
    # The last one is what is used now.
    shown = [[start + i * series.width for i in range(slices)] for start in starts[:-1]]
    known = sums.sums(series, [start for slot in shown for start in slot])
    counts = [
        sum(known[start] for start in slot) if all(start in known for start in slot) else None
        for slot in shown
    ]
    levels = limit.levels(starts[:-1], counts, scope.capacity // limit.capacity)
    return Use([*levels, scope.used], step, scope.capacity)


# --- what is in flight


def _in_flight(sums: AttemptSums, scope: Scope) -> list[int | None]:
    """How much was in flight at each instant of the last minute, from its release to its answer;
    None before what is read.
    """
    now, most = sums.now, NEWEST if sums.has_time else FEW
    instants = [now - FLIGHT + FLIGHT * i // PARTS for i in range(PARTS)]
    unit = scope.budget.limit.unit
    what = "calls" if unit == "calls" else "cost"
    rows = attempts(
        sums.using, scope.budget.rules, scope.budget.limit.per, scope.value, scope.budget.former
    )
    columns = ("released_at", "finished_at", what)
    ended = rows.filter(finished_at__gt=from_us(instants[0])).order_by("-finished_at")
    newest = list(ended.values_list(*columns)[:most])
    changes = [0] * (PARTS + 1)
    for released, finished, cost in [*newest, *rows.open().values_list(*columns)[:most]]:
        amount = cost if unit == "calls" else cost_of(cost, unit)
        changes[bisect_left(instants, to_us(released))] += amount
        if finished is not None:
            changes[bisect_left(instants, to_us(finished))] -= amount
    for at, after in pairwise(range(PARTS)):
        changes[after] += changes[at]
    known = to_us(newest[-1][1]) if len(newest) == most else 0
    return [
        level if instant >= known else None
        for instant, level in zip(instants, changes, strict=False)
    ]
