"""What a run begins with: its scene, one with a name, for what two things do together, or a mixed one,
in which any kinds of limits meet; and how long it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.simulation.settings_of_runs import LimitOf, RuleOf, Rules, Scene

KEYS: tuple[Any, ...] = (
    "k1",
    {"key": "k1", "part": "p1"},
    {"key": "k1", "part": "p2"},
    {"key": "k2", "part": "p1"},
)
QUEUES = ("q1", "q2")
TIGHT = 0.01  # seconds of jitter


@dataclass(frozen=True)
class Length:
    """Of what there is more in a long run. Tuples are drawn from; times are seconds."""

    troubled: float  # for so long misfortunes happen
    quiet: float  # and nothing ends sooner than this after them
    misfortunes: tuple[int, ...]
    kinds: tuple[int, int]  # of misfortunes
    dispensers: tuple[int, ...]
    workers: tuple[int, ...]
    makers: tuple[int, ...]  # where there are any, they are alone in every other run
    senders: tuple[int, ...]  # how many calls one transaction sends
    calls: tuple[int, int]
    permits: tuple[int, ...]
    probed: float  # how often it is asked what a run left behind


LONG = Length(
    troubled=3.5, quiet=1.0, misfortunes=(0, 1, 2, 3, 4, 6, 9), kinds=(1, 5),
    dispensers=(1, 2, 2, 3), workers=(1, 2, 2), makers=(0, 0, 1, 2), senders=(1, 1, 2, 4),
    calls=(4, 10), permits=(0, 0, 1, 2, 4), probed=1.0,
)  # fmt: skip
SHORT = Length(
    troubled=0.8, quiet=0.1, misfortunes=(0, 1, 2, 2), kinds=(1, 2), dispensers=(1, 1, 2, 2),
    workers=(1, 2, 2), makers=(0, 0, 1, 2), senders=(2, 3, 4), calls=(3, 5), permits=(0, 0, 0, 1),
    probed=0.1,
)  # fmt: skip
LONG_ONES = 10


def length_of(seed: int) -> Length:
    """How long the run of this seed is: short ones are many, and every tenth is a long one."""
    return SHORT if seed % LONG_ONES else LONG


def drawn(draw: Any) -> Scene:
    listed = named()
    number = draw.randrange(len(listed) + 4)
    scene = listed[number] if number < len(listed) else mixed(draw)
    return tightened(scene) if draw.random() < 0.3 else scene


def one(*limits: LimitOf, **more: Any) -> Rules:
    return {"r": RuleOf(limits, **more)}


def spent(*limits: LimitOf) -> Rules:
    """A rule with these limits whose answers say what its calls have cost."""
    return one(*limits, settles=True)


def named() -> list[Scene]:
    window = LimitOf("window", 3)
    account = LimitOf("window", 4, name="account")
    keyed = LimitOf("window", 2, per="key")
    long = LimitOf("window", 3, 6, per="key")
    bucket = LimitOf("bucket", 4, burst=3)
    tokens = LimitOf("window", 9, unit="tokens")
    calendar = LimitOf("calendar", 3, 2)
    strict = LimitOf("window", 1, strict=True)
    queued = RuleOf((LimitOf("window", 2, per="queue"),), queues=QUEUES)
    lone = {"a": RuleOf((account,)), "b": RuleOf((LimitOf("window", 3),))}
    shared = {"a": RuleOf((account,)), "b": RuleOf((window, account), priority=2)}
    costs = tuple({"tokens": n} for n in (1, 2, 4, 5))
    # What is tallied by some settings, and by rates that operators give, is not by others.
    crossed: dict[str, Any] = {
        "is_tallied": True, "coarse": 10, "overspends": True,
        "plots": (("rate", "deploy"), ("rate", "broker"), ("rate", "freeze"), ("rate", "cancel")),
    }  # fmt: skip
    untallied, tallied = (LimitOf("window", n, 2, unit="tokens") for n in (9, 14))
    late = LimitOf("window", 2, 2, per="key")  # answers are recorded after it, now and then
    return [
        Scene("window", one(window), one(replace(window, n=2))),
        Scene("tallied", one(window), one(replace(window, n=4)), is_tallied=True),
        Scene("two", one(window, LimitOf("window", 5, 2)), one(window)),
        Scene("keys", one(keyed, LimitOf("window", 2)), one(keyed), ("k1", "k2", "k3")),
        Scene("parts", one(long), one(replace(long, n=2)), KEYS),
        Scene("shared", shared, lone),
        Scene("linked", lone, shared, is_tallied=True),
        Scene("bucket", one(bucket), one(replace(bucket, burst=2))),
        Scene("once", one(LimitOf("once", 2), LimitOf("window", 6)), one(LimitOf("once", 1))),
        Scene("strict", one(strict), one(strict)),
        Scene("tokens", one(tokens), one(tokens), costs=costs),
        Scene("settled", one(tokens, settles=True), one(tokens, settles=True), costs=costs),
        Scene(
            "counted", one(tokens, settles=True), one(tokens, settles=True), costs=costs,
            is_tallied=True,
        ),
        Scene("both", spent(window, tallied), spent(window, untallied), costs=costs, **crossed),
        Scene("crossed", spent(untallied), spent(tallied), costs=costs, **crossed),
        Scene("crossed back", spent(tallied), spent(untallied), costs=costs, **crossed),
        Scene("crossed keys", spent(untallied, late), spent(tallied, late), KEYS, costs, **crossed),
        Scene("limited", spent(), spent(tallied), costs=costs, **crossed),
        Scene("queues", {"r": queued}, {"r": queued}),
        Scene("again", one(window, on_lost="retry"), one(window, on_lost="retry")),
        Scene("calendar", one(calendar), one(replace(calendar, n=2))),
        Scene("quota", one(calendar), one(calendar), is_tallied=True),
    ]  # fmt: skip


def tightened(scene: Scene) -> Scene:
    """The scene where the network is quick, and every limit knows it."""

    def tight(rules: Rules) -> Rules:
        return {
            name: replace(rule, limits=tuple(replace(one, tight=TIGHT) for one in rule.limits))
            for name, rule in rules.items()
        }

    return replace(
        scene, name=f"tight {scene.name}", rules=tight(scene.rules), other=tight(scene.other)
    )


def mixed(draw: Any) -> Scene:
    """Two or three limits of any kinds, of one rule or shared by two."""
    limits = [_limit(draw) for _ in range(draw.choice([1, 2, 2, 3]))]
    first, rest = limits[0], tuple(limits[1:])
    has_queues = any(limit.per == "queue" for limit in limits)
    more = {"queues": QUEUES if has_queues else (), "on_lost": draw.choice(["auto", "retry"])}
    rules: Rules = {"r": RuleOf(tuple(limits), **more)}
    other: Rules = {"r": RuleOf((_another(first, draw), *rest), **more)}
    if draw.random() < 0.3:
        first = replace(first, name="account")
        rules = {"a": RuleOf((first,), **more), "b": RuleOf((*rest, first), 2, **more)}
        other = {"a": RuleOf((first,), **more), "b": RuleOf(rest or (_limit(draw),), **more)}
    every = [one for some in (rules, other) for rule in some.values() for one in rule.limits]
    calls = min((limit.n for limit in every if limit.unit == "calls"), default=1)
    tokens = min((limit.capacity for limit in every if limit.unit == "tokens"), default=0)
    costs: tuple[Any, ...] = (1, 1, 2) if calls > 1 else (1,)
    if any(limit.kind == "bucket" and limit.burst < 2 for limit in every):
        costs = (1,)
    if tokens:
        costs = tuple({"tokens": n} for n in range(1, tokens + 1))
    # a call must have each part that a limit of its rule is per
    keys = KEYS[1:] if any(limit.per == "part" for limit in every) else KEYS
    # Of the limits of one rule some are tallied then, and some are not.
    return Scene("mixed", rules, other, keys, costs, draw.random() < 0.4, draw.choice([1, 1, 2, 3]))


def _limit(draw: Any) -> LimitOf:
    kind = draw.choice(["window", "window", "bucket", "calendar", "once"])
    per = draw.choice(["rule", "rule", "key", "part", "queue"])
    n = draw.randint(1, 4)
    if kind == "once":
        return LimitOf(kind, n, per=per)
    is_tokens = draw.random() < 0.2
    n += 4 if is_tokens else 0
    return LimitOf(
        kind, n, draw.choice([1, 1, 2]), per, unit="tokens" if is_tokens else "calls",
        strict=draw.random() < 0.2, burst=draw.randint(1, n) if kind == "bucket" else 0,
        tight=draw.choice([None, None, None, TIGHT]),
    )  # fmt: skip


def _another(limit: LimitOf, draw: Any) -> LimitOf:
    """The limit as other settings have it."""
    n = max(1, limit.n + draw.choice([-1, 0, 1]))
    return replace(limit, n=n, burst=min(limit.burst, n))
