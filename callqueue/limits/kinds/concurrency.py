"""Concurrency: at most n calls in flight."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from django.core.exceptions import ImproperlyConfigured

from callqueue.limits.kinds.base import Limit, Meter, Usage
from callqueue.limits.kinds.fields import check_count, with_known_fields
from callqueue.limits.kinds.sliding_window import WindowMeter


@with_known_fields
@dataclass(frozen=True)
class Concurrency(Limit):
    """At most n in flight: released and not yet answered."""

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

    def meter(self, usage: Usage, now: int) -> Meter:
        return WindowMeter(self.n, usage.open, [], now, 0)

    def with_rate(self, rate: str) -> Self:
        if not rate.isdecimal():
            raise ImproperlyConfigured(f"Concurrency.n: {rate!r} is not a whole number")
        return replace(self, n=int(rate))

    def times(self, count: int) -> Self:
        return replace(self, n=self.n * count)

    def seconds_until_gone(
        self, meter: Meter, amount: float, now: int, latency: float
    ) -> float | None:
        if latency:
            return max(0, math.ceil(amount + meter.used) - 1) // self.n * latency
        return 0.0 if amount <= meter.free else None

    def last_period(
        self, meter: Meter, amount: float, now: int, latency: float
    ) -> tuple[float, float]:
        return 0.0, amount
