"""Audit: from the ledger, the highest use of every limit in any window, beside what the limit
allows.

An attempt is counted at `sent_at`, when its last byte left: the best estimate of when the provider
counted it. Without one (other handlers, a connection that failed, a lost attempt) it is counted at
`finished_at`, from which the ledger ages it. One that was begun and is still open counts as of now;
a voided one never. In flight is from `sent_at` (else `started_at`) to `finished_at`. Attempts are
read once, in order, and no more of them is kept than the widest window holds.
"""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from callqueue import conf, database, events, states, tables
from callqueue.database import as_parameter, from_us, micros_sql, quoted, rows, to_us
from callqueue.ledger import agreement
from callqueue.limits.budgets import Book, Budget, cost_of
from callqueue.limits.kinds import SECOND, Concurrency, FixedWindow, Limit, TokenBucket

PAGE = 5000
SLACK = (
    60 * SECOND
)  # how much later than its lease allows an answer may be recorded, and still be read in order


@dataclass(frozen=True)
class Finding:
    """One limit of one rule. `value` is the key or queue with the highest use; rules that share a
    budget share its figures.

    `used_share`: the average use of the limit, as a share of it, from the first to the last call,
    pauses left out.
    """

    name: str
    rule: str
    per: str
    rate: str
    allowed: int
    highest: int
    used_share: float
    exceeded: bool
    value: str
    counted: int


@dataclass(frozen=True)
class Audit:
    """What was found, and from when on."""

    since: datetime
    findings: Sequence[Finding]
    attempts: int

    @property
    def exceeded(self) -> Sequence[Finding]:
        """The limits that were exceeded. There should be none, ever."""
        return [finding for finding in self.findings if finding.exceeded]


@dataclass(slots=True)
class Seen:
    """An attempt as the audit sees it, in microseconds. An open one has no `finished`."""

    rule: str
    key: str
    queue: str
    cost: Any
    counted: int
    began: int
    finished: int | None
    released: int = 0


def audit(using: str, *, since: timedelta, tell: bool = True) -> Audit:
    """Judge the attempts that ended no longer ago than `since` by the rules of today, changed
    limits included.

    Tells `limit_exceeded` of each limit that was, unless `tell` is false.
    """
    book = agreement.book_in_force(using)
    now = database.clock(using)
    cut = now - since
    result = judge(book, _attempts(using, book, to_us(cut), to_us(now)), to_us(now), cut)
    for found in result.exceeded if tell else ():
        events.tell(
            "limit_exceeded",
            limit=found.name,
            rule=found.rule,
            highest=found.highest,
            allowed=found.allowed,
        )
    return result


def judge(book: Book, attempts: Iterator[Seen], now: int, since: datetime) -> Audit:
    """The findings on attempts, which come about in the order of their ends; none much later than
    its rule's timeout.
    """
    budgets = {b.id: _Budget(b) for b in book.all_budgets()}
    of_rule: dict[str, list[_Budget]] = {}
    for b in book.all_budgets():
        for rule in (*b.rules, *(name for name, _ in b.former)):
            of_rule.setdefault(rule, []).append(budgets[b.id])
    lag = _lag(book)
    in_flight = {
        rule
        for rule, listed in of_rule.items()
        if any(isinstance(b.limit, Concurrency) for b in listed)
    }
    upcoming: list[tuple[int, int, int, Seen]] = []  # instant, what happens then, a running number
    number = 0
    for number, seen in enumerate(attempts, start=1):
        heapq.heappush(upcoming, (seen.counted, _COUNTED, number, seen))
        if seen.rule in in_flight:
            heapq.heappush(upcoming, (seen.began, _BEGAN, number, seen))
            if seen.finished is not None:
                heapq.heappush(upcoming, (seen.finished, _ENDED, number, seen))
        horizon = (now if seen.finished is None else seen.finished) - lag
        while upcoming and upcoming[0][0] <= horizon:
            _happen(of_rule, heapq.heappop(upcoming))
    while upcoming:
        _happen(of_rule, heapq.heappop(upcoming))
    findings = [
        budgets[b.id].finding(rule) for rule, listed in book.budgets.items() for b in listed
    ]
    return Audit(since, findings, number)


