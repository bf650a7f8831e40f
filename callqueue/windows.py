"""How much of each limit was used over its last windows, for plots against the limit. Reads, and changes nothing.

In: budgets, each with one value of its `per`. Out: the use at evenly spaced instants, the present last. Attempts are summed by
the database, a slot of a window at a time; a slot that is over does not change any more, so it is counted once and kept in
Django's cache. What is not counted yet is counted newest first for as long as the caller allows, and is None until then.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from django.core.cache import cache
from django.db.models import Q
from django.db.models.functions import Coalesce

from callqueue import conf, database, ledger
from callqueue.budgets import Budget, cost_of
from callqueue.callcheck import check_key
from callqueue.database import Slot, from_us, to_us
from callqueue.limits import SECOND, Concurrency, FixedWindow, Limit, TokenBucket
from callqueue.minutes import place

SHOWN = 3  # windows
PARTS = 20  # slots of a window
HOURS = 24  # the same of a calendar window, so that those of a day are hours, on days of 23 and 25 hours too
FLIGHT = 60 * SECOND  # what is shown of a limit on what is in flight, which has no window
CHUNK = 20_000  # attempts that one statement may read, as far as the limit's rate tells
SETTLING = 60 * SECOND  # how much later than its lease allows an answer may be recorded


@dataclass(frozen=True)
class Scope:
    """A budget, for one value of its `per` ("" for all of it: per="rule", and all queues together). `capacity` is its limit."""

    budget: Budget
    value: str
    capacity: int
    used: int

    @property
    def id(self) -> str:
        """A name for what is counted, the same for all who count it."""
        limit = self.budget.limit
        text = repr((self.budget.id, self.budget.rules, type(limit).__name__, limit.per, limit.unit, self.value, _width(limit)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Use:
    """The use of a limit at evenly spaced instants, `step` microseconds apart, the present last; None: not counted yet."""

    levels: Sequence[int | None]
    step: int
    capacity: int


def look(using: str, scopes: Sequence[Scope], *, seconds: float = 0.06) -> list[Use]:
    """The use of each scope's last windows, in the same order. At most `seconds` are spent on counting, and one statement."""
    now = to_us(database.clock(using))
    until = time.monotonic() + seconds
    kept = _Kept(using, now)
    found: dict[int, Use] = {}
    for i in sorted(range(len(scopes)), key=lambda i: kept.counted_at(scopes[i])):
        found[i] = _use(kept, scopes[i], until)
    return [found[i] for i in range(len(scopes))]


