"""What is in force where the settings of processes differ: everything that any of them holds.

An opinion is what one process's settings say of the limits, as JSON. In force is the union of all
that are held; those that are not any more tell what was charged together before. Pure:
`ledger/settings.py` reads and writes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from callqueue.clocks import Us
from callqueue.limits.budgets import Book, Budget, groups_of, with_rate
from callqueue.limits.kinds import DAY, KINDS, SECOND, Limit
from callqueue.limits.rules import Rule

Opinion = Mapping[str, Sequence[Mapping[str, Any]]]  # by rule: its limits, in their order

# microseconds after its release by which every attempt has ended: no timeout or lease is longer
# than a day
LATE = 4 * DAY
# microseconds after an opinion has lapsed, by which each pass that goes by it has read the clock
LINGERS = 60 * SECOND
# the version of a book whose settings are not in force: no pass may go by it
OF_NOBODY = -1


@dataclass(frozen=True)
class Stated:
    """What all processes together say, as of one version."""

    version: int = 0
    opinions: Mapping[str, Opinion] = field(default_factory=dict)  # by digest
    lapsed: Sequence[tuple[Opinion, Us]] = ()  # each with the instant
    # that operators changed, by the limit's id in the settings
    rates: Mapping[str, str] = field(default_factory=dict)

    def book(self, own: Book) -> Book:
        """What is in force for a process of these settings: its own limits, and all opinions'.
        A limit counts every rule that any opinion counts in it; where opinions differ in a limit,
        every variant must admit a call. Of one version, all processes that have stated an opinion
        find the same; one that has not, where others have, finds the version OF_NOBODY.
        """
        mine = opinion_of(own)
        digest = digest_of(mine)
        union = _Union([mine, *(self.opinions[d] for d in self.opinions if d != digest)], self)
        limits = union.limits.items()
        budgets = {settings_id: limit.budgets(settings_id) for settings_id, limit in limits}
        return Book(
            rules={**dict.fromkeys(union.ids, Rule()), **own.rules},
            budgets={
                rule: tuple(b for settings_id in ids for b in budgets[settings_id])
                for rule, ids in union.ids.items()
            },
            groups=groups_of(union.ids, [limit.rules for _, limit in limits]),
            own=own.with_rates(self.rates),
            version=self.version if not self.opinions or digest in self.opinions else OF_NOBODY,
            unreadable=frozenset(
                rule for _, limit in limits if limit.is_unreadable for rule in limit.rules
            ),
        )

    def former_rules(self, limit_name: str) -> dict[str, Us]:
        """The rules that lapsed opinions charged to a named limit, and up to which instant."""
        until: dict[str, Us] = {}
        for opinion, lapsed_at in self.lapsed:
            for rule in (rule for name, rule in each_name_with_rule(opinion) if name == limit_name):
                until[rule] = max(until.get(rule, Us(0)), lapsed_at + LINGERS)
        return until

    @property
    def longest_window(self) -> int:
        """The longest, in microseconds, in which any limit that anybody stated counts a charge."""
        every = [*self.opinions.values(), *(opinion for opinion, _ in self.lapsed)]
        by_place = {str(place): opinion for place, opinion in enumerate(every)}
        book = Stated(opinions=by_place, rates=self.rates).book(Book({}, {}, {}))
        return max((budget.limit.window_us for budget in book.all_budgets()), default=0)


@dataclass
class _Joint:
    """A limit, in one variant or several, for all rules that any opinion counts in it."""

    former: Mapping[str, Us]  # rules, and until when
    variants: dict[str, Limit] = field(default_factory=dict)
    rules: set[str] = field(default_factory=set)
    is_unreadable: bool = False

    def budgets(self, settings_id: str) -> list[Budget]:
        """One for each variant; where there are several, each with an id of its own."""
        rules = tuple(sorted(self.rules))
        former = tuple(sorted((rule, at) for rule, at in self.former.items() if rule not in rules))
        return [
            Budget(
                settings_id if len(self.variants) == 1 else f"{settings_id}~{digest[:6]}",
                variant,
                rules,
                former,
                settings_id,
            )
            for digest, variant in self.variants.items()
        ]


class _Union:
    """The limits of all these opinions together."""

    def __init__(self, opinions: Sequence[Opinion], stated: Stated) -> None:
        self.limits: dict[str, _Joint] = {}  # by their ids in the settings
        self.ids: dict[str, dict[str, None]] = {  # by rule, of its limits, in their order
            rule: {} for opinion in opinions for rule in opinion
        }
        for opinion in opinions:
            for rule, index, data in each_limit(opinion):
                self._add_limit(settings_id_of(rule, index, data), rule, data, stated)

    def _add_limit(
        self, settings_id: str, rule: str, data: Mapping[str, Any], stated: Stated
    ) -> None:
        """Add a rule's limit, at the rate in force: a variant, or none if it is unreadable."""
        self.ids[rule][settings_id] = None
        if settings_id not in self.limits:
            former = stated.former_rules(settings_id) if data.get("name") else {}
            self.limits[settings_id] = _Joint(former)
        joint, limit = self.limits[settings_id], limit_from_data(data)
        joint.rules.add(rule)
        if limit is None:
            joint.is_unreadable = True
        else:
            limit = with_rate(limit, stated.rates.get(settings_id))
            joint.variants[digest_of(as_data(limit))] = limit


