"""Where one rule stands, from what was read of all of them: what it is doing, what holds it, and
when its backlog is gone. Reads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from callqueue.database import to_us
from callqueue.limits.budgets import Budget, key_part
from callqueue.limits.kinds import SECOND
from callqueue.operations import histograms
from callqueue.operations.attempts_now import InFlight
from callqueue.operations.backlog import Backlog
from callqueue.operations.draining import Drain
from callqueue.operations.history import Lately, PeakUse

STALLED = 10 * SECOND  # after which a released call that no worker began says that none is there
FAILING = 0.2  # share of failed attempts over a quarter of an hour from which a rule is failing
FULL = 60 * SECOND  # for so long after a window was full a limit is taken to be what binds
ENDLESS = float("inf")

# What a rule is doing, the worst first.
STATES = (
    "held", "no_dispenser", "no_workers", "failing", "stuck", "at_limit", "draining", "idle",
)  # fmt: skip


@dataclass(frozen=True)
class HoldNow:
    """A hold in force. `source`: who laid it."""

    rule: str
    per: str
    value: str
    until: datetime | None
    reason: str
    source: str

    @property
    def is_on_keys(self) -> bool:
        """Whether it keeps back the calls of some keys, and not of all."""
        return self.per not in ("rule", "queue")

    def seconds(self, now: int) -> float:
        """Seconds until it ends; infinite where it does not by itself."""
        return ENDLESS if self.until is None else max(0.0, (to_us(self.until) - now) / SECOND)


@dataclass(frozen=True)
class Standing:
    """Where one rule stands. `hold`: what holds the whole rule; `holds`: all. `drain`: how its
    backlog goes; None where it has none. `peaks`: the highest use of its limits within the last
    hour, in the settings' order. `rate`: attempts answered a second, over the last minute;
    `latency`: seconds that each took, 0 where none was.
    """

    name: str
    queues: tuple[str, ...]
    state: str
    backlog: Backlog
    in_flight: InFlight
    hold: HoldNow | None
    holds: Sequence[HoldNow]
    lately: Lately
    peaks: Sequence[tuple[Budget, PeakUse | None]]
    drain: Drain | None
    drained_s: float | None
    rate: float
    latency: float

    @property
    def p95(self) -> float | None:
        """The 95th percentile of the wait, in seconds, over the last quarter of an hour."""
        return histograms.percentile(self.lately.quarter.waits, histograms.P95)

    def doing(self, now: int, is_dispensing: bool) -> str:
        """What it is doing: the worst that can be said of it."""
        ready, quarter = self.backlog.ready, self.lately.quarter
        if self.hold is not None:
            return "held"
        if not is_dispensing and (ready or self.in_flight.count):
            return "no_dispenser"
        if self.in_flight.is_stalled(now - STALLED):
            return "no_workers"
        if quarter.failed and quarter.failed >= FAILING * quarter.sent:
            return "failing"
        if not ready:
            return "idle"
        if self._is_at_limit(now):
            return "at_limit"
        return "draining" if self.rate or self.in_flight.count else "stuck"

    def _is_at_limit(self, now: int) -> bool:
        """Whether a limit is used up: by what it is charged with now, or by what one of its windows
        held that has hardly gone by.
        """
        if self.drain is not None and any(gate.is_full for gate in self.drain.gates):
            return True
        return any(
            peak is not None
            and peak.full_until * SECOND >= now - budget.limit.window_us - FULL
            and bool(self.rate or budget.limit.window_us > FULL)
            for budget, peak in self.peaks
        )


def hold_on_all(holds: Sequence[HoldNow], queues: Sequence[str], now: int) -> HoldNow | None:
    """What holds a whole rule: of several holds the one that ends last; or, where each of its
    queues is held, the one that is the first to let a queue go.
    """
    whole = [one for one in holds if one.per == "rule"]
    if whole:
        return max(whole, key=lambda one: one.seconds(now))
    by_queue: dict[str, HoldNow] = {}
    for one in holds:
        if one.per == "queue":
            known = by_queue.get(one.value)
            if known is None or one.seconds(now) > known.seconds(now):
                by_queue[one.value] = one
    if queues and all(queue in by_queue for queue in queues):
        return min((by_queue[queue] for queue in queues), key=lambda one: one.seconds(now))
    return None


def belated(
    holds: Sequence[HoldNow], keys: Sequence[tuple[str, int]], now: int
) -> tuple[tuple[float, int], ...]:
    """What a rule's holds on keys keep back: for so many seconds so many calls, a hold each."""
    on_keys: dict[tuple[str, str], float] = {}
    for one in holds:
        if one.is_on_keys:
            scope = (one.per, one.value)
            on_keys[scope] = max(one.seconds(now), on_keys.get(scope, 0.0))
    found: dict[tuple[str, str], int] = {}
    pers = {per for per, _ in on_keys}
    for key, calls in keys:
        for per in pers:
            scope = (per, key_part(key, per))
            if scope in on_keys:
                found[scope] = found.get(scope, 0) + calls
    return tuple((on_keys[scope], calls) for scope, calls in found.items())


def drained_s(drain: Drain | None, flight: InFlight, now: int, is_dispensing: bool) -> float | None:
    """Seconds until all that waits is gone; None where nobody can say."""
    if drain is None:
        return 0.0
    if not is_dispensing or flight.is_stalled(now - STALLED):
        return None
    return drain.seconds()


def held_s(holds: Mapping[str, HoldNow | None], now: int) -> dict[str, float]:
    """By rule, the seconds until the hold on the whole rule ends."""
    return {rule: one.seconds(now) for rule, one in holds.items() if one is not None}
