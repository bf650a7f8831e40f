"""What became of attempts and calls since the hour began, with how long they took: for metrics that
count upwards.

In: a database alias. Out: counts by rule, the same for every process that asks, so that any may be
scraped; they begin anew with each hour (UTC), as counters do after a restart. None until all
minutes of the hour are counted, newest first: see bucket_counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.db.models import Avg, Count, DurationField, ExpressionWrapper, F, Q

from callqueue import database, states, tables
from callqueue.database import Slot, from_us, to_us
from callqueue.limits.kinds import SECOND
from callqueue.operations.bucket_counts import BucketCounts, Buckets

MINUTE, HOUR = 60 * SECOND, 3600 * SECOND
# upper bounds of a histogram's buckets, in seconds
WAITS = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
ANSWERS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
BUCKETS = Buckets(MINUTE, 5 * SECOND, 2 * SECOND, 10, growth=4, most=60, kept=60, nothing=())
ENDED = (states.DONE, states.FAILED, states.UNKNOWN)

Row = tuple[str, Any, int, tuple[int, ...], float]  # rule, what became, count, below bounds, sum


@dataclass
class Outcomes:
    """Of one rule: attempts by outcome; calls by final status (a number); and of the two histograms
    the counts below each bound, and the sum of seconds.
    """

    attempts: Counter[str] = field(default_factory=Counter)
    calls: Counter[int] = field(default_factory=Counter)
    waits: list[int] = field(default_factory=lambda: [0] * (len(WAITS) + 1))
    waited: float = 0.0
    answers: list[int] = field(default_factory=lambda: [0] * (len(ANSWERS) + 1))
    answered: float = 0.0


def this_hour(using: str, names: Sequence[str], *, until: float) -> dict[str, Outcomes] | None:
    """By rule, since the hour began. `until`: when (monotonic) there is no more time."""
    now = to_us(database.clock(using))
    starts = range(now // HOUR * HOUR, now + 1, MINUTE)
    counts = BucketCounts(using, now, until)
    found = {name: Outcomes() for name in names}
    for label, count, add in (
        ("outcomes of attempts", _attempts, _add_attempt),
        ("outcomes of calls", _calls, _add_call),
    ):
        counted = _counted(counts, using, label, names, starts, count)
        if counted is None:
            return None
        for rows in counted:
            for row in rows:
                if row[0] in found:
                    add(found[row[0]], row)
    return found


def _counted(
    counts: BucketCounts, using: str, label: str, names: Sequence[str], starts: range, count: Any
) -> list[Sequence[Row]] | None:
    def of(named: Sequence[str], chunk: Sequence[int]) -> Mapping[tuple[str, int], Any]:
        by_minute: dict[int, list[Row]] = {}
        begin, end = min(chunk), max(chunk) + MINUTE
        for slot, *row in count(using, names, begin, end):
            by_minute.setdefault(begin + int(slot) * MINUTE, []).append(_row(*row))
        return {(named[0], start): tuple(rows) for start, rows in by_minute.items()}

    (known,) = counts.counts([f"{label} {sorted(names)}"], BUCKETS, starts, of)
    return [known[s] for s in starts] if known.keys() >= set(starts) else None


def _row(rule: str, what: Any, count: int, timed: int, mean: timedelta | None, *below: int) -> Row:
    seconds = 0.0 if mean is None else mean.total_seconds() * timed
    return rule, what, count, (*below, timed), seconds


def _attempts(using: str, names: Sequence[str], begin: int, end: int) -> Any:
    """Attempts that ended, and how long their answers took."""
    rows = tables.attempts(using).filter(
        rule__in=names, finished_at__gte=from_us(begin), finished_at__lt=from_us(end)
    )
    took = _between("sent_at", "finished_at")
    return _grouped(rows, "finished_at", begin, "outcome", took, ANSWERS)


def _calls(using: str, names: Sequence[str], begin: int, end: int) -> Any:
    """Calls that ended, and how long they waited, once due, for their last release."""
    rows = tables.calls(using).filter(
        rule__in=names,
        status__in=ENDED,
        finished_at_dt__gte=from_us(begin),
        finished_at_dt__lt=from_us(end),
    )
    waited = _between("due_at_dt", "dispatched_at_dt")
    return _grouped(rows, "finished_at_dt", begin, "status", waited, WAITS)


def _grouped(
    rows: Any, at: str, begin: int, what: str, seconds: Any, bounds: Sequence[float]
) -> Any:
    below = {
        f"below_{number}": Count("pk", filter=Q(seconds__lte=timedelta(seconds=bound)))
        for number, bound in enumerate(bounds)
    }
    timed = rows.annotate(minute=Slot(at, begin, MINUTE), seconds=seconds).order_by()
    return timed.values_list("minute", "rule", what).annotate(
        count=Count("pk"), timed=Count("seconds"), mean=Avg("seconds"), **below
    )


def _between(begin: str, end: str) -> Any:
    return ExpressionWrapper(F(end) - F(begin), output_field=DurationField())


def _add_attempt(found: Outcomes, row: Row) -> None:
    _, outcome, count, below, seconds = row
    found.attempts[outcome] += count
    found.answers = [a + b for a, b in zip(found.answers, below, strict=True)]
    found.answered += seconds


def _add_call(found: Outcomes, row: Row) -> None:
    _, status, count, below, seconds = row
    found.calls[status] += count
    found.waits = [a + b for a, b in zip(found.waits, below, strict=True)]
    found.waited += max(0.0, seconds)
