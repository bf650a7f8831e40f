"""What dispensers hold of the limits where their settings differ, and what is in force then:
everything that any of them holds.

An opinion is a dispenser's rules with their limits, as JSON. An agreement is what all that are
alive go by: their opinions, the changed limits, and what was ever charged together, so that a limit
goes on counting what it was charged with under settings of the past. Pure: `agreement.py` reads and
writes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from callqueue.limits.budgets import Book, Budget, Former, groups_of, with_rate
from callqueue.limits.kinds import DAY, KINDS, Limit
from callqueue.limits.rules import Rule

LATE = (
    4 * DAY
    # microseconds after its release by which every attempt has ended: no timeout or lease is longer
    # than a day
)

Opinion = Mapping[str, Sequence[Mapping[str, Any]]]  # by rule: its limits, in their order
Past = Mapping[
    str, Mapping[str, int | None]
]  # by limit or rule: rules whose releases it counts, up to an instant (None: all)


@dataclass(frozen=True)
class Agreement:
    """What all dispensers that are alive go by. `token` names it: a new one for each change, never
    used again.

    `digests` are those of their opinions; `differ`: whether these differ in a limit. `charged`: by
    a named limit, the rules that were ever charged to it. `names`: by rule, the names it had
    besides; `kinds` tell by which definition a rule was last known. `rates` are those that
    operators changed, by the limit's id in the settings.
    """

    token: str = ""
    digests: tuple[str, ...] = ()
    differ: bool = False
    charged: Past = field(default_factory=dict)
    names: Past = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    rates: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, token: str, memo: Mapping[str, Any], rates: Mapping[str, str]) -> Agreement:
        """From what a row keeps of it."""
        known = {f.name: memo[f.name] for f in fields(cls) if f.name in memo}
        return cls(
            **{
                **known,
                "token": token,
                "digests": tuple(known.get("digests", ())),
                "rates": dict(rates),
            }
        )

    def as_memo(self) -> dict[str, Any]:
        """What a row keeps of it, besides its token and its rates."""
        return {
            name: value for name, value in asdict(self).items() if name not in ("token", "rates")
        }

    def says_the_same(self, other: Agreement) -> bool:
        """Whether the same is in force by both. Which definitions are known makes no difference to
        that.
        """
        return replace(self, token="", kinds={}) == replace(other, token="", kinds={})


def opinion_of(book: Book) -> Opinion:
    """What these settings hold of the limits, as JSON."""
    return {name: [_as_data(limit) for limit in rule.limits] for name, rule in book.rules.items()}


def digest_of(opinion: Opinion) -> str:
    """A short text that differs where the opinions do."""
    return _digest(opinion)


def kinds_of(book: Book) -> dict[str, str]:
    """By rule with a limit of its own: a digest of all that its definition says. A rule that is
    renamed keeps it.
    """
    return {
        name: _digest([[f.name, _plain(getattr(rule, f.name))] for f in fields(rule)])
        for name, rule in book.rules.items()
        if any(not limit.name for limit in rule.limits)
    }


def renewed(
    agreement: Agreement,
    opinions: Mapping[str, Opinion],
    kinds: Mapping[str, str] | None = None,
    settled_at: int | None = None,
) -> Agreement:
    """The agreement of those that hold these opinions, by digest; its token is still the old one.

    `kinds` are those of the rules of a dispenser that joins. `settled_at`: an instant by which no
    pass goes by an agreement other than the present one any more, so that what was not charged
    together under it is not from then on; None: not known.
    """
    kinds = kinds or {}
    alive = {rule for opinion in opinions.values() for rule in opinion}
    names = {name: dict(others) for name, others in agreement.names.items()}
    for rule in kinds.keys() - agreement.kinds.keys():
        same = {
            old for old, kind in agreement.kinds.items() if kind == kinds[rule] and old not in kinds
        }
        _call_the_same(names, {rule, *same})
    charged: dict[str, dict[str, int | None]] = {
        limit: dict(rules) for limit, rules in agreement.charged.items()
    }
    together = {(limit, rule) for opinion in opinions.values() for limit, rule in _named(opinion)}
    for limit, rule in together:
        charged.setdefault(limit, {})[rule] = None
    for limit, rules in charged.items():
        _end(rules, {rule for rule in rules if (limit, rule) in together}, settled_at)
    for others in names.values():
        _end(others, alive, settled_at)
    return replace(
        agreement,
        digests=tuple(sorted(opinions)),
        differ=bool(differences(opinions)),
        charged=charged,
        names=names,
        kinds={**agreement.kinds, **kinds},
    )


def is_settled(agreement: Agreement, opinions: Mapping[str, Opinion]) -> bool:
    """Whether all that is counted without an end is charged under these opinions."""
    return renewed(agreement, opinions, settled_at=0) == renewed(agreement, opinions)


def in_force(own: Book, agreement: Agreement, opinions: Mapping[str, Opinion], now: int) -> Book:
    """What is in force at `now` (microseconds) for a process with these settings: its own limits,
    and those of all opinions.

    A limit counts every rule that any of them counts in it, and where they differ in it, all must
    admit a call. Of one agreement, every process that takes part in it finds the same budgets and
    groups.
    """
    mine = opinion_of(own)
    digest = digest_of(mine)
    union = _Union(
        [mine, *(opinion for other, opinion in opinions.items() if other != digest)], agreement
    )
    budgets = {
        settings_id: limit.budgets(settings_id, now) for settings_id, limit in union.limits.items()
    }
    return Book(
        rules={**dict.fromkeys(union.ids, Rule()), **own.rules},
        budgets={
            rule: tuple(b for settings_id in ids for b in budgets[settings_id])
            for rule, ids in union.ids.items()
        },
        groups=groups_of(union.ids, [limit.rules for limit in union.limits.values()]),
        own=own.with_rates(agreement.rates),
        agreement=agreement.token if not agreement.digests or digest in agreement.digests else "",
        unreadable=frozenset(
            rule for limit in union.limits.values() if limit.is_unreadable for rule in limit.rules
        ),
    )


@dataclass(frozen=True)
class Difference:
    """A limit on which dispensers differ: what each of them says of it, and who does."""

    limit: str
    rules: tuple[str, ...]
    said: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        return f"limit {self.limit}: " + "; ".join(
            f"{what} says {', '.join(who)}" for what, who in self.said.items()
        )


def differences(opinions: Mapping[str, Opinion]) -> list[Difference]:
    """The limits on which these opinions, by who holds them, differ; about a rule that it does not
    know, nobody says anything.
    """
    if len(opinions) < 2:
        return []
    said: dict[str, dict[str, str]] = {}
    rules: dict[str, set[str]] = {}
    for who, opinion in opinions.items():
        for rule, index, data in _each(opinion):
            settings_id = _settings_id(rule, index, data)
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
                what: tuple(who for who, says in said[settings_id].items() if says == what)
                for what in words
            }
            listed.append(Difference(settings_id, tuple(sorted(rules[settings_id])), by_words))
    return listed


# --- limits as data


def _as_data(limit: Limit) -> dict[str, Any]:
    return {
        "kind": type(limit).__name__,
        **{f.name: getattr(limit, f.name) for f in fields(limit) if f.init},
    }


def _from_data(data: Mapping[str, Any]) -> Limit | None:
    """The limit; None where another version of callqueue wrote what this one does not know."""
    try:
        return KINDS[data["kind"]](
            **{name: value for name, value in data.items() if name != "kind"}
        )
    except (KeyError, TypeError, ImproperlyConfigured):
        return None


def _in_words(data: Mapping[str, Any]) -> str:
    """As the settings write it, but for its name and what is as it always is."""
    kind = KINDS.get(data["kind"])
    usual = {f.name: f.default for f in fields(kind)} if kind else {}
    main = data.get("rate", data.get("n"))
    more = [f"{name}={value!r}" for name, value in sorted(data.items()) if name not in ("kind", "name", "rate", "n")
            and usual.get(name) != value]  # fmt: skip
    return f"{data['kind']}({', '.join([repr(main), *more])})"


def _each(opinion: Opinion) -> Iterable[tuple[str, int, Mapping[str, Any]]]:
    return (
        (rule, index, data) for rule, limits in opinion.items() for index, data in enumerate(limits)
    )


def _settings_id(rule: str, index: int, data: Mapping[str, Any]) -> str:
    return data.get("name") or f"{rule}#{index}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A field of a rule as text that is the same in every process that has the same settings."""
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    return repr(value)


