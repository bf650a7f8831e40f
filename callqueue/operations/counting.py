"""Counts history, as attempts end: each attempt once, into the totals, and every limit's highest
use. A chore of dispensers, of which one at a time does it.

No worker writes anything for it. All that ended before an instant is counted, but what was still
open when that instant was passed: such attempts are remembered by their keys, since one may be
recorded later with an end before it. An attempt that nobody could see then was begun later, and so
ends later. So none is missed and none is counted twice, however late its record comes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from callqueue import database, states, tables
from callqueue.database import to_us
from callqueue.ledger import agreement
from callqueue.limits.budgets import Book
from callqueue.limits.kinds import SECOND
from callqueue.operations import ended_attempts, histograms
from callqueue.operations.ended_attempts import FAILED, Ended
from callqueue.operations.history import COLUMNS, KEPT, MINUTE, QUARTER, WEEK, Counts
from callqueue.operations.kept_rows import KeptRows
from callqueue.operations.peaks import Peaks, Use, rolled

EVERY = 3 * SECOND  # how often what ended is counted
MARGIN = 2 * SECOND  # how long ago: by more than clocks differ
PATIENCE = 15 * SECOND  # for which another dispenser that counts is left to it
SPENT = 0.05  # seconds of a round of chores that may be spent where there is much to count
STRETCH = 10 * SECOND  # of what is counted in one transaction; more, where that is little
LONGEST = 12 * STRETCH
LITTLE, MUCH = 500, 2000  # attempts

Scope = tuple[str, str, int, int]  # a rule, a key ("": all), the width and beginning of a stretch


def count_on(using: str) -> None:
    """Count what ended since, unless another dispenser does. Spends a bounded time, and goes on at
    the next call.
    """
    counter, late = _counters.setdefault(using, Counter(using)), time.monotonic() + SPENT
    if database.in_transaction(using):
        return
    try:
        while counter.count() and time.monotonic() < late:
            pass
    except BaseException:
        _counters.pop(using, None)  # what it remembers may not have been written
        raise


class Counter:
    """One process's part in the counting. It remembers the rows that it wrote last, for as long as
    nobody else counts.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self._mark: tuple[int, int] | None = None  # the row's `until` and `frame`
        self._peaks: Peaks | None = None
        self._stretch = STRETCH
        self._totals: KeptRows[Scope, Counts] = _kept_totals(using)
        self._uses: KeptRows[tuple[str, int, int], Use] = _kept_uses(using)

    def count(self) -> bool:
        """Count one stretch; whether there is more to count."""
        if not self._is_its_turn():
            return False
        book = agreement.book_in_force(self.using)
        with database.writing(self.using):
            row = database.locked(tables.counted(self.using).filter(pk=1)).first()
            if row is None:
                return False
            now = to_us(database.clock(self.using))
            row.until = row.until or now - WEEK * SECOND
            if self._mark != (row.until, row.frame):
                self._start_over()
            until = min(now - MARGIN, row.until + self._stretch)
            if until <= row.until or not self._follow(book, row.until):
                return False
            until = self._count(book, row, until, now)
            self._mark = (until, row.frame)
        return until < now - MARGIN - EVERY

    def _is_its_turn(self) -> bool:
        """Whether there is something to count, and nobody else does. One statement; two at
        first.
        """
        found = tables.counted(self.using).values_list("until", "frame").first()
        if found is None:
            tables.counted(self.using).bulk_create(
                [tables.Counted(id=1, pending=[])], ignore_conflicts=True
            )
            return True
        behind = to_us(database.clock(self.using)) - found[0]
        return behind > MARGIN + (EVERY if self._mark == found else PATIENCE)

    def _start_over(self) -> None:
        self._totals, self._uses = _kept_totals(self.using), _kept_uses(self.using)
        self._peaks = None

    def _follow(self, book: Book, until: int) -> bool:
        """Whether the peaks have come as far as the totals."""
        if self._peaks is None or self._peaks.book is not book:
            self._peaks = Peaks(self.using, book, until, self._peaks)
        return self._peaks.catch_up(until, time.monotonic() + SPENT)

    def _count(self, book: Book, row: Any, until: int, now: int) -> int:
        """Count what ended in [row.until, until), and what was pending; how far it is counted."""
        using, rules = self.using, sorted({*book.rules, *_former(book)})
        under_way = ended_attempts.under_way(using, until)  # before what has ended is read
        late = ended_attempts.ended_of(using, row.pending, row.until)
        found = ended_attempts.ended(using, rules, row.until, until)
        if not found and until + LONGEST < now:
            until = min(now - MARGIN, ended_attempts.next_end(using, rules, until) or now)
            under_way = ended_attempts.under_way(using, until)
            found = ended_attempts.ended(using, rules, row.until, until)
        if len(found) < LITTLE:
            self._stretch = min(LONGEST, 2 * self._stretch)
        elif len(found) > MUCH:
            self._stretch = max(SECOND, self._stretch // 4)
        self._totals.add(totals_of([*late, *found]))
        self._count_peaks(row, rules, late, found, until, now, under_way)
        counted = {one.pk for one in late} | {one.pk for one in found}
        row.pending = sorted(under_way.keys() - counted)
        row.until = until
        row.save(using=using)
        return until

    def _count_peaks(
        self,
        row: Any,
        rules: list[str],
        late: list[Ended],
        found: list[Ended],
        until: int,
        now: int,
        under_way: Mapping[int, int],
    ) -> None:
        peaks = self._peaks
        assert peaks is not None
        peaks.take([*late, *found])
        peaks.cursor = until
        horizon = min(until, *under_way.values()) if under_way else until
        if now - until > 2 * STRETCH:
            horizon = min(horizon, until - peaks.lag)
        elif (first := ended_attempts.first_begun(self.using, rules, until)) is not None:
            horizon = min(horizon, first)
        # However long a call is in flight: what is kept of what came after it is bounded.
        horizon = max(horizon, until - peaks.lag)
        uses = peaks.advance(horizon, row.peaks_until)
        self._uses.add(rolled(uses, tuple(KEPT)))
        row.peaks_until = max(row.peaks_until, horizon)


def totals_of(attempts: Iterable[Ended]) -> dict[Scope, Counts]:
    """What these attempts add to the totals."""
    minutes: dict[Scope, Counts] = {}
    keys: dict[Scope, Counts] = {}
    for one in attempts:
        if not one.is_charged:
            continue
        at = one.finished // SECOND
        counts = Counts(
            1,
            one.outcome == states.SUCCEEDED,
            one.outcome in FAILED,
            one.outcome == states.THROTTLED,
            one.outcome == states.LOST,
        )
        if one.key:
            scope = (one.rule, one.key, QUARTER, at // QUARTER * QUARTER)
            keys.setdefault(scope, Counts()).add(counts)
        if one.sent is not None:
            counts.answers = {histograms.place((one.finished - one.sent) / SECOND): 1}
            if one.due is not None and one.due <= one.sent:
                counts.waits = {histograms.place((one.sent - one.due) / SECOND): 1}
        scope = (one.rule, "", MINUTE, at // MINUTE * MINUTE)
        minutes.setdefault(scope, Counts()).add(counts)
    found = keys
    for (rule, key, _, start), counts in minutes.items():
        for width in KEPT:
            found.setdefault((rule, key, width, start // width * width), Counts()).add(counts)
    return found


def _kept_totals(using: str) -> KeptRows[Scope, Counts]:
    names = ("rule", "key", "width", "start")
    return KeptRows(using, "Total", names, COLUMNS, Counts)


def _kept_uses(using: str) -> KeptRows[tuple[str, int, int], Use]:
    columns = ("highest", "allowed", "value", "used", "room")
    return KeptRows(using, "Peak", ("budget", "width", "start"), columns, Use)


def _former(book: Book) -> set[str]:
    """Rules that limits still count, and the settings know no more."""
    return {name for budget in book.all_budgets() for name, _ in budget.former}


_counters: dict[str, Counter] = {}
