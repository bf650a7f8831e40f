"""Agreements: what is in force where the settings of dispensers differ, everything that any of them
holds.

An agreement is what all dispensers that are alive go by: their opinions, the changed limits, and
what was ever charged together, so that a limit goes on counting what it was charged with under
settings of the past. Pure: `ledger/agreement.py` reads and writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from callqueue.limits.budgets import Book, Budget, Former, groups_of, with_rate
from callqueue.limits.kinds import DAY, Limit
from callqueue.limits.opinions import (
    Opinion,
    as_data,
    differences,
    digest_of,
    each,
    from_data,
    named,
    opinion_of,
    settings_id_of,
)
from callqueue.limits.rules import Rule

# microseconds after its release by which every attempt has ended: no timeout or lease is longer
# than a day
LATE = 4 * DAY

# by limit or rule: rules whose releases it counts, up to an instant (None: all)
Past = Mapping[str, Mapping[str, int | None]]


@dataclass(frozen=True)
class Agreement:
    """What all dispensers that are alive go by. `token` names it: a new one for each change, never
    used again.

    `digests` are those of their opinions; `differ`: whether these differ in a limit. `charged`: by
    a named limit, the rules that were ever charged to it. `names`: by rule, the names it had
    besides; `kinds` tell by which definition a rule was last known. `rates` are those that
    operators changed, by the limit's id in the settings. `guests`: by digest, the opinions of
    processes that are no dispensers and charge all the same, each with the instant at which it was
    let in: what they charge counts, and dispensers do not go by their limits.
    """

    token: str = ""
    digests: tuple[str, ...] = ()
    differ: bool = False
    charged: Past = field(default_factory=dict)
    names: Past = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    rates: Mapping[str, str] = field(default_factory=dict)
    guests: Mapping[str, tuple[int, Opinion]] = field(default_factory=dict)

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
        """Whether the same is in force by both, whichever definitions they know."""
        return self._in_force == other._in_force

    @property
    def _in_force(self) -> Agreement:
        return replace(self, token="", kinds={}, guests=dict.fromkeys(self.guests, (0, {})))

    @property
    def holders(self) -> frozenset[str]:
        """The digests of all opinions by which anybody charges."""
        return frozenset(self.digests) | frozenset(self.guests)

    def with_guest(self, digest: str, opinion: Opinion, now: int) -> Agreement:
        return replace(self, guests={**self.guests, digest: (now, opinion)})

    def without_guests(self, until: int) -> Agreement:
        """Without those that were let in up to an instant."""
        left = {digest: guest for digest, guest in self.guests.items() if guest[0] > until}
        return replace(self, guests=left)


def renewed(
    agreement: Agreement,
    opinions: Mapping[str, Opinion],
    kinds: Mapping[str, str] | None = None,
    settled_at: int | None = None,
) -> Agreement:
    """The agreement of the dispensers that hold these opinions, by digest, and of its guests; its
    token is still the old one.

    `kinds` are those of the rules of a dispenser that joins. `settled_at`: an instant by which no
    pass goes by an agreement other than the present one any more, so that what was not charged
    together under it is not from then on; None: not known.
    """
    kinds = kinds or {}
    every = [*opinions.values(), *(opinion for _, opinion in agreement.guests.values())]
    alive = {rule for opinion in every for rule in opinion}
    names = _names_with(agreement, kinds)
    for others in names.values():
        _end(others, alive, settled_at)
    together = {(limit, rule) for opinion in every for limit, rule in named(opinion)}
    charged: dict[str, dict[str, int | None]] = {
        limit: dict(rules) for limit, rules in agreement.charged.items()
    }
    for limit, rule in together:
        charged.setdefault(limit, {})[rule] = None
    for limit, rules in charged.items():
        _end(rules, {rule for rule in rules if (limit, rule) in together}, settled_at)
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


# --- what is in force


@dataclass
class _Joint:
    """A limit, in one variant or several, for all rules that any opinion counts in it."""

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
            for rule, index, data in each(opinion):
                self._add(settings_id_of(rule, index, data), rule, data, agreement)
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
        joint, limit = self.limits[settings_id], from_data(data)
        joint.rules.add(rule)
        if limit is None:
            joint.is_unreadable = True
        else:
            limit = with_rate(limit, agreement.rates.get(settings_id))
            joint.variants[digest_of(as_data(limit))] = limit


# --- what counts


def _names_with(agreement: Agreement, kinds: Mapping[str, str]) -> dict[str, dict[str, int | None]]:
    """The names of rules. A rule that is new here, and defined as one that is gone from these
    settings, is that one, renamed.
    """
    names = {name: dict(others) for name, others in agreement.names.items()}
    for rule in kinds.keys() - agreement.kinds.keys():
        same = {
            old for old, kind in agreement.kinds.items() if kind == kinds[rule] and old not in kinds
        }
        _call_the_same(names, {rule, *same})
    return names


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
