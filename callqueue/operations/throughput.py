"""How many calls ended in each minute of the last hour, by rule: done, and failed or unknown; and
of keys, how many attempts.

A minute that is over does not change any more, so it is counted once and kept in Django's cache.
What is not counted yet is counted newest first for as long as the caller allows; the rest is None
until the next look.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC
from functools import reduce
from operator import or_
from typing import Any

from django.core.cache import cache
from django.db.models import Count, Q
from django.db.models.functions import TruncMinute

from callqueue import database, states, tables
from callqueue.database import Slot, from_us, to_us
from callqueue.ledger.time_buckets import place, stretch
from callqueue.limits.kinds import SECOND

MINUTES = 60
MINUTE = 60 * SECOND
FRESH = 2  # seconds for which the count of a minute that is not over is good enough
OF_KEYS = 10  # minutes of keys that are counted at first: they have few attempts each
LASTING = (MINUTES + 2) * 60
SETTLED = 5 * SECOND  # after its end until every call of a minute is surely committed
ENDED = (states.DONE, states.FAILED, states.UNKNOWN)

Minute = Mapping[str, tuple[int, int]]  # rule -> (done, failed)
Key = tuple[str, str]  # a rule's name, and a key


def per_minute(using: str, *, until: float) -> list[Minute | None]:
    """The last hour, oldest minute first; the last one is not over. Counts until then (monotonic),
    and one statement at least.
    """
    now = to_us(database.clock(using))
    wanted, where = _hour(now), place(using)
    names = {minute: f"callqueue:minute:{where}:{minute}" for minute in wanted}
    kept: dict[str, Any] = cache.get_many(names.values())
    found: dict[int, Minute] = {
        minute: kept[name] for minute, name in names.items() if name in kept
    }
    missing = [minute for minute in reversed(wanted) if minute not in found]
    for chunk in _chunks(missing, 1, until):
        counted = _count(using, chunk)
        found.update(counted)
        for minute, counts in counted.items():
            cache.set(names[minute], counts, timeout=LASTING if _is_over(minute, now) else FRESH)
    return [found.get(minute) for minute in wanted]


def of_keys(using: str, keys: Sequence[Key], *, until: float) -> list[list[tuple[int, int] | None]]:
    """The last hour of some (rule, key), oldest minute first: attempts that succeeded, and that
    were answered otherwise.

    Of attempts, because those have an index by key. Counts until then (monotonic), and one
    statement at least.
    """
    now = to_us(database.clock(using))
    wanted, where = _hour(now), place(using)
    names = {
        key: f"callqueue:minutes:{where}:{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
        for key in keys
    }
    kept: dict[str, dict[int, Any]] = cache.get_many(names.values())
    # By key and minute: succeeded, not succeeded, and when they were counted.
    found: dict[Key, dict[int, tuple[int, int, int]]] = {
        key: {
            minute: counts
            for minute, counts in kept.get(names[key], {}).items()
            if minute in wanted
            and (_is_over(minute, counts[2]) or now - counts[2] < FRESH * SECOND)
        }
        for key in keys
    }
    for chunk in _chunks(
        [m for m in reversed(wanted) if any(m not in found[key] for key in keys)], OF_KEYS, until
    ):
        lacking = [key for key in keys if any(minute not in found[key] for minute in chunk)]
        counted = _count_attempts(using, lacking, chunk)
        for key in lacking:
            found[key].update(
                {minute: (*counted.get((key, minute), (0, 0)), now) for minute in chunk}
            )
        cache.set_many({names[key]: found[key] for key in lacking}, timeout=LASTING)
    return [
        [found[key][minute][:2] if minute in found[key] else None for minute in wanted]
        for key in keys
    ]


def _hour(now: int) -> range:
    return range(now // MINUTE - MINUTES + 1, now // MINUTE + 1)


def _is_over(minute: int, at: int) -> bool:
    return (minute + 1) * MINUTE + SETTLED < at


def _chunks(missing: Sequence[int], size: int, until: float) -> Iterator[Sequence[int]]:
    """Minutes that follow each other, to be counted together, newest first: `size`, and then as
    many as the last let expect.
    """
    place = 0
    while place < len(missing) and (place == 0 or time.monotonic() < until):
        chunk, began = stretch(missing[place:], size, 1), time.monotonic()
        yield chunk
        ended = time.monotonic()
        size = min(20, 4 * size) if ended - began < (until - ended) / 3 else size
        place += len(chunk)


def _count(using: str, chunk: Sequence[int]) -> dict[int, Minute]:
    begin, end = from_us(min(chunk) * MINUTE), from_us((max(chunk) + 1) * MINUTE)
    ended = tables.calls(using).filter(
        status__in=ENDED, finished_at_dt__gte=begin, finished_at_dt__lt=end
    )
    grouped = ended.order_by().values_list(
        TruncMinute("finished_at_dt", tzinfo=UTC), "rule", "status"
    )
    counts: dict[int, dict[str, tuple[int, int]]] = {minute: {} for minute in chunk}
    for at, rule, status, count in grouped.annotate(count=Count("pk")):
        minute = counts.get(to_us(at) // MINUTE, {})
        done, failed = minute.get(rule, (0, 0))
        minute[rule] = (done + count, failed) if status == states.DONE else (done, failed + count)
    return dict(counts)


def _count_attempts(
    using: str, keys: Sequence[Key], chunk: Sequence[int]
) -> dict[tuple[Key, int], tuple[int, int]]:
    """Of these keys in these minutes: how many attempts succeeded, and how many were answered
    otherwise.
    """
    of_rule: dict[str, list[str]] = {}
    for rule, key in keys:
        of_rule.setdefault(rule, []).append(key)
    asked = reduce(or_, (Q(rule=rule, key__in=listed) for rule, listed in of_rule.items()))
    begin, end = min(chunk) * MINUTE, (max(chunk) + 1) * MINUTE
    attempts = (
        tables.attempts(using)
        .charged()
        .filter(finished_at__gte=from_us(begin), finished_at__lt=from_us(end))
    )
    grouped = attempts.filter(asked).annotate(minute=Slot("finished_at", begin, MINUTE)).order_by()
    counts = grouped.values_list("rule", "key", "minute").annotate(
        succeeded=Count("pk", filter=Q(outcome=states.SUCCEEDED)), answered=Count("pk")
    )
    return {
        ((rule, key), min(chunk) + int(minute)): (succeeded, answered - succeeded)
        for rule, key, minute, succeeded, answered in counts
    }
