"""How many calls ended in each minute of the last hour, by rule: done, and failed or unknown; and
of keys, how many attempts.

What is not counted yet is counted newest first for as long as the caller allows; the rest is None
until the next look: see bucket_counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC
from functools import reduce
from operator import or_

from django.db.models import Count, Q
from django.db.models.functions import TruncMinute

from callqueue import database, states, tables
from callqueue.database import Slot, from_us, to_us
from callqueue.limits.kinds import SECOND
from callqueue.operations.bucket_counts import BucketCounts, Buckets

MINUTES = 60
MINUTE = 60 * SECOND
FRESH = 2 * SECOND  # for which the count of a minute that is not over is good enough
SETTLED = 5 * SECOND  # after its end until every call of a minute is surely committed
OF_KEYS = 10  # minutes of keys that are counted at first: they have few attempts each
ENDED = (states.DONE, states.FAILED, states.UNKNOWN)
# 20 minutes are the most that one statement counts
OF_RULES = Buckets(MINUTE, SETTLED, FRESH, 1, growth=4, most=20, kept=MINUTES, nothing={})
OF_EACH_KEY = Buckets(
    MINUTE, SETTLED, FRESH, OF_KEYS, growth=4, most=20, kept=MINUTES, nothing=(0, 0)
)

Minute = Mapping[str, tuple[int, int]]  # rule -> (done, failed)
Key = tuple[str, str]  # a rule's name, and a key


def per_minute(using: str, *, until: float) -> list[Minute | None]:
    """The last hour, oldest minute first; the last one is not over. Counts until then (monotonic),
    and one statement at least.
    """
    now = to_us(database.clock(using))

    def count(names: Sequence[str], chunk: Sequence[int]) -> Mapping[tuple[str, int], Minute]:
        return {(names[0], start): minute for start, minute in _count(using, chunk).items()}

    counts = BucketCounts(using, now, until)
    (found,) = counts.counts(["minutes"], OF_RULES, _hour(now), count)
    return [found.get(start) for start in _hour(now)]


def of_keys(using: str, keys: Sequence[Key], *, until: float) -> list[list[tuple[int, int] | None]]:
    """The last hour of some (rule, key), oldest minute first: attempts that succeeded, and that
    were answered otherwise.

    Of attempts, because those have an index by key. Counts until then (monotonic), and one
    statement at least.
    """
    now = to_us(database.clock(using))
    named = {repr(key): key for key in keys}

    def count(
        names: Sequence[str], chunk: Sequence[int]
    ) -> Mapping[tuple[str, int], tuple[int, int]]:
        counted = _count_attempts(using, [named[name] for name in names], chunk)
        return {(repr(key), start): counts for (key, start), counts in counted.items()}

    counts = BucketCounts(using, now, until)
    listed = counts.counts(list(named), OF_EACH_KEY, _hour(now), count)
    found = dict(zip(named, listed, strict=True))
    return [[found[repr(key)].get(start) for start in _hour(now)] for key in keys]


def _hour(now: int) -> range:
    """When the last minutes began, oldest first."""
    last = now // MINUTE * MINUTE
    return range(last - (MINUTES - 1) * MINUTE, last + 1, MINUTE)


def _count(using: str, chunk: Sequence[int]) -> dict[int, Minute]:
    ended = tables.calls(using).filter(
        status__in=ENDED,
        finished_at_dt__gte=from_us(min(chunk)),
        finished_at_dt__lt=from_us(max(chunk) + MINUTE),
    )
    minute = TruncMinute("finished_at_dt", tzinfo=UTC)
    grouped = ended.order_by().values_list(minute, "rule", "status").annotate(count=Count("pk"))
    counts: dict[int, dict[str, tuple[int, int]]] = defaultdict(dict)
    for at, rule, status, count in grouped:
        done, failed = counts[to_us(at)].get(rule, (0, 0))
        is_done = status == states.DONE
        counts[to_us(at)][rule] = (done + count, failed) if is_done else (done, failed + count)
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
    begin, end = min(chunk), max(chunk) + MINUTE
    rows = tables.attempts(using).charged().filter(asked)
    rows = rows.filter(finished_at__gte=from_us(begin), finished_at__lt=from_us(end))
    grouped = rows.annotate(minute=Slot("finished_at", begin, MINUTE)).order_by()
    counts = grouped.values_list("rule", "key", "minute").annotate(
        succeeded=Count("pk", filter=Q(outcome=states.SUCCEEDED)), answered=Count("pk")
    )
    return {
        ((rule, key), begin + int(minute) * MINUTE): (succeeded, answered - succeeded)
        for rule, key, minute, succeeded, answered in counts
    }
