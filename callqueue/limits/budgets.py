"""Which limits count together: budgets, and the groups of rules that share one.

A limit with a name is one budget for every rule that lists it; one without belongs to its rule
alone. Rules that share a budget, directly or through others, form a group, which a pass plans as a
whole. What a call costs in each unit is here, and the parts of its key. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from django.core.exceptions import ImproperlyConfigured

from callqueue.clocks import Us
from callqueue.limits.kinds import Limit
from callqueue.limits.rules import Rule

Cost = int | Mapping[str, int]


# a rule, and the last instant (microseconds) at which what it released counts
Former = tuple[str, Us]


@dataclass(frozen=True)
class Budget:
    """One limit and the rules it counts; a limit that differs among settings has several."""

    id: str  # its name, or "<rule>#<index>" where it has none
    limit: Limit
    rules: tuple[str, ...]
    former: tuple[Former, ...] = ()  # rules that it goes on counting the earlier releases of
    settings_id: str = ""  # what the settings call it

    @property
    def known_as(self) -> str:
        """Its id in the settings, which all its variants share."""
        return self.settings_id or self.id

    @property
    def charging_rules(self) -> list[str]:
        """The rules that charge it, and those that did and still count."""
        return [*self.rules, *(name for name, _ in self.former)]

    def counts(self, rule: str, released_at: Us) -> bool:
        """Whether an attempt that the rule released at this instant is charged to it."""
        return rule in self.rules or any(
            rule == name and released_at <= until for name, until in self.former
        )

    def value_of(self, key: str, queue: str) -> str:
        """The value of the limit's `per` for a call with this key on this queue."""
        per = self.limit.per
        if per == "rule":
            return ""
        return queue if per == "queue" else key_part(key, per)

    def charge_of(self, cost: Cost) -> int:
        return cost_of(cost, self.limit.unit)


@dataclass(frozen=True)
class Book:
    """Rules with their budgets and groups: of these settings, or of all that is in force."""

    rules: Mapping[str, Rule]
    budgets: Mapping[str, tuple[Budget, ...]]  # by rule
    groups: Mapping[str, tuple[str, ...]]  # by rule: the names in its group, sorted
    # the book of this process's settings (None: this one). Rules that only others have, of which
    # nothing but the limits is known, are in `rules` with default fields
    own: Book | None = None
    version: int = 0  # of the settings in force
    # rules with a limit that this version of callqueue does not know
    unreadable: frozenset[str] = field(default=frozenset())

    @property
    def settings(self) -> Book:
        """The book of this process's own settings."""
        return self.own or self

    def all_budgets(self) -> tuple[Budget, ...]:
        return tuple({b.id: b for budgets in self.budgets.values() for b in budgets}.values())

    def group_budgets(self, group: Iterable[str]) -> tuple[Budget, ...]:
        return tuple({b.id: b for rule in group for b in self.budgets[rule]}.values())

    def former_rules_under_way(self, group: Iterable[str], now: Us) -> set[str]:
        """The former rules of a group of which a pass by older settings may still be under way."""
        budgets = self.group_budgets(group)
        return {name for budget in budgets for name, until in budget.former if until > now}

    def may_owe(self, budget: Budget) -> bool:
        """Whether an attempt may cost more than it was released for."""
        return bool(budget.former or any(self.rules[one].settle for one in budget.rules))

    def queues_of(self, budget: Budget) -> list[str]:
        return sorted({queue for rule in budget.rules for queue in self.rules[rule].queue_names})

    def distinct_groups(self) -> tuple[tuple[str, ...], ...]:
        return tuple(sorted(set(self.groups.values())))

    def moved_by(self, moved: int) -> Book:
        """This book for a ledger that was moved so far: its calendars are in ledger time."""
        if not moved or not any(b.limit.is_calendar for one in self.budgets.values() for b in one):
            return self
        budgets = {
            rule: tuple(replace(b, limit=b.limit.moved_by(moved)) for b in listed)
            for rule, listed in self.budgets.items()
        }
        return replace(self, budgets=budgets)

    def with_rates(self, rates: Mapping[str, str]) -> Book:
        """This book with operators' rates by `known_as`; unknown and unfit ones are passed over."""
        if not rates:
            return self
        changed = {
            rule: tuple(
                replace(b, limit=with_rate(b.limit, rates.get(b.known_as))) for b in budgets
            )
            for rule, budgets in self.budgets.items()
        }
        return replace(self, budgets=changed)