_ENDED, _BEGAN, _COUNTED = range(3)  # at one instant, what ends makes room for what begins


def _happen(of_rule: dict[str, list[_Budget]], event: tuple[int, int, int, Seen]) -> None:
    instant, what, _, seen = event
    for budget in of_rule.get(seen.rule, ()):
        budget.see(instant, what, seen)


def _lag(book: Book) -> int:
    """How long after it was sent an attempt may end."""
    longest = max((rule.total_timeout for rule in book.rules.values()), default=0.0)
    return round((longest + conf.current().grace) * SECOND) + SLACK


class _Budget:
    """A budget with a tally for each value of its `per`."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.limit = budget.limit
        self.tallies: dict[str, Tally] = {}

    def see(self, instant: int, what: int, seen: Seen) -> None:
        is_concurrency = isinstance(self.limit, Concurrency)
        if is_concurrency == (what == _COUNTED) or not self.budget.counts(seen.rule, seen.released):
            return
        if cost := cost_of(seen.cost, self.limit.unit):
            value = self.budget.value_of(seen.key, seen.queue)
            tally = self.tallies.get(value)
            if tally is None:
                tally = self.tallies[value] = tally_of(self.limit)
            tally.add(instant, -cost if what == _ENDED else cost)

    def finding(self, rule: str) -> Finding:
        limit = self.limit
        value, worst = max(
            self.tallies.items(), key=lambda item: item[1].highest, default=("", tally_of(limit))
        )
        return Finding(
            name=limit.label,
            rule=rule,
            per=limit.per,
            rate=limit.rate_text,
            allowed=limit.capacity,
            highest=worst.highest,
            used_share=round(worst.share(), 4),
            exceeded=worst.highest > limit.capacity,
            value=value,
            counted=sum(tally.counted for tally in self.tallies.values()),
        )


def tally_of(limit: Limit) -> Tally:
    """The tally that counts as this limit does."""
    if isinstance(limit, FixedWindow):
        return _CalendarTally(limit)
    if isinstance(limit, TokenBucket):
        return _BucketTally(limit)
    return _FlightTally(limit) if isinstance(limit, Concurrency) else _WindowTally(limit)


class Tally:
    """One budget for one value of its `per`: instants go in, in order; out come the highest use and
    the average share.
    """

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.highest = self.counted = 0

    def add(self, instant: int, cost: int) -> None:
        """So much was counted at this instant; for what is in flight, a negative cost is its
        end.
        """
        raise NotImplementedError

    def share(self) -> float:
        """The average use as a share of the limit."""
        raise NotImplementedError


class _Level(Tally):
    """Use that has a level at every instant: its average is over the time from the first to the
    last change.

    Time in which it stood at 0 for longer than `pause_us` is left out: nothing was waiting then.
    """

    pause_us = SECOND

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit)
        self.level = self._area = self._time = 0
        self._at: int | None = None

    def change(self, instant: int, by: int) -> None:
        if self._at is not None:
            length = instant - self._at
            if self.level or length <= self.pause_us:
                self._area += self.level * length
                self._time += length
        self._at = instant
        self.level += by
        self.highest = max(self.highest, self.level)

    def share(self) -> float:
        return (
            self._area / (self._time * self.limit.capacity)
            if self._time
            else self.highest / self.limit.capacity
        )


class _FlightTally(_Level):
    """Concurrency: how many are in flight."""

    def add(self, instant: int, cost: int) -> None:
        self.counted += max(0, cost)
        self.change(instant, cost)


class _WindowTally(_Level):
    """Sliding window: what the window that ends here holds. Exact: nothing is put into bins."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit)
        self.pause_us = limit.window_us
        self._instants: deque[int] = deque()
        self._costs: deque[int] = deque()
        self._first: int | None = None

    def add(self, instant: int, cost: int) -> None:
        if self._first is None:
            self._first = instant
        while self._instants and self._instants[0] + self.pause_us <= instant:
            self.change(self._instants.popleft() + self.pause_us, -self._costs.popleft())
        self._instants.append(instant)
        self._costs.append(cost)
        self.counted += cost
        self.change(instant, cost)

    def share(self) -> float:
        """Where all of it took no longer than a window, the whole window is what was used of it."""
        if self._time < self.pause_us:
            return self.highest / self.limit.capacity
        return super().share()