# --- where opinions differ


@dataclass(frozen=True)
class Difference:
    """A limit on which dispensers differ: what each of them says of it, and who does."""

    limit: str
    rules: tuple[str, ...]
    said: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        return f"limit {self.limit}: " + "; ".join(
            f"{words} says {', '.join(who)}" for words, who in self.said.items()
        )


def differences(opinions: Mapping[str, Opinion]) -> list[Difference]:
    """Limits on which opinions, by holder, differ. Who has none of its rules has no say."""
    if len(opinions) < 2:
        return []
    said: dict[str, dict[str, str]] = {}
    rules: dict[str, set[str]] = {}
    for who, opinion in opinions.items():
        for rule, index, data in each_limit(opinion):
            settings_id = settings_id_of(rule, index, data)
            said.setdefault(settings_id, {})[who] = _in_words(data)
            rules.setdefault(settings_id, set()).add(rule)
    listed = []
    for settings_id in sorted(said):
        for who, opinion in opinions.items():
            if not rules[settings_id].isdisjoint(opinion):
                said[settings_id].setdefault(who, "no limit")
        words = sorted(set(said[settings_id].values()))
        if len(words) > 1:
            by_words = {
                text: tuple(who for who, says in said[settings_id].items() if says == text)
                for text in words
            }
            listed.append(Difference(settings_id, tuple(sorted(rules[settings_id])), by_words))
    return listed


def _in_words(data: Mapping[str, Any]) -> str:
    """The limit as settings write it, without its name and what is its default."""
    kind = KINDS.get(data["kind"])
    usual = {f.name: f.default for f in fields(kind)} if kind else {}
    main = data.get("rate", data.get("n"))
    more = [
        f"{name}={value!r}"
        for name, value in sorted(data.items())
        if name not in ("kind", "name", "rate", "n") and usual.get(name) != value
    ]
    return f"{data['kind']}({', '.join([repr(main), *more])})"


# --- opinions and limits as data


def opinion_of(book: Book) -> Opinion:
    """What these settings say of the limits, as JSON."""
    return {name: [as_data(limit) for limit in rule.limits] for name, rule in book.rules.items()}


def as_data(limit: Limit) -> dict[str, Any]:
    return {
        "kind": type(limit).__name__,
        **{f.name: getattr(limit, f.name) for f in fields(limit) if f.init},
    }


def limit_from_data(data: Mapping[str, Any]) -> Limit | None:
    """The limit; None where another version of callqueue wrote what this one does not know."""
    try:
        return KINDS[data["kind"]](
            **{name: value for name, value in data.items() if name != "kind"}
        )
    except (KeyError, TypeError, ImproperlyConfigured):
        return None


def each_limit(opinion: Opinion) -> Iterable[tuple[str, int, Mapping[str, Any]]]:
    """(its rule, its place among the rule's limits, the limit as data)"""
    return (
        (rule, index, data) for rule, limits in opinion.items() for index, data in enumerate(limits)
    )


def each_name_with_rule(opinion: Opinion) -> Iterable[tuple[str, str]]:
    return ((data["name"], rule) for rule, _, data in each_limit(opinion) if data.get("name"))


def settings_id_of(rule: str, index: int, data: Mapping[str, Any]) -> str:
    return data.get("name") or f"{rule}#{index}"


def digest_of(value: Any) -> str:
    """A short text that differs where what is given does: an opinion, a limit as data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
