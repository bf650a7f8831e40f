"""The account for those who only look: the dashboard, forecasts and status reports.

It charges what the account of a release charges, but counts tallied budgets from the attempts, and
estimates them where there is no time to count. It changes nothing, and no release goes by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from callqueue.database import from_us, to_us
from callqueue.ledger.account import Account
from callqueue.ledger.memo import Memo
from callqueue.ledger.tallies import Scope, is_tallied
from callqueue.ledger.window_tallies import COARSE
from callqueue.limits.budgets import Book, Budget, cost_of
from callqueue.limits.kinds import Limit, Meter, Usage
from callqueue.operations.attempt_sums import AttemptSums, Series, attempts, total_cost

SLICES = 240  # parts of a tallied window whose charges are told apart


class KnownRoom(Meter):
    """A tallied budget of which only what is free is known, and not when there will be more."""

    def __init__(self, capacity: int, used: int, now: int) -> None:
        self._n, self._open, self._now = capacity, used, now

    @property
    def used(self) -> int:
        return self._open

    def free_at(self, cost: int) -> int | None:
        return self._now if cost <= self.free else None


@dataclass
class LedgerView(Account):
    """An account for those who only look.

    With `sums`, tallied budgets are counted as far as those have time, and `estimated` names the
    scopes that were not counted to the end; without, they are read from the tallies as for a
    release.
    """

    sums: AttemptSums | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.estimated: set[Scope] = set()
        self._used: dict[Scope, int] = {}  # of tallied budgets per key

    def values(self, budget: Budget) -> list[str]:
        """The values of the budget's `per` that are known to be charged: of open attempts, and of
        those that were read; of tallies the fullest.
        """
        if budget.id in self.tallies:
            return sorted(self.tallies[budget.id].fullest())
        scopes = {**self.open, **self.aged, **self._used}
        return sorted({value for budget_id, value in scopes if budget_id == budget.id})

    def usage(self, budget: Budget, value: str = "") -> Usage:
        """What one budget is charged with, for one value of its `per`. A tallied window's charges
        come in slices of it.
        """
        if not is_tallied(budget.limit) or self._is_read_by_rows(budget.limit):
            return super().usage(budget, value)
        charged = self.open.get((budget.id, value), 0)
        return Usage(charged, self._sliced(budget, value), budget.limit.horizon(self.now))

    def read_tallies(self, has_corrections: bool) -> None:
        if self.sums is None:
            super().read_tallies(has_corrections)

    def read_values(self, budget: Budget, values: Sequence[str]) -> None:
        if self.sums is None:
            super().read_values(budget, values)
            return
        for value in values:
            if (budget.id, value) not in self._used:
                self._look_at(budget, value)

    def new_meter(self, budget: Budget, value: str) -> Meter:
        limit, scope = budget.limit, (budget.id, value)
        if self.sums is None or not is_tallied(limit) or self._is_read_by_rows(limit):
            return super().new_meter(budget, value)
        if limit.is_keyed:
            used = self._used.get(scope, 0)
        else:
            counts, missing = self._counted(budget, value)
            used = sum(counts.values())
            if missing:
                self.estimated.add(scope)
        return KnownRoom(limit.capacity, used + self.open.get(scope, 0), self.now)

    def _is_read_by_rows(self, limit: Limit) -> bool:
        """Whether a tallied limit's attempts are read one by one: those of some keys, where they
        are not too many.
        """
        is_small = limit.capacity <= COARSE or limit.keeps_level
        return self.sums is not None and limit.is_keyed and is_small

    def _look_at(self, budget: Budget, value: str) -> None:
        """Read what one value of a tallied budget per key is charged with."""
        scope, limit = (budget.id, value), budget.limit
        rows = attempts(self.using, budget.rules, limit.per, value, budget.former)
        rows = rows.filter(finished_at__gt=from_us(limit.horizon(self.now)))
        if not self._is_read_by_rows(limit):
            total = rows.aggregate(total=total_cost(limit.unit))["total"]
            self._used[scope] = int(total or 0)
            return
        self._used[scope] = 0
        for key, cost, sent, ended in rows.values_list("key", "cost", "sent_at", "finished_at"):
            if budget.value_of(key, "") == value and (spent := cost_of(cost, limit.unit)):
                at = limit.aged_from(None if sent is None else to_us(sent), to_us(ended))
                self.aged[scope].append((at, spent))

    def _sliced(self, budget: Budget, value: str) -> list[tuple[int, int]]:
        """What the answered attempts of a tallied budget charge, each slice of the window as one
        charge at its end.
        """
        limit, now = budget.limit, self.now
        if limit.is_calendar or limit.is_keyed:
            used = self.meter(budget, value).used - self.open.get((budget.id, value), 0)
            return [(now, used)] if used > 0 else []
        counts, _ = self._counted(budget, value)
        late = limit.window_us // SLICES + limit.jitter_us
        return sorted((min(now, start + late), total) for start, total in counts.items() if total)

    def _counted(self, budget: Budget, value: str) -> tuple[dict[int, int], int]:
        """What the answered attempts of a tallied budget charge, by the beginning of slots of its
        window, and how many slots there was no time to count: each of those is taken to be like the
        mean of the others.
        """
        limit, series = budget.limit, sliced(budget, value)
        first = limit.horizon(self.now)
        if not limit.is_calendar:
            first = -(-first // series.width) * series.width
        starts = list(range(first, self.now + 1, series.width))
        sums = (self.sums or AttemptSums(self.using, self.now)).sums(series, starts)
        missing = [start for start in starts if start not in sums]
        if not missing:
            return sums, 0
        total = sum(sums.values())
        mean, room = round(total / len(sums)) if sums else 0, max(0, limit.capacity - total)
        return sums | dict.fromkeys(missing, min(mean, room // len(missing))), len(missing)


def look(
    using: str,
    book: Book,
    rules: Sequence[str],
    now: int,
    memo: Memo | None = None,
    *,
    sums: AttemptSums | None = None,
) -> LedgerView:
    """The account of these rules (a whole group) at `now`, to be looked at."""
    view = LedgerView(using, book, tuple(rules), now, now, memo or Memo(), sums)
    view.read()
    return view


def sliced(budget: Budget, value: str) -> Series:
    """What is summed of a tallied budget, in slices of its window."""
    limit = budget.limit
    return Series.of(budget, value, limit.window_us // SLICES, limit.capacity // SLICES)
