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
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from callqueue import conf, database, events
from callqueue.database import to_us
from callqueue.ledger import agreement
from callqueue.limits.budgets import Book
from callqueue.limits.kinds import SECOND
from callqueue.operations.audit_tallies import tally_of
from callqueue.operations.audited_attempts import Seen, attempts
from callqueue.operations.audited_budgets import (
    COUNTED,
    AuditedBudget,
    Event,
    by_rule,
    events_of,
    rules_in_flight,
)

# how much later than its lease allows an answer may be recorded, and still be read in order
SLACK = 60 * SECOND


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


def audit(using: str, *, since: timedelta, tell: bool = True) -> Audit:
    """Judge the attempts that ended no longer ago than `since` by the rules of today, changed
    limits included.

    Tells `limit_exceeded` of each limit that was, unless `tell` is false.
    """
    book = agreement.book_in_force(using)
    now = database.clock(using)
    cut = now - since
    result = judge(book, attempts(using, book, to_us(cut), to_us(now)), to_us(now), cut)
    for found in result.exceeded if tell else ():
        events.emit(
            "limit_exceeded",
            limit=found.name,
            rule=found.rule,
            highest=found.highest,
            allowed=found.allowed,
        )
    return result


def judge(book: Book, attempts: Iterable[Seen], now: int, since: datetime) -> Audit:
    """The findings on attempts, which come about in the order of their ends; none much later than
    its rule's timeout.
    """
    budgets = {budget.id: AuditedBudget(budget) for budget in book.all_budgets()}
    of_rule = by_rule(budgets.values())
    count = 0
    for instant, what, _, seen in _in_order(
        attempts, rules_in_flight(of_rule), now, longest_lag(book)
    ):
        count += what == COUNTED
        for budget in of_rule.get(seen.rule, ()):
            budget.see(instant, what, seen)
    findings = [
        _finding(budgets[budget.id], rule)
        for rule, listed in book.budgets.items()
        for budget in listed
    ]
    return Audit(since, findings, count)


def _in_order(
    attempts: Iterable[Seen], in_flight: Container[str], now: int, lag: int
) -> Iterator[Event]:
    """What happened, by the instant. `in_flight`: the rules of which it matters when attempts begin
    and end. `lag`: how long after it was sent an attempt may end.
    """
    upcoming: list[Event] = []
    for number, seen in enumerate(attempts):
        for event in events_of(seen, number, seen.rule in in_flight):
            heapq.heappush(upcoming, event)
        horizon = (now if seen.finished is None else seen.finished) - lag
        while upcoming and upcoming[0][0] <= horizon:
            yield heapq.heappop(upcoming)
    while upcoming:
        yield heapq.heappop(upcoming)


def longest_lag(book: Book) -> int:
    """How long after it was sent an attempt may end."""
    longest = max((rule.total_timeout for rule in book.rules.values()), default=0.0)
    return round((longest + conf.current().grace) * SECOND) + SLACK


def _finding(budget: AuditedBudget, rule: str) -> Finding:
    limit = budget.limit
    value, worst = max(
        budget.tallies.items(), key=lambda item: item[1].highest, default=("", tally_of(limit))
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
        counted=sum(tally.counted for tally in budget.tallies.values()),
    )