class _CalendarTally(Tally):
    """Fixed window: each calendar window by itself. The last one, which may not be over, is left
    out of the average.
    """

    limit: FixedWindow

    def __init__(self, limit: FixedWindow) -> None:
        super().__init__(limit)
        self._window = (0, 0)
        self._count = self._over = self._windows = 0

    def add(self, instant: int, cost: int) -> None:
        if not self._window[0] <= instant < self._window[1]:
            if self._count:
                self._over, self._windows = self._over + self._count, self._windows + 1
            self._window, self._count = self.limit.window(instant), 0
        self._count += cost
        self.counted += cost
        self.highest = max(self.highest, self._count)

    def share(self) -> float:
        if not self._windows:
            return self._count / self.limit.n
        return self._over / (self._windows * self.limit.n)


class _BucketTally(Tally):
    """Token bucket, full at first: the most tokens that it ever lacked. What spilled over while
    calls went is unused.
    """

    limit: TokenBucket

    def __init__(self, limit: TokenBucket) -> None:
        super().__init__(limit)
        self._cap = self._level = limit.burst * limit.period_us
        self._at: int | None = None
        self._spilled = 0

    def add(self, instant: int, cost: int) -> None:
        if self._at is not None:
            level = self._level + self.limit.n * (instant - self._at)
            spilled = max(0, level - self._cap)
            if spilled <= self.limit.n * max(self.limit.period_us, SECOND):
                self._spilled += spilled
            self._level = min(self._cap, level)
        self._at = instant
        self._level -= cost * self.limit.period_us
        self.counted += cost
        self.highest = max(self.highest, -(-(self._cap - self._level) // self.limit.period_us))

    def share(self) -> float:
        taken = self.counted * self.limit.period_us
        return taken / (taken + self._spilled + max(0, self._level)) if taken else 0.0


def _attempts(using: str, book: Book, cut: int, now: int) -> Iterator[Seen]:
    """The attempts of all rules by the end, page by page; the open ones that a worker has begun
    come last.
    """
    what = "cost" if any(b.limit.unit != "calls" for b in book.all_budgets()) else "calls"
    counted = {
        rule for b in book.all_budgets() for rule in (*b.rules, *(name for name, _ in b.former))
    }
    streams = [_ended(using, what, rule, cut) for rule in sorted(counted)]
    yield from heapq.merge(*streams, key=lambda seen: seen.finished or now)
    for row in _rows(using, what, "finished_at IS NULL AND started_at IS NOT NULL", []):
        yield _seen(row, now)


def _ended(using: str, what: str, rule: str, cut: int) -> Iterator[Seen]:
    where = "rule = %s AND outcome <> %s AND finished_at >= %s AND (finished_at > %s OR id > %s) ORDER BY finished_at, id"
    finished, last = as_parameter(using, from_us(cut)), 0
    while page := _rows(
        using, what, f"{where} LIMIT {PAGE}", [rule, states.VOIDED, finished, finished, last]
    ):
        for row in page:
            yield _seen(row, 0)
        finished, last = as_parameter(using, from_us(page[-1][7])), page[-1][0]


def _rows(using: str, what: str, where: str, params: list[Any]) -> list[Any]:
    """Attempts, their instants in microseconds."""
    columns = [quoted(using, name) for name in ("id", "rule", "key", "queue", what)]
    instants = ("sent_at", "COALESCE(started_at, released_at)", "finished_at", "released_at")
    listed = ", ".join(columns + [micros_sql(using, instant) for instant in instants])
    return rows(
        using,
        f"SELECT {listed} FROM {quoted(using, tables.CallAttempt._meta.db_table)} WHERE {where}",
        params,
    )


def _seen(row: Any, now: int) -> Seen:
    _, rule, key, queue, cost, sent, began, finished, released = row
    if sent is not None:
        counted = began = sent
    else:
        counted = now if finished is None else finished
    return Seen(
        rule,
        key,
        queue,
        json.loads(cost) if isinstance(cost, str | bytes) else cost,
        counted,
        began,
        finished,
        released,
    )
