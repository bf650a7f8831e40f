"""What every kind of limit is: the arithmetic that says when a call may go.

Instants are whole microseconds since the epoch, in ledger time. Pure: `now` is an
argument. docs/explanation/ledger.md gives the argument for why this never exceeds a limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import tzinfo
from functools import wraps
from typing import Any, ClassVar, Self, TypeVar

from django.core.exceptions import ImproperlyConfigured

from callqueue.clocks import Us
from callqueue.texts import nearest_name, storable

D = TypeVar("D")
SECOND = 1_000_000
PERIODS = {
    "s": SECOND,
    "m": 60 * SECOND,
    "h": 3600 * SECOND,
    "d": 86400 * SECOND,
    "w": 7 * 86400 * SECOND,
}
DAY = PERIODS["d"]
_RATE = re.compile(r"([0-9]{1,12})/([0-9]{0,6})([smhdw])")
# what `jitter=None` is: seconds at least, a share of the window where that is more
JITTER, JITTER_SHARE = 0.05, 50
MOST_JITTER = 60  # seconds that a jitter may be said to be


def parse_rate(rate: object, where: str) -> tuple[int, int]:
    """ "5/2s" is (5, 2_000_000), in microseconds. ImproperlyConfigured names `where`."""
    match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if not match:
        raise ImproperlyConfigured(
            f'{where}: {rate!r} is not a rate; write "<n>/<period>", as in "10/s", "5/2s", "100/h"'
        )
    n, count, unit = int(match[1]), int(match[2] or 1), match[3]
    if n < 1 or count < 1:
        raise ImproperlyConfigured(
            f"{where}: {rate!r}: both numbers must be at least 1 (to stop a rule, pause it)"
        )
    if count * PERIODS[unit] > 366 * DAY:
        raise ImproperlyConfigured(f"{where}: {rate!r}: the period is longer than a year")
    return n, count * PERIODS[unit]


def check_count(limit: object, name: str) -> None:
    value = getattr(limit, name)
    if type(value) is not int or value < 1:
        where = f"{type(limit).__name__}.{name}"
        raise ImproperlyConfigured(f"{where}: {value!r} is not a whole number of at least 1")


def with_known_fields(declared: type[D]) -> type[D]:
    """The dataclass, made to refuse a field that it does not have and suggest the nearest."""
    construct, known = declared.__init__, [f.name for f in fields(declared) if f.init]  # type: ignore[arg-type]

    @wraps(construct)
    def construct_known(self: D, *values: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                near = nearest_name(name, known)
                advice = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
                raise ImproperlyConfigured(
                    f"{declared.__name__}: there is no field {name!r}; {advice}"
                )
        construct(self, *values, **named)

    declared.__init__ = construct_known  # type: ignore[assignment]
    return declared


@dataclass(frozen=True)
class Usage:
    open: int = 0  # the cost of attempts that do not age yet
    aged: Sequence[tuple[Us, int]] = ()  # (instant, cost) of those that do, sorted by instant
    since: Us = Us(0)  # of a bucket: from when `aged` is complete
    level: int = 0  # what it held then, in tokens times the period; 0 is the safe guess
    # an attempt may cost more than it was released for: a bucket may hold less than nothing
    may_owe: bool = False


class Meter:
    """One budget while a pass plans releases: says when a cost fits, and takes it.

    What it takes is open until the ledger knows since when it ages. So room shrinks with `take`
    only, and a call that must pass several meters goes at the latest of their instants.
    """

    _n: int  # the most that is ever used
    _open = 0

    @property
    def used(self) -> int:
        """The cost of all that counts now. A tally's meter may read the database."""
        raise NotImplementedError

    @property
    def free(self) -> int:
        return max(0, self._n - self.used)

    def free_at(self, cost: int) -> Us | None:
        """The earliest instant, from now on, at which `cost` fits, or when to ask again; None: not
        before an answer, if ever. A tally's meter may read the database.
        """
        raise NotImplementedError

    def known_free_at(self, cost: int) -> Us | None:
        """As `free_at`, but None where that only says when to ask again."""
        return self.free_at(cost)

    def when_to_review(self, instant: Us) -> Us:
        """When to ask again of a cost that, as known now, fits at `instant`: then, or earlier."""
        return instant

    def take(self, cost: int) -> None:
        """Charge `cost`, released now or at any later instant that `free_at` gave."""
        self._open += cost


