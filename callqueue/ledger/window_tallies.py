"""The tallies of windows, sliding and by the calendar: how much each value of a budget's `per` is
charged with, and when how much of it leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from callqueue import database, tables
from callqueue.ledger import tally_rows
from callqueue.ledger.tally import Kept, Tally, fingerprint, longest_gap, stored_name
from callqueue.limits.budgets import Budget
from callqueue.limits.kinds import SECOND, FixedWindow, Limit, Meter

COARSE = 2000  # a window per rule or queue that may hold more calls than this is tallied
FULLEST = 20  # values of a budget per key that are shown at most
SHORT = 5 * SECOND  # a window per key that is longer is tallied
# one of other units than calls that is longer, and may hold more, is tallied
SHORT_UNITS = 60 * SECOND
ROOMY = 1000  # as long as so much is free, nobody asks what has left
# a tally is counted anew this long after it was, or after an eighth of its window if that is longer
RECOUNT = 3600 * SECOND
# while former rules' attempts count, a tally is counted anew so often in a window, and nothing
# taken away between
FORMER = 100


class Tallies:
    """The tallies of one budget at `now`, here those of a sliding window. Only what was loaded or
    is not per key is known.

    `until`: up to when a pass releases. `near`: by value, what leaves until then, as (ended, cost),
    sorted. `freed`: values that have more room than before. `is_anew`: whether they were counted
    anew.
    """

    def __init__(
        self, using: str, budget: Budget, now: int, kept: Mapping[str, Any] | None, until: int
    ) -> None:
        self.using, self.budget, self.limit = using, budget, budget.limit
        self.now, self.until = now, until
        self.print = fingerprint(budget)
        self.by_value: dict[str, Tally] = {}
        self.near: dict[str, list[tuple[int, int]]] = {}
        self.freed: set[str] = set()
        self.is_anew = self._has_advanced = False
        self._next_leave: int | None = None
        believed = self._believed(kept)
        self.kept = believed or Kept(self.print, self.horizon(), now)
        if believed is None:
            self._recount()
        elif not self.limit.is_keyed:
            self.by_value = {value: Tally(used) for value, used in believed.values.items()}

    @classmethod
    def suits(cls, limit: Limit) -> bool:
        """Whether a limit of this kind is to be tallied: its window may hold many attempts."""
        if limit.is_keyed:
            return limit.period_us > SHORT
        return limit.capacity > COARSE and (limit.unit == "calls" or limit.period_us > SHORT_UNITS)

    def of(self, value: str) -> Tally:
        """The tally of a value."""
        return self.by_value.setdefault(value, Tally())

    def meter(self, value: str) -> Meter:
        """A meter over one tally; what it takes is charged to it."""
        return _WindowMeter(self, value)

    def unknown(self, values: Iterable[str]) -> list[str]:
        """Those of these values that rows are still to be asked about."""
        if self.is_anew:
            return []
        return [value for value in dict.fromkeys(values) if value not in self.by_value]

    def load(self, values: Iterable[str]) -> None:
        """Read the tallies of these values, of a budget per key."""
        if wanted := self.unknown(values):
            name = stored_name(self.budget)
            self.know(tally_rows.stored(self.using, {name: wanted}).get(name, ()), wanted)

    def know(self, rows: Iterable[tuple[str, int, int, int]], asked: Iterable[str] = ()) -> None:
        """Take in what rows say, (value, used, full_at, pk), of all that were asked about. What is
        known already may be newer.
        """
        for value, used, full_at, pk in rows:
            self.by_value.setdefault(value, Tally(used, full_at, pk))
        for value in asked:
            self.of(value)

    def loaded_fullest(self) -> list[str]:
        """The values that are charged most, of those that are loaded."""
        tallies = sorted(self.by_value.items(), key=lambda item: (item[1].full_at, item[1].used))
        return [value for value, _ in tallies[-FULLEST:]]

    def advance(self) -> None:
        """Take away what has left since the last pass, and see what leaves next. Once a pass."""
        if self.is_behind:
            (found,) = tally_rows.left(self.using, [self.leaving()])
            self.let_leave(found)

    @property
    def is_behind(self) -> bool:
        """Whether it is still to be advanced."""
        return self.leaves_one_by_one and not self._has_advanced

    def leaving(self) -> tally_rows.Leaving:
        """What is to be asked to advance."""
        end = self.horizon()
        return tally_rows.Leaving(self.budget, self.kept.left, end, self.looks_ahead_to(end))

    def let_leave(self, found: Sequence[tuple[str, int, int]]) -> None:
        """Advance by what was found."""
        self._has_advanced = True
        begin, end = self.kept.left, self.horizon()
        self.load(value for value, _, _ in found)
        for value, ended, cost in found:
            if ended <= end:
                self.take_away(value, ended, cost)
            else:
                self.near.setdefault(value, []).append((ended, cost))
        for listed in self.near.values():
            listed.sort()
        # Else nothing new is to be remembered.
        if found or end - begin > longest_gap(self.limit) // 2:
            self.kept.left = max(begin, end)

    def correct(self, value: str, ended: int, charged: int, cost: int) -> None:
        """An attempt that is counted as it was charged cost something else, or has left before it
        was known to have ended.
        """
        self.load([value])
        self.change(value, cost - charged)
        if ended <= self.kept.left and cost:
            self.take_away(value, ended, cost)

    def settle_ended(self, value: str, ended: int, charged: int, cost: int) -> None:
        """The same of a permit: those are settled after their end too, so what has left was taken
        away when it did. Where it was not, it counts too long, until the tally is counted anew.
        """
        if ended > self.kept.left:
            self.correct(value, ended, charged, cost)

    def next_leave(self) -> int:
        """The earliest instant past `until` at which more may leave than is known now."""
        if self._next_leave is None:
            recounted = self.kept.counted + self.limit.window_us // FORMER + 1
            found = recounted if self.kept.has_former else self.find_next()
            self._next_leave = max(self.until + 1, found)
        return self._next_leave

    def remembered(self) -> dict[str, Any]:
        """What the rules' row is to remember."""
        values = {} if self.limit.is_keyed else {v: t.used for v, t in self.by_value.items()}
        return asdict(self.kept) | {"values": values}

    def save(self) -> None:
        """Write what changed, of a budget per key. At most three statements."""
        if not self.limit.is_keyed:
            return
        if self.is_anew:
            self._stored().delete()
        else:
            self._delete_idle()
            self._update_changed()
        self._create_new()

    # --- what kinds of windows differ in

    @property
    def leaves_one_by_one(self) -> bool:
        """Whether attempts leave one by one. What former rules used is counted anew instead."""
        return not self.kept.has_former

    def horizon(self) -> int:
        """Until when attempts have left: those that ended by then."""
        return self.limit.horizon(self.now) - 1

    def looks_ahead_to(self, end: int) -> int:
        """Until when those have ended that leave while this pass releases."""
        return end + self.until - self.now

    def take_away(self, value: str, ended: int, cost: int) -> None:
        """An attempt that ended then has left."""
        self.change(value, -cost)

    def count(self, horizon: int) -> int:
        """Count all after the horizon; the end after which former rules' use is to be added."""
        for value, cost in tally_rows.charged(self.using, self.budget, horizon):
            self.of(value).used += cost
        return horizon

    def is_current(self, known: Kept) -> bool:
        """Whether what is kept can be brought up to now."""
        return known.has_former or self.horizon() - known.left <= longest_gap(self.limit)

    def find_next(self) -> int:
        """When more may leave than is known now. At most one statement."""
        after = self.horizon() + self.until - self.now
        ended = tally_rows.first_end(self.using, self.budget, after)
        return (self.now if ended is None else ended) + self.limit.window_us + 1

    def change(self, value: str, by: int) -> None:
        """Charge a value with so much more, or less."""
        tally = self.of(value)
        tally.used, tally.is_changed = max(0, tally.used + by), True
        if by < 0:
            self.freed.add(value)

    # --- what is kept

    def _believed(self, kept: Mapping[str, Any] | None) -> Kept | None:
        """What is kept, where it is of this very budget, not too old, and of this window."""
        if kept is None or kept["print"] != self.print:
            return None
        known, window = Kept(**{**kept, "values": dict(kept["values"])}), self.limit.window_us
        good_for = window // FORMER if known.has_former else max(RECOUNT, window // 8)
        is_fresh = known.counted <= self.now <= known.counted + good_for
        return known if is_fresh and self.is_current(known) else None

    def _recount(self) -> None:
        """Count the tallies anew from the attempts."""
        self.is_anew = self._has_advanced = True
        horizon = self.count(self.limit.horizon(self.now) - 1)
        if self.budget.former:
            self._count_former(horizon)

    def _count_former(self, horizon: int) -> None:
        """Add what former rules used. They are charged no more, so that it can only become less
        until it is counted anew.
        """
        for value, cost in tally_rows.charged_by_former(self.using, self.budget, horizon):
            self.of(value).used += cost
            self.kept.has_former = True

    def _stored(self) -> Any:
        return tables.Tally.objects.using(self.using).filter(budget=stored_name(self.budget))

    def _delete_idle(self) -> None:
        idle = [t.pk for t in self.by_value.values() if t.pk and t.is_idle(self.now)]
        if idle:
            self._stored().filter(pk__in=idle).delete()

    def _update_changed(self) -> None:
        known = (t for t in self.by_value.values() if t.pk and not t.is_idle(self.now))
        changed = [
            {"pk": t.pk, "used": t.used, "full_at": t.full_at} for t in known if t.is_changed
        ]
        database.update_each(tables.Tally, self.using, changed)

    def _create_new(self) -> None:
        name = stored_name(self.budget)
        new = [
            tables.Tally(budget=name, value=value, used=t.used, full_at=t.full_at)
            for value, t in self.by_value.items()
            if not t.is_idle(self.now) and not t.pk
        ]
        self._stored().bulk_create(new)


