"""The settings that runs draw from: in words of their own, so that the judge reads them without the
product's classes; and what is made of them for the product.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

JITTER = 0.05  # seconds that the network takes at most, as limits assume it by default


@dataclass(frozen=True)
class LimitOf:
    """A limit. `kind`: window, bucket, once, or day (by the calendar)."""

    kind: str
    n: int
    seconds: float = 1
    per: str = "rule"
    name: str = ""
    unit: str = "calls"
    strict: bool = False
    burst: int = 0

    def built(self) -> Any:
        from callqueue import Concurrency, FixedWindow, SlidingWindow, TokenBucket

        given: dict[str, Any] = {"per": self.per}
        if self.name:
            given["name"] = self.name
        if self.kind == "once":
            return Concurrency(self.n, **given)
        given["unit"] = self.unit
        if self.strict:
            given["strict"] = True
        if self.kind == "bucket":
            return TokenBucket(f"{self.n}/{self.seconds:g}s", burst=self.burst, **given)
        if self.kind == "day":
            return FixedWindow(f"{self.n}/m", **given)
        return SlidingWindow(f"{self.n}/{self.seconds:g}s", **given)

    @property
    def jitter(self) -> float:
        return max(JITTER, 0.02 * self.seconds)


@dataclass(frozen=True)
class RuleOf:
    """A rule."""

    limits: tuple[LimitOf, ...]
    priority: int = 0
    queues: tuple[str, ...] = ()
    on_lost: str = "auto"

    def ids(self, rule: str) -> list[tuple[str, LimitOf]]:
        """The limits by the names that the docs give them."""
        return [(one.name or f"{rule}#{i}", one) for i, one in enumerate(self.limits)]


Rules = Mapping[str, RuleOf]
KEYS: list[Any] = ["k1", "k2", {"key": "k1", "part": "p1"}, {"key": "k1", "part": "p2"}]


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
    calls: tuple[int, int] = (4, 10)


def one(*limits: LimitOf, **more: Any) -> Rules:
    return {"r": RuleOf(limits, **more)}


def scenes() -> list[Scene]:
    window = LimitOf("window", 3)
    account = LimitOf("window", 4, name="account")
    keyed = LimitOf("window", 2, per="key")
    long = LimitOf("window", 3, 6, per="key")
    bucket = LimitOf("bucket", 4, burst=3)
    tokens = LimitOf("window", 9, unit="tokens")
    queued = RuleOf((LimitOf("window", 2, per="queue"),), queues=("q1", "q2"))
    lone = {"a": RuleOf((account,)), "b": RuleOf((LimitOf("window", 3),))}
    shared = {"a": RuleOf((account,)), "b": RuleOf((account, window), priority=2)}
    return [
        Scene("window", one(window), one(replace(window, n=2))),
        Scene("tallied", one(window), one(replace(window, n=4)), is_tallied=True),
        Scene("two", one(window, LimitOf("window", 5, 2)), one(window)),
        Scene("keys", one(keyed, LimitOf("window", 5)), one(keyed), ("k1", "k2", "k3")),
        Scene("parts", one(long), one(replace(long, n=2)), (*KEYS, {"key": "k2", "part": "p1"})),
        Scene("shared", shared, lone),
        Scene("linked", lone, shared, is_tallied=True),
        Scene("bucket", one(bucket), one(replace(bucket, burst=2))),
        Scene("once", one(LimitOf("once", 2), LimitOf("window", 6)), one(LimitOf("once", 1))),
        Scene("strict", one(replace(window, strict=True)), one(replace(window, strict=True))),
        Scene("tokens", one(tokens), one(tokens), costs=tuple({"tokens": n} for n in (1, 2, 4, 5))),
        Scene("queues", {"r": queued}, {"r": queued}),
        Scene("again", one(window, on_lost="retry"), one(window, on_lost="retry")),
    ]


def drawn(draw: random.Random) -> Scene:
    return draw.choice(scenes())


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
            **({"queues": list(rule.queues)} if rule.queues else {}),
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
    is_gone: bool = False  # deleted, or meddled with by other code
    requeued_at: list[int] = field(default_factory=list)
    forecast: Any = None

    def value(self, per: str, queue: str) -> str:
        """For which value of a limit's `per` it counts."""
        if per == "rule":
            return ""
        if per == "queue":
            return queue
        if isinstance(self.key, dict):
            return str(self.key.get(per, ""))
        return str(self.key) if per == "key" else ""

    def charge(self, unit: str) -> int:
        if isinstance(self.cost, dict):
            return int(self.cost.get(unit, 1 if unit == "calls" else 0))
        return int(self.cost) if unit == "calls" else 0