@dataclass(frozen=True)
class Limit:
    """What every limit has. `per`: "rule", "queue", "key", or the name of a call's key."""

    per: str = field(default="rule", kw_only=True)
    name: str | None = field(default=None, kw_only=True)
    unit: str = field(default="calls", kw_only=True)
    strict: bool = field(default=False, kw_only=True)
    jitter: float | None = field(default=None, kw_only=True)

    # Whether it counts what is in flight, from release to record, and nothing that is recorded.
    counts_in_flight: ClassVar[bool] = False
    # Whether its windows begin by the calendar, so that all that one holds leaves at once.
    is_calendar: ClassVar[bool] = False
    # Whether what has aged is summed up in a level, from which a later pass may go on.
    keeps_level: ClassVar[bool] = False

    def __post_init__(self) -> None:
        where = type(self).__name__
        for name in ("per", "unit", "name"):
            value = getattr(self, name)
            if name == "name" and value is None:
                continue
            if not isinstance(value, str) or not value or storable(value) != value:
                raise ImproperlyConfigured(f"{where}.{name}: {value!r} is not a name")
        if not isinstance(self.strict, bool):
            raise ImproperlyConfigured(f"{where}.strict: {self.strict!r} is not True or False")
        if self.jitter is not None and (
            isinstance(self.jitter, bool)
            or not isinstance(self.jitter, int | float)
            or not 0 <= self.jitter <= MOST_JITTER
        ):
            raise ImproperlyConfigured(
                f"{where}.jitter: {self.jitter!r} is not a number of seconds from 0 to 60"
            )

    @property
    def is_keyed(self) -> bool:
        return not (self.is_per_rule or self.is_per_queue)

    @property
    def is_per_rule(self) -> bool:
        return self.per == "rule"

    @property
    def is_per_queue(self) -> bool:
        return self.per == "queue"

    @property
    def jitter_us(self) -> int:
        """Microseconds; where `jitter` is None, 0.05 s or 2 % of the window, whichever is more. A
        large one costs no more than an answer takes: a call ages from its answer if that is sooner.
        """
        if self.jitter is not None:
            return round(self.jitter * SECOND)
        return max(round(JITTER * SECOND), self._jitter_window_us // JITTER_SHARE)

    @property
    def _jitter_window_us(self) -> int:
        return self.period_us

    @property
    def ages_unanswered(self) -> bool:
        """Whether an attempt that is known to be sent ages before it is answered."""
        return not self.strict and not self.counts_in_flight

    @property
    def capacity(self) -> int:
        """The largest cost that this limit could ever admit at once."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """How the limit is called where people read it: its name, or its kind, rate and scope."""
        unit = "" if self.unit == "calls" else f" of {self.unit}"
        scope = "" if self.per == "rule" else f" per {self.per}"
        return self.name or f"{type(self).__name__} {self.rate_text}{unit}{scope}"

    @property
    def rate_text(self) -> str:
        raise NotImplementedError

    @property
    def window_us(self) -> int:
        """For how many microseconds after `aged_from` an attempt may count at most."""
        raise NotImplementedError

    @property
    def period_us(self) -> int:
        """Microseconds of the period that its rate names."""
        return self.window_us

    def horizon(self, now: Us) -> Us:
        """The instant before which nothing that aged or ended matters at `now`."""
        return now - self.window_us

    @property
    def patience_us(self) -> int:
        """How long the ledger can do without news that a call was sent, if it `ages_unanswered`."""
        return self.window_us + self.jitter_us

    def aged_from(self, sent_at: Us | None, finished_at: Us | None) -> Us:
        """The latest instant at which the provider can have counted an attempt: `jitter` after its
        last byte left, and never later than its answer. The answer alone, where there is one,
        if the limit is strict; and where no `sent_at` is known.
        """
        if sent_at is None or (self.strict and finished_at is not None):
            assert finished_at is not None
            return finished_at
        counted = sent_at + self.jitter_us
        return counted if finished_at is None else min(finished_at, counted)

    def meter(self, usage: Usage, now: Us) -> Meter:
        raise NotImplementedError

    def meter_with(self, free: int, now: Us) -> Meter:
        """A meter of which so much is free now, and more only after an answer."""
        full = self.capacity * self.period_us
        return self.meter(Usage(self.capacity - free, (), now, full), now)

    def level(self, usage: Usage, until: Us) -> int:
        """`Usage.level` at `until` or a later last charge, open ones apart; if it `keeps_level`."""
        raise NotImplementedError

    @property
    def per_second(self) -> float | None:
        """How much it lets through a second, over a long time; None: that depends on answers."""
        return None

    @property
    def zone(self) -> tzinfo | None:
        return None

    def moved_by(self, moved: int) -> Self:
        """The limit where ledger time was moved so far (in µs): another if it has a calendar."""
        return self

    def with_rate(self, rate: str) -> Self:
        """This limit with a rate that an operator set; ImproperlyConfigured where it is none."""
        raise NotImplementedError

    # --- how a backlog goes through it; no release goes by this

    def seconds_until_gone(
        self, meter: Meter, amount: float, now: Us, latency: float
    ) -> float | None:
        """Seconds until a backlog of `amount` has passed, by estimate; None: it needs a latency.
        `latency`: how long a call is charged before it ages, in seconds, 0 where it is not known.
        """
        if amount <= meter.free:
            return 0.0
        return self._seconds_until_gone(meter, amount, now, latency)

    def _seconds_until_gone(self, meter: Meter, amount: float, now: Us, latency: float) -> float:
        """As `seconds_until_gone`, of an `amount` that is more than is free. Here room opens in
        each period in the same order: what is free now first, then each as its charge leaves. What
        is open now is taken to have half of its time behind it.
        """
        charged = latency or min(JITTER, self.jitter_us / SECOND)
        period = self.window_us / SECOND + charged
        full, last = divmod(max(0, math.ceil(amount) - 1), self.capacity)
        first = meter.free_at(last + 1)
        wait = period - charged / 2 if first is None else (first - now) / SECOND
        return full * period + wait

    def last_period(
        self, meter: Meter, amount: float, now: Us, latency: float
    ) -> tuple[float, float]:
        """(Seconds until the period in which a backlog's last passes, how much passes then.)"""
        period = self.window_us / SECOND + (latency or min(JITTER, self.jitter_us / SECOND))
        full, last = divmod(max(0, math.ceil(amount) - 1), self.capacity)
        return full * period, last + 1


@dataclass(frozen=True)
class RateLimit(Limit):
    rate: str
    n: int = field(init=False, repr=False, compare=False, default=0)
    period_us: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        n, period = parse_rate(self.rate, f"{type(self).__name__}.rate")
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "period_us", period)

    @property
    def capacity(self) -> int:
        return self.n

    @property
    def rate_text(self) -> str:
        return self.rate

    @property
    def per_second(self) -> float:
        return self.n * SECOND / self.period_us

    @property
    def window_us(self) -> int:
        return self.period_us

    def with_rate(self, rate: str) -> Self:
        return replace(self, rate=rate)