def book_of(rules: Mapping[str, Rule]) -> Book:
    """The book of these rules. ImproperlyConfigured where two limits of one name differ."""
    named: dict[str, tuple[str, Limit]] = {}
    users: dict[str, list[str]] = {}
    ids: dict[str, list[str]] = {rule: [] for rule in rules}
    limits: dict[str, Limit] = {}
    for rule_name, rule in rules.items():
        for index, limit in enumerate(rule.limits):
            budget_id = limit.name or f"{rule_name}#{index}"
            first_rule, first = named.setdefault(budget_id, (rule_name, limit))
            if first != limit or type(first) is not type(limit):
                raise ImproperlyConfigured(
                    f"CALLQUEUE['RULES']: the limit named {budget_id!r} is {first!r} "
                    f"in rule {first_rule!r} and {limit!r} in rule {rule_name!r}; "
                    "limits of one name are one budget and must be equal"
                )
            limits[budget_id] = limit
            users.setdefault(budget_id, []).append(rule_name)
            ids[rule_name].append(budget_id)
    budgets = {
        rule: tuple(Budget(i, limits[i], tuple(users[i])) for i in ids[rule]) for rule in rules
    }
    return Book(dict(rules), budgets, groups_of(rules, users.values()))


def with_rate(limit: Limit, rate: str | None) -> Limit:
    """The limit with an operator's rate; as it is for None, or where its kind takes none such."""
    try:
        return limit if rate is None else limit.with_rate(rate)
    except ImproperlyConfigured:
        return limit


def cost_of(cost: Cost, unit: str) -> int:
    """What `cost` charges in `unit`. An int is calls; a mapping has 1 call unless it says."""
    if isinstance(cost, int):  # asked first: nearly every call's cost is one
        return cost if unit == "calls" else 0
    return cost.get(unit, 1 if unit == "calls" else 0)


def costs_more(cost: Cost, charged: Cost) -> bool:
    """Whether `cost` is more than `charged` in any unit."""
    if cost == charged:
        return False
    units = {"calls", *(cost if isinstance(cost, Mapping) else ())}
    return any(cost_of(cost, unit) > cost_of(charged, unit) for unit in units)


def larger_cost(one: Cost, other: Cost) -> Cost:
    """Of two costs the larger in each unit, as a mapping."""
    units = {"calls"}.union(*(cost for cost in (one, other) if isinstance(cost, Mapping)))
    return {unit: max(cost_of(one, unit), cost_of(other, unit)) for unit in sorted(units)}


@lru_cache(maxsize=16384)
def key_part(key: str, per: str) -> str:
    """The value that `per` picks from a call's key text; "" where the key has no such part.
    A key is one string, or a mapping written as JSON with sorted names. For `per="key"` a mapping
    counts as a whole unless it has a part named "key".
    """
    parts = named_parts(key)
    if per == "key":
        return parts.get("key", key) if parts else key
    return parts.get(per, "")


@lru_cache(maxsize=16384)
def named_parts(key: str) -> Mapping[str, str]:
    """The named parts of a key text; empty for a plain string."""
    if not key.startswith("{"):
        return {}
    try:
        parts = json.loads(key)
    except (ValueError, RecursionError):
        return {}
    return parts if isinstance(parts, dict) else {}


@lru_cache(maxsize=16384)
def scopes_of(key: str) -> frozenset[tuple[str, str]]:
    """(per, value) of each hold by key that keeps this key back: on the whole, or on a part."""
    parts = {(name, value) for name, value in named_parts(key).items() if isinstance(value, str)}
    whole = {("key", key)} if key else set()
    return frozenset(whole | {part for part in parts if part[0] not in ("rule", "queue")})


def groups_of(rules: Iterable[str], sharers: Iterable[Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """By rule, its whole group, sorted. `sharers`: of each budget, the rules that share it."""
    group = {rule: {rule} for rule in rules}
    for users in sharers:
        merged = set().union(*(group[user] for user in users))
        for rule in merged:
            group[rule] = merged
    return {rule: tuple(sorted(members)) for rule, members in group.items()}
