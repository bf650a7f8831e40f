"""A kind of limit that callqueue does not have: what the recipe "Add a limit" makes of it."""

from __future__ import annotations

from dataclasses import dataclass

from callqueue.limits.kinds.base import Meter, RateLimit, Usage, with_known_fields
from callqueue.limits.kinds.windows import WindowMeter


@with_known_fields
@dataclass(frozen=True)
class Spaced(RateLimit):
    """Any two calls are more than period / n apart."""

    @property
    def capacity(self) -> int:
        return 1

    @property
    def window_us(self) -> int:
        return -(-self.period_us // self.n)

    def meter(self, usage: Usage, now: int) -> Meter:
        aged = [charge for charge in usage.aged if charge[0] + self.window_us >= now]
        return WindowMeter(1, usage.open, aged, now, self.window_us)
