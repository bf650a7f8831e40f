"""The tallies of token buckets per key: what is open, and when each would be full again."""

from __future__ import annotations

from callqueue.ledger import tally_rows
from callqueue.ledger.window_tallies import Tallies
from callqueue.limits.kinds import SECOND, Limit, Meter, TokenBucket, Usage

LATE = 5 * SECOND  # how much later than it ended an attempt may be seen to have ended


class BucketTallies(Tallies):
    """A token bucket's tallies: what ended less than LATE ago is taken to leave now."""

    limit: TokenBucket

    @classmethod
    def suits(cls, limit: Limit) -> bool:
        return limit.is_keyed and limit.window_us > 60 * SECOND

    def meter(self, value: str) -> Meter:
        return _BucketMeter(self, value)

    def horizon(self) -> int:
        return self.now - LATE

    def looks_ahead_to(self, end: int) -> int:
        return end

    def take_away(self, value: str, ended: int, cost: int) -> None:
        self._lower(value, ended, cost)
        self.change(value, -cost)

    def settle_ended(self, value: str, ended: int, charged: int, cost: int) -> None:
        """What it cost more is missing from the level; what it cost less may be in it no more."""
        super().settle_ended(value, ended, charged, cost)
        if ended <= self.kept.left and cost > charged:
            self.load([value])
            self._lower(value, ended, cost - charged)

    def count(self, horizon: int) -> int:
        sealed = self.kept.left  # what ended before is in the level
        empty_until = horizon + self.time_to_fill(self.limit.burst)
        for value, ended, cost in tally_rows.by_slots(self.using, self.budget, horizon, sealed):
            tally = self.of(value)
            tally.full_at = max(tally.full_at or empty_until, ended) + self.time_to_fill(cost)
        for value, cost in tally_rows.charged(self.using, self.budget, sealed):
            tally = self.of(value)
            tally.used, tally.full_at = tally.used + cost, tally.full_at or empty_until
        return sealed

    def _lower(self, value: str, ended: int, cost: int) -> None:
        """Take so much out of the level; what is known late is as if it had been taken later."""
        tally = self.of(value)
        tally.full_at = max(tally.full_at, ended) + self.time_to_fill(cost)
        tally.is_changed = True

    def find_next(self) -> int:
        return self.now + SECOND

    def time_to_fill(self, cost: int) -> int:
        """How long the bucket takes to get so many tokens, in whole microseconds, rounded up."""
        return -(-cost * self.limit.period_us // self.limit.n)


class _BucketMeter(Meter):
    """A meter over the tally of one bucket."""

    def __init__(self, tallies: BucketTallies, value: str) -> None:
        self._tallies, self._tally, limit = tallies, tallies.of(value), tallies.limit
        level = limit.burst * limit.period_us - limit.n * max(0, self._tally.full_at - tallies.now)
        self._meter = limit.meter(Usage(self._tally.used, (), tallies.now, level), tallies.now)

    @property
    def used(self) -> int:
        return self._meter.used

    @property
    def free(self) -> int:
        return self._meter.free

    def free_at(self, cost: int) -> int | None:
        instant = self.known_at(cost)
        return self._tallies.next_leave() if instant is None else instant

    def known_at(self, cost: int) -> int | None:
        """When the cost fits; None where it waits for what is open."""
        return self._meter.free_at(cost)

    def take(self, cost: int) -> None:
        self._meter.take(cost)
        self._tally.used, self._tally.is_changed = self._tally.used + cost, True
