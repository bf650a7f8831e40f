"""The settings that runs draw from: in words of their own, so that the judge reads them without the
product's classes; and what is made of them for the product.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

JITTER = 0.05  # seconds that the network takes at most, as limits assume it by default


@dataclass(frozen=True)
class LimitOf:
    """A limit. `kind`: window, bucket, once, or calendar."""

    kind: str
    n: int
    seconds: float = 1
    per: str = "rule"
    name: str = ""
    unit: str = "calls"
    strict: bool = False
    burst: int = 0
    tight: float | None = None  # its jitter in seconds, where it is not the usual one

    def built(self) -> Any:
        from callqueue import Concurrency, FixedWindow, SlidingWindow, TokenBucket

        given: dict[str, Any] = {"per": self.per}
        if self.name:
            given["name"] = self.name
        if self.kind == "once":
            return Concurrency(self.n, **given)
        given |= {"unit": self.unit, "strict": self.strict, "jitter": self.tight}
        rate = f"{self.n}/{self.seconds:g}s"
        if self.kind == "bucket":
            return TokenBucket(rate, burst=self.burst, **given)
        if self.kind == "calendar":
            return FixedWindow(rate, timezone="Asia/Kathmandu", **given)
        return SlidingWindow(rate, **given)

    @property
    def jitter(self) -> float:
        return max(JITTER, 0.02 * self.seconds) if self.tight is None else self.tight

    @property
    def capacity(self) -> int:
        """The most that one call may cost."""
        return self.burst if self.kind == "bucket" else self.n


@dataclass(frozen=True)
class RuleOf:
    """A rule."""

    limits: tuple[LimitOf, ...]
    priority: int = 0
    queues: tuple[str, ...] = ()
    on_lost: str = "auto"
    settles: bool = False  # answers say what a call has cost

    def ids(self, rule: str) -> list[tuple[str, LimitOf]]:
        """The limits by the names that the docs give them."""
        return [(one.name or f"{rule}#{i}", one) for i, one in enumerate(self.limits)]


Rules = Mapping[str, RuleOf]


@dataclass(frozen=True)
class Scene:
    """What one run begins with: the settings, the others that are deployed meanwhile, and the keys
    and costs of calls.
    """

    name: str
    rules: Rules
    other: Rules
    keys: tuple[Any, ...] = ("",)
    costs: tuple[Any, ...] = (1,)
    is_tallied: bool = False  # small windows are tallied as large ones are
    coarse: int = 1  # where so: those that may hold more than this
    plots: tuple[tuple[str, ...], ...] = ()  # what does harm together here, if not as elsewhere
    overspends: bool = False  # answers say that calls have cost up to three times their charge

    def limits(self, rule: str | None = None) -> Iterator[LimitOf]:
        """All limits of a rule, or of all, in both settings."""
        for rules in (self.rules, self.other):
            for name, one in rules.items():
                if rule in (None, name):
                    yield from one.limits

    def tallies(self, limit: LimitOf) -> bool:
        """Whether a limit is tallied here, though it is small."""
        is_keyed = limit.per not in ("rule", "queue")
        if limit.kind == "bucket":
            return self.is_tallied and is_keyed
        return self.is_tallied and limit.kind != "once" and (is_keyed or limit.n > self.coarse)

    def settles(self, rule: str) -> bool:
        return rule in self.rules and self.rules[rule].settles


def callqueue_settings(rules: Rules) -> dict[str, Any]:
    """What a project would have in its settings."""
    from callqueue import Retry, Rule

    retry = Retry(max_attempts=3, base=0.2, cap=0.8, max_hold=3.0)
    given = {
        name: Rule(
            limits=[limit.built() for limit in rule.limits],
            priority=rule.priority,
            retry=retry,
            connect_timeout=0.5,
            read_timeout=1.2,
            total_timeout=1.5,
            on_lost=rule.on_lost,
            queues=list(rule.queues) or None,
            settle=_used if rule.settles else None,
        )
        for name, rule in rules.items()
    }
    return {
        "RULES": given,
        "LEASE": {"RELEASE": 1.5, "GRACE": 0.5},
        "DISPENSER": {"INTERVAL": 1.0, "POLL": 0.4},
        "ALLOWED_NETWORKS": ["127.0.0.0/8"],
        "RETENTION": {},
    }


def _used(response: Any) -> dict[str, int]:
    """What an answer says that the call has cost."""
    return {"tokens": response.json()["tokens"]}


@dataclass
class CallOf:
    """A call as its sender knows it."""

    token: str
    rule: str
    key: Any
    cost: Any
    method: str
    sent_at: int
    pk: int | None = None
    is_committed: bool = False
    may_repeat: bool = False  # its rule says so
    expires: int | None = None  # when, as the database's clock shows it, from its beginning on
    is_gone: bool = False  # deleted, or meddled with by other code
    requeued_at: list[int] = field(default_factory=list)

    def value(self, per: str, queue: str) -> str:
        """For which value of a limit's `per` it counts."""
        return value_of(self.key, per, queue)

    def charge(self, unit: str) -> int:
        if isinstance(self.cost, dict):
            return int(self.cost.get(unit, 1 if unit == "calls" else 0))
        return int(self.cost) if unit == "calls" else 0


def value_of(key: Any, per: str, queue: str) -> str:
    """For which value of a limit's `per` a call with this key counts. A mapping that has no part
    of the name "key" is a key as a whole.
    """
    if per == "rule":
        return ""
    if per == "queue":
        return queue
    if isinstance(key, str) and key.startswith("{"):
        key = json.loads(key)
    if isinstance(key, dict):
        whole = json.dumps(key, sort_keys=True) if per == "key" else ""
        return str(key.get(per, whole))
    return str(key) if per == "key" else ""
