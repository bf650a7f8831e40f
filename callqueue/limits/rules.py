"""Rules: how the calls of one kind are limited, retried and made. Validated when built. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured

from callqueue.limits.kinds import KINDS, Limit, with_known_fields
from callqueue.texts import storable

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
MAX_NAME = 100  # the width of the columns that hold names of rules, queues and methods
HOSTS_WANTED = (
    "host names alone, such as 'api.example.com' or '*.example.com', without scheme, port or path"
)


@with_known_fields
@dataclass(frozen=True)
class Retry:
    """When a failed attempt is tried again. Times in seconds; see docs/reference/rules.md.

    `max_attempts` failed attempts end a call; throttled ones do not count until there were
    `max_rate_limited`. A hold laid by the provider is never longer than `max_hold`.
    """

    max_attempts: int = 3
    base: float = 1.0
    factor: float = 2.0
    cap: float = 600.0
    jitter: bool = True
    statuses: tuple[int, ...] = (408, 425, 429, 500, 502, 503, 504)
    max_hold: float = 21600.0
    max_rate_limited: int = 20

    def __post_init__(self) -> None:
        _check_whole(self, "max_attempts", 1, 1000)
        _check_whole(self, "max_rate_limited", 0, 100_000)
        _check_seconds(self, "base", 0, 86400)
        _check_number(self, "factor", 1, 100)
        _check_seconds(self, "cap", 0, 30 * 86400)
        _check_seconds(self, "max_hold", 0, 366 * 86400)
        _check_flag(self, "jitter")
        statuses = (
            tuple(self.statuses) if isinstance(self.statuses, Sequence | set | frozenset) else None
        )
        if statuses is None or not all(type(s) is int and 100 <= s <= 599 for s in statuses):
            raise _wrong(self, "statuses", "a sequence of HTTP status codes")
        object.__setattr__(self, "statuses", statuses)


@with_known_fields
@dataclass(frozen=True, kw_only=True)
class Breaker:
    """When a rule is held because its calls keep failing, and for how long, in seconds.

    Trips after `failures` failed attempts in a row `within` seconds. The rule is then held for
    `hold`, `factor` times longer each time that the first call after that fails, at most `longest`.
    See docs/how-to/circuit-breaker.md.
    """

    failures: int = 10
    within: float = 60.0
    hold: float = 30.0
    factor: float = 2.0
    longest: float = 600.0

    def __post_init__(self) -> None:
        _check_whole(self, "failures", 1, 10_000)
        _check_seconds(self, "within", 0.1, 86400)
        _check_seconds(self, "hold", 0.1, 86400)
        _check_number(self, "factor", 1, 100)
        _check_seconds(self, "longest", 0.1, 86400)
        if self.longest < self.hold:
            raise _wrong(self, "longest", f"at least hold, {self.hold:g}")


@with_known_fields
@dataclass(frozen=True, kw_only=True)
class Rule:
    """How the calls under one name are limited, retried and made; see docs/reference/rules.md.

    Timeouts are seconds. `total_timeout` runs from name resolution to the last byte and caps the
    other two.
    """

    hosts: Sequence[str] = ()
    queues: str | Sequence[str] | None = None
    limits: Sequence[Limit] = ()
    retry: Retry = field(default_factory=Retry)
    connect_timeout: float = 3.05
    read_timeout: float = 27
    total_timeout: float = 60
    priority: int = 0
    idempotency_header: str | None = "Idempotency-Key"
    idempotency_ttl: timedelta = timedelta(hours=24)
    on_lost: str = "auto"
    verify: bool | str = True
    keep_response_bytes: int | None = None
    classify: str | Callable[..., Any] | None = None
    settle: str | Callable[..., Any] | None = None
    breaker: Breaker | None = None
    reconcile: str | Callable[..., Any] | None = None

    ON_LOST: ClassVar[tuple[str, ...]] = ("auto", "retry", "unknown")

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", _checked_names(self, "hosts", self.hosts))
        if not all(map(is_host_pattern, self.hosts)):
            raise _wrong(self, "hosts", HOSTS_WANTED)
        if self.queues is not None:
            object.__setattr__(self, "queues", _checked_names(self, "queues", self.queues))
            if not self.queues:
                raise _wrong(self, "queues", "a name, several, or None for Celery's default queue")
        _check_limits(self)
        object.__setattr__(self, "limits", tuple(self.limits))
        if not isinstance(self.retry, Retry):
            raise _wrong(self, "retry", "a Retry(...)")
        for name in ("connect_timeout", "read_timeout", "total_timeout"):
            _check_seconds(self, name, 0.001, 86400)
        _check_whole(self, "priority", -32768, 32767)
        _check_idempotency(self)
        if self.on_lost not in self.ON_LOST:
            raise _wrong(self, "on_lost", "one of 'auto', 'retry', 'unknown'")
        if not isinstance(self.verify, bool | str) or self.verify == "":
            raise _wrong(self, "verify", "True, False, or the path of a CA bundle")
        if self.keep_response_bytes is not None:
            _check_whole(self, "keep_response_bytes", 0, 2**30)
        for name in ("classify", "settle", "reconcile"):
            _check_callable(self, name)
        if self.breaker is not None and not isinstance(self.breaker, Breaker):
            raise _wrong(self, "breaker", "a Breaker(...), or None")

    @property
    def queue_names(self) -> tuple[str, ...]:
        """The queues that calls of the rule may go to; "" is Celery's default queue."""
        return tuple(self.queues) if self.queues else ("",)


