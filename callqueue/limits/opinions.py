"""Opinions: what a dispenser's settings say of the limits, as JSON, and where those of several
differ. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from callqueue.limits.budgets import Book
from callqueue.limits.kinds import KINDS, Limit
from callqueue.limits.rules import Rule

Opinion = Mapping[str, Sequence[Mapping[str, Any]]]  # by rule: its limits, in their order


def opinion_of(book: Book) -> Opinion:
    """What these settings hold of the limits, as JSON."""
    return {name: [as_data(limit) for limit in rule.limits] for name, rule in book.rules.items()}


def kinds_of(book: Book) -> dict[str, str]:
    """By rule with a limit of its own: a digest of its definition. A renamed rule keeps it."""
    return {
        name: digest_of(plain_rule(rule))
        for name, rule in book.rules.items()
        if any(not limit.name for limit in rule.limits)
    }


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
        for rule, index, data in each(opinion):
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
                what: tuple(who for who, says in said[settings_id].items() if says == what)
                for what in words
            }
            listed.append(Difference(settings_id, tuple(sorted(rules[settings_id])), by_words))
    return listed


# --- limits as data


def as_data(limit: Limit) -> dict[str, Any]:
    """The limit's kind and fields, as JSON."""
    return {
        "kind": type(limit).__name__,
        **{f.name: getattr(limit, f.name) for f in fields(limit) if f.init},
    }


def from_data(data: Mapping[str, Any]) -> Limit | None:
    """The limit; None where another version of callqueue wrote what this one does not know."""
    try:
        return KINDS[data["kind"]](
            **{name: value for name, value in data.items() if name != "kind"}
        )
    except (KeyError, TypeError, ImproperlyConfigured):
        return None


def _in_words(data: Mapping[str, Any]) -> str:
    """The limit as settings write it, but for its name and what is as it always is."""
    kind = KINDS.get(data["kind"])
    usual = {f.name: f.default for f in fields(kind)} if kind else {}
    main = data.get("rate", data.get("n"))
    more = [
        f"{name}={value!r}"
        for name, value in sorted(data.items())
        if name not in ("kind", "name", "rate", "n") and usual.get(name) != value
    ]
    return f"{data['kind']}({', '.join([repr(main), *more])})"


def each(opinion: Opinion) -> Iterable[tuple[str, int, Mapping[str, Any]]]:
    """Each limit of it: its rule, its place there, and the limit as data."""
    return (
        (rule, index, data) for rule, limits in opinion.items() for index, data in enumerate(limits)
    )


def named(opinion: Opinion) -> Iterable[tuple[str, str]]:
    """Each limit of it that has a name: that name, and the rule."""
    return ((data["name"], rule) for rule, _, data in each(opinion) if data.get("name"))


def settings_id_of(rule: str, index: int, data: Mapping[str, Any]) -> str:
    """What the settings call a limit: its name, or its rule and its place there."""
    return data.get("name") or f"{rule}#{index}"


def digest_of(value: Any) -> str:
    """A short text that differs where what is given does: an opinion, a limit as data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def plain_rule(rule: Rule) -> list[list[Any]]:
    """A rule as JSON that is the same in every process that has the same settings."""
    return [[f.name, _plain(getattr(rule, f.name))] for f in fields(rule)]


def _plain(value: Any) -> Any:
    if callable(value):
        name = getattr(value, "__qualname__", type(value).__name__)
        return f"{getattr(value, '__module__', '')}.{name}"
    return repr(value)
