"""The token bucket: bursts of so many, refilled at a rate."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import ClassVar

from callqueue.clocks import Us
from callqueue.limits.kinds.base import (
    SECOND,
    Meter,
    RateLimit,
    Usage,
    check_count,
    with_known_fields,
)


@with_known_fields
@dataclass(frozen=True)
class TokenBucket(RateLimit):
    """`burst` tokens, refilled at `rate`; each unit of cost takes a token (RFC 2697 section 3).

    Full use needs (burst - 1) / rate to be at least what passes until the ledger knows that a call
    was sent: some 0.2 s, or its answer where that comes sooner.
    """

    burst: int

    keeps_level: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "burst")

    @property
    def capacity(self) -> int:
        return self.burst

    @property
    def window_us(self) -> int:
        # Four times as long as the bucket takes to fill, but at least a hundred times the jitter:
        # to assume the bucket empty that long ago then costs at most one percent of the rate.
        full = 4 * self.burst * self.period_us // self.n
        return max(full, 100 * self.jitter_us, SECOND)

    @property
    def _jitter_window_us(self) -> int:
        # A bucket has no window; it fills in this time.
        return self.burst * self.period_us // self.n

    @property
    def patience_us(self) -> int:
        # Until the news is there, the bucket has its other tokens to give.
        return (self.burst - 1) * self.period_us // self.n

    def meter(self, usage: Usage, now: Us) -> Meter:
        return _BucketMeter(self, usage, now)

    def level(self, usage: Usage, until: Us) -> int:
        return self.level_at(usage, until)[0]

    def level_at(self, usage: Usage, until: Us) -> tuple[int, Us]:
        """(`Usage.level`, when): at `until` or, if later, the last charge; open ones apart."""
        cap, level, at = self.burst * self.period_us, usage.level, usage.since
        for leave, charges in groupby(usage.aged, key=itemgetter(0)):
            costs = [cost for _, cost in charges]
            # What leaves in one microsecond is a full bucket at most, or its dearest charge: more
            # was brought together by a jump of the clock. Where calls may have cost more than they
            # were released for, all is owed.
            taken = sum(costs) if usage.may_owe else min(sum(costs), max(self.burst, *costs))
            level = min(cap, level + self.n * (leave - at)) - taken * self.period_us
            at = leave
        if until > at:
            level, at = min(cap, level + self.n * (until - at)), until
        return level, at

    def _seconds_until_gone(self, meter: Meter, amount: float, now: Us, latency: float) -> float:
        each = self.period_us / self.n / SECOND
        # the next token is there sooner than that, or later where some are owed
        at = meter.free_at(meter.free + 1)
        first = each if at is None else (at - now) / SECOND
        filled = max(0.0, first + (amount - meter.free - 1) * each)
        return max(filled, amount / self.burst * latency)

    def last_period(
        self, meter: Meter, amount: float, now: Us, latency: float
    ) -> tuple[float, float]:
        return 0.0, amount


class _BucketMeter(Meter):
    """Levels are tokens times the period, whole: a microsecond refills exactly n."""

    def __init__(self, limit: TokenBucket, usage: Usage, now: Us) -> None:
        self._refill, self._period, self._now = limit.n, limit.period_us, now
        self._cap = limit.burst * limit.period_us
        self._level, self._at = limit.level_at(usage, now)
        self._open = usage.open
        # when the first charge is read no more: before it the bucket is taken as empty, so that
        # without it the level may be found to be more
        self._forgets_at = usage.aged[0][0] + limit.window_us + 1 if usage.aged else None

    @property
    def used(self) -> int:  # what is missing from the full bucket, rounded up, and what is open
        return -(-(self._cap - self._level) // self._period) + self._open

    @property
    def free(self) -> int:
        # The last charge may leave only after now, and the bucket fills until then.
        level = self._level - self._refill * max(0, self._at - self._now)
        return max(0, level // self._period - self._open)

    def free_at(self, cost: int) -> Us | None:
        wanted = (self._open + cost) * self._period
        if wanted > self._cap:
            return None
        return max(self._now, self._at - (self._level - wanted) // self._refill)

    def when_to_review(self, instant: Us) -> Us:
        return instant if self._forgets_at is None else min(instant, Us(self._forgets_at))
