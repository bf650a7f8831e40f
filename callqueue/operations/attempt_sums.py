"""Sums of what attempts cost, by slots of time: for windows that hold too many to be read again at
every look. Changes no table; releases never go by them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from django.db.models import BigIntegerField, F, Q, Sum
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast, Coalesce

from callqueue import conf, tables
from callqueue.database import Slot, from_us
from callqueue.limits.budgets import Budget, Former
from callqueue.limits.kinds import SECOND
from callqueue.operations.bucket_counts import BucketCounts, Buckets

# attempts that the first statement may read, as far as the limit's rate tells; after a quick one
# the next reads more
CHUNK = 5000
SETTLING = 60 * SECOND  # how much later than its lease allows an answer may be recorded


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

    @classmethod
    def of(cls, budget: Budget, value: str, width: int, expected: int) -> Series:
        """Of what is charged to a budget, at the instants from which it is charged."""
        limit, former = budget.limit, budget.former
        return cls(
            budget.rules, limit.per, value, limit.unit, width, limit.strict, former, expected
        )

    @property
    def name(self) -> str:
        """Different where anything differs that is summed."""
        return repr(astuple(replace(self, expected=1)))


class AttemptSums:
    """The sums known at `now`, and those that there is time to count until `until`: see
    BucketCounts.
    """

    def __init__(self, using: str, now: int, until: float | None = None) -> None:
        self.using, self.now = using, now
        self._counts = BucketCounts(using, now, until)
        longest = max((rule.total_timeout for rule in conf.current().rules.values()), default=0.0)
        self._settling = round((longest + conf.current().grace) * SECOND) + SETTLING

    @property
    def has_time(self) -> bool:
        """Whether there is still time to count."""
        return self._counts.has_time

    def turns(self, series: Sequence[Series]) -> list[int]:
        """The places of these series in the order in which to ask for them: those that waited
        longest first, so that each has its turn.
        """
        return sorted(range(len(series)), key=lambda i: self._counts.counted_at(series[i].name))

    def sums(self, series: Series, starts: Sequence[int]) -> dict[int, int]:
        """The sums of slots by their beginning, as far as they are known when there is no more
        time.
        """
        first = max(1, CHUNK // max(1, series.expected))
        buckets = Buckets(series.width, self._settling, series.width // 10, first)

        def count(names: Sequence[str], chunk: Sequence[int]) -> Mapping[tuple[str, int], int]:
            begin, end = min(chunk), max(chunk) + series.width
            summed = self._sum(series, begin, end)
            return {(names[0], begin + slot * series.width): n for slot, n in summed.items()}

        (found,) = self._counts.counts([series.name], buckets, starts, count)
        return found

    def _sum(self, series: Series, begin: int, end: int) -> dict[int, int]:
        """The sums of [begin, end), by the slots' numbers."""
        rows = attempts(self.using, series.rules, series.per, series.value, series.former)
        rows = rows.filter(
            finished_at__gte=from_us(begin), finished_at__lt=from_us(end + self._settling)
        )
        at = F("finished_at") if series.by_end else Coalesce("sent_at", "finished_at")
        rows = rows.annotate(at=at).filter(at__gte=from_us(begin), at__lt=from_us(end))
        slots = rows.annotate(slot=Slot("at", begin, series.width)).order_by().values_list("slot")
        summed = slots.annotate(total=total_cost(series.unit))
        return {int(slot): int(total) for slot, total in summed}


def attempts(
    using: str, rules: Sequence[str], per: str, value: str, former: Sequence[Former] = ()
) -> Any:
    """The attempts that a limit of these rules counts, of one value of its `per`; without a value,
    of all.
    """
    rows = tables.attempts(using).charged().filter(_of_rules(rules, former))
    if per == "rule" or not value:
        return rows
    if per == "queue":
        return rows.filter(queue=value)
    part = Q(
        key__contains=json.dumps({per: value}, ensure_ascii=False, separators=(",", ":"))[1:-1]
    )
    return rows.filter(Q(key=value) | part if per == "key" else part)


def total_cost(unit: str) -> Any:
    """What attempts cost in a unit, summed by the database."""
    if unit == "calls":
        return Sum("calls")
    return Coalesce(Sum(Cast(KeyTextTransform(unit, "cost"), BigIntegerField())), 0)


def _of_rules(rules: Sequence[str], former: Sequence[Former]) -> Q:
    """The condition of attempts of these rules, and of those that were released by former ones as
    long as those counted.
    """
    condition = Q(rule__in=rules)
    for rule, until in former:
        condition |= (
            Q(rule=rule) if until is None else Q(rule=rule, released_at__lte=from_us(until))
        )
    return condition