@dataclass(frozen=True, kw_only=True)
class Route:
    """What a ROUTER may answer: where a call belongs. What `send` was told wins over it."""

    rule: str | None = None
    key: str | Mapping[str, str] | None = None
    priority: int | None = None
    cost: int | Mapping[str, int] | None = None


@dataclass(frozen=True)
class Discard:
    """What a ROUTER may answer: do not queue this call. `send` then returns None."""

    why: str


def is_host_pattern(text: str) -> bool:
    """Whether it is a host's name, an address, "*.example.com" or "*": no scheme, port, path."""
    name = text.removeprefix("*.") if text != "*" else "any"
    return bool(name) and not re.search(r"[\s/@*]", name) and (name.count(":") != 1)


def _check_limits(rule: Rule) -> None:
    if isinstance(rule.limits, Limit) or not isinstance(rule.limits, Sequence):
        raise _wrong(rule, "limits", "a list of limits, as in limits=[SlidingWindow('100/h')]")
    for limit in rule.limits:
        if type(limit) is Limit or not isinstance(limit, Limit):
            *others, last = KINDS
            kinds = f"{', '.join(others)} or {last}"
            raise _wrong(rule, "limits", f"made of {kinds}; got {limit!r}")
    names = [limit.name for limit in rule.limits if limit.name]
    if len(set(names)) < len(names):
        raise _wrong(rule, "limits", "free of two limits with one name")


def _check_idempotency(rule: Rule) -> None:
    header = rule.idempotency_header
    if header is not None and not (
        isinstance(header, str) and re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", header)
    ):
        raise _wrong(rule, "idempotency_header", "a header's name, or None")
    if not isinstance(rule.idempotency_ttl, timedelta) or rule.idempotency_ttl < timedelta(0):
        wanted = "a timedelta, as in timedelta(hours=24), and not negative"
        raise _wrong(rule, "idempotency_ttl", wanted)


def _checked_names(rule: Rule, name: str, value: object) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence | set | frozenset) or not all(
        isinstance(n, str) and n.strip() for n in names
    ):
        raise _wrong(rule, name, "a name or a list of names")
    if any(storable(n) != n for n in names):
        raise _wrong(rule, name, "made of text that a database can store")
    if any(len(n) > MAX_NAME for n in names):
        raise _wrong(rule, name, f"of names no longer than {MAX_NAME} characters")
    if len(set(names)) < len(names):
        raise _wrong(rule, name, "free of repetitions")
    return tuple(names)


def _check_callable(rule: Rule, name: str) -> None:
    value = getattr(rule, name)
    if value is None or callable(value) or (isinstance(value, str) and _DOTTED.fullmatch(value)):
        return
    raise _wrong(rule, name, "a callable, a dotted path, or None")


def _check_flag(owner: object, name: str) -> None:
    if not isinstance(getattr(owner, name), bool):
        raise _wrong(owner, name, "True or False")


def _check_whole(owner: object, name: str, low: int, high: int) -> None:
    value = getattr(owner, name)
    if type(value) is not int or not low <= value <= high:
        raise _wrong(owner, name, f"a whole number from {low} to {high}")


def _check_seconds(owner: object, name: str, low: float, high: float) -> None:
    _check_number(owner, name, low, high, "a number of seconds")


def _check_number(
    owner: object, name: str, low: float, high: float, wanted: str = "a number"
) -> None:
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _wrong(owner, name, f"{wanted} from {low:g} to {high:g}")


def _wrong(owner: object, name: str, wanted: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(
        f"{type(owner).__name__}.{name}: {getattr(owner, name)!r} is not {wanted}"
    )


def backoff(retry: Retry, failures: int, rand: float) -> float:
    """Seconds before the next try after `failures` (1 and up) failed ones; `rand`: from 0 to 1."""
    # The jitter is "equal" of "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015):
    # unlike "full", it leaves a provider that just failed alone for a while.
    whole = min(retry.cap, _exponential_delay(failures, float(retry.base), float(retry.factor)))
    return whole / 2 + whole / 2 * rand if retry.jitter else whole


def _exponential_delay(failures: int, base: float, factor: float) -> float:
    # in floats throughout: a power of integers would be computed to its last digit
    if base == 0:
        return 0.0
    try:
        return base * factor ** max(0, failures - 1)
    except OverflowError:
        return float("inf")
