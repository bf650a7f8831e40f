"""Peaks: the highest use of each limit in any window, as an audit counts it, while calls go on.

In: attempts, in stretches by their ends. Out: per budget and minute the highest use, and what share
of the limit was used. The tallies are the audit's own; all that a window still holds is in memory,
so one that begins anew reads it again, a little at a time.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from callqueue import tables
from callqueue.database import as_parameter, from_us, places, rows
from callqueue.limits.budgets import Book
from callqueue.limits.kinds import SECOND
from callqueue.operations import audit
from callqueue.operations.audited_attempts import Seen
from callqueue.operations.audited_budgets import (
    AuditedBudget,
    Event,
    by_rule,
    events_of,
    rules_in_flight,
)
from callqueue.operations.ended_attempts import Ended, ended
from callqueue.operations.history import kept_name

MOST = 200_000  # calls that a budget's windows may hold to be followed; an audit has no such bound
LARGE = 600 * SECOND  # windows that may hold more
STRETCH = 20 * SECOND  # what is read again at a time; more, where that is little
LITTLE, MUCH = 1000, 4000  # attempts
MINUTE = 60 * SECOND


@dataclass
class Use:
    """The highest use in a minute, and what was used of what could have been."""

    highest: int = 0
    allowed: int = 0
    value: str = ""
    used: float = 0.0
    room: float = 0.0

    def add(self, other: Use) -> None:
        """Take in another's. Where a limit was changed meanwhile, what counts is the share of what
        was allowed then.
        """
        if other.highest * max(1, self.allowed) > self.highest * max(1, other.allowed):
            self.highest, self.allowed, self.value = other.highest, other.allowed, other.value
        self.allowed = self.allowed or other.allowed
        self.used += other.used
        self.room += other.room


class Peaks:
    """The peaks of a book, from the attempts that ended from `cursor` on."""

    def __init__(self, using: str, book: Book, until: int, before: Peaks | None = None) -> None:
        self.using, self.book = using, book
        self._before = {} if before is None else _loosened(before, book, until)
        budgets = {budget.id: AuditedBudget(budget) for budget in book.all_budgets()}
        self.budgets = {
            name: one for name, one in budgets.items() if not _is_too_large(using, one, until)
        }
        self.of_rule = by_rule(self.budgets.values())
        self._in_flight = rules_in_flight(self.of_rule)
        self.lag = audit.longest_lag(book)
        # By rule, from when on its attempts are read again: no longer ago than its windows reach.
        self._since = {
            rule: min(until, *(one.limit.horizon(until) for one in listed)) - self.lag
            for rule, listed in self.of_rule.items()
        }
        self.cursor = min(self._since.values(), default=until - self.lag)
        self._stretch = STRETCH
        self._horizon = self._number = 0
        self._upcoming: list[Event] = []
        self._amounts: dict[str, tuple[float, float]] = {}
        self._touched: dict[str, int] = {}
        self._last: dict[tuple[str, str], int] = {}

    def catch_up(self, until: int, late: float) -> bool:
        """Read again what the windows hold, up to `until`, as long as there is time (monotonic);
        whether it is all read.
        """
        while self.cursor < until and time.monotonic() < late:
            end = min(until, self.cursor + self._stretch)
            rules = sorted(rule for rule, since in self._since.items() if since < end)
            found = ended(self.using, rules, self.cursor, end)
            self.take(found)
            if len(found) < LITTLE:
                self._stretch *= 2
            elif len(found) > MUCH:
                self._stretch = max(SECOND, self._stretch // 4)
            self.cursor = end
            self.advance(end - self.lag, end)
        return self.cursor >= until

    def take(self, found: Sequence[Ended]) -> None:
        """Take in attempts that ended, in the order of their ends."""
        for one in found:
            if one.rule in self.of_rule and one.is_charged:
                self._number += 1
                seen = _seen(one)
                for instant, what, number, _ in events_of(
                    seen, self._number, one.rule in self._in_flight
                ):
                    # What comes later than any timeout allows is counted as of now.
                    at = max(instant, self._horizon)
                    heapq.heappush(self._upcoming, (at, what, number, seen))

    def advance(self, horizon: int, since: int) -> dict[tuple[str, int], Use]:
        """Count all that happened before the horizon, before which nothing else can have; the use
        by budget and minute (seconds since the epoch) of what happened from `since` on.
        """
        found: dict[tuple[str, int], Use] = {}
        minute = 0
        while self._upcoming and self._upcoming[0][0] < horizon:
            instant, what, _, seen = heapq.heappop(self._upcoming)
            if instant // MINUTE != minute:
                self._share(found if minute * MINUTE >= since - MINUTE else None, minute)
                minute = instant // MINUTE
            for budget in self.of_rule[seen.rule]:
                use = self._use(budget, instant, what, seen)
                if use is not None and instant >= since:
                    found.setdefault((kept_name(budget.budget.id), minute * 60), Use()).add(use)
        self._share(found if minute * MINUTE >= since - MINUTE else None, minute)
        self._horizon = max(self._horizon, horizon)
        return found

    def _use(self, budget: AuditedBudget, instant: int, what: int, seen: Seen) -> Use | None:
        """What is used just after an event; None where it changed nothing."""
        value = budget.budget.value_of(seen.key, seen.queue)
        before = budget.tallies.get(value)
        if before is not None:
            before.highest = 0
        tally = budget.see(instant, what, seen)
        if tally is None:
            return None
        self._touched[budget.budget.id] = instant
        if budget.limit.is_keyed:
            self._last[budget.budget.id, value] = instant
        return Use(tally.highest, self._allowed(budget, instant), value)

    def _allowed(self, budget: AuditedBudget, instant: int) -> int:
        """What its windows may hold: more than now, for as long as they hold what was sent before
        the limit was lowered.
        """
        before, until = self._before.get(budget.budget.id, (0, 0))
        is_held = before and budget.limit.horizon(instant) < until
        return max(budget.limit.capacity, before if is_held else 0)

    def _share(self, found: dict[tuple[str, int], Use] | None, minute: int) -> None:
        """The minute is over: what was used of what could have been, where a limit is not per
        key; and forget keys that are idle.
        """
        for name in self._touched:
            budget = self.budgets[name]
            if budget.limit.is_keyed:
                continue
            amounts = [tally.amounts() for tally in budget.tallies.values()]
            now = sum(used for used, _ in amounts), sum(room for _, room in amounts)
            before = self._amounts.get(name, (0.0, 0.0))
            self._amounts[name] = now
            if found is not None and minute:
                use = Use(0, 0, "", now[0] - before[0], now[1] - before[1])
                found.setdefault((kept_name(name), minute * 60), Use()).add(use)
        self._touched.clear()
        self._forget(minute * MINUTE)

    def _forget(self, now: int) -> None:
        """Keys that have been idle for two windows; and budgets that hold too much."""
        idle = [
            scope
            for scope, last in self._last.items()
            if last < now - 2 * self.budgets[scope[0]].limit.window_us - MINUTE
        ]
        for name, value in idle:
            if not self.budgets[name].is_concurrency:
                del self.budgets[name].tallies[value]
            del self._last[name, value]
        for name, budget in list(self.budgets.items()):
            if sum(tally.held for tally in budget.tallies.values()) > 2 * MOST:
                del self.budgets[name]
                self._last = {scope: at for scope, at in self._last.items() if scope[0] != name}
                self.of_rule = by_rule(self.budgets.values())


def _loosened(before: Peaks, book: Book, now: int) -> dict[str, tuple[int, int]]:
    """Of limits that were lowered: what they allowed, and the instant until which calls were sent
    that went by that.
    """
    found = {}
    for budget in book.all_budgets():
        old = before.budgets.get(budget.id)
        if old is not None:
            allowed, until = old.limit.capacity, now + before.lag
            earlier, lasts = before._before.get(budget.id, (0, 0))
            if earlier > allowed and budget.limit.horizon(now) < lasts:
                allowed, until = earlier, lasts
            if allowed > budget.limit.capacity:
                found[budget.id] = (allowed, until)
    return found


def _is_too_large(using: str, budget: AuditedBudget, until: int) -> bool:
    """Whether a budget's windows hold too many calls to be read again and kept in memory."""
    limit = budget.limit
    if limit.window_us <= LARGE:
        return False
    names = [*budget.budget.rules, *(name for name, _ in budget.budget.former)]
    since = as_parameter(using, from_us(limit.horizon(until)))
    inner = (
        f"SELECT 1 AS one FROM {tables.name(using, 'CallAttempt')} "
        f"WHERE rule IN ({places(names)}) AND finished_at > %s LIMIT {MOST + 1}"
    )
    ((count,),) = rows(using, f"SELECT COUNT(*) FROM ({inner}) AS few", [*names, since])
    return int(count) > MOST


def _seen(one: Ended) -> Seen:
    """The attempt as an audit sees it."""
    at = one.finished if one.sent is None else one.sent
    began = one.began if one.sent is None else one.sent
    return Seen(one.rule, one.key, one.queue, one.cost, at, began, one.finished, one.released)


def rolled(
    found: Mapping[tuple[str, int], Use], widths: Sequence[int]
) -> dict[tuple[str, int, int], Use]:
    """The uses of minutes by budget, width and beginning of longer stretches."""
    wide: dict[tuple[str, int, int], Use] = {}
    for (budget, start), use in found.items():
        for width in widths:
            wide.setdefault((budget, width, start // width * width), Use()).add(use)
    return wide
