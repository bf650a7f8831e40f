"""A simulation of a drain, which follows each call: when each of so many would go, be sent and be
answered, under a rule's limits. The judge of the estimate in closed form.

It follows the ledger's rule: a call is charged until the ledger knows that it was sent, and then
ages from the earlier of its answer and `jitter` past its last byte. Pure; instants are
microseconds. Workers are never the bottleneck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from callqueue.limits.budgets import Book, Budget, cost_of
from callqueue.limits.kinds import SECOND, FixedWindow, Limit, TokenBucket, Usage

# microseconds after which the ledger knows, usually, that a call was sent which is not answered
TOLD = 150_000


class Lane:
    """One limit over the whole run. All calls cost the same, are sent in order and answered in
    order. Instants and `notice` are microseconds. `is_told`: whether the ledger is told that a call
    was sent before it is answered.

    Here a call fits once the charge of the call `room` places before it has ended: so it is with
    windows, and with what is in flight.
    """

    def __init__(self, limit: Limit, cost: int, values: int) -> None:
        self.limit, self.cost, self.values = limit, cost, values
        self.is_told = True
        self.waited = 0
        self.jitter = limit.jitter_us
        self._room = limit.capacity // cost
        self._ends: list[deque[tuple[int, bool]]] = [
            deque(maxlen=self._room) for _ in range(values)
        ]

    def free_at(self, number: int, at: int, notice: int) -> tuple[int, bool]:
        """From when on, not before `at`, call `number` fits; and whether that waits for an answer,
        which is noticed so much later.
        """
        ends = self._ends[number % self.values]
        if len(ends) < self._room:
            return at, False
        end, by_answer = ends[0]
        return max(at, end + notice if by_answer else end), by_answer

    def take(self, number: int, sent: int, answered: int) -> None:
        """Charge call `number`."""
        self._ends[number % self.values].append(self._end(sent, answered))

    def charge(self, usage: Usage, start: int, latency: int) -> None:
        """Charge what others took before `start`. Open attempts are answered like the rest."""
        aged = [(self.leaves(at), False, cost) for at, cost in usage.aged]
        charges = [charge for charge in aged if charge[0] > start]
        charges.append((*self._end(start, start + latency), usage.open))
        owed = 0
        for end, by_answer, cost in charges:
            owed += cost
            while owed >= self.cost:
                owed -= self.cost
                self._ends[0].append((end, by_answer))

    def leaves(self, instant: int) -> int:
        """When a charge that ages from `instant` no longer counts."""
        return instant + self.limit.window_us + 1 if self.limit.window_us else instant

    def known_at(self, sent: int, answered: int) -> int:
        """When the ledger knows that a call was sent: until then it is open."""
        if self.is_told and self.limit.ages_unanswered:
            return min(answered, sent + TOLD)
        return answered

    def aged_from(self, sent: int, answered: int) -> int:
        """From when a call ages."""
        return self.limit.aged_from(sent, answered)

    def _end(self, sent: int, answered: int) -> tuple[int, bool]:
        """When a call's charge ends, and whether that is with its answer, or with being told."""
        left, known = self.leaves(self.aged_from(sent, answered)), self.known_at(sent, answered)
        return (known, True) if known >= left else (left, False)


class CalendarLane(Lane):
    """A charge leaves with the window of its instant."""

    limit: FixedWindow

    def __init__(self, limit: FixedWindow, cost: int, values: int) -> None:
        super().__init__(limit, cost, values)
        self._window = (0, 0)

    def leaves(self, instant: int) -> int:
        if not self._window[0] <= instant + self.jitter < self._window[1]:
            self._window = self.limit.window(instant + self.jitter)
        return self._window[1] + self.jitter