# --- what is in force


@dataclass
class _Joint:
    """A limit as the opinions have it, one or several, for all the rules that any of them counts in
    it.
    """

    past: Mapping[str, int | None]
    variants: dict[str, Limit] = field(default_factory=dict)
    rules: set[str] = field(default_factory=set)
    is_unreadable: bool = False

    def budgets(self, settings_id: str, now: int) -> list[Budget]:
        """One for each variant; where there are several, each with an id of its own."""
        rules = tuple(sorted(self.rules))
        return [
            Budget(
                settings_id if len(self.variants) == 1 else f"{settings_id}~{digest[:6]}",
                variant,
                rules,
                self._former(now - LATE - variant.window_us),
                settings_id,
            )
            for digest, variant in self.variants.items()
        ]

    def _former(self, oldest: int) -> tuple[Former, ...]:
        former = ((rule, until) for rule, until in self.past.items() if rule not in self.rules)
        return tuple(
            sorted((rule, until) for rule, until in former if until is None or until > oldest)
        )


class _Union:
    """All opinions taken together: `limits` by their ids in the settings, and the `ids` of every
    rule's limits, in its order.
    """

    def __init__(self, opinions: Sequence[Opinion], agreement: Agreement) -> None:
        self.limits: dict[str, _Joint] = {}
        self.ids: dict[str, dict[str, None]] = {
            rule: {} for opinion in opinions for rule in opinion
        }
        for opinion in opinions:
            for rule, index, data in _each(opinion):
                self._add(_settings_id(rule, index, data), rule, data, agreement)
        for settings_id, limit in self.limits.items():
            for rule in limit.rules:
                self.ids[rule][settings_id] = None

    def _add(
        self, settings_id: str, rule: str, data: Mapping[str, Any], agreement: Agreement
    ) -> None:
        self.ids[rule][settings_id] = None
        if settings_id not in self.limits:
            past = (
                agreement.charged.get(settings_id, {})
                if data.get("name")
                else agreement.names.get(rule, {})
            )
            self.limits[settings_id] = _Joint(
                past, rules=set() if data.get("name") else past.keys() & self.ids.keys()
            )
        joint, limit = self.limits[settings_id], _from_data(data)
        joint.rules.add(rule)
        if limit is None:
            joint.is_unreadable = True
        else:
            limit = with_rate(limit, agreement.rates.get(settings_id))
            joint.variants[_digest(_as_data(limit))] = limit


# --- what counts


def _named(opinion: Opinion) -> Iterable[tuple[str, str]]:
    return ((data["name"], rule) for rule, _, data in _each(opinion) if data.get("name"))


def _call_the_same(names: dict[str, dict[str, int | None]], rules: set[str]) -> None:
    """These names, and those that they had before, are of one rule."""
    if len(rules) < 2:
        return
    every = rules.union(*(names.get(rule, {}) for rule in rules))
    for rule in every:
        for other in every - {rule}:
            names.setdefault(rule, {}).setdefault(other, None)


def _end(counted: dict[str, int | None], alive: Collection[str], settled_at: int | None) -> None:
    """What is not charged any more counts up to now; what is charged again, without an end."""
    for rule, until in counted.items():
        if rule in alive:
            counted[rule] = None
        elif until is None:
            counted[rule] = settled_at
