"""How much of each limit was used over its last windows, for plots against the limit. Reads, and
changes nothing.

In: budgets, each with one value of its `per`. Out: the use at evenly spaced instants, the present
last; None where it has not been counted yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from callqueue import database
from callqueue.database import from_us, to_us
from callqueue.ledger.tallies import is_tallied
from callqueue.limits.budgets import Budget, cost_of
from callqueue.limits.kinds import (
    SECOND,
    Concurrency,
    FixedWindow,
    Limit,
    SlidingWindow,
    TokenBucket,
)
from callqueue.operations.attempt_sums import AttemptSums, Series, attempts
from callqueue.operations.ledger_view import SLICES, sliced

SHOWN = 3  # windows
PARTS = 20  # slots of a window
# the same of a calendar window, so that those of a day are hours, on days of 23 and 25 hours too
HOURS = 24
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
        expected = self.capacity // PARTS
        return Series(
            self.budget.rules,
            limit.per,
            self.value,
            limit.unit,
            _width(limit),
            limit.strict,
            self.budget.former,
            expected=expected,
        )

    @property
    def slices(self) -> int:
        """How many slots of the series are one of the plot: those of a large sliding window are
        what the ledger counts too.
        """
        limit = self.budget.limit
        return (
            SLICES // PARTS
            if isinstance(limit, SlidingWindow) and is_tallied(limit) and not limit.is_keyed
            else 1
        )


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
    if isinstance(limit, Concurrency):
        return Use([*_in_flight(sums, scope), scope.used], FLIGHT // PARTS, scope.capacity)
    series, slices = scope.series, scope.slices
    starts = _starts(limit, now, slices * series.width)
    shown = [
        [start + i * series.width for i in range(slices)] for start in starts[:-1]
    ]  # the last one is what is used now
    known = sums.sums(series, [start for slot in shown for start in slot])
    counts = [
        sum(known[start] for start in slot) if all(start in known for start in slot) else None
        for slot in shown
    ]
    levels = _levels(scope, starts[:-1], counts)
    return Use([*levels, scope.used], slices * series.width, scope.capacity)


# --- slots


def _width(limit: Limit) -> int:
    """How long a slot is, in microseconds."""
    if isinstance(limit, FixedWindow):
        return max(1, limit.period_us // HOURS)
    if isinstance(limit, TokenBucket):
        return max(SECOND, limit.burst * limit.period_us // limit.n) // PARTS
    return max(1, limit.window_us // PARTS)


def _starts(limit: Limit, now: int, width: int) -> list[int]:
    """When each slot begins that is to be counted: those of the windows shown, and of the window
    before, which they hold.
    """
    if isinstance(limit, FixedWindow):
        begin = limit.window(now)[0]
        for _ in range(SHOWN - 1):
            begin = limit.window(begin - 1)[0]
    else:
        begin = (now // width - (SHOWN + 1) * PARTS + 1) * width
    return list(range(begin, now + 1, width))


def _levels(scope: Scope, starts: Sequence[int], counts: Sequence[int | None]) -> list[int | None]:
    """The use at the end of each slot that is shown."""
    limit = scope.budget.limit
    if isinstance(limit, FixedWindow):
        return _since_the_window_began(limit, starts, counts)
    if isinstance(limit, TokenBucket):
        return _taken_from_the_bucket(limit, scope.capacity // limit.burst, counts)[PARTS:]
    return [None if None in held else sum(filter(None, held)) for held in _windows(counts)]


def _windows(counts: Sequence[int | None]) -> Iterable[Sequence[int | None]]:
    return (counts[i - PARTS + 1 : i + 1] for i in range(PARTS, len(counts)))


def _since_the_window_began(
    limit: FixedWindow, starts: Sequence[int], counts: Sequence[int | None]
) -> list[int | None]:
    levels: list[int | None] = []
    level: int | None = 0
    window = limit.window(starts[0])
    for start, count in zip(starts, counts, strict=True):
        if start >= window[1]:
            window, level = limit.window(start), 0
        level = None if level is None or count is None else level + count
        levels.append(level)
    return levels


def _taken_from_the_bucket(
    limit: TokenBucket, buckets: int, counts: Sequence[int | None]
) -> list[int | None]:
    """What the bucket lacks, taken to be empty at first, as the ledger does: a window later that is
    forgotten.
    """
    cap, refill, level, known = (
        limit.burst * buckets,
        limit.n * buckets * _width(limit) / limit.period_us,
        0.0,
        0,
    )
    levels: list[int | None] = []
    for count in counts:
        level, known = (
            (0.0, 0) if count is None else (max(0.0, min(cap, level + refill - count)), known + 1)
        )
        levels.append(None if known <= PARTS else round(cap - level))
    return levels


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
