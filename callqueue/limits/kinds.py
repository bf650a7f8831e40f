"""The limit kinds, and the arithmetic that says when a call may go.

In: the charges on one budget (open ones, and the instants from which answered ones age). Out: the
earliest instant at which a further cost fits. Instants are whole microseconds since the epoch, on
the database's clock. Pure: no clock, no database; `now` is an argument. docs/explanation/ledger.md
gives the argument for why this never exceeds a limit.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from functools import wraps
from itertools import accumulate
from typing import Any, ClassVar, TypeVar
from zoneinfo import ZoneInfo

from django.core.exceptions import ImproperlyConfigured

from callqueue.texts import nearest

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


def parse_rate(rate: object, where: str) -> tuple[int, int]:
    """``"5/2s"`` -> ``(5, 2_000_000)``: so many per so many microseconds. ImproperlyConfigured
    names `where`.
    """
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


def with_known_fields(declared: type[D]) -> type[D]:
    """A dataclass whose constructor refuses a field that it does not have as settings are refused:
    with the nearest it has.
    """
    construct, known = declared.__init__, [f.name for f in fields(declared) if f.init]  # type: ignore[arg-type]

    @wraps(construct)
    def construct_known(self: D, *values: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                near = nearest(name, known)
                advice = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
                raise ImproperlyConfigured(
                    f"{declared.__name__}: there is no field {name!r}; {advice}"
                )
        construct(self, *values, **named)

    declared.__init__ = construct_known  # type: ignore[assignment]
    return declared


@dataclass(frozen=True)
class Usage:
    """The charges on one budget: `open` is the cost of unanswered attempts, `aged` the (instant,
    cost) of answered ones.

    `aged` is sorted by instant. For a token bucket, `since` is the instant from which `aged` is
    complete, and `level` what the bucket held then, in tokens times the period (0: assume it was
    empty, the safe guess).
    """

    open: int = 0
    aged: Sequence[tuple[int, int]] = ()
    since: int = 0
    level: int = 0


class Meter:
    """One budget while a pass plans releases: says when a cost fits, and takes it.

    What it takes is open: it ages only once it is answered. So room never shrinks with time, only
    with `take`, and a call that must pass several meters goes at the latest of their instants.
    """

    used: int
    free: int

    def free_at(self, cost: int) -> int | None:
        """The earliest instant, not before now, at which `cost` fits; None: not before an
        unanswered attempt ends.
        """
        raise NotImplementedError

    def known_at(self, cost: int) -> int | None:
        """As `free_at`, but None too where that gives no more than the earliest instant to ask
        again.
        """
        return self.free_at(cost)

    def take(self, cost: int) -> None:
        """Charge `cost`, released now or at any later instant that `free_at` gave."""
        raise NotImplementedError


@dataclass(frozen=True)
class Limit:
    """What every limit has. `per`: "rule", "queue", "key", or the name of one of the call's
    keys.
    """

    per: str = field(default="rule", kw_only=True)
    name: str | None = field(default=None, kw_only=True)
    unit: str = field(default="calls", kw_only=True)
    strict: bool = field(default=False, kw_only=True)
    jitter: float = field(default=0.05, kw_only=True)

    # Whether it counts what is in flight, from release to answer, and nothing that is answered.
    counts_in_flight: ClassVar[bool] = False
    # Whether its windows begin by the calendar, so that all that one holds leaves at once.
    is_calendar: ClassVar[bool] = False
    # Whether what has aged is summed up in a level, from which a later pass may go on.
    keeps_level: ClassVar[bool] = False

    def __post_init__(self) -> None:
        where = type(self).__name__
        for name in ("per", "unit"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ImproperlyConfigured(f"{where}.{name}: {value!r} is not a name")
        if self.name is not None and (not isinstance(self.name, str) or not self.name):
            raise ImproperlyConfigured(f"{where}.name: {self.name!r} is not a name")
        if not isinstance(self.strict, bool):
            raise ImproperlyConfigured(f"{where}.strict: {self.strict!r} is not True or False")
        if (
            isinstance(self.jitter, bool)
            or not isinstance(self.jitter, int | float)
            or not 0 <= self.jitter <= 60
        ):
            raise ImproperlyConfigured(
                f"{where}.jitter: {self.jitter!r} is not a number of seconds from 0 to 60"
            )

    @property
    def is_keyed(self) -> bool:
        """Whether it is per key, or per one of the call's keys."""
        return not (self.is_per_rule or self.is_per_queue)

    @property
    def is_per_rule(self) -> bool:
        """Whether all calls of its rules count together."""
        return self.per == "rule"

    @property
    def is_per_queue(self) -> bool:
        """Whether each queue counts by itself."""
        return self.per == "queue"

    @property
    def is_plain(self) -> bool:
        """Whether it is per rule and in calls: what is free of it is how many calls may go."""
        return self.is_per_rule and self.unit == "calls"

    @property
    def capacity(self) -> int:
        """The largest cost that this limit could ever admit at once."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """How the limit is called where people read it: its name, or its kind, rate and scope."""
        return self.name or f"{type(self).__name__} {self.rate_text}" + (
            f" per {self.per}" if self.per != "rule" else ""
        )

    @property
    def rate_text(self) -> str:
        """The rate as it was written."""
        raise NotImplementedError

    @property
    def window_us(self) -> int:
        """For how long an answered attempt may matter, in microseconds."""
        raise NotImplementedError

    @property
    def period_us(self) -> int:
        """Microseconds of the period that its rate names."""
        return self.window_us

    def horizon(self, now: int) -> int:
        """The instant before which nothing that ended matters at `now`."""
        return now - self.window_us

    def aged_from(self, sent_at: int | None, finished_at: int) -> int:
        """The latest instant at which the provider can have counted an answered attempt.

        Never later than its answer; `jitter` after its last byte left, unless the limit is strict
        or nothing was stamped.
        """
        if self.strict or sent_at is None:
            return finished_at
        return min(finished_at, sent_at + round(self.jitter * SECOND))

    def meter(self, usage: Usage, now: int) -> Meter:
        """A meter of this limit over `usage`."""
        raise NotImplementedError

    def level(self, usage: Usage, until: int) -> int:
        """What is left of it at `until`, open charges apart, in its own measure: see `Usage.level`.

        Only of a limit that `keeps_level`.
        """
        raise NotImplementedError

    def with_rate(self, rate: str) -> Limit:
        """The same limit with another rate: what an operator's override makes."""
        raise NotImplementedError


