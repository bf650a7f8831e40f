"""Simulates the draining of a rule: when each of so many calls would go, be sent and be answered,
under the rule's limits.

In: a book, a rule's name, a number of calls, what a call takes. Out: how long it takes, and which
limit binds. It follows the ledger's rule: a call is charged until its answer, and then ages from
the earlier of its answer and `jitter` past its last byte. Pure: no clock, no database; instants are
microseconds. It assumes that workers are never the bottleneck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from callqueue.limits.budgets import Book, Budget, cost_of
from callqueue.limits.kinds import SECOND, FixedWindow, Limit, TokenBucket, Usage, bucket_level

DELIVERY = 0.025  # seconds from a release to the wire, where the slot was not known ahead
NOTICE = 0.015  # seconds from an answer to a release that waited for it
POINTS = 400  # of the curve that a plot shows


@dataclass(frozen=True)
class Simulated:
    """What draining takes. `binding_limit` is the label of the limit that made calls wait longest;
    None: nothing did.

    `curve` holds (seconds, calls sent so far), thinned out; `last_release` is when the last call
    went, in seconds.
    """

    rule: str
    calls: int
    seconds: float
    binding_limit: str | None
    last_release: float = 0.0
    curve: Sequence[tuple[float, int]] = ()


def simulate(
    book: Book,
    rule: str,
    calls: int,
    *,
    latency: float = 0.2,
    start: int = 0,
    cost: Any = 1,
    keys: int = 1,
    usage: Mapping[str, Usage] | None = None,
    delivery: float = DELIVERY,
    notice: float = NOTICE,
) -> Simulated:
    """Drain `calls` calls of one `cost` from `start` on, each answered `latency` seconds after it
    was sent.

    `keys`: over how many keys they are spread, in turns. `usage`: what budgets are charged with at
    the start, by budget id. ValueError where a limit could never admit such a cost. Takes about a
    second for 100,000 calls.
    """
    pace = _Pace(*(round(seconds * SECOND) for seconds in (latency, delivery, notice)))
    lanes = []
    for budget in book.budgets[rule]:
        if charged := cost_of(cost, budget.limit.unit):
            lane = _lane(budget, charged, _values(budget, book, keys))
            if usage and budget.id in usage:
                lane.charge(usage[budget.id], start, pace)
            lanes.append(lane)
    return _drain(rule, calls, lanes, start, pace)


@dataclass(frozen=True)
class _Pace:
    """What things take, in microseconds."""

    latency: int
    delivery: int
    notice: int


def _drain(rule: str, calls: int, lanes: Sequence[_Lane], start: int, pace: _Pace) -> Simulated:
    now = sent = answered = start
    # whether the slot at `now` was known ahead, so that the call is at the wire when it opens
    is_planned = False
    every = max(1, calls // POINTS)
    curve: list[tuple[float, int]] = []
    for number in range(calls):
        release, binding, by_answer = now, None, False
        for lane in lanes:
            instant, waits_for_answer = lane.free_at(number, release, pace.notice)
            if instant > release:
                release, binding, by_answer = instant, lane, waits_for_answer
        if binding is not None:
            binding.waited += release - now
            now, is_planned = release, not by_answer
        sent = max(sent, now if is_planned else now + pace.delivery)
        answered = sent + pace.latency
        for lane in lanes:
            lane.take(number, sent, answered)
        if number % every == 0 or number == calls - 1:
            curve.append(((sent - start) / SECOND, number + 1))
    slowest = max(lanes, key=lambda lane: lane.waited, default=None)
    label = slowest.limit.label if slowest is not None and slowest.waited else None
    return Simulated(
        rule, calls, (answered - start) / SECOND, label, (now - start) / SECOND, tuple(curve)
    )


def _lane(budget: Budget, cost: int, values: int) -> _Lane:
    if cost > budget.limit.capacity:
        raise ValueError(
            f"a cost of {cost} could never be admitted: {budget.limit.label} allows {budget.limit.capacity}"
        )
    if isinstance(budget.limit, TokenBucket):
        return _BucketLane(budget.limit, cost, values)
    return _EndsLane(budget.limit, cost, values)


def _values(budget: Budget, book: Book, keys: int) -> int:
    """Over how many values of the limit's `per` the calls are spread."""
    if budget.limit.per == "rule":
        return 1
    if budget.limit.per == "queue":
        return len({queue for rule in budget.rules for queue in book.rules[rule].queue_names})
    return keys


