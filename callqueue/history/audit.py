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
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from callqueue import conf, database, events, states, tables
from callqueue.database import as_parameter, from_us, micros_sql, quoted, rows, to_us
from callqueue.history.audit_tallies import Tally, tally_of
from callqueue.ledger import settings
from callqueue.limits.budgets import Book, Budget, cost_of
from callqueue.limits.kinds import SECOND

PAGE = 5000  # attempts that one statement reads
# how much later than its lease allows an answer may be recorded, and still be read in order
SLACK = 60 * SECOND
ENDED, BEGAN, COUNTED = range(3)  # at one instant, what ends makes room for what begins


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


def audit(using: str, *, since: timedelta, rules: Sequence[str] = (), tell: bool = True) -> Audit:
    """Judge the attempts that ended no longer ago than `since` by the rules of today, changed
    limits included; of all rules, or of these and those that share a limit with them.

    Tells `limit_exceeded` of each limit that was, unless `tell` is false.
    """
    book = settings.book_in_force(using)
    if rules:
        group = {other for rule in rules for other in book.groups[rule]}
        book = replace(book, budgets={name: book.budgets[name] for name in group})
    now = database.clock(using)
    cut = now - since
    result = judge(book, _attempts(using, book, to_us(cut), to_us(now)), to_us(now), cut)
    for found in result.exceeded if tell else ():
        facts = {"highest": found.highest, "allowed": found.allowed}
        events.emit("limit_exceeded", limit=found.name, rule=found.rule, **facts)
    return result


def judge(book: Book, attempts: Iterable[Seen], now: int, since: datetime) -> Audit:
    """The findings on attempts, which come about in the order of their ends; none much later than
    its rule's timeout.
    """
    budgets = {budget.id: _Audited(budget) for budget in book.all_budgets()}
    of_rule: dict[str, list[_Audited]] = {}
    for audited in budgets.values():
        for rule in _charging(audited.budget):
            of_rule.setdefault(rule, []).append(audited)
    flights = {rule for rule, listed in of_rule.items() if any(a.is_of_flights for a in listed)}
    count = 0
    for instant, what, _, seen in _in_order(attempts, flights, now, _longest_lag(book)):
        count += what == COUNTED
        for audited in of_rule.get(seen.rule, ()):
            audited.see(instant, what, seen)
    listed = [(rule, budget.id) for rule, charged in book.budgets.items() for budget in charged]
    return Audit(since, [budgets[name].finding(rule) for rule, name in listed], count)


def _charging(budget: Budget) -> list[str]:
    """The rules that charge it, and those that did and still count."""
    return [*budget.rules, *(name for name, _ in budget.former)]


def _longest_lag(book: Book) -> int:
    """How long after it was sent an attempt may end."""
    longest = max((rule.total_timeout for rule in book.rules.values()), default=0.0)
    return round((longest + conf.current().grace) * SECOND) + SLACK


def _in_order(
    attempts: Iterable[Seen], flights: Container[str], now: int, lag: int
) -> Iterator[tuple[int, int, int, Seen]]:
    """What happened, by the instant: what, a running number, and to which attempt. `flights`: the
    rules of which it matters when attempts begin and end. `lag`: how long after it was sent an
    attempt may end.
    """
    upcoming: list[tuple[int, int, int, Seen]] = []
    for number, seen in enumerate(attempts):
        heapq.heappush(upcoming, (seen.counted, COUNTED, number, seen))
        if seen.rule in flights:
            heapq.heappush(upcoming, (seen.began, BEGAN, number, seen))
            if seen.finished is not None:
                heapq.heappush(upcoming, (seen.finished, ENDED, number, seen))
        horizon = (now if seen.finished is None else seen.finished) - lag
        while upcoming and upcoming[0][0] <= horizon:
            yield heapq.heappop(upcoming)
    while upcoming:
        yield heapq.heappop(upcoming)


class _Audited:
    """A budget with a tally for each value of its `per`."""

    def __init__(self, budget: Budget) -> None:
        self.budget, self.limit = budget, budget.limit
        self.is_of_flights = budget.limit.counts_in_flight
        self.tallies: dict[str, Tally] = {}

    def see(self, instant: int, what: int, seen: Seen) -> None:
        """Count an event, where it is one to this limit."""
        if self.is_of_flights == (what == COUNTED):
            return
        cost = cost_of(seen.cost, self.limit.unit)
        if not cost or not self.budget.counts(seen.rule, seen.released):
            return
        value = self.budget.value_of(seen.key, seen.queue)
        if value not in self.tallies:
            self.tallies[value] = tally_of(self.limit)
        self.tallies[value].add(instant, -cost if what == ENDED else cost)

    def finding(self, rule: str) -> Finding:
        limit, none = self.limit, ("", tally_of(self.limit))
        value, worst = max(self.tallies.items(), key=lambda item: item[1].highest, default=none)
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


# --- the ledger's attempts, page by page


def _attempts(using: str, book: Book, cut: int, now: int) -> Iterator[Seen]:
    """The attempts of all rules by the end; the open ones that a worker has begun come last."""
    what = "cost" if any(b.limit.unit != "calls" for b in book.all_budgets()) else "calls"
    rules = {rule for budget in book.all_budgets() for rule in _charging(budget)}
    streams = [_ended(using, what, rule, cut) for rule in sorted(rules)]
    yield from heapq.merge(*streams, key=lambda seen: seen.finished or now)
    for row in _rows(using, what, "finished_at IS NULL AND started_at IS NOT NULL", []):
        yield _seen(row, now)


def _ended(using: str, what: str, rule: str, cut: int) -> Iterator[Seen]:
    where = (
        "rule = %s AND outcome <> %s AND finished_at >= %s AND (finished_at > %s OR id > %s) "
        f"ORDER BY finished_at, id LIMIT {PAGE}"
    )
    finished, last = as_parameter(using, from_us(cut)), 0
    while page := _rows(using, what, where, [rule, states.VOIDED, finished, finished, last]):
        for row in page:
            yield _seen(row, 0)
        finished, last = as_parameter(using, from_us(page[-1][7])), page[-1][0]


def _rows(using: str, what: str, where: str, params: list[Any]) -> list[Any]:
    """Attempts, their instants in microseconds."""
    columns = [quoted(using, name) for name in ("id", "rule", "key", "queue", what)]
    instants = ("sent_at", "COALESCE(started_at, released_at)", "finished_at", "released_at")
    listed = ", ".join(columns + [micros_sql(using, instant) for instant in instants])
    table = tables.name(using, "CallAttempt")
    return rows(using, f"SELECT {listed} FROM {table} WHERE {where}", params)


def _seen(row: Any, now: int) -> Seen:
    _, rule, key, queue, cost, sent, began, finished, released = row
    cost = json.loads(cost) if isinstance(cost, str | bytes) else cost
    if sent is not None:
        counted = began = sent
    else:
        counted = now if finished is None else finished
    return Seen(rule, key, queue, cost, counted, began, finished, released)
