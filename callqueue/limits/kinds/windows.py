"""Limits on what is in a window (sliding, or of the calendar), or under way."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import ClassVar, Self
from zoneinfo import ZoneInfo

from django.core.exceptions import ImproperlyConfigured

from callqueue.clocks import Us
from callqueue.limits.kinds.base import (
    DAY,
    MOST_JITTER,
    PERIODS,
    SECOND,
    Limit,
    Meter,
    RateLimit,
    Usage,
    check_count,
    with_known_fields,
)

# windows of a backlog that are looked up one by one; the rest are taken to be as long as the mean
WINDOWS = 400


@with_known_fields
@dataclass(frozen=True)
class SlidingWindow(RateLimit):
    """At most n in any window of the period, wherever the window begins."""

    def meter(self, usage: Usage, now: Us) -> Meter:
        aged = [charge for charge in usage.aged if charge[0] + self.period_us >= now]
        return WindowMeter(self.n, usage.open, aged, now, self.period_us)


class WindowMeter(Meter):
    """A charge leaves one period after it ages. A Concurrency has no window: `aged` is empty."""

    def __init__(
        self, n: int, open_cost: int, aged: Sequence[tuple[Us, int]], now: Us, period: int
    ) -> None:
        self._n, self._now, self._period, self._open = n, now, period, open_cost
        self._instants = [at for at, _ in aged]
        # the cost that has left once what ages from each of these has
        self._leaving = list(accumulate(cost for _, cost in aged))
        self._aged = self._leaving[-1] if self._leaving else 0

    @property
    def used(self) -> int:
        return self._open + self._aged

    def free_at(self, cost: int) -> Us | None:
        excess = self.used + cost - self._n
        if excess <= 0:
            return self._now
        if excess > self._aged:
            return None
        last = self._instants[bisect_left(self._leaving, excess)]
        # One microsecond past: a window closed at both ends is kept too.
        return max(self._now, last + self._period + 1)


@with_known_fields
@dataclass(frozen=True)
class Concurrency(Limit):
    """At most n in flight: released and not recorded."""

    n: int

    counts_in_flight: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "n")

    @property
    def capacity(self) -> int:
        return self.n

    @property
    def rate_text(self) -> str:
        return str(self.n)

    @property
    def window_us(self) -> int:
        return 0

    def meter(self, usage: Usage, now: Us) -> Meter:
        return WindowMeter(self.n, usage.open, [], now, 0)

    def with_rate(self, rate: str) -> Self:
        if not rate.isdecimal():
            raise ImproperlyConfigured(f"Concurrency.n: {rate!r} is not a whole number")
        return replace(self, n=int(rate))

    def seconds_until_gone(
        self, meter: Meter, amount: float, now: Us, latency: float
    ) -> float | None:
        if latency:
            return max(0, math.ceil(amount + meter.used) - 1) // self.n * latency
        return 0.0 if amount <= meter.free else None

    def last_period(
        self, meter: Meter, amount: float, now: Us, latency: float
    ) -> tuple[float, float]:
        return 0.0, amount


@with_known_fields
@dataclass(frozen=True)
class FixedWindow(RateLimit):
    """At most n in each calendar window: windows of days begin at local midnight in `timezone`,
    weeks on Monday, shorter ones are counted from midnight. Days of 23 and 25 hours are what the
    calendar says.
    """

    timezone: str = "UTC"
    # by how much its instants, which are ledger time, are behind its calendar's; no setting
    moved: int = field(default=0, init=False)

    is_calendar: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            ZoneInfo(self.timezone)
        except (TypeError, ValueError, OSError, KeyError):
            raise ImproperlyConfigured(
                f"FixedWindow.timezone: {self.timezone!r} is not a time zone's name"
            ) from None

    def moved_by(self, moved: int) -> Self:
        other = copy(self)
        object.__setattr__(other, "moved", moved)
        return other

    def with_rate(self, rate: str) -> Self:
        return super().with_rate(rate).moved_by(self.moved)

    @property
    def zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone)

    @property
    def window_us(self) -> int:
        # A local day may be 25 hours long, and at both of its edges a window counts `jitter` more
        # than itself.
        return self.period_us + 2 * PERIODS["h"] + 2 * self.jitter_us

    @property
    def jitter_us(self) -> int:
        # Here it covers what the provider's clock may be off, too. Two per cent of a day would be
        # much: for so long would a day that is used up keep back calls of the next.
        return min(super().jitter_us, MOST_JITTER * SECOND)

    @property
    def patience_us(self) -> int:
        # An attempt that is not known to be counted before a window begins counts in it, too.
        return self.jitter_us

    def window(self, instant: Us) -> tuple[Us, Us]:
        """The calendar window around `instant`: its first instant, and the first after it."""
        begin, end = self._window_by_wall(instant + self.moved)
        return begin - self.moved, end - self.moved

    def _window_by_wall(self, wall: Us) -> tuple[Us, Us]:
        zone = self.zone
        day = datetime.fromtimestamp(wall // SECOND, zone).date()
        if self.period_us % DAY == 0:
            days = self.period_us // DAY
            first = (day.toordinal() - 1) // days * days + 1
            return _midnight(first, zone), _midnight(first + days, zone)
        midnight = _midnight(day.toordinal(), zone)
        start = midnight + (wall - midnight) // self.period_us * self.period_us
        return start, min(start + self.period_us, _midnight(day.toordinal() + 1, zone))

    def horizon(self, now: Us) -> Us:
        return self.window(now - self.jitter_us)[0] - self.jitter_us

    def meter(self, usage: Usage, now: Us) -> Meter:
        return _CalendarMeter(self, usage, now)

    def _seconds_until_gone(self, meter: Meter, amount: float, now: Us, latency: float) -> float:
        wanted = math.ceil((amount - meter.free) / self.n)
        first = instant = self.window(now)[1]
        counted = min(wanted, WINDOWS)
        for _ in range(counted - 1):
            instant = self.window(instant)[1]
        each = (instant - first) / (counted - 1) if counted > 1 else 0
        return float((instant - now + (wanted - counted) * each) + self.jitter_us) / SECOND

    def last_period(
        self, meter: Meter, amount: float, now: Us, latency: float
    ) -> tuple[float, float]:
        if amount <= meter.free:
            return 0.0, amount
        left = (amount - meter.free) % self.n
        return self._seconds_until_gone(meter, amount, now, latency), left or self.n


class _CalendarMeter(Meter):
    """A call within `jitter` of an edge counts on both sides: the provider's clock may be off."""

    def __init__(self, limit: FixedWindow, usage: Usage, now: Us) -> None:
        self._n, self._now, self._open = limit.n, now, usage.open
        self._jitter = limit.jitter_us
        start, end = limit.window(now - self._jitter)
        # since when a window counts, and its first instant: this one, and the next two
        self._changes = [(now, start), (end + self._jitter, end)]
        after = limit.window(end)[1]
        self._changes.append((after + self._jitter, after))
        self._counts = [
            sum(cost for at, cost in usage.aged if at >= first - self._jitter)
            for _, first in self._changes
        ]

    @property
    def used(self) -> int:
        return self._open + self._counts[0]

    def free_at(self, cost: int) -> Us | None:
        for (instant, _), count in zip(self._changes, self._counts, strict=True):
            if self._open + count + cost <= self._n:
                return instant
        return None


def _midnight(ordinal: int, zone: ZoneInfo) -> Us:
    """A local day's first instant; not 00:00 where the clock is put forward at midnight."""
    day = datetime.fromordinal(ordinal).replace(tzinfo=zone)
    instant = day.astimezone(UTC)
    while instant.astimezone(zone).date() < day.date():
        instant += timedelta(minutes=15)
    return Us(int(instant.timestamp()) * SECOND)
