"""Simulates the draining of a rule: when each of so many calls would go, be sent and be answered,
under the rule's limits.

In: a book, a rule's name, a number of calls, what a call takes. Out: how long it takes, and which
limit binds. It follows the ledger's rule: a call is charged until the ledger knows that it was
sent, and then ages from the earlier of its answer and `jitter` past its last byte. Pure: no clock,
no database; instants are microseconds. It assumes that workers are never the bottleneck.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from callqueue.limits.budgets import Book, Budget, cost_of
from callqueue.limits.kinds import SECOND, Limit, Usage
from callqueue.limits.kinds.lanes import Lane

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
            lane.is_told = is_told and not book.rules[rule].redirects
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


def _lane(limit: Limit, cost: int, values: int) -> Lane:
    if cost > limit.capacity:
        allowed = f"{limit.label} allows {limit.capacity}"
        raise ValueError(f"a cost of {cost} could never be admitted: {allowed}")
    return limit.lane(cost, values)


def _values(budget: Budget, book: Book, keys: int) -> int:
    """Over how many values of the limit's `per` the calls are spread."""
    if budget.limit.is_per_rule:
        return 1
    return len(book.queues_of(budget)) if budget.limit.is_per_queue else keys
