"""The sliding window: at most n in any window of the period."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from callqueue.limits.kinds.base import Meter, RateLimit, Usage
from callqueue.limits.kinds.fields import with_known_fields


@with_known_fields
@dataclass(frozen=True)
class SlidingWindow(RateLimit):
    """At most n in any window of the period, wherever the window begins."""

    def meter(self, usage: Usage, now: int) -> Meter:
        aged = [charge for charge in usage.aged if charge[0] + self.period_us >= now]
        return WindowMeter(self.n, usage.open, aged, now, self.period_us)


class WindowMeter(Meter):
    """A window, or none: charges leave one period after the instant they age from."""

    def __init__(
        self, n: int, open_cost: int, aged: Sequence[tuple[int, int]], now: int, period: int
    ) -> None:
        self._n, self._now, self._period, self._open = n, now, period, open_cost
        self._instants = [at for at, _ in aged]
        self._leaving = list(accumulate(cost for _, cost in aged))
        self._aged = self._leaving[-1] if self._leaving else 0

    @property
    def used(self) -> int:
        return self._open + self._aged

    def free_at(self, cost: int) -> int | None:
        excess = self.used + cost - self._n
        if excess <= 0:
            return self._now
        if excess > self._aged:
            return None
        last = self._instants[bisect_left(self._leaving, excess)]
        # One microsecond past: a window closed at both ends is kept too.
        return max(self._now, last + self._period + 1)