class BucketLane(Lane):
    """A bucket: an open call holds its tokens, which leave when the call begins to age."""

    limit: TokenBucket

    def __init__(self, limit: TokenBucket, cost: int, values: int) -> None:
        super().__init__(limit, cost, values)
        self._cap = limit.burst * limit.period_us
        # Tokens times the period, and the instant of that.
        self._levels = [[self._cap, 0] for _ in range(values)]
        # From when each ages, and when the ledger knows.
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
        aged, known = self.aged_from(sent, answered), self.known_at(sent, answered)
        self._open[number % self.values].append((aged, known))

    def charge(self, usage: Usage, start: int, latency: int) -> None:
        level, at = self.limit.level_at(usage, start)
        self._levels[0] = [level, at]
        answered = start + latency
        open_calls = -(-usage.open // self.cost)
        one = self.aged_from(start, answered), self.known_at(start, answered)
        self._open[0].extend([one] * open_calls)

    def _settle(self, value: int) -> None:
        leave, _ = self._open[value].popleft()
        level, at = self._levels[value]
        level = min(self._cap, level + self.limit.n * max(0, leave - at))
        self._levels[value] = [level - self.cost * self.limit.period_us, max(at, leave)]


LANES: Mapping[type[Limit], type[Lane]] = {FixedWindow: CalendarLane, TokenBucket: BucketLane}

DELIVERY = 0.025  # seconds from a release to the wire, where the slot was not known ahead
NOTICE = 0.015  # seconds from an answer to a release that waited for it


@dataclass(frozen=True)
class Simulated:
    """What draining takes. `binding_limit` is the label of the limit that made calls wait longest;
    None: nothing did.

    `last_release` is when the last call went, in seconds.
    """

    rule: str
    calls: int
    seconds: float
    binding_limit: str | None
    last_release: float = 0.0


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
    is_told: bool = True,
) -> Simulated:
    """Drain `calls` calls of one `cost` from `start` on, each answered `latency` seconds after it
    was sent.

    `keys`: over how many keys they are spread, in turns. `usage`: what budgets are charged with at
    the start, by budget id. `is_told`: whether workers tell the ledger of calls under way, as they
    do of HTTP calls that follow no redirects. ValueError where a limit could never admit such a
    cost. Takes about a second for 100,000 calls.
    """
    pace = _Pace(*(round(seconds * SECOND) for seconds in (latency, delivery, notice)))
    lanes = []
    for budget in book.budgets[rule]:
        if charged := cost_of(cost, budget.limit.unit):
            lane = _lane(budget.limit, charged, _values(budget, book, keys))
            lane.is_told = is_told
            if usage and budget.id in usage:
                lane.charge(usage[budget.id], start, pace.latency)
            lanes.append(lane)
    return _drain(rule, calls, lanes, start, pace)


@dataclass(frozen=True)
class _Pace:
    """What things take, in microseconds."""

    latency: int
    delivery: int
    notice: int


def _drain(rule: str, calls: int, lanes: Sequence[Lane], start: int, pace: _Pace) -> Simulated:
    now = sent = answered = start
    # whether the slot at `now` was known ahead, so that the call is at the wire when it opens
    is_planned = False
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
    slowest = max(lanes, key=lambda lane: lane.waited, default=None)
    label = slowest.limit.label if slowest is not None and slowest.waited else None
    return Simulated(rule, calls, (answered - start) / SECOND, label, (now - start) / SECOND)


def _lane(limit: Limit, cost: int, values: int) -> Lane:
    if cost > limit.capacity:
        allowed = f"{limit.label} allows {limit.capacity}"
        raise ValueError(f"a cost of {cost} could never be admitted: {allowed}")
    kind = next((lane for of, lane in LANES.items() if isinstance(limit, of)), Lane)
    return kind(limit, cost, values)


def _values(budget: Budget, book: Book, keys: int) -> int:
    """Over how many values of the limit's `per` the calls are spread."""
    if budget.limit.is_per_rule:
        return 1
    return len(book.queues_of(budget)) if budget.limit.is_per_queue else keys
