"""Sums of attempts by slots of time: for windows that hold too many to be read again at every look.
Changes no table.

In: until when there is time, what to sum, and the slots. Out: the sums that are known then, newest
counted first. A slot that is over does not change any more, so it is counted once and kept in
Django's cache. Only where the ledger was moved along with a clock that jumped is what was kept
wrong, for a window at most; releases never go by it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from django.core.cache import cache
from django.db import connections
from django.db.models import BigIntegerField, F, Q, Sum
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast, Coalesce

from callqueue import conf, tables
from callqueue.database import Slot, from_us
from callqueue.limits.budgets import Former
from callqueue.limits.kinds import SECOND

# attempts that the first statement may read, as far as the limit's rate tells; after a quick one
# the next reads more
CHUNK = 5000
KEPT = 1500  # slots of a series that are kept
SETTLING = 60 * SECOND  # how much later than its lease allows an answer may be recorded


Counts = Mapping[int, tuple[int, int]]  # by a slot's beginning: its sum, and when that was counted


@dataclass(frozen=True)
class Series:
    """What is summed: the attempts of some rules, of one value of `per` ("": of all), in a unit, at
    the instant they were sent.

    With `by_end` at the instant they were answered. `former`: rules of which only what was released
    until an instant counts. `width`: microseconds of a slot; `expected`: attempts that it may hold.
    """

    rules: tuple[str, ...]
    per: str
    value: str
    unit: str
    width: int
    by_end: bool = False
    former: tuple[Former, ...] = ()
    expected: int = field(default=1, compare=False)


class Slots:
    """The sums known at `now` (microseconds on the database's clock), and those that there is time
    to count.

    `until`: when (monotonic) there is no more time; None: all is counted. However late it is, one
    statement is made where any is wanted, so that whoever looks again and again sees all in the
    end.
    """

    def __init__(self, using: str, now: int, until: float | None = None) -> None:
        self.using, self.now = using, now
        self._until, self._has_counted = float("inf") if until is None else until, False
        self._place = place(using)
        longest = max((rule.total_timeout for rule in conf.current().rules.values()), default=0.0)
        self._settling = round((longest + conf.current().grace) * SECOND) + SETTLING
        self._entries: dict[str, Counts] = {}

    @property
    def has_time(self) -> bool:
        """Whether there is still time to count."""
        return time.monotonic() < self._until

    def turns(self, series: Sequence[Series]) -> list[int]:
        """The places of these series in the order in which to ask for them: those that waited
        longest first, so that each has its turn.
        """
        return sorted(
            range(len(series)),
            key=lambda place: max((at for _, at in self._entry(series[place]).values()), default=0),
        )

    def sums(self, series: Series, starts: Sequence[int]) -> dict[int, int]:
        """The sums of slots by their beginning, as far as they are known when there is no more
        time.
        """
        kept = self._entry(series)
        found = {
            start: kept[start]
            for start in starts
            if start in kept and self._still_holds(series, start, kept[start][1])
        }
        missing = [start for start in reversed(starts) if start not in found]
        at, size = 0, max(1, CHUNK // max(1, series.expected))
        while at < len(missing) and (self.has_time or not self._has_counted):
            self._has_counted = True
            chunk, began = stretch(missing[at:], size, series.width), time.monotonic()
            summed = self._sum(series, min(chunk), max(chunk) + series.width)
            found.update(
                {
                    start: (summed.get((start - min(chunk)) // series.width, 0), self.now)
                    for start in chunk
                }
            )
            ended = time.monotonic()
            at, size = (
                at + len(chunk),
                2 * size if ended - began < (self._until - ended) / 4 else size,
            )
        if at:
            name, lasting = self._name(series), (len(starts) + 20) * series.width // SECOND + 60
            self._entries[name] = dict(sorted({**kept, **found}.items())[-KEPT:])
            cache.set(name, self._entries[name], timeout=lasting)
        return {start: total for start, (total, _) in found.items()}

    def _sum(self, series: Series, begin: int, end: int) -> dict[int, int]:
        """The sums of [begin, end), by the slots' numbers."""
        rows = attempts(self.using, series.rules, series.per, series.value, series.former)
        rows = rows.filter(
            finished_at__gte=from_us(begin), finished_at__lt=from_us(end + self._settling)
        )
        rows = rows.annotate(
            at=F("finished_at") if series.by_end else Coalesce("sent_at", "finished_at")
        )
        rows = rows.filter(at__gte=from_us(begin), at__lt=from_us(end)).annotate(
            slot=Slot("at", begin, series.width)
        )
        return {
            int(slot): int(total)
            for slot, total in rows.order_by()
            .values_list("slot")
            .annotate(total=total_cost(series.unit))
        }

    def _still_holds(self, series: Series, start: int, counted_at: int) -> bool:
        """Whether the slot was over when it was counted, or that was just now."""
        return (
            start + series.width + self._settling < counted_at
            or self.now - counted_at < series.width // 10
        )

    def _entry(self, series: Series) -> Counts:
        name = self._name(series)
        if name not in self._entries:
            self._entries[name] = cache.get(name) or {}
        return self._entries[name]

    def _name(self, series: Series) -> str:
        text = repr(astuple(replace(series, expected=1)))
        return f"callqueue:slots2:{self._place}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def stretch(newest_first: Sequence[int], size: int, width: int) -> Sequence[int]:
    """The first `size` of these, as far as each follows the one before: what is counted together
    spans nothing else.
    """
    first = newest_first[:size]
    return first[
        : next((i for i, start in enumerate(first) if start != first[0] - i * width), size)
    ]


def place(using: str) -> str:
    """A name for the database: those that share a cache must not share what is kept there."""
    settings = connections[using].settings_dict
    text = f"{settings.get('HOST')}:{settings.get('PORT')}/{settings['NAME']}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def attempts(
    using: str, rules: Sequence[str], per: str, value: str, former: Sequence[Former] = ()
) -> Any:
    """The attempts that a limit of these rules counts, of one value of its `per`; without a value,
    of all.
    """
    rows = tables.attempts(using).charged().filter(of_rules(rules, former))
    if per == "rule" or not value:
        return rows
    if per == "queue":
        return rows.filter(queue=value)
    part = Q(
        key__contains=json.dumps({per: value}, ensure_ascii=False, separators=(",", ":"))[1:-1]
    )
    return rows.filter(Q(key=value) | part if per == "key" else part)


def of_rules(rules: Sequence[str], former: Sequence[Former]) -> Q:
    """The condition of attempts of these rules, and of those that were released by former ones as
    long as those counted.
    """
    condition = Q(rule__in=rules)
    for rule, until in former:
        condition |= (
            Q(rule=rule) if until is None else Q(rule=rule, released_at__lte=from_us(until))
        )
    return condition


def total_cost(unit: str) -> Any:
    """What attempts cost in a unit, summed by the database."""
    if unit == "calls":
        return Sum("calls")
    return Coalesce(Sum(Cast(KeyTextTransform(unit, "cost"), BigIntegerField())), 0)
