"""When a backlog is gone, in closed form, in seconds; None where nobody can say. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from callqueue.clocks import Us
from callqueue.limits.kinds import SECOND, Limit, Meter, Usage

TOLD_S = 0.15  # after which, usually, the ledger knows that a call was sent
WAY_S = 0.04  # from an answer to the next release, and from there to the wire
CHAINED = 4  # with more gates than this, none is taken in turn for the slowest

Sizes = Sequence[tuple[int, int]]  # (calls, values): so many values of a `per` have so many each


@dataclass(frozen=True)
class Gate:
    """A limit that a backlog must pass."""

    limit: Limit
    meter: Meter  # what is charged now
    sizes: Sizes = ()  # how the calls are spread over the values of its `per`, where it is per key
    lanes: int = 1  # over how many queues, where it is per queue
    emptiest: Meter | None = None  # what is charged of the queue with most room
    before: float = 0.0  # calls of other rules that wait and go first
    beside: int = 0  # calls of other rules that wait and take turns with these
    cost: float = 1.0  # of a call
    charged_s: float = 0.0  # seconds for which a call is charged before it ages; 0: nobody knows

    @property
    def is_full(self) -> bool:
        return (self.emptiest or self.meter).free < max(1, round(self.cost))

    def amount_with(self, calls: float) -> float:
        """What is charged to it (per key: to the key with most) until so many calls have gone."""
        if self.sizes:
            return gone_of_largest(self.sizes, math.ceil(calls)) * self.amount_of_call
        return (calls + self.before + min(calls, self.beside)) / self.lanes * self.amount_of_call

    @property
    def amount_of_call(self) -> float:
        """What a call takes, with what no other fits in: of 7 a minute, a call of 5 takes 7."""
        whole = self.limit.capacity // max(self.cost, 1e-9)
        return self.cost if self.limit.keeps_level or not whole else self.limit.capacity / whole

    def seconds_to_pass(self, amount: float, now: Us) -> float | None:
        way = WAY_S if self.charged_s and self.waits_for_answers else 0.0
        charged = self.charged_s + way
        evenly = self.limit.seconds_until_gone(self.meter, amount, now, charged)
        if self.emptiest is None:
            return evenly
        # The first ones go by the queue that has room, whatever the fullest waits for.
        by_one = self.limit.seconds_until_gone(self.emptiest, amount * self.lanes, now, charged)
        return min((one for one in (evenly, by_one) if one is not None), default=None)

    @property
    def waits_for_answers(self) -> bool:
        """Whether its room opens as calls are answered, or told of, and not with time alone."""
        return not self.limit.ages_unanswered or self.limit.keeps_level

    def last_period(self, amount: float, now: Us) -> tuple[float, float]:
        """In how many seconds the last period for `amount` begins; the share left for that."""
        if not amount:
            return 0.0, 0.0
        start, left = self.limit.last_period(self.meter, amount, now, self.charged_s)
        return start, left / amount

    def as_it_will_be(self, seconds: float, now: Us) -> Gate:
        """The gate in so many seconds: idle, if its window (no calendar) is over; else as it is."""
        limit = self.limit
        if seconds * SECOND < limit.window_us or limit.is_calendar:
            return self
        level = limit.capacity * limit.period_us
        meter = limit.meter(Usage(level=level, since=now), now)
        emptiest = meter if self.emptiest else None
        return replace(self, meter=meter, emptiest=emptiest, before=0.0)


def seconds_to_pass(gates: Sequence[Gate], calls: float, now: Us) -> float | None:
    """Seconds until so many calls have passed all of these gates; None where nobody can say."""
    # each gate alone; then of each its whole periods, and the others for what is left
    longest = 0.0
    for gate in gates:
        alone = gate.seconds_to_pass(gate.amount_with(calls), now)
        if alone is None:
            return None
        longest = max(longest, alone)
    slow = [gate for gate in gates if not gate.sizes] if len(gates) <= CHAINED else ()
    for gate in slow:
        start, share = gate.last_period(gate.amount_with(calls), now)
        if start:
            others = [other.as_it_will_be(start, now) for other in gates if other is not gate]
            longest = max(longest, start + (seconds_to_pass(others, calls * share, now) or 0.0))
    return longest


def place_of_slowest(gates: Sequence[Gate], calls: float, now: Us) -> int | None:
    """The place of the gate that takes longest alone (an unknown time is 0); None: all take 0."""
    alone = [gate.seconds_to_pass(gate.amount_with(calls), now) or 0.0 for gate in gates]
    return alone.index(max(alone)) if any(alone) else None


def seconds_charged(
    limit: Limit, latency: float, *, late: float = 0.0, is_told: bool = True
) -> float:
    """Seconds for which a call that takes `latency` from its release is charged before it ages; 0:
    nobody knows. `late`: sent so long after its slot; `is_told`: the ledger hears when it was sent.
    """
    if limit.ages_unanswered and is_told:
        known = TOLD_S if limit.keeps_level else limit.jitter_us / SECOND
        return min(latency, known + late)
    return latency


def gone_of_largest(sizes: Sizes, gone: int) -> int:
    """How many calls of the value with most are gone, of `gone` in all, as values take turns."""
    left, before, values = gone, 0, sum(count for _, count in sizes)
    for size, count in sorted(sizes):
        step = (size - before) * values
        if step >= left:
            return before + -(-left // values)
        left, before, values = left - step, size, values - count
    return before