class _Lane:
    """One limit over the whole run. All calls cost the same, are sent in order and answered in
    order.
    """

    def __init__(self, limit: Limit, cost: int, values: int) -> None:
        self.limit, self.cost, self.values = limit, cost, values
        self.waited = 0
        self._jitter = round(limit.jitter * SECOND)

    def free_at(self, number: int, at: int, notice: int) -> tuple[int, bool]:
        """From when on, not before `at`, call `number` fits; and whether that waits for an
        answer.
        """
        raise NotImplementedError

    def take(self, number: int, sent: int, answered: int) -> None:
        """Charge call `number`."""
        raise NotImplementedError

    def charge(self, usage: Usage, start: int, pace: _Pace) -> None:
        """Charge what others took before `start`; open attempts are taken to be answered like the
        rest.
        """
        raise NotImplementedError

    def aged_from(self, sent: int, answered: int) -> int:
        """From when an answered call ages."""
        return answered if self.limit.strict else min(answered, sent + self._jitter)


class _EndsLane(_Lane):
    """Windows and concurrency: a call fits once the charge of the call `room` places before it has
    ended.
    """

    def __init__(self, limit: Limit, cost: int, values: int) -> None:
        super().__init__(limit, cost, values)
        self._room = limit.capacity // cost
        self._ends: list[deque[tuple[int, bool]]] = [
            deque(maxlen=self._room) for _ in range(values)
        ]
        self._window = (0, 0)

    def free_at(self, number: int, at: int, notice: int) -> tuple[int, bool]:
        ends = self._ends[number % self.values]
        if len(ends) < self._room:
            return at, False
        end, by_answer = ends[0]
        return max(at, end + notice if by_answer else end), by_answer

    def take(self, number: int, sent: int, answered: int) -> None:
        left = self._leaves(self.aged_from(sent, answered))
        self._ends[number % self.values].append(
            (answered, True) if answered >= left else (left, False)
        )

    def charge(self, usage: Usage, start: int, pace: _Pace) -> None:
        charges = [
            (self._leaves(at), False, cost) for at, cost in usage.aged if self._leaves(at) > start
        ]
        answered = start + pace.latency
        left = self._leaves(self.aged_from(start, answered))
        charges.append(
            (answered, True, usage.open) if answered >= left else (left, False, usage.open)
        )
        owed = 0
        for end, by_answer, cost in charges:
            owed += cost
            while owed >= self.cost:
                owed -= self.cost
                self._ends[0].append((end, by_answer))

    def _leaves(self, instant: int) -> int:
        """When a charge that ages from `instant` no longer counts."""
        if isinstance(self.limit, FixedWindow):
            if not self._window[0] <= instant + self._jitter < self._window[1]:
                self._window = self.limit.window(instant + self._jitter)
            return self._window[1] + self._jitter
        return instant + self.limit.window_us + 1 if self.limit.window_us else instant


class _BucketLane(_Lane):
    """A token bucket: open calls hold their tokens; a token leaves at the instant from which its
    call ages.
    """

    limit: TokenBucket

    def __init__(self, limit: TokenBucket, cost: int, values: int) -> None:
        super().__init__(limit, cost, values)
        self._cap = limit.burst * limit.period_us
        self._levels = [
            [self._cap, 0] for _ in range(values)
        ]  # tokens times the period, and the instant of that
        self._open: list[deque[tuple[int, int]]] = [
            deque() for _ in range(values)
        ]  # aged from, answered

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

    def charge(self, usage: Usage, start: int, pace: _Pace) -> None:
        level, at = bucket_level(self.limit, usage, start)
        self._levels[0] = [level, at]
        answered = start + pace.latency
        self._open[0].extend(
            [(self.aged_from(start, answered), answered)] * -(-usage.open // self.cost)
        )

    def _settle(self, value: int) -> None:
        leave, _ = self._open[value].popleft()
        level, at = self._levels[value]
        level = min(self._cap, level + self.limit.n * max(0, leave - at))
        self._levels[value] = [level - self.cost * self.limit.period_us, max(at, leave)]
