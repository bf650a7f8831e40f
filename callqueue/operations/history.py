"""History: what was sent and answered, and how far each limit was used, by stretches of time. Reads
what a dispenser counted (see counting), whatever the number of calls.

In: a database alias, and a range. Out: exact sums up to `counted_until`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from django.db.models import Sum

from callqueue import database, tables
from callqueue.database import ClockNow, all_loaded, quoted, to_us
from callqueue.database import rows as read
from callqueue.limits.kinds import SECOND
from callqueue.maintenance.history import DAY as DAY
from callqueue.maintenance.history import HOUR as HOUR
from callqueue.maintenance.history import KEPT as KEPT
from callqueue.maintenance.history import LONG as LONG
from callqueue.maintenance.history import MINUTE as MINUTE
from callqueue.maintenance.history import QUARTER as QUARTER
from callqueue.operations import histograms

WEEK = 604800  # seconds
LONGEST_NAME = 150  # characters of a budget's name


class Range(NamedTuple):
    """A length of time up to now, in seconds, and the stretches by which it is shown."""

    name: str
    length: int
    width: int

    def starts(self, now: int) -> range:
        """When its stretches begin (seconds since the epoch), the present one last."""
        last = now // SECOND // self.width * self.width
        return range(last - self.length, last + 1, self.width)


RANGES = (Range("hour", HOUR, MINUTE), Range("day", DAY, QUARTER), Range("week", WEEK, LONG))


@dataclass
class Counts:
    """What attempts came to that reached the wire: `sent` of them, `done`, `failed` or `throttled`;
    of those that failed, `lost`: nobody knows of an answer. Histograms of how long their calls
    waited from when they were due, and of their answer times.
    """

    sent: int = 0
    done: int = 0
    failed: int = 0
    throttled: int = 0
    lost: int = 0
    waits: dict[str, int] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)

    def add(self, other: Counts) -> None:
        """Add what another counted."""
        self.sent += other.sent
        self.done += other.done
        self.failed += other.failed
        self.throttled += other.throttled
        self.lost += other.lost
        histograms.add(self.waits, other.waits)
        histograms.add(self.answers, other.answers)


@dataclass(frozen=True)
class PeakUse:
    """The highest use of a limit in any window, of which `value`, and the share of it that was
    used; None where no window was over. `full_until`: when the last stretch ends in which all of it
    was used (seconds since the epoch); 0 where none was.
    """

    highest: int
    allowed: int
    value: str
    share: float | None
    full_until: int = 0


def counted_until(using: str) -> tuple[int, int, int]:
    """The instant that it is now, and up to when attempts are in the totals, and in the peaks:
    microseconds; 0 where nothing was counted yet. One statement; then two.
    """
    rows = tables.counted(using).annotate(now=ClockNow())
    found = rows.values_list("now", "until", "peaks_until").first()
    if found is None:
        return to_us(database.clock(using)), 0, 0
    return to_us(found[0]), found[1], found[2]


def of_rule(using: str, rule: str, shown: Range, now: int) -> list[tuple[int, Counts]]:
    """The stretches of a range, oldest first: when each begins, and what it counted."""
    starts = shown.starts(now)
    found = {start: Counts() for start in starts}
    rows = tables.totals(using).filter(
        rule=rule, key="", width=shown.width, start__gte=starts[0], start__lte=starts[-1]
    )
    for start, *counts in rows.values_list("start", *COLUMNS):
        found[start] = Counts(*counts)
    return sorted(found.items())


COLUMNS = ("sent", "done", "failed", "throttled", "lost", "waits", "answers")


def of_keys(
    using: str, rule: str, seconds: int, now: int, most: int
) -> tuple[list[tuple[str, Counts]], int]:
    """The keys of a rule that sent most since the beginning of the quarter of an hour that was so
    many seconds ago, and how much all sent. Two statements.
    """
    rows = tables.totals(using).filter(
        rule=rule, width=QUARTER, start__gte=quarter_before(now, seconds)
    )
    whole = rows.filter(key="").aggregate(sent=Sum("sent"))["sent"]
    sums = {f"{name}_": Sum(name) for name in COUNTED}
    grouped: Any = rows.exclude(key="").values_list("key").annotate(**sums)
    grouped = grouped.order_by(f"-{next(iter(sums))}", "key")
    return [(key, Counts(*counts)) for key, *counts in grouped[:most]], whole or 0


COUNTED = ("sent", "done", "failed", "throttled", "lost")


def quarter_before(now: int, seconds: int) -> int:
    """When the quarter of an hour began that was so many seconds ago (seconds since the epoch)."""
    return (now // SECOND - seconds) // QUARTER * QUARTER


@dataclass
class Lately:
    """A rule's last hour, day and quarter of an hour."""

    hour: Counts = field(default_factory=Counts)
    day: Counts = field(default_factory=Counts)
    quarter: Counts = field(default_factory=Counts)