class CalendarTallies(Tallies):
    """The tallies of a calendar window: all that it holds leaves at once."""

    limit: FixedWindow
    leaves_one_by_one = False

    def is_current(self, known: Kept) -> bool:
        return known.left == self.horizon()

    def find_next(self) -> int:
        jitter = self.limit.jitter_us
        return self.limit.window(self.now - jitter)[1] + jitter


class _WindowMeter(Meter):
    """A tallied window. Asks what has left only when little is free."""

    def __init__(self, tallies: Tallies, value: str) -> None:
        self._tallies, self._value = tallies, value
        self._n, self._now = tallies.limit.capacity, tallies.now

    @property
    def used(self) -> int:
        if self._n - self._tallies.of(self._value).used < ROOMY:
            self._tallies.advance()
        return self._tallies.of(self._value).used

    def free_at(self, cost: int) -> int | None:
        instant = self.known_at(cost)
        return self._tallies.next_leave() if instant is None else instant

    def known_at(self, cost: int) -> int | None:
        """When the cost fits; None where it fits only after more has left than is known."""
        excess = self._excess(cost)
        if excess > 0:
            self._tallies.advance()
            excess = self._excess(cost)
        if excess <= 0:
            return self._now
        for ended, leaving in self._tallies.near.get(self._value, ()):
            excess -= leaving
            if excess <= 0:
                return max(self._now, ended + self._tallies.limit.window_us + 1)
        return None

    def take(self, cost: int) -> None:
        tally = self._tallies.of(self._value)
        tally.used, tally.is_changed = tally.used + cost, True

    def _excess(self, cost: int) -> int:
        return self._tallies.of(self._value).used + cost - self._n
