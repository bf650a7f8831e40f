"""Tallies: what budgets with long windows are charged with, kept as it changes instead of counted
anew at every pass.

A release adds its cost, under the lock of the budget's rules; each pass takes away what has left
the window since the last. Who voids, settles or records late marks the attempt: only a pass knows
which limits are tallied. Attempts stay the truth: where what is kept is not known to be of this
budget, rules and clock, it is counted anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from callqueue import database, tables
from callqueue.clocks import Us
from callqueue.ledger import tally_rows
from callqueue.ledger.tally_rows import Kept, Tally, fingerprint, longest_lag, stored_name
from callqueue.limits.budgets import Book, Budget, cost_of
from callqueue.limits.kinds import (
    SECOND,
    FixedWindow,
    Limit,
    Meter,
    SlidingWindow,
    TokenBucket,
    Usage,
)

COARSE = 2000  # a window per rule or queue that may hold more calls than this is tallied
FULLEST = 20  # values of a budget per key that are shown at most
SHORT = 5 * SECOND  # a window per key that is longer is tallied
# one of other units than calls that is longer, and may hold more, is tallied
SHORT_UNITS = 60 * SECOND
SHORT_BUCKET = 60 * SECOND  # a bucket per key that takes longer to fill is tallied
ROOMY = 1000  # as long as so much is free, nobody asks what has left
# a tally is counted anew this long after it was, or after an eighth of its window if that is longer
RECOUNT = 3600 * SECOND
# while former rules' attempts count, a tally is counted anew so often in a window, and nothing
# taken away between
FORMER = 100
# microseconds that ledger time may be late by after a jump of the clock; by more, what has left is
# not known any more (`ledger_time.AHEAD`)
BACK = 30 * SECOND
LATE = 5 * SECOND  # how much later than it ended an attempt may be seen to have ended
Scope = tuple[str, str]  # a budget's id, and the value of its `per` ("" for per="rule")
MARGIN = 60 * SECOND  # for which an attempt is kept when no limit can count it any more


class Tallies:
    """The tallies of one budget at `now`, here those of a sliding window, as far as loaded."""

    def __init__(
        self, using: str, budget: Budget, now: Us, kept: Mapping[str, Any] | None, until: Us
    ) -> None:
        self.using, self.budget, self.limit = using, budget, budget.limit
        self.now, self.until = now, until  # a pass releases up to `until`
        self.print = fingerprint(budget)
        self.by_value: dict[str, Tally] = {}
        self.near: dict[str, list[tuple[Us, int]]] = {}  # what leaves by `until`: (ended, cost)
        self.freed: set[str] = set()  # values that have more room than before
        self._next_leave: Us | None = None
        believed = self._believable(kept)
        # `is_anew`: they are counted anew
        self.is_anew, self._has_advanced = believed is None, False
        self.kept = believed or Kept(self.print, self.horizon(), now)
        if believed and not self.limit.is_keyed:
            self.by_value = {value: Tally(used) for value, used in believed.values.items()}

    @classmethod
    def suits(cls, limit: Limit) -> bool:
        """Whether a limit of this kind may hold so much that it is tallied: see `is_tallied`."""
        if limit.is_keyed:
            return limit.period_us > SHORT
        return limit.capacity > COARSE and (limit.unit == "calls" or limit.period_us > SHORT_UNITS)

    def tally_of(self, value: str) -> Tally:
        return self.by_value.setdefault(value, Tally())

    def meter(self, value: str) -> Meter:
        """A meter over one tally; what it takes is planned, and charged by `change`."""
        return _TalliedWindowMeter(self, value)

    def values_to_load(self, values: Iterable[str]) -> list[str]:
        """Those of these values whose rows are still to be read."""
        if self.is_anew:
            return []
        return [value for value in dict.fromkeys(values) if value not in self.by_value]

    def load(self, values: Iterable[str]) -> None:
        if wanted := self.values_to_load(values):
            name = stored_name(self.budget)
            self.take_in_rows(tally_rows.rows_of_values(self.using, {name: wanted}).get(name, ()))

    def take_in_rows(self, rows: Iterable[tally_rows.Stored]) -> None:
        """Load rows: (value, used, full_at, pk). A known tally stays, as it may be newer."""
        for value, used, full_at, pk in rows:
            self.by_value.setdefault(value, Tally(used, full_at, pk))

    def fullest_loaded_values(self) -> list[str]:
        tallies = sorted(self.by_value.items(), key=lambda item: (item[1].full_at, item[1].used))
        return [value for value, _ in tallies[-FULLEST:]]

    def advance(self) -> None:
        advance(self.using, [self])

    @property
    def is_behind(self) -> bool:
        return self.reads_what_left and not self._has_advanced

    def leaving_to_read(self) -> tally_rows.Leaving:
        end = self.horizon()
        return tally_rows.Leaving(self.budget, self.kept.left, end, self.looks_ahead_to(end))

    def let_leave(self, found: Sequence[tuple[str, Us, int]]) -> None:
        """Take away what has left: (value, ended, cost); note what leaves until the pass ends."""
        self._has_advanced = True
        begin, end = self.kept.left, self.horizon()
        for value, ended, cost in found:
            if ended <= end:
                self.take_away(value, ended, cost)
            else:
                self.near.setdefault(value, []).append((ended, cost))
        for listed in self.near.values():
            listed.sort()
        # Else nothing new is to be remembered.
        if found or end - begin > longest_lag(self.limit) // 2:
            self.kept.left = max(begin, end)

    def correct(self, value: str, ended: Us, charged: int, cost: int) -> None:
        """Put right what an attempt was charged; take that away if it has left. May read rows."""
        self.load([value])
        self.change(value, cost - charged)
        if ended <= self.kept.left and cost:
            self.take_away(value, ended, cost)

    def correct_settled(self, value: str, ended: Us, charged: int, cost: int) -> None:
        # What left was taken away when it did, or counts too long, until it is counted anew.
        if ended > self.kept.left:
            self.correct(value, ended, charged, cost)

    def next_leave(self) -> Us:
        """The earliest instant past `until` at which more may leave than is known. May read it."""
        if self._next_leave is None:
            recounted = self.kept.counted + self.limit.window_us // FORMER + 1
            found = recounted if self.kept.has_former else self.find_next_leave()
            self._next_leave = max(self.until + 1, found)
        return self._next_leave

    def as_kept(self) -> dict[str, Any]:
        """The fields of `Kept`, for the memo that the next pass reads."""
        values = {} if self.limit.is_keyed else {v: t.used for v, t in self.by_value.items()}
        return vars(self.kept) | {"values": values}

    def save(self) -> None:
        if not self.limit.is_keyed:
            return  # the memo has them: `as_kept`
        if self.is_anew:
            self._stored_rows().delete()
        else:
            self._delete_idle()
            self._update_changed()
        self._create_new()

    # --- what kinds of windows differ in

    @property
    def reads_what_left(self) -> bool:
        return not self.kept.has_former  # what former rules used is counted anew instead

    def horizon(self) -> Us:
        """Attempts that ended by then have left."""
        return self.limit.horizon(self.now) - 1

    def looks_ahead_to(self, end: Us) -> Us:
        """Attempts that ended by then leave while this pass releases."""
        return end + (self.until - self.now)

    def take_away(self, value: str, ended: Us, cost: int) -> None:
        self.change(value, -cost)

    def recount_since(self) -> Us:
        """A recount counts what is open, and the attempts that ended after this instant."""
        return self.limit.horizon(self.now) - 1

    def fill_anew(self, charged: Iterable[tuple[str, int]]) -> None:
        for value, cost in charged:
            self.tally_of(value).used += cost

    def is_current(self, known: Kept) -> bool:
        # Else it is counted anew: too much has left since, or it is of a time still to come.
        behind = self.horizon() - known.left
        # what ends from now on is to leave: of a short window even a little late is before that
        is_ahead = known.left > self.now - SECOND or behind < -BACK
        return known.has_former or (not is_ahead and behind <= longest_lag(self.limit))

    def find_next_leave(self) -> Us:
        """When more may leave than is known now. At most one statement."""
        after = self.looks_ahead_to(self.horizon())
        ended = tally_rows.first_end_after(self.using, self.budget, after)
        return (self.now if ended is None else ended) + self.limit.window_us + 1

    def change(self, value: str, by: int) -> None:
        tally = self.tally_of(value)
        tally.used, tally.is_changed = max(0, tally.used + by), True
        if by < 0:
            self.freed.add(value)

    # --- what is kept

    def _believable(self, kept: Mapping[str, Any] | None) -> Kept | None:
        """What is kept, if it is of this very budget and current; None: to be counted anew."""
        if kept is None or kept["print"] != self.print:
            return None
        known, window = Kept(**{**kept, "values": dict(kept["values"])}), self.limit.window_us
        good_for = window // FORMER if known.has_former else max(RECOUNT, window // 8)
        is_fresh = known.counted <= self.now <= known.counted + good_for
        return known if is_fresh and self.is_current(known) else None

    def recount(self, charged: Iterable[tuple[str, int]]) -> None:
        """Fill the tallies anew, with what the rules charge; what former rules do is read here."""
        self.fill_anew(charged)
        if self.budget.former:
            self._add_charged_by_former(self.recount_since())

    def _add_charged_by_former(self, horizon: Us) -> None:
        # Former rules charge nothing new: it only becomes less, until it is counted anew.
        for value, cost in tally_rows.charged_by_former(self.using, self.budget, horizon):
            self.tally_of(value).used += cost
            self.kept.has_former = True

    def _stored_rows(self) -> Any:
        return tables.Tally.objects.using(self.using).filter(budget=stored_name(self.budget))

    def _delete_idle(self) -> None:
        idle = [t.pk for t in self.by_value.values() if t.pk and t.is_idle(self.now)]
        if idle:
            self._stored_rows().filter(pk__in=idle).delete()

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
        self._stored_rows().bulk_create(new)


class CalendarTallies(Tallies):
    limit: FixedWindow
    reads_what_left = False  # all that a calendar window holds leaves at once

    def is_current(self, known: Kept) -> bool:
        return known.left == self.horizon()

    def find_next_leave(self) -> Us:
        jitter = self.limit.jitter_us
        return self.limit.window(self.now - jitter)[1] + jitter


class _TalliedWindowMeter(Meter):
    """A tallied window. Reads what has left only when little is free; `used` has it until then."""

    def __init__(self, tallies: Tallies, value: str) -> None:
        self._tallies, self._value = tallies, value
        self._n, self._now = tallies.limit.capacity, tallies.now

    @property
    def used(self) -> int:
        if self._excess(ROOMY) > 0:
            self._tallies.advance()
        return self._n + self._excess(0)

    def free_at(self, cost: int) -> Us | None:
        instant = self.known_free_at(cost)
        return self._tallies.next_leave() if instant is None else instant

    def known_free_at(self, cost: int) -> Us | None:
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
        self._tallies.tally_of(self._value).planned += cost

    def _excess(self, cost: int) -> int:
        tally = self._tallies.tally_of(self._value)
        return tally.used + tally.planned + cost - self._n


class BucketTallies(Tallies):
    """A token bucket's tallies: what ended less than LATE ago counts in full, as if open."""

    limit: TokenBucket

    @classmethod
    def suits(cls, limit: Limit) -> bool:
        return limit.is_keyed and limit.window_us > SHORT_BUCKET

    def meter(self, value: str) -> Meter:
        return _TalliedBucketMeter(self, value)

    def horizon(self) -> Us:
        return self.now - LATE

    def looks_ahead_to(self, end: Us) -> Us:
        return end  # a bucket's meter says itself how far it fills meanwhile

    def take_away(self, value: str, ended: Us, cost: int) -> None:
        """What it cost counts as used no more: it goes into the level, as of when it ended."""
        self._lower_level(value, ended, cost)
        self.change(value, -cost)

    def correct_settled(self, value: str, ended: Us, charged: int, cost: int) -> None:
        # What it cost more is missing from the level; what it cost less may be in it no more.
        super().correct_settled(value, ended, charged, cost)
        if ended <= self.kept.left and cost > charged:
            self.load([value])
            self._lower_level(value, ended, cost - charged)

    def recount_since(self) -> Us:
        return self.kept.left  # what ended before is in the level

    def fill_anew(self, charged: Iterable[tuple[str, int]]) -> None:
        """These as used; what ended by `kept.left` is read, as levels, empty a window ago."""
        begin, sealed = self.limit.horizon(self.now) - 1, self.kept.left
        full_if_empty = begin + self.time_to_fill(self.limit.burst)
        for value, ended, cost in tally_rows.ended_parts(self.using, self.budget, begin, sealed):
            tally = self.tally_of(value)
            tally.full_at = max(tally.full_at or full_if_empty, ended) + self.time_to_fill(cost)
        for value, cost in charged:
            tally = self.tally_of(value)
            tally.used, tally.full_at = tally.used + cost, tally.full_at or full_if_empty

    def _lower_level(self, value: str, ended: Us, cost: int) -> None:
        tally = self.tally_of(value)  # what is known late is as if it had been taken later
        tally.full_at = max(tally.full_at, ended) + self.time_to_fill(cost)
        tally.is_changed = True

    def find_next_leave(self) -> Us:
        return self.now + SECOND

    def time_to_fill(self, cost: int) -> int:
        """How long the bucket takes to fill by it: whole microseconds, rounded up."""
        return -(-cost * self.limit.period_us // self.limit.n)


class _TalliedBucketMeter(Meter):
    def __init__(self, tallies: BucketTallies, value: str) -> None:
        self._tallies, self._tally, limit = tallies, tallies.tally_of(value), tallies.limit
        level = limit.burst * limit.period_us - limit.n * max(0, self._tally.full_at - tallies.now)
        self._meter = limit.meter(Usage(self._tally.used, (), tallies.now, level), tallies.now)

    @property
    def used(self) -> int:
        return self._meter.used

    @property
    def free(self) -> int:
        return self._meter.free

    def free_at(self, cost: int) -> Us | None:
        instant = self.known_free_at(cost)
        return self._tallies.next_leave() if instant is None else instant

    def known_free_at(self, cost: int) -> Us | None:
        """When the cost fits; None where it waits for what is open."""
        return self._meter.free_at(cost)

    def take(self, cost: int) -> None:
        self._meter.take(cost)


# A kind that is not named here is read attempt by attempt, however many its window holds.
OF_KINDS: Mapping[type[Limit], type[Tallies]] = {
    SlidingWindow: Tallies,
    FixedWindow: CalendarTallies,
    TokenBucket: BucketTallies,
}


def is_tallied(limit: Limit) -> bool:
    """Whether the limit's window may hold so many attempts that they are not read at every pass."""
    kind = OF_KINDS.get(type(limit))
    return kind is not None and kind.suits(limit)


def tallies_of(
    using: str, kept: Sequence[tuple[Budget, Mapping[str, Any] | None]], now: Us, until: Us
) -> list[Tallies]:
    """The tallies of these budgets at `now`, as kept, or counted anew: mostly by one statement."""
    found = [OF_KINDS[type(b.limit)](using, b, now, known, until) for b, known in kept]
    anew = [one for one in found if one.is_anew]
    asked = [(one.budget, one.recount_since()) for one in anew]
    for one, charged in zip(anew, tally_rows.open_or_ended_since(using, asked), strict=True):
        one.recount(charged)
    return found


def advance(using: str, tallies: Iterable[Tallies]) -> None:
    """Take away what has left since the last pass; note what leaves next. Mostly two statements."""
    behind = [one for one in tallies if one.is_behind]
    found = tally_rows.what_left(using, [one.leaving_to_read() for one in behind])
    wanted = {
        stored_name(one.budget): values
        for one, left in zip(behind, found, strict=True)
        if one.limit.is_keyed and (values := one.values_to_load(value for value, _, _ in left))
    }
    stored = tally_rows.rows_of_values(using, wanted)
    for one, left in zip(behind, found, strict=True):
        one.take_in_rows(stored.get(stored_name(one.budget), ()))
        one.let_leave(left)


def load_fullest(using: str, tallies: Iterable[Tallies]) -> None:
    """Load the fullest values of each budget that is per key. One statement for many."""
    keyed = [one for one in tallies if one.limit.is_keyed and not one.is_anew]
    # rows of known values may say too much
    most = FULLEST + max((len(one.by_value) for one in keyed), default=0)
    found = tally_rows.rows_of_fullest(using, [stored_name(one.budget) for one in keyed], most)
    for one in keyed:
        one.take_in_rows(found.get(stored_name(one.budget), ()))


def apply_corrections(using: str, group: Sequence[str], tallies: Collection[Tallies]) -> None:
    """Tell the tallies what attempts of these rules cost after all, and take the marks off their
    rows, also where there are no tallies. All that nobody has locked, as no release may go by less
    than is known: two statements for CORRECTIONS. After recounts, which count them as charged.
    """
    while corrections := tally_rows.take_next_corrections(using, group):
        for one in tallies:
            for correction in corrections:
                if correction.rule in one.budget.rules:
                    _apply_correction(one, correction)
        if len(corrections) < tally_rows.CORRECTIONS:
            return


def _apply_correction(tallies: Tallies, correction: tally_rows.Correction) -> None:
    value, unit = tallies.budget.value_of(correction.key, correction.queue), tallies.limit.unit
    charged, cost = cost_of(correction.charged, unit), cost_of(correction.cost, unit)
    correct = tallies.correct_settled if correction.settled else tallies.correct
    correct(value, correction.ended, charged, cost)


def counting_times(book: Book) -> dict[str, int]:
    """By rule: microseconds after its end in which a limit may count an attempt, and a minute."""
    longest = dict.fromkeys(book.budgets, 0)
    for budget in book.all_budgets():
        for rule in budget.charging_rules:
            longest[rule] = max(longest.get(rule, 0), _counting_time(budget.limit))
    return {rule: window + MARGIN for rule, window in longest.items()}


def longest_counting_time(book: Book) -> int:
    """The longest of `counting_times`: that of attempts whose rule the book has no more."""
    return max(counting_times(book).values(), default=MARGIN)


def _counting_time(limit: Limit) -> int:
    return limit.window_us + (longest_lag(limit) if is_tallied(limit) else 0)