def lately(using: str, rules: Sequence[str], now: int) -> dict[str, Lately]:
    """Every rule's last hour and quarter of an hour, in whole minutes and the present one, and last
    day, in quarters of an hour. One statement.
    """
    found = {rule: Lately() for rule in rules}
    hour, day = RANGES[0].starts(now)[0], RANGES[1].starts(now)[0]
    quarter = now // SECOND // MINUTE * MINUTE - QUARTER
    table, no_key = tables.name(using, "Total"), f"{quoted(using, 'key')} = ''"
    counted, summed = ", ".join(COUNTED), ", ".join(f"SUM({name})" for name in COUNTED)
    sql = (
        f"SELECT 0, rule, {counted}, waits, answers FROM {table} "
        f"WHERE width = {MINUTE} AND start >= {quarter} AND {no_key} UNION ALL "
        f"SELECT width, rule, {summed}, NULL, NULL FROM {table} "
        f"WHERE (width = {MINUTE} AND start >= {hour} OR width = {QUARTER} AND start >= {day}) "
        f"AND {no_key} GROUP BY width, rule"
    )
    listed = [row for row in read(using, sql) if row[1] in found]
    for (width, rule, *counts), waits, answers in zip(
        (row[:-2] for row in listed),
        all_loaded([row[-2] for row in listed]),
        all_loaded([row[-1] for row in listed]),
        strict=True,
    ):
        values: list[Any] = [*map(int, counts), waits or {}, answers or {}]
        one = found[rule]
        {0: one.quarter, MINUTE: one.hour, QUARTER: one.day}[width].add(Counts(*values))
    return found


def this_hour(using: str, rules: Sequence[str], now: int) -> dict[str, Counts]:
    """What each of these rules came to since the hour began (UTC). One statement."""
    found = {rule: Counts() for rule in rules}
    began = now // SECOND // HOUR * HOUR
    rows = tables.totals(using).filter(key="", width=QUARTER, start__gte=began)
    for rule, *counts in rows.values_list("rule", *COLUMNS):
        if rule in found:
            found[rule].add(Counts(*counts))
    return found


def kept_name(budget: str) -> str:
    """The name of a budget as its peaks are kept: a long one is cut, and told apart."""
    if len(budget) <= LONGEST_NAME:
        return budget
    return f"{budget[:100]}…{hashlib.sha256(budget.encode()).hexdigest()[:16]}"


def peaks(
    using: str, width: int, since: int, budgets: Iterable[str] | None = None
) -> dict[str, PeakUse]:
    """By budget, the highest use in the stretches of this width from `since` on; of all budgets, or
    of these. One statement.
    """
    rows = tables.peaks(using).filter(width=width, start__gte=since)
    names: dict[str, str] = {}
    if budgets is not None:
        names = {kept_name(name): name for name in budgets}
        rows = rows.filter(budget__in=list(names))
    found: dict[str, PeakUse] = {}
    sums: dict[str, list[float]] = {}
    columns = ("start", "budget", "highest", "allowed", "value", "used", "room")
    full: dict[str, int] = {}
    for start, budget, highest, allowed, value, used, room in rows.order_by("start").values_list(
        *columns
    ):
        if highest >= allowed:
            full[budget] = start + width
        sums.setdefault(budget, []).extend((used, room))
        worst = found.get(budget)
        if worst is None or highest * max(1, worst.allowed) > worst.highest * max(1, allowed):
            found[budget] = PeakUse(highest, allowed, value, None)
    return {
        names.get(budget, budget): replace(
            one,
            share=sum(sums[budget][::2]) / room if (room := sum(sums[budget][1::2])) else None,
            full_until=full.get(budget, 0),
        )
        for budget, one in found.items()
    }


def series(
    using: str, budget: str, shown: Range, now: int, until: int
) -> Sequence[tuple[int, int | None]]:
    """The highest use of a budget in each stretch of a range, oldest first; None in those that are
    not counted yet, from `until` on (microseconds).
    """
    starts = shown.starts(now)
    rows = tables.peaks(using).filter(
        budget=kept_name(budget), width=shown.width, start__gte=starts[0], start__lte=starts[-1]
    )
    known = dict(rows.values_list("start", "highest"))
    return [(start, known.get(start, 0 if start * SECOND < until else None)) for start in starts]