def _use(kept: _Kept, scope: Scope, until: float) -> Use:
    limit, now = scope.budget.limit, kept.now
    if isinstance(limit, Concurrency):
        levels = _in_flight(kept.using, scope, now) if time.monotonic() < until else [None] * PARTS
        return Use([*levels, scope.used], FLIGHT // PARTS, scope.capacity)
    starts = _starts(limit, now)
    counts = [kept.counts(scope, starts, until).get(start) for start in starts]
    levels = _levels(scope, starts, counts)
    return Use([*levels[:-1], scope.used], _width(limit), scope.capacity)


# --- slots


def _width(limit: Limit) -> int:
    """How long a slot is, in microseconds."""
    if isinstance(limit, FixedWindow):
        return max(1, limit.period_us // HOURS)
    if isinstance(limit, TokenBucket):
        return max(SECOND, limit.burst * limit.period_us // limit.n) // PARTS
    return max(1, limit.window_us // PARTS)


def _starts(limit: Limit, now: int) -> list[int]:
    """When each slot begins that is to be counted: those of the windows shown, and of the window before, which they hold."""
    width = _width(limit)
    if isinstance(limit, FixedWindow):
        begin = limit.window(now)[0]
        for _ in range(SHOWN - 1):
            begin = limit.window(begin - 1)[0]
    else:
        begin = (now // width - (SHOWN + 1) * PARTS + 1) * width
    return list(range(begin, now + 1, width))


def _levels(scope: Scope, starts: Sequence[int], counts: Sequence[int | None]) -> list[int | None]:
    """The use at the end of each slot that is shown."""
    limit = scope.budget.limit
    if isinstance(limit, FixedWindow):
        return _since_the_window_began(limit, starts, counts)
    if isinstance(limit, TokenBucket):
        return _taken_from_the_bucket(limit, scope.capacity // limit.burst, counts)[PARTS:]
    return [None if None in held else sum(filter(None, held)) for held in _windows(counts)]


def _windows(counts: Sequence[int | None]) -> Iterable[Sequence[int | None]]:
    return (counts[i - PARTS + 1 : i + 1] for i in range(PARTS, len(counts)))


def _since_the_window_began(limit: FixedWindow, starts: Sequence[int], counts: Sequence[int | None]) -> list[int | None]:
    levels: list[int | None] = []
    level: int | None = 0
    window = limit.window(starts[0])
    for start, count in zip(starts, counts, strict=True):
        if start >= window[1]:
            window, level = limit.window(start), 0
        level = None if level is None or count is None else level + count
        levels.append(level)
    return levels


def _taken_from_the_bucket(limit: TokenBucket, buckets: int, counts: Sequence[int | None]) -> list[int | None]:
    """What the bucket lacks, taken to be empty at first, as the ledger does: a window later that is forgotten."""
    cap, refill, level, known = limit.burst * buckets, limit.n * buckets * _width(limit) / limit.period_us, 0.0, 0
    levels: list[int | None] = []
    for count in counts:
        level, known = (0.0, 0) if count is None else (max(0.0, min(cap, level + refill - count)), known + 1)
        levels.append(None if known <= PARTS else round(cap - level))
    return levels


# --- counting


class _Kept:
    """What earlier looks counted, kept in the cache by scope: the count of each slot that is over, and of others for a while."""

    def __init__(self, using: str, now: int) -> None:
        self.using, self.now = using, now
        self._place = place(using)
        longest = max((rule.total_timeout for rule in conf.current().rules.values()), default=0.0)
        self._settling = round((longest + conf.current().grace) * SECOND) + SETTLING
        self._entries: dict[str, tuple[int, Mapping[int, int]]] = {}

    def counted_at(self, scope: Scope) -> int:
        """When the scope was counted last; those that waited longest come first, so that each has its turn."""
        return self._entry(scope)[0]

    def counts(self, scope: Scope, starts: Sequence[int], until: float) -> dict[int, int]:
        """The counts of slots by their beginning, as far as they are known at `until` (monotonic)."""
        counted_at, kept = self._entry(scope)
        width = _width(scope.budget.limit)
        is_fresh = self.now - counted_at < width // 10
        found = {start: kept[start] for start in starts if start in kept and (is_fresh or self._is_over(start, width))}
        missing = [start for start in reversed(starts) if start not in found]
        size = max(1, CHUNK * PARTS // scope.capacity)
        at = 0
        while at < len(missing) and (time.monotonic() < until):
            chunk = missing[at : at + size]
            sums = _summed(self.using, scope, min(chunk), max(chunk) + width, width, self._settling)
            found.update({start: sums.get((start - min(chunk)) // width, 0) for start in chunk})
            at, size = at + size, 2 * size
        if at:
            lasting = (SHOWN + 2) * PARTS * width // SECOND + 60
            cache.set(self._name(scope), (self.now, found), timeout=lasting)
        return found

    def _is_over(self, start: int, width: int) -> bool:
        return start + width + self._settling < self.now

    def _entry(self, scope: Scope) -> tuple[int, Mapping[int, int]]:
        name = self._name(scope)
        if name not in self._entries:
            self._entries[name] = cache.get(name) or (0, {})
        return self._entries[name]

    def _name(self, scope: Scope) -> str:
        return f"callqueue:use:{self._place}:{scope.id}"


def _summed(using: str, scope: Scope, begin: int, end: int, width: int, settling: int) -> dict[int, int]:
    """What was counted in each slot of [begin, end), by number, at the instants that callqueue_audit goes by."""
    rows = _attempts(using, scope).filter(finished_at__gte=from_us(begin), finished_at__lt=from_us(end + settling))
    rows = rows.annotate(at=Coalesce("sent_at", "finished_at")).filter(at__gte=from_us(begin), at__lt=from_us(end))
    rows = rows.annotate(slot=Slot("at", begin, width)).order_by().values_list("slot")
    return {int(slot): int(total) for slot, total in rows.annotate(total=ledger.total_cost(scope.budget.limit.unit))}


def _in_flight(using: str, scope: Scope, now: int) -> list[int | None]:
    """How much was in flight at each instant of the last minute, from its release to its answer."""
    instants = [now - FLIGHT + FLIGHT * i // PARTS for i in range(PARTS)]
    unit = scope.budget.limit.unit
    what = "calls" if unit == "calls" else "cost"
    attempts, columns = _attempts(using, scope), ("released_at", "finished_at", what)
    ended = attempts.filter(finished_at__gt=from_us(instants[0])).order_by("-finished_at")
    newest = list(ended.values_list(*columns)[: CHUNK // 4])
    changes = [0] * (PARTS + 1)
    for released, finished, cost in [*newest, *attempts.open().values_list(*columns)[: CHUNK // 4]]:
        amount = cost if unit == "calls" else cost_of(cost, unit)
        changes[bisect_left(instants, to_us(released))] += amount
        if finished is not None:
            changes[bisect_left(instants, to_us(finished))] -= amount
    for at, after in pairwise(range(PARTS)):
        changes[after] += changes[at]
    known = to_us(newest[-1][1]) if len(newest) == CHUNK // 4 else 0
    return [level if instant >= known else None for instant, level in zip(instants, changes, strict=False)]


def _attempts(using: str, scope: Scope) -> Any:
    """The attempts that the scope counts, by rule and, where it is per key, by key."""
    from callqueue.models import CallAttempt

    per, rows = scope.budget.limit.per, CallAttempt.objects.using(using).charged().filter(rule__in=scope.budget.rules)
    if per in ("rule", "queue"):
        return rows
    part = Q(key__contains=check_key({per: scope.value})[1:-1])
    if per == "key":
        pers = {limit.per for rule in scope.budget.rules for limit in conf.current().rules[rule].keyed_limits}
        part = Q(key=scope.value) | part if pers > {"key"} else Q(key=scope.value)  # the latter has an index
    return rows.filter(part)
