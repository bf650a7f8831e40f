"""Audit: from the ledger, the highest use of every limit in any window, beside what it allows.

An attempt is counted at `sent_at`, the best estimate of when the provider counted it; without one
at `finished_at`, from which the ledger ages it. One that was begun and is still open counts as of
now; a voided one never. In flight is from `sent_at` (else `started_at`) to `finished_at`. The audit
shares no arithmetic with what releases calls.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from callqueue import conf, events, states, tables
from callqueue.clocks import Us
from callqueue.database import (
    MICROSECOND,
    as_parameter,
    from_us,
    json_value,
    micros_sql,
    quoted,
    rows,
    to_us,
)
from callqueue.ledger import ledger_time, settings
from callqueue.limits.budgets import Book, Budget, cost_of
from callqueue.limits.kinds import SECOND, Limit

PAGE = 5000  # attempts that one statement reads
# how much later than its lease allows an answer may be recorded, and still be read in order
SLACK = 60 * SECOND
FOREVER = float("inf")


@dataclass(frozen=True)
class Finding:
    """One limit of one rule; rules that share a budget share its figures."""

    name: str
    rule: str
    per: str
    rate: str
    allowed: int
    highest: int
    used_share: float  # on average, from the first to the last call, pauses left out
    exceeded: bool
    value: str  # the key or queue with the highest use
    counted: int  # the cost of all


@dataclass(frozen=True)
class Audit:
    since: datetime  # by the database's clock
    findings: Sequence[Finding]
    attempts: int  # how many were judged

    @property
    def over_limit(self) -> Sequence[Finding]:
        return [finding for finding in self.findings if finding.exceeded]


@dataclass(slots=True)
class Seen:
    """An attempt as the audit sees it, in microseconds. An open one has no `finished_at`."""

    rule: str
    key: str
    queue: str
    cost: Any
    counted_at: Us
    began_at: Us
    finished_at: Us | None
    released_at: Us = Us(0)


def audit(using: str, *, since: timedelta, rules: Sequence[str] = (), tell: bool = True) -> Audit:
    """Judge the attempts that ended no longer ago than `since` by the rules of today, changed
    limits included; of all rules, or of these and those that share a limit with them. Tells
    `limit_exceeded` of each limit that was, unless `tell` is false.
    """
    reading = ledger_time.read(using)
    book = settings.book_in_force(using).moved_by(reading.moved)
    if rules:
        group = {other for rule in rules for other in book.groups[rule]}
        book = replace(book, budgets={name: book.budgets[name] for name in group})
    now = from_us(reading.at)
    cut = now - since
    attempts = _read_attempts(using, book, to_us(cut), to_us(now))
    result = judge(book, attempts, to_us(now), cut + reading.moved * MICROSECOND)
    for found in result.over_limit if tell else ():
        facts = {"highest": found.highest, "allowed": found.allowed}
        events.emit("limit_exceeded", limit=found.name, rule=found.rule, **facts)
    return result


def judge(book: Book, attempts: Iterable[Seen], now: Us, since: datetime) -> Audit:
    """What `attempts`, about in the order of their ends, used of every limit in the book."""
    budgets = {budget.id: _Audited(budget) for budget in book.all_budgets()}
    of_rule: dict[str, list[_Audited]] = {}
    for audited in budgets.values():
        for rule in audited.budget.charging_rules:
            of_rule.setdefault(rule, []).append(audited)
    flights = {rule for rule, listed in of_rule.items() if any(a.is_of_flights for a in listed)}
    count = 0
    for instant, is_begin, _, seen in _by_instant(attempts, flights, now, _longest_lag_us(book)):
        count += not is_begin and seen.rule in of_rule
        for audited in of_rule.get(seen.rule, ()):
            if audited.is_of_flights == is_begin:
                audited.charge(instant, seen)
    listed = [(rule, budget.id) for rule, charged in book.budgets.items() for budget in charged]
    return Audit(since, [budgets[name].finding(rule) for rule, name in listed], count)


def _longest_lag_us(book: Book) -> int:
    longest = max((rule.total_timeout for rule in book.rules.values()), default=0.0)
    return round((longest + conf.current().grace) * SECOND) + SLACK


def _by_instant(
    attempts: Iterable[Seen], flights: Container[str], now: Us, lag: int
) -> Iterator[tuple[Us, bool, int, Seen]]:
    """(instant, is_begin, number, attempt) by instant: when counted; of `flights`, when begun."""
    # `flights`: rules; `lag`: how long after it was sent an attempt may end
    upcoming: list[tuple[Us, bool, int, Seen]] = []
    for number, seen in enumerate(attempts):
        heapq.heappush(upcoming, (seen.counted_at, False, number, seen))
        if seen.rule in flights:
            heapq.heappush(upcoming, (seen.began_at, True, number, seen))
        horizon = (now if seen.finished_at is None else seen.finished_at) - lag
        while upcoming and upcoming[0][0] <= horizon:
            yield heapq.heappop(upcoming)
    while upcoming:
        yield heapq.heappop(upcoming)


class _Audited:
    """A budget, and what was used of it for each value of its `per`."""

    def __init__(self, budget: Budget) -> None:
        self.budget, self.limit = budget, budget.limit
        self.is_of_flights = budget.limit.counts_in_flight
        self.uses: dict[str, WindowUse] = {}

    def charge(self, instant: Us, seen: Seen) -> None:
        cost = cost_of(seen.cost, self.limit.unit)
        if cost and self.budget.counts(seen.rule, seen.released_at):
            value = self.budget.value_of(seen.key, seen.queue)
            if value not in self.uses:
                self.uses[value] = new_use(self.limit)
            end = FOREVER if seen.finished_at is None else seen.finished_at
            self.uses[value].add(instant, cost, end)

    def finding(self, rule: str) -> Finding:
        limit, none = self.limit, ("", new_use(self.limit))
        value, worst = max(self.uses.items(), key=lambda item: item[1].highest, default=none)
        return Finding(
            name=limit.label,
            rule=rule,
            per=limit.per,
            rate=limit.rate_text,
            allowed=limit.capacity,
            highest=worst.highest,
            used_share=round(worst.average_share(), 4),
            exceeded=worst.highest > limit.capacity,
            value=value,
            counted=sum(use.counted for use in self.uses.values()),
        )


# --- one budget, for one value of its `per`


def new_use(limit: Limit) -> WindowUse:
    return BucketUse(limit) if limit.keeps_level else WindowUse(limit)


class WindowUse:
    """What takes up a limit from one instant to another: a window from when it was counted, a
    calendar window as a whole, a flight from begin to end. What goes in does so in order. Time in
    which nothing was used for longer than `_pause_us` is left out: nothing was waiting then.
    """

    def __init__(self, limit: Limit) -> None:
        self.limit: Any = limit
        self.highest = self.counted = self._level = self._area = self._time = 0
        self._pause_us = 0 if limit.is_calendar else limit.window_us or SECOND
        self._at: Us | None = None
        self._ends: list[tuple[float, int]] = []

    def add(self, instant: Us, cost: int, end: float = FOREVER) -> None:
        if self.limit.is_calendar:
            instant, end = self.limit.window(instant)
        elif not self.limit.counts_in_flight:
            end = instant + self.limit.window_us
        while self._ends and self._ends[0][0] <= instant:
            at, over = heapq.heappop(self._ends)
            self._change_level(Us(at), -over)
        heapq.heappush(self._ends, (end, cost))
        self._change_level(instant, cost)
        self.counted += cost

    def _change_level(self, instant: Us, by: int) -> None:
        length = 0 if self._at is None else instant - self._at
        if self._level or length <= self._pause_us:
            self._area += self._level * length
            self._time += length
        self._at = instant
        self._level += by
        self.highest = max(self.highest, self._level)

    def average_share(self) -> float:
        # Where all of it took no longer than a window, the whole window is what was used of it.
        if not self._time or (not self.limit.is_calendar and self._time < self.limit.window_us):
            return float(self.highest / self.limit.capacity)
        return float(self._area / (self._time * self.limit.capacity))


class BucketUse(WindowUse):
    """A token bucket, full at first: the most that it ever lacked. What spilled over is unused."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit)
        self._cap = self._level = limit.capacity * self.limit.period_us
        self._spilled = 0

    def add(self, instant: Us, cost: int, end: float = FOREVER) -> None:
        n, period = self.limit.n, self.limit.period_us
        level = self._level + (0 if self._at is None else n * (instant - self._at))
        spilled = max(0, level - self._cap)
        if spilled <= n * max(period, SECOND):  # what is more is a pause, and left out
            self._spilled += spilled
        self._at, self._level = instant, min(self._cap, level) - cost * period
        self.counted += cost
        self.highest = max(self.highest, -(-(self._cap - self._level) // period))

    def average_share(self) -> float:
        taken = self.counted * self.limit.period_us
        return taken / (taken + self._spilled + max(0, self._level)) if taken else 0.0


# --- the ledger's attempts, page by page


def _read_attempts(using: str, book: Book, cut: Us, now: Us) -> Iterator[Seen]:
    """Ended attempts of the book's rules by end, none voided; then begun open ones of all rules."""
    cost_column = "cost" if any(b.limit.unit != "calls" for b in book.all_budgets()) else "calls"
    rules = {rule for budget in book.all_budgets() for rule in budget.charging_rules}
    streams = [_read_ended_of_rule(using, cost_column, rule, cut) for rule in sorted(rules)]
    yield from heapq.merge(*streams, key=lambda seen: seen.finished_at or now)
    for row in _read_rows(using, cost_column, "finished_at IS NULL AND started_at IS NOT NULL", []):
        yield _seen_from_row(row, now)


def _read_ended_of_rule(using: str, cost_column: str, rule: str, cut: Us) -> Iterator[Seen]:
    where = (
        "rule = %s AND outcome <> %s AND finished_at >= %s AND (finished_at > %s OR id > %s) "
        f"ORDER BY finished_at, id LIMIT {PAGE}"
    )
    finished, last = as_parameter(using, from_us(cut)), 0
    while page := _read_rows(
        using, cost_column, where, [rule, states.VOIDED, finished, finished, last]
    ):
        for row in page:
            yield _seen_from_row(row, Us(0))
        finished, last = as_parameter(using, from_us(page[-1][7])), page[-1][0]


def _read_rows(using: str, cost_column: str, where: str, params: list[Any]) -> list[Any]:
    """Rows of attempts, as `_seen_from_row` takes them."""
    columns = [quoted(using, name) for name in ("id", "rule", "key", "queue", cost_column)]
    instants = ("sent_at", "COALESCE(started_at, released_at)", "finished_at", "released_at")
    listed = ", ".join(columns + [micros_sql(using, instant) for instant in instants])
    table = tables.name(using, "CallAttempt")
    return rows(using, f"SELECT {listed} FROM {table} WHERE {where}", params)


def _seen_from_row(row: Any, now: Us) -> Seen:
    _, rule, key, queue, cost, sent, began, finished, released = row
    if sent is not None:
        counted = began = sent
    else:
        counted = now if finished is None else finished
    return Seen(rule, key, queue, json_value(cost), counted, began, finished, released)
