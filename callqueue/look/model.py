"""What a look sees: types alone. Instants are microseconds, lengths of time seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from callqueue.clocks import Us
from callqueue.database import from_us, to_us
from callqueue.history.sums import Recent
from callqueue.limits.budgets import Book, scopes_of
from callqueue.limits.in_force import Difference
from callqueue.limits.kinds import SECOND
from callqueue.limits.rules import Rule
from callqueue.look import attempts, estimate
from callqueue.look.alive import Sign
from callqueue.look.attempts import InFlight, Pace, Stall
from callqueue.look.estimate import Gate
from callqueue.look.limits import LimitLook
from callqueue.look.waiting import Waiting

PATIENCE_S = 10  # for which a call may wait before its limit is what people ask about
LASTING_S = 60  # after which a backlog shows how fast calls really go
FAILING = 0.2  # share of failed attempts over a quarter of an hour from which a rule is failing
GROWING = 1.1  # times as many come in as go out
PERIODS = 3  # of a limit, within which what goes through it is known from the pace
FOREVER = float("inf")

# What a rule is doing, the worst first. The first five are troubles: a rule may have several.
STATES = (
    "no_dispenser", "no_workers", "held", "failing", "stuck", "at_limit", "draining", "ok",
)  # fmt: skip
TROUBLES = STATES[:5]


@dataclass(frozen=True)
class HoldLook:
    rule: str
    per: str
    value: str
    until: datetime | None  # wall time; None: until it is resumed
    reason: str
    source: str  # who laid it

    @property
    def is_on_keys(self) -> bool:
        return self.per not in ("rule", "queue")

    def is_on_key(self, key: str | None) -> bool:
        return (self.per, self.value) in scopes_of(key or "")

    def seconds_left(self, wall: Us) -> float:
        """Seconds until it ends, by what the clock shows; FOREVER: it does not end by itself."""
        return FOREVER if self.until is None else max(0.0, (to_us(self.until) - wall) / SECOND)


@dataclass(frozen=True)
class RuleLook:
    name: str
    rule: Rule
    now: Us
    moved: int  # wall time less ledger time
    is_dispensing: bool  # any dispenser runs
    has_fallen_silent: bool  # the last one did not end, and gives no sign of life
    waits: Waiting
    flight: InFlight
    pace: Pace
    incoming: float  # calls that came in a second, over the last minute
    holds: Sequence[HoldLook]  # those on the whole rule and on queues, and a few of those on keys
    keys_held: int
    kept_calls: int  # what those on keys keep back
    kept_s: float  # for how long the last of those does; FOREVER: until it is resumed
    limits: Sequence[LimitLook]
    waited_for: str  # id of the budget that kept its next call back in the last pass, or empty
    gates: Sequence[Gate]  # one for each of `limits`
    is_limited: bool  # limits, and not the workers, are what its calls have waited for lately
    stalls: Sequence[Stall]  # the queues of its own that nobody takes calls from
    recent: Recent

    @cached_property
    def hold(self) -> HoldLook | None:
        return self.hold_on(None)

    def hold_on(self, key: str | None) -> HoldLook | None:
        """Of holds that bind calls of this key (None: all calls), the last to end; None: none."""
        binding = [one for one in self.holds if one.per == "rule" or one.is_on_key(key)]
        on_queues: dict[str, HoldLook] = {}
        for one in sorted(self.holds, key=self.seconds_left_of):
            if one.per == "queue":
                on_queues[one.value] = one
        # Queues that are all held count as one hold, which ends when the first lets go.
        if all(queue in on_queues for queue in self.rule.queue_names):
            of_queues = [on_queues[queue] for queue in self.rule.queue_names]
            binding.append(min(of_queues, key=self.seconds_left_of))
        return max(binding, key=self.seconds_left_of, default=None)

    def seconds_left_of(self, hold: HoldLook) -> float:
        return hold.seconds_left(self.now + self.moved)

    def to_wall(self, instant: Us) -> datetime:
        """An instant of ledger time as the database's clock shows it."""
        return from_us(instant + self.moved)

    @property
    def hold_left_s(self) -> float:
        return 0.0 if self.hold is None else self.seconds_left_of(self.hold)

    @property
    def oldest_due_s(self) -> float | None:
        """For how long the oldest call has been due; None where none is."""
        due, wall = self.waits.oldest_due, self.now + self.moved
        return None if due is None or due > wall else (wall - due) / SECOND

    @property
    def binding(self) -> LimitLook | None:
        """The full limit the last pass waited for, else the last to open; None: none is full."""
        full = [one for one, gate in zip(self.limits, self.gates, strict=True) if gate.is_full]
        named = [one for one in full if one.budget.id == self.waited_for]
        # Where some is free, though less than a call costs, `opens_at` says nothing.
        return max(
            named or full,
            key=lambda one: one.opens_at or (0 if one.free else FOREVER),
            default=None,
        )

    @cached_property
    def troubles(self) -> tuple[str, ...]:
        """All that is wrong with it, the worst first."""
        quarter, has_work = self.recent.quarter, bool(self.waits.ready or self.flight.count)
        found = {
            "no_dispenser": not self.is_dispensing and has_work,
            "no_workers": bool(self.stalls),
            "held": self.hold is not None,
            "failing": bool(quarter.failed) and quarter.failed >= FAILING * quarter.sent,
            "stuck": self._is_stuck,
        }
        return tuple(name for name in TROUBLES if found[name])

    @property
    def state(self) -> str:
        if self.troubles:
            return self.troubles[0]
        if not self._has_waited:
            return "ok"
        return "draining" if self.binding is None else "at_limit"

    @property
    def is_growing(self) -> bool:
        return self._has_waited and self.incoming > GROWING * self.pace.per_second

    def drain_s(self, calls: int | None = None) -> float | None:
        """Seconds until so many calls, else all ready, are answered; None: see `why_unknown`."""
        calls = self.waits.ready if calls is None else calls
        if not calls:
            return 0.0
        if not self.gates and not self.pace.per_second:
            return None
        passed = self.seconds_to_release(calls, self.gates)
        if passed is None:
            return None
        kept = self.kept_s if calls > self.waits.ready - self.kept_calls else 0.0
        return None if kept == FOREVER else max(self.hold_left_s + passed, kept) + self.pace.latency

    def seconds_to_release(self, calls: int, gates: Sequence[Gate]) -> float | None:
        """Seconds until so many calls have passed these gates unheld; None: nobody can say."""
        if self._why_stopped:
            return None
        passed = estimate.seconds_to_pass(gates, calls, self.now)
        if passed is None:
            return None
        if (pace := self.pace.per_second) and not self.is_limited:
            if (self.oldest_due_s or 0.0) >= LASTING_S:
                passed = max(passed, calls / pace)
            elif not gates:  # as many as in the last minute may go at once: perhaps no more came
                passed = max(0.0, calls / pace - attempts.RECENT_S)
        return passed

    @property
    def why_unknown(self) -> str:
        """Where nobody knows when its calls are done: why, a word; empty: a gate cannot say."""
        if self._why_stopped or self.kept_s == FOREVER:
            return self._why_stopped or "held"
        return "" if self.pace.per_second else "no_pace"

    @property
    def _why_stopped(self) -> str:
        if self.has_fallen_silent:  # one that ended, or never ran, may start now
            return "no_dispenser"
        if self.stalls and {one.queue for one in self.stalls} >= set(self.rule.queue_names):
            return "no_workers"
        if self.hold_left_s == FOREVER:
            return "held"
        return "stuck" if "stuck" in self.troubles else ""

    @property
    def _has_waited(self) -> bool:
        return self.waits.ready > 0 and (self.oldest_due_s or 0.0) >= PATIENCE_S

    @property
    def _is_stuck(self) -> bool:
        return (
            self._has_waited
            and self.is_dispensing
            and self.hold is None
            and self.binding is None
            and not (self.pace.per_second or self.flight.count or self.keys_held)
        )


