"""A simulation of a drain, which follows each call through the meters of its limits: when each of
so many would go, be sent and be answered. The judge of the estimate in closed form.

Pure; instants are microseconds. Workers are never the bottleneck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from callqueue.limits.budgets import Book
from callqueue.limits.kinds import SECOND, Limit, TokenBucket, Usage

# microseconds after which the ledger knows, usually, that a call was sent which is not answered
TOLD = 150_000
DELIVERY = 0.025  # seconds from a release to the wire, where the slot was not known ahead
NOTICE = 0.015  # seconds from an answer to a release that waited for it


class Simulated(NamedTuple):
    """Seconds until the last call is answered, and until it goes."""

    seconds: float
    last_release: float


class _Value:
    """The charges under one value of a limit. All calls cost the same and are sent in order."""

    def __init__(self, limit: Limit, cost: int, usage: Usage) -> None:
        self.limit, self.cost, self.usage = limit, cost, usage
        self.open: deque[tuple[int, int]] = deque()  # from when each ages, when the ledger knows

    def free_at(self, at: int, notice: int) -> tuple[int, bool]:
        """From when on a call fits; and whether that waits for an answer, noticed so much later."""
        by_answer = False
        while True:
            meter = self.limit.meter(self._known(at), at)
            if (free := meter.free_at(self.cost)) is not None:
                return free, by_answer and free == at
            at, by_answer = max(at, self.open[0][1]) + notice, True

    def take(self, sent: int, answered: int) -> None:
        told = min(answered, sent + TOLD) if self.limit.ages_unanswered else answered
        self.open.append((self.limit.aged_from(sent, answered), told))

    def _known(self, at: int) -> Usage:
        """What the ledger knows at that time; of a window no more than fills it."""
        aged = list(self.usage.aged)
        while self.open and self.open[0][1] <= at:
            aged.append((self.open.popleft()[0], self.cost))
        self.usage = replace(self.usage, aged=aged, open=self.cost * len(self.open))
        if isinstance(self.limit, TokenBucket):
            level, since = self.limit.level_at(self.usage, at)
            self.usage = replace(self.usage, aged=[], level=level, since=since)
        else:
            self.usage = replace(self.usage, aged=aged[-self.limit.capacity :])
        return self.usage


def simulate(
    book: Book,
    rule: str,
    calls: int,
    *,
    latency: float = 0.2,
    start: int = 0,
    cost: int = 1,
    keys: int = 1,
    usage: Mapping[str, Usage] | None = None,
    delivery: float = DELIVERY,
    notice: float = NOTICE,
) -> Simulated:
    """Drain `calls` calls of one `cost` from `start` on, each answered `latency` seconds after it
    was sent.

    `keys`: over how many keys they are spread, in turns. `usage`: what budgets are charged with at
    the start, by budget id; the others are idle.
    """
    late, way, noticed = (round(seconds * SECOND) for seconds in (latency, delivery, notice))
    lanes = []
    for budget in book.budgets[rule]:
        limit, number = budget.limit, keys if budget.limit.is_keyed else 1
        idle = Usage(level=limit.capacity * limit.period_us, since=start)
        lanes.append(
            [_Value(limit, cost, (usage or {}).get(budget.id, idle)) for _ in range(number)]
        )
    now = sent = answered = start
    is_planned = False  # whether the slot at `now` was known ahead: the call is at the wire by then
    for number in range(calls):
        release, by_answer = now, False
        values = [lane[number % len(lane)] for lane in lanes]
        for value in values:
            instant, waits_for_answer = value.free_at(release, noticed)
            if instant > release:
                release, by_answer = instant, waits_for_answer
        if release > now:
            now, is_planned = release, not by_answer
        sent = max(sent, now if is_planned else now + way)
        answered = sent + late
        for value in values:
            value.take(sent, answered)
    return Simulated((answered - start) / SECOND, (now - start) / SECOND)