@dataclass(frozen=True)
class _RateLimit(Limit):
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
    def window_us(self) -> int:
        return self.period_us

    def with_rate(self, rate: str) -> Limit:
        return type(self)(rate, **_options(self))


@with_known_fields
@dataclass(frozen=True)
class SlidingWindow(_RateLimit):
    """At most n in any window of the period, wherever the window begins."""

    def meter(self, usage: Usage, now: int) -> Meter:
        return _WindowMeter(
            self.n,
            usage.open,
            [c for c in usage.aged if c[0] + self.period_us >= now],
            now,
            self.period_us,
        )


@with_known_fields
@dataclass(frozen=True)
class FixedWindow(_RateLimit):
    """At most n in each calendar window: windows of days begin at local midnight in `timezone`,
    weeks on Monday.

    Windows shorter than a day are counted from local midnight. Days of 23 and 25 hours are what the
    calendar says.
    """

    timezone: str = "UTC"

    is_calendar: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            ZoneInfo(self.timezone)
        except (TypeError, ValueError, OSError, KeyError):
            raise ImproperlyConfigured(
                f"FixedWindow.timezone: {self.timezone!r} is not a time zone's name"
            ) from None

    @property
    def window_us(self) -> int:
        # A local day may be 25 hours long, and at both of its edges a window counts `jitter` more
        # than itself.
        return self.period_us + 2 * PERIODS["h"] + 2 * round(self.jitter * SECOND)

    def window(self, instant: int) -> tuple[int, int]:
        """The calendar window that contains `instant`: its first instant, and the first after
        it.
        """
        zone = ZoneInfo(self.timezone)
        day = datetime.fromtimestamp(instant // SECOND, zone).date()
        if self.period_us % DAY == 0:
            days = self.period_us // DAY
            first = (day.toordinal() - 1) // days * days + 1
            return _midnight(first, zone), _midnight(first + days, zone)
        midnight, next_midnight = (
            _midnight(day.toordinal(), zone),
            _midnight(day.toordinal() + 1, zone),
        )
        start = midnight + (instant - midnight) // self.period_us * self.period_us
        return start, min(start + self.period_us, next_midnight)

    def horizon(self, now: int) -> int:
        jitter = round(self.jitter * SECOND)
        return self.window(now - jitter)[0] - jitter

    def meter(self, usage: Usage, now: int) -> Meter:
        return _CalendarMeter(self, usage, now)


@with_known_fields
@dataclass(frozen=True)
class TokenBucket(_RateLimit):
    """A bucket of `burst` tokens that refills at `rate`; each unit of cost takes a token.

    Full use needs (burst - 1) / rate to be at least the jitter. Sources: the token bucket of RFC
    2697 section 3.
    """

    burst: int = field(kw_only=True)

    keeps_level: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.burst, bool) or not isinstance(self.burst, int) or self.burst < 1:
            raise ImproperlyConfigured(
                f"TokenBucket.burst: {self.burst!r} is not a whole number of at least 1"
            )

    @property
    def capacity(self) -> int:
        return self.burst

    @property
    def window_us(self) -> int:
        # Four times as long as the bucket takes to fill, and a hundred times the jitter: assuming
        # the bucket empty that long ago then costs at most one percent of the rate.
        return max(
            4 * self.burst * self.period_us // self.n, round(100 * self.jitter * SECOND), SECOND
        )

    def meter(self, usage: Usage, now: int) -> Meter:
        return _BucketMeter(self, usage, now)

    def level(self, usage: Usage, until: int) -> int:
        return bucket_level(self, usage, until)[0]

    def with_rate(self, rate: str) -> Limit:
        return TokenBucket(rate, burst=self.burst, **_options(self))