def explains_pace(gate: Gate) -> bool:
    """Whether calls wait for the limit, not for workers: never if it opens every few seconds."""
    limit = gate.limit
    is_short = (
        not limit.counts_in_flight and limit.period_us * PERIODS <= attempts.RECENT_S * SECOND
    )
    return gate.is_full and not is_short


@dataclass(frozen=True)
class Look:
    """Rules at one moment. Microseconds are ledger time; datetimes as the clock shows them."""

    now: Us
    moved: int  # wall time less ledger time
    book: Book
    rules: Sequence[RuleLook]
    signs: Sequence[Sign]  # of every dispenser, the newest first
    workers: Sequence[Us]  # when each process that takes calls took one last, the latest first
    stalls: Sequence[Stall]  # of all rules
    summed_until: Us  # up to when sums are added up
    differences: Sequence[Difference]  # between the opinions of those dispensers that are alive
    before: Look | None = None  # of a look at other rates, the same moment with those in force

    @property
    def wall_time(self) -> datetime:
        return self.to_wall(self.now)

    def to_wall(self, instant: Us) -> datetime:
        """An instant of ledger time as the database's clock shows it."""
        return from_us(instant + self.moved)

    @property
    def dispensers(self) -> list[Sign]:
        return [one for one in self.signs if one.is_alive]

    def rule(self, name: str) -> RuleLook:
        for one in self.rules:
            if one.name == name:
                return one
        raise KeyError(name)

    @property
    def worst_first(self) -> list[RuleLook]:
        return sorted(self.rules, key=lambda one: (STATES.index(one.state), one.name))
