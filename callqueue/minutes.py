"""How many calls ended in each minute of the last hour, by rule: done, and failed or unknown; and of keys, how many attempts.

A minute that is over does not change any more, so it is counted once and kept in Django's cache. What is not counted yet
is counted newest first for as long as the caller allows; the rest is None until the next look.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC
from typing import Any

from django.core.cache import cache
from django.db.models import Count
from django.db.models.functions import TruncMinute

from callqueue import database, states
from callqueue.database import from_us, to_us
from callqueue.limits import SECOND
from callqueue.slots import Series, Slots, place

MINUTES = 60
MINUTE = 60 * SECOND
FRESH = 2  # seconds for which the count of a minute that is not over is good enough
EXPECTED = 300  # attempts of a key in a minute, until it is known better
SETTLED = 5 * SECOND  # after its end until every call of a minute is surely committed
ENDED = (states.DONE, states.FAILED, states.UNKNOWN)

Minute = Mapping[str, tuple[int, int]]  # rule -> (done, failed)


def per_minute(using: str, *, until: float) -> list[Minute | None]:
    """The last hour, oldest minute first; the last one is not over. Counts until then (monotonic), and one statement at least."""
    now = to_us(database.clock(using))
    latest = now // MINUTE
    wanted = range(latest - MINUTES + 1, latest + 1)
    names = {minute: f"callqueue:minute:{place(using)}:{minute}" for minute in wanted}
    kept: dict[str, Any] = cache.get_many(names.values())
    found: dict[int, Minute] = {minute: kept[name] for minute, name in names.items() if name in kept}
    missing = [minute for minute in reversed(wanted) if minute not in found]
    for counted in _counted(using, missing, until):
        found.update(counted)
        for minute, counts in counted.items():
            is_over = (minute + 1) * MINUTE + SETTLED < now
            cache.set(names[minute], counts, timeout=(MINUTES + 2) * 60 if is_over else FRESH)
    return [found.get(minute) for minute in wanted]


def of_keys(using: str, keys: Sequence[tuple[str, str]], *, until: float) -> list[list[tuple[int, int] | None]]:
    """The last hour of some (rule, key), oldest minute first: attempts that succeeded, and that were answered otherwise.

    Of attempts, because those have an index by key. Counts until then (monotonic), and one statement at least.
    """
    now = to_us(database.clock(using))
    slots, latest = Slots(using, now, until), now // MINUTE
    starts = [minute * MINUTE for minute in range(latest - MINUTES + 1, latest + 1)]
    pairs = [(_answers(rule, key), replace(_answers(rule, key), outcome=states.SUCCEEDED)) for rule, key in keys]
    found: dict[int, list[tuple[int, int] | None]] = {}
    for i in slots.turns([succeeded for _, succeeded in pairs]):
        succeeded, answered = (slots.sums(series, starts) for series in reversed(pairs[i]))
        found[i] = [
            (succeeded[start], max(0, answered[start] - succeeded[start])) if start in succeeded and start in answered else None
            for start in starts
        ]
    return [found[i] for i in range(len(pairs))]


def _answers(rule: str, key: str) -> Series:
    return Series((rule,), "key", key, "attempts", MINUTE, by_end=True, expected=EXPECTED)


def _counted(using: str, missing: Sequence[int], until: float) -> Iterator[dict[int, Minute]]:
    """Count these minutes, newest first: one at first, and then so many at once as the last ones let expect."""
    size, place, seconds = 1, 0, until - time.monotonic()
    while place < len(missing) and (place == 0 or time.monotonic() < until):
        chunk = missing[place : place + size]
        began = time.monotonic()
        yield _count(using, chunk)
        size = min(20, 4 * size) if time.monotonic() - began < seconds / 8 else 1
        place += len(chunk)


def _count(using: str, chunk: Sequence[int]) -> dict[int, Minute]:
    from callqueue.models import CallQueue

    begin, end = from_us(min(chunk) * MINUTE), from_us((max(chunk) + 1) * MINUTE)
    ended = CallQueue.objects.using(using).filter(status__in=ENDED, finished_at_dt__gte=begin, finished_at_dt__lt=end)
    grouped = ended.order_by().values_list(TruncMinute("finished_at_dt", tzinfo=UTC), "rule", "status")
    counts: dict[int, dict[str, tuple[int, int]]] = {minute: {} for minute in chunk}
    for at, rule, status, count in grouped.annotate(count=Count("pk")):
        minute = counts.get(to_us(at) // MINUTE, {})
        done, failed = minute.get(rule, (0, 0))
        minute[rule] = (done + count, failed) if status == states.DONE else (done, failed + count)
    return dict(counts)
