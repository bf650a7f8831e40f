"""Counts by buckets of time, for those who only look: each is counted once it is over, and kept in
Django's cache.

In: the buckets, by their beginnings, and a function that counts a stretch of them. Out: the counts
that are known when there is no more time, the newest counted first. Only where the ledger was moved
along with a clock that jumped is what was kept wrong, until that is too old to be shown.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.core.cache import cache
from django.db import connections

from callqueue.limits.kinds import SECOND

Kept = Mapping[int, tuple[Any, int]]  # by a bucket's beginning: its count, and when it was counted
# Counts those that are named, in a stretch of buckets: by name and beginning; without, it is 0.
Counter = Callable[[Sequence[str], Sequence[int]], Mapping[tuple[str, int], Any]]


@dataclass(frozen=True)
class Buckets:
    """How buckets of time are counted: a length of `width`, all instants in microseconds.

    `settling`: so long after its end is all of a bucket surely recorded. `fresh`: for so long is
    the count of a bucket that is not over good enough. The first statement counts `first` buckets;
    after a quick one the next counts `growth` times as many, at most `most`. So many as `kept` stay
    in the cache. `nothing`: the count of a bucket that holds nothing.
    """

    width: int
    settling: int
    fresh: int
    first: int = 1
    growth: int = 2
    most: int = 100_000
    kept: int = 1500
    nothing: Any = 0


class BucketCounts:
    """The counts known at `now` (microseconds on the database's clock), and those that there is
    time to count.

    `until`: when (monotonic) there is no more time; None: all is counted. However late it is, one
    statement is made where any is wanted, so that whoever looks again and again sees all in the
    end.
    """

    def __init__(self, using: str, now: int, until: float | None = None) -> None:
        self.using, self.now = using, now
        self._until, self._has_counted = float("inf") if until is None else until, False
        self._place = _place(using)
        self._entries: dict[str, Kept] = {}

    @property
    def has_time(self) -> bool:
        """Whether there is still time to count."""
        return time.monotonic() < self._until

    def counts(
        self, names: Sequence[str], buckets: Buckets, starts: Sequence[int], count: Counter
    ) -> list[dict[int, Any]]:
        """Of each that is named: the counts of its buckets by their beginnings, as far as they are
        known when there is no more time.
        """
        self._load(names)
        found = {name: self._good(name, buckets, starts) for name in names}
        missing = [s for s in reversed(starts) if any(s not in found[name] for name in names)]
        changed: dict[str, None] = {}
        for chunk in self._chunks(missing, buckets):
            lacking = [name for name in names if not found[name].keys() >= set(chunk)]
            counted = count(lacking, chunk)
            for name in lacking:
                of_name = {start: counted.get((name, start), buckets.nothing) for start in chunk}
                found[name].update({start: (n, self.now) for start, n in of_name.items()})
            changed.update(dict.fromkeys(lacking))
        self._keep({name: found[name] for name in changed}, buckets, len(starts))
        return [{start: n for start, (n, _) in found[name].items()} for name in names]

    def counted_at(self, name: str) -> int:
        """When any bucket of what is named was counted last; 0 where none was."""
        self._load([name])
        return max((at for _, at in self._entries[name].values()), default=0)

    def _good(self, name: str, buckets: Buckets, starts: Sequence[int]) -> dict[int, Any]:
        """What is kept of buckets that were over when they were counted, or counted just now."""
        kept, lasting = self._entries[name], buckets.width + buckets.settling
        return {
            start: kept[start]
            for start in starts
            if start in kept
            and (start + lasting < kept[start][1] or self.now - kept[start][1] < buckets.fresh)
        }

    def _chunks(self, missing: Sequence[int], buckets: Buckets) -> Iterator[Sequence[int]]:
        """Stretches of buckets to be counted together, newest first, as long as there is time."""
        at, size = 0, buckets.first
        while at < len(missing) and (self.has_time or not self._has_counted):
            self._has_counted = True
            chunk, began = _stretch(missing[at : at + size], buckets.width), time.monotonic()
            yield chunk
            ended = time.monotonic()
            at += len(chunk)
            if ended - began < (self._until - ended) / 4:
                size = min(buckets.most, buckets.growth * size)

    def _load(self, names: Sequence[str]) -> None:
        wanted = {name: self._cached(name) for name in names if name not in self._entries}
        stored = cache.get_many(wanted.values()) if wanted else {}
        self._entries |= {name: stored.get(cached) or {} for name, cached in wanted.items()}

    def _keep(self, found: Mapping[str, Kept], buckets: Buckets, count: int) -> None:
        if not found:
            return
        for name, counts in found.items():
            newest = sorted({**self._entries[name], **counts}.items())[-buckets.kept :]
            self._entries[name] = dict(newest)
        lasting = (count + 20) * buckets.width // SECOND + 60
        cache.set_many({self._cached(n): self._entries[n] for n in found}, timeout=lasting)

    def _cached(self, name: str) -> str:
        return f"callqueue:counts:{self._place}:{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _stretch(newest_first: Sequence[int], width: int) -> Sequence[int]:
    """The first of these, as far as each follows the one before: what is counted together spans
    nothing else.
    """
    first = newest_first[0]
    gaps = (i for i, start in enumerate(newest_first) if start != first - i * width)
    return newest_first[: next(gaps, len(newest_first))]


def _place(using: str) -> str:
    """A name for the database: those that share a cache must not share what is kept there."""
    settings = connections[using].settings_dict
    text = f"{settings.get('HOST')}:{settings.get('PORT')}/{settings['NAME']}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
