"""The token bucket: bursts of so many, refilled at a rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import ClassVar, Self

from django.core.exceptions import ImproperlyConfigured

from callqueue.limits.kinds.base import PARTS, Meter, RateLimit, Usage
from callqueue.limits.kinds.fields import SECOND, with_known_fields
from callqueue.limits.kinds.lanes import Lane


@with_known_fields
@dataclass(frozen=True)
class TokenBucket(RateLimit):
    """A bucket of `burst` tokens that refills at `rate`; each unit of cost takes a token.

    Full use needs (burst - 1) / rate to be at least the jitter. Sources: the token bucket of RFC
    2697 section 3.
    """

    burst: int = field(kw_only=True)

    keeps_level: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.burst, bool) or not isinstance(self.burst, int) or self.burst < 1:
            raise ImproperlyConfigured(
                f"TokenBucket.burst: {self.burst!r} is not a whole number of at least 1"
            )

    @property
    def capacity(self) -> int:
        return self.burst

    @property
    def window_us(self) -> int:
        # Four times as long as the bucket takes to fill, and a hundred times the jitter: assuming
        # the bucket empty that long ago then costs at most one percent of the rate.
        full = 4 * self.burst * self.period_us // self.n
        return max(full, round(100 * self.jitter * SECOND), SECOND)

    def meter(self, usage: Usage, now: int) -> Meter:
        return _BucketMeter(self, usage, now)

    def level(self, usage: Usage, until: int) -> int:
        return self.level_at(usage, until)[0]

    def level_at(self, usage: Usage, until: int) -> tuple[int, int]:
        """What the bucket holds at `until`, open charges apart, and the instant of that level
        (`until`, or the last leave).

        What leaves in one and the same microsecond is a full bucket at most, or its dearest charge:
        more than that never left a bucket together, but was moved together by a clock that was set
        back (`ledger.clock_shift`), and would empty the bucket for longer than it takes to fill.
        """
        cap, level, at = self.burst * self.period_us, usage.level, usage.since
        for leave, charges in groupby(usage.aged, key=itemgetter(0)):
            costs = [cost for _, cost in charges]
            taken = min(sum(costs), max(self.burst, *costs))
            level = min(cap, level + self.n * max(0, leave - at)) - taken * self.period_us
            at = max(at, leave)
        if until > at:
            level, at = min(cap, level + self.n * (until - at)), until
        return level, at

    def times(self, count: int) -> Self:
        return replace(super().times(count), burst=self.burst * count)

    def lane(self, cost: int, values: int) -> Lane:
        return _BucketLane(self, cost, values)

    def seconds_for(self, meter: Meter, amount: float, now: int, latency: float) -> float:
        """Until the last token of it is there."""
        return (amount - meter.free) * self.period_us / self.n / SECOND

    @property
    def slot_us(self) -> int:
        return max(SECOND, self.burst * self.period_us // self.n) // PARTS

    def levels(
        self, starts: Sequence[int], counts: Sequence[int | None], values: int = 1
    ) -> list[int | None]:
        """What the buckets lack, taken to be empty at first, as the ledger does: a window later
        that is forgotten.
        """
        cap, refill = self.burst * values, self.n * values * self.slot_us / self.period_us
        level, known = 0.0, 0
        levels: list[int | None] = []
        for count in counts:
            is_known = count is not None
            level = max(0.0, min(cap, level + refill - count)) if count is not None else 0.0
            known = known + 1 if is_known else 0
            levels.append(None if known <= PARTS else round(cap - level))
        return levels[PARTS:]


class _BucketMeter(Meter):
    """Token bucket. Levels are whole numbers: tokens times the period, so that a microsecond
    refills exactly n of them.
    """

    def __init__(self, limit: TokenBucket, usage: Usage, now: int) -> None:
        self._n, self._period, self._now = limit.n, limit.period_us, now
        self._cap = limit.burst * limit.period_us
        self._level, self._at = limit.level_at(usage, now)
        self._open = usage.open

    @property
    def used(self) -> int:  # type: ignore[override]
        return -(-(self._cap - self._level) // self._period) + self._open

    @property
    def free(self) -> int:  # type: ignore[override]
        return max(0, self._level // self._period - self._open)

    def free_at(self, cost: int) -> int | None:
        wanted = (self._open + cost) * self._period
        if wanted > self._cap:
            return None
        return max(self._now, self._at - (self._level - wanted) // self._n)

    def take(self, cost: int) -> None:
        self._open += cost


class _BucketLane(Lane):
    """A token bucket: open calls hold their tokens; a token leaves at the instant from which its
    call ages.
    """

    limit: TokenBucket

    def __init__(self, limit: TokenBucket, cost: int, values: int) -> None:
        super().__init__(limit, cost, values)
        self._cap = limit.burst * limit.period_us
        # Tokens times the period, and the instant of that.
        self._levels = [[self._cap, 0] for _ in range(values)]
        # From when each ages, and when it is answered.
        self._open: list[deque[tuple[int, int]]] = [deque() for _ in range(values)]

    def free_at(self, number: int, at: int, notice: int) -> tuple[int, bool]:
        value, by_answer = number % self.values, False
        pending = self._open[value]
        while True:
            while pending and pending[0][1] <= at:
                self._settle(value)
            wanted = (len(pending) + 1) * self.cost * self.limit.period_us
            if wanted <= self._cap:
                level, since = self._levels[value]
                instant = max(at, since - (level - wanted) // self.limit.n)
                return instant, by_answer and instant == at
            at, by_answer = pending[0][1] + notice, True

    def take(self, number: int, sent: int, answered: int) -> None:
        self._open[number % self.values].append((self.aged_from(sent, answered), answered))

    def charge(self, usage: Usage, start: int, latency: int) -> None:
        level, at = self.limit.level_at(usage, start)
        self._levels[0] = [level, at]
        answered = start + latency
        open_calls = -(-usage.open // self.cost)
        self._open[0].extend([(self.aged_from(start, answered), answered)] * open_calls)

    def _settle(self, value: int) -> None:
        leave, _ = self._open[value].popleft()
        level, at = self._levels[value]
        level = min(self._cap, level + self.limit.n * max(0, leave - at))
        self._levels[value] = [level - self.cost * self.limit.period_us, max(at, leave)]