@with_known_fields
@dataclass(frozen=True)
class Concurrency(Limit):
    """At most n in flight: released and not yet answered."""

    n: int

    counts_in_flight: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ImproperlyConfigured(
                f"Concurrency.n: {self.n!r} is not a whole number of at least 1"
            )

    @property
    def capacity(self) -> int:
        return self.n

    @property
    def rate_text(self) -> str:
        return str(self.n)

    @property
    def window_us(self) -> int:
        return 0

    def meter(self, usage: Usage, now: int) -> Meter:
        return _WindowMeter(self.n, usage.open, [], now, 0)

    def with_rate(self, rate: str) -> Limit:
        if not rate.isdecimal():
            raise ImproperlyConfigured(f"Concurrency.n: {rate!r} is not a whole number")
        return Concurrency(int(rate), **_options(self))


class _WindowMeter(Meter):
    """Sliding window and concurrency: open charges, and charges that leave one period after the
    instant they age from.
    """

    def __init__(
        self, n: int, open_cost: int, aged: Sequence[tuple[int, int]], now: int, period: int
    ) -> None:
        self._n, self._now, self._period, self._open = n, now, period, open_cost
        self._instants = [at for at, _ in aged]
        self._leaving = list(accumulate(cost for _, cost in aged))
        self._aged = self._leaving[-1] if self._leaving else 0

    @property
    def used(self) -> int:  # type: ignore[override]
        return self._open + self._aged

    @property
    def free(self) -> int:  # type: ignore[override]
        return max(0, self._n - self.used)

    def free_at(self, cost: int) -> int | None:
        excess = self.used + cost - self._n
        if excess <= 0:
            return self._now
        if excess > self._aged:
            return None
        last = self._instants[bisect_left(self._leaving, excess)]
        return max(
            self._now, last + self._period + 1
        )  # one microsecond past: a window closed at both ends is kept too

    def take(self, cost: int) -> None:
        self._open += cost


class _CalendarMeter(Meter):
    """Fixed window. A call within `jitter` of an edge counts on both sides of it: the provider's
    clock may be that far off.
    """

    def __init__(self, limit: FixedWindow, usage: Usage, now: int) -> None:
        self._n, self._now, self._open = limit.n, now, usage.open
        self._jitter = round(limit.jitter * SECOND)
        start, end = limit.window(now - self._jitter)
        self._changes = [(now, start), (end + self._jitter, end)]
        after = limit.window(end)[1]
        self._changes.append((after + self._jitter, after))
        self._counts = [
            sum(cost for at, cost in usage.aged if at >= first - self._jitter)
            for _, first in self._changes
        ]

    @property
    def used(self) -> int:  # type: ignore[override]
        return self._open + self._counts[0]

    @property
    def free(self) -> int:  # type: ignore[override]
        return max(0, self._n - self.used)

    def free_at(self, cost: int) -> int | None:
        for (instant, _), count in zip(self._changes, self._counts, strict=True):
            if self._open + count + cost <= self._n:
                return instant
        return None

    def take(self, cost: int) -> None:
        self._open += cost


class _BucketMeter(Meter):
    """Token bucket. Levels are whole numbers: tokens times the period, so that a microsecond
    refills exactly n of them.
    """

    def __init__(self, limit: TokenBucket, usage: Usage, now: int) -> None:
        self._n, self._period, self._now = limit.n, limit.period_us, now
        self._cap = limit.burst * limit.period_us
        self._level, self._at = bucket_level(limit, usage, now)
        self._open = usage.open

    @property
    def used(self) -> int:  # type: ignore[override]
        return -(-(self._cap - self._level) // self._period) + self._open

    @property
    def free(self) -> int:  # type: ignore[override]
        return max(0, self._level // self._period - self._open)

    def free_at(self, cost: int) -> int | None:
        wanted = (self._open + cost) * self._period
        if wanted > self._cap:
            return None
        return max(self._now, self._at - (self._level - wanted) // self._n)

    def take(self, cost: int) -> None:
        self._open += cost


def bucket_level(limit: TokenBucket, usage: Usage, until: int) -> tuple[int, int]:
    """What the bucket holds at `until`, open charges apart, and the instant of that level (`until`,
    or the last leave).
    """
    cap, level, at = limit.burst * limit.period_us, usage.level, usage.since
    for leave, cost in usage.aged:
        level = min(cap, level + limit.n * max(0, leave - at)) - cost * limit.period_us
        at = max(at, leave)
    if until > at:
        level, at = min(cap, level + limit.n * (until - at)), until
    return level, at


def _midnight(ordinal: int, zone: ZoneInfo) -> int:
    """The first instant of a local day, which need not be 00:00 where the clock is put forward at
    midnight.
    """
    day = datetime.fromordinal(ordinal).replace(tzinfo=zone)
    instant = day.astimezone(UTC)
    while instant.astimezone(zone).date() < day.date():
        instant += timedelta(minutes=15)
    return int(instant.timestamp()) * SECOND


def _options(limit: Limit) -> dict[str, Any]:
    options = {name: getattr(limit, name) for name in ("per", "name", "unit", "strict", "jitter")}
    if isinstance(limit, FixedWindow):
        options["timezone"] = limit.timezone
    return options
