"""How a rule's backlog drains: when so many of its calls are gone, as its limits let them, if they
are all that holds it back. Pure: a page draws it, and asks what another rate would do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from callqueue.limits.kinds import Limit, Meter

POINTS = 60  # of a curve

Sizes = Sequence[tuple[int, int]]  # so many calls each, for so many values of a limit's `per`


@dataclass(frozen=True)
class Gate:
    """A limit that the backlog must pass.

    `meter`: the limit's, now. `sizes`: how the calls are spread over the values of its `per`, where
    it is per key; `lanes`: over how many queues, where it is per queue. `before`: calls of other
    rules that go first, and `beside`: that take turns. `cost`: what a call costs; `charged_s`: for
    how many seconds it is charged before it ages, 0 where nobody knows.
    """

    limit: Limit
    meter: Meter
    sizes: Sizes = ()
    lanes: int = 1
    before: int = 0
    beside: int = 0
    cost: float = 1.0
    charged_s: float = 0.0

    @property
    def is_full(self) -> bool:
        """Whether nothing more fits now. Of a limit per key that cannot be said."""
        return not self.limit.is_keyed and self.meter.free <= 0

    def seconds(self, calls: int, now: int) -> float | None:
        """Seconds until so many calls of the backlog have passed; None where nobody can say."""
        if self.limit.is_keyed:
            amount: float = depth(self.sizes, calls)
        else:
            amount = (calls + self.before + min(calls, self.beside)) / self.lanes
        return self.passed_s(amount, now)

    def passed_s(self, amount: float, now: int) -> float | None:
        """Seconds until so many calls have passed that all count in the same window."""
        return self.limit.seconds_until_gone(self.meter, amount * self.cost, now, self.charged_s)


@dataclass(frozen=True)
class Drain:
    """A backlog of `calls`, the gates it must pass, and what else is known: `now` in microseconds,
    seconds that a call takes, calls a second that were sent lately, and seconds that it is held.
    `belated`: of holds on keys, the seconds that each lasts, and the calls that it keeps back,
    which go last.
    """

    calls: int
    gates: Sequence[Gate]
    now: int
    latency: float = 0.0
    pace: float = 0.0
    held: float = 0.0
    belated: Sequence[tuple[float, int]] = ()

    def seconds(self, calls: int | None = None) -> float | None:
        """Seconds until so many calls are answered, or all; None where nobody can say."""
        calls = self.calls if calls is None else calls
        if not calls:
            return 0.0
        free = self._free(calls)
        waits = [free] if free is not None else []
        if calls > self.calls - sum(kept for _, kept in self.belated):
            waits += [self._after(seconds, kept) for seconds, kept in self.belated]
        longest = max(waits, default=math.inf)
        return None if free is None or math.isinf(longest) else longest

    def _free(self, calls: int) -> float | None:
        """The same without what is kept back by holds on keys."""
        taken = [gate.seconds(calls, self.now) for gate in self.gates]
        if not taken:
            return self.held + calls / self.pace if self.pace else None
        known = [seconds for seconds in taken if seconds is not None]
        return self.held + max(known) + self.latency if len(known) == len(taken) else None

    def _after(self, seconds: float, kept: int) -> float:
        """Seconds until the calls of one value are gone that are kept back for so long."""
        taken = [gate.passed_s(kept, self.now) for gate in self.gates if gate.limit.is_keyed]
        known = [one for one in taken if one is not None]
        return seconds + max(known, default=0.0) + self.latency

    @property
    def kept_back(self) -> int:
        """The calls that holds on keys keep back until somebody resumes them."""
        return sum(calls for seconds, calls in self.belated if math.isinf(seconds))

    def curve(self) -> list[tuple[float, int]]:
        """How many calls are left after so many seconds, as long as somebody can say; empty where
        nobody can.
        """
        points = [(0.0, self.calls)]
        if self.held and not math.isinf(self.held):
            points.append((self.held, self.calls))
        for part in range(1, POINTS + 1):
            gone = -(-self.calls * part // POINTS)
            seconds = self.seconds(gone)
            if seconds is None:
                return points if part > 1 else []
            points.append((max(seconds, points[-1][0]), self.calls - gone))
        return points


def depth(sizes: Sizes, calls: int) -> int:
    """How many calls of each value are gone, where values take turns, when so many are gone."""
    left, before, values = calls, 0, sum(count for _, count in sizes)
    for size, count in sorted(sizes):
        step = (size - before) * values
        if step >= left:
            return before + -(-left // values)
        left, before, values = left - step, size, values - count
    return before
