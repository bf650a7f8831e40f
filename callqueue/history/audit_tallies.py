"""The tallies of an audit: by kind of limit, the highest use of one budget, and its average share.

In: instants in microseconds, in order, with costs. Out: exact figures. They count by themselves,
and share no arithmetic with what releases calls. Pure.
"""

from __future__ import annotations

from collections import deque

from callqueue.limits.kinds import SECOND, Concurrency, FixedWindow, Limit, TokenBucket


def tally_of(limit: Limit) -> Tally:
    """The tally that counts as this limit does."""
    if isinstance(limit, FixedWindow):
        return _CalendarTally(limit)
    if isinstance(limit, TokenBucket):
        return _BucketTally(limit)
    return _FlightTally(limit) if isinstance(limit, Concurrency) else _WindowTally(limit)


class Tally:
    """One budget for one value of its `per`: instants go in, in order; out come the highest use and
    the average share.
    """

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.highest = self.counted = 0

    def add(self, instant: int, cost: int) -> None:
        """So much was counted at this instant; for what is in flight, a negative cost is its
        end.
        """
        raise NotImplementedError

    def amounts(self) -> tuple[float, float]:
        """What was used so far, and what could have been: both only grow."""
        raise NotImplementedError

    def share(self) -> float:
        """The average use as a share of the limit."""
        used, room = self.amounts()
        return used / room if room else self.highest / self.limit.capacity


class _Level(Tally):
    """Use that has a level at every instant: its average is over the time from the first to the
    last change.

    Time in which it stood at 0 for longer than `pause_us` is left out: nothing was waiting then.
    """

    pause_us = SECOND

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit)
        self.level = self._area = self._time = 0
        self._at: int | None = None

    def change(self, instant: int, by: int) -> None:
        if self._at is not None:
            length = instant - self._at
            if self.level or length <= self.pause_us:
                self._area += self.level * length
                self._time += length
        self._at = instant
        self.level += by
        self.highest = max(self.highest, self.level)

    def amounts(self) -> tuple[float, float]:
        return self._area / SECOND, self._time * self.limit.capacity / SECOND


class _FlightTally(_Level):
    """Concurrency: how many are in flight."""

    def add(self, instant: int, cost: int) -> None:
        self.counted += max(0, cost)
        self.change(instant, cost)


class _WindowTally(_Level):
    """Sliding window: what the window that ends here holds. Exact: nothing is put into bins."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit)
        self.pause_us = limit.window_us
        self._instants: deque[int] = deque()
        self._costs: deque[int] = deque()

    def add(self, instant: int, cost: int) -> None:
        while self._instants and self._instants[0] + self.pause_us <= instant:
            self.change(self._instants.popleft() + self.pause_us, -self._costs.popleft())
        self._instants.append(instant)
        self._costs.append(cost)
        self.counted += cost
        self.change(instant, cost)

    def share(self) -> float:
        """Where all of it took no longer than a window, the whole window is what was used of it."""
        if self._time < self.pause_us:
            return self.highest / self.limit.capacity
        return super().share()


class _CalendarTally(Tally):
    """Fixed window: each calendar window by itself. The last one, which may not be over, is left
    out of the average.
    """

    limit: FixedWindow

    def __init__(self, limit: FixedWindow) -> None:
        super().__init__(limit)
        self._window = (0, 0)
        self._count = self._over = self._windows = 0

    def add(self, instant: int, cost: int) -> None:
        if not self._window[0] <= instant < self._window[1]:
            if self._count:
                self._over, self._windows = self._over + self._count, self._windows + 1
            self._window, self._count = self.limit.window(instant), 0
        self._count += cost
        self.counted += cost
        self.highest = max(self.highest, self._count)

    def amounts(self) -> tuple[float, float]:
        return self._over, self._windows * self.limit.n

    def share(self) -> float:
        return super().share() if self._windows else self._count / self.limit.n


class _BucketTally(Tally):
    """Token bucket, full at first: the most tokens that it ever lacked. What spilled over while
    calls went is unused.
    """

    limit: TokenBucket

    def __init__(self, limit: TokenBucket) -> None:
        super().__init__(limit)
        self._cap = self._level = limit.burst * limit.period_us
        self._at: int | None = None
        self._spilled = 0

    def add(self, instant: int, cost: int) -> None:
        if self._at is not None:
            level = self._level + self.limit.n * (instant - self._at)
            spilled = max(0, level - self._cap)
            if spilled <= self.limit.n * max(self.limit.period_us, SECOND):
                self._spilled += spilled
            self._level = min(self._cap, level)
        self._at = instant
        self._level -= cost * self.limit.period_us
        self.counted += cost
        self.highest = max(self.highest, -(-(self._cap - self._level) // self.limit.period_us))

    def amounts(self) -> tuple[float, float]:
        taken = self.counted * self.limit.period_us
        return taken / SECOND, (taken + self._spilled) / SECOND

    def share(self) -> float:
        used, room = self.amounts()
        return used / (room + max(0, self._level) / SECOND) if used else 0.0
