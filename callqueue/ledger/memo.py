"""What passes remember of a group of rules, as the row of its first rule keeps it.

Known room is what a pass that counted left free; later ones take from it without counting. Nothing
but what they took has been charged since, so they decide as the first would have. It is not
believed where a cost may turn out to be more, where a hold was laid, or where ledger time was moved
since; and known of limits per rule alone. Tallied limits need none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, Self

from callqueue.clocks import Us
from callqueue.ledger.tallies import is_tallied
from callqueue.ledger.tally_rows import fingerprint
from callqueue.limits.budgets import Book, Budget
from callqueue.limits.kinds import Usage

_BETWEEN = "\x1f"


@dataclass
class Memo:
    """What passes remember of a group of rules. It is believed only while each rule's row counts as
    many passes as `version` says, and names this group, by this version of the settings, as the
    last with a pass over it. Any other pass over one of the rules voids it; so does a rule that
    shared a budget by another version.
    """

    # of token buckets, (instant, level, fingerprint) by scope
    levels: dict[str, list[Any]] = field(default_factory=dict)
    tallies: dict[str, Any] = field(default_factory=dict)  # by budget, what their `Kept` says
    in_turn: list[str] = field(default_factory=list)  # the rules whose keys took turns
    # by rule whose keys begin to, the last (key, priority) looked at
    gathering: dict[str, Any] = field(default_factory=dict)
    # by rule, the budget that kept its next call back; for who looks
    binding: dict[str, str] = field(default_factory=dict)
    room: dict[str, Any] = field(default_factory=dict)  # as `KnownRoom` dumps it
    moved: int = 0  # how far the ledger was

    @classmethod
    def load(
        cls,
        group: Sequence[str],
        kept: Mapping[str, tuple[int, Mapping[str, Any]]],
        settings_version: int,
        moved: int,
    ) -> Memo:
        """A group's memo, empty where it is not believed. `kept`: by rule, its passes and memo. No
        levels if the ledger was at another `moved` then: what was open may have ended before them.
        """
        stored = kept[min(group)][1] if min(group) in kept else {}
        version = {rule: passes for rule, (passes, _) in kept.items()}
        own = group_identity(group, settings_version)
        if (
            stored.get("version") != version
            or set(kept) != set(group)
            or any(memo.get("group") != own for _, memo in kept.values())
        ):
            return cls(moved=moved)
        return cls(
            dict(stored["levels"]) if stored.get("moved", 0) == moved else {},
            dict(stored["tallies"]),
            list(stored["in_turn"]),
            dict(stored["gathering"]),
            dict(stored.get("binding", {})),
            dict(stored.get("room", {})),
            moved,
        )

    def dump(self, passes: Mapping[str, int], settings_version: int) -> dict[str, Any]:
        return {
            "version": dict(passes),
            "group": group_identity(passes, settings_version),
            **vars(self),
        }


def group_identity(group: Iterable[str], settings_version: int) -> list[int | str]:
    return [settings_version, *sorted(group)]


class Level(NamedTuple):
    """What a token bucket held at an instant: no charge from before it can still come or change."""

    at: Us
    level: int  # tokens times the period
    print: str  # of the budget


def kept_level(memo: Memo, budget: Budget, value: str, since: Us, now: Us) -> Level | None:
    """The level, if it is of this very budget, no earlier than `since` and no later than `now`."""
    found = memo.levels.get(_bucket_name(budget, value))
    level = Level(*found) if found else None
    if level is None or level.print != fingerprint(budget):
        return None
    return level if since <= level.at <= now else None


def usage_since_kept_level(
    memo: Memo, budget: Budget, value: str, usage: Usage, oldest_open: Us, now: Us
) -> Usage:
    """The usage since the memo's level, if any; keeps a newer one there, of before what is open."""
    # The level is that of the oldest instant that an open attempt may still age from, or be
    # charged more from.
    known = kept_level(memo, budget, value, usage.since, now)
    if known:
        newer = [charge for charge in usage.aged if charge[0] > known.at]
        usage = replace(usage, aged=newer, since=known.at, level=known.level)
    if oldest_open > usage.since:
        before = [charge for charge in usage.aged if charge[0] <= oldest_open]
        level = budget.limit.level(replace(usage, open=0, aged=before), oldest_open)
        kept_now = Level(oldest_open, level, fingerprint(budget))
        memo.levels[_bucket_name(budget, value)] = list(kept_now)
    return usage


def forget_other_levels(memo: Memo, budgets: Container[str]) -> None:
    memo.levels = {
        name: level for name, level in memo.levels.items() if name.partition(_BETWEEN)[0] in budgets
    }


def _bucket_name(budget: Budget, value: str) -> str:
    return f"{budget.id}{_BETWEEN}{value}"


# --- Known room


@dataclass(frozen=True)
class KnownRoom:
    """What was free at an instant after which nothing was charged but what is taken off."""

    at: Us
    moved: int  # how far the ledger was then
    print: str  # of what budgets
    laid: Mapping[str, int]  # by rule, how many holds had been laid, of which none was in force
    free: Mapping[str, int]  # by budget
    open: Mapping[str, int]  # by rule, how many attempts are open at most

    @classmethod
    def load(cls, kept: Mapping[str, Any]) -> Self | None:
        return cls(**kept) if kept else None

    def dump(self) -> dict[str, Any]:
        return dict(vars(self))

    def without(self, charged: Mapping[str, int], released: Mapping[str, int]) -> Self:
        """What is left after these releases: their charges by budget, their number by rule."""
        free = {name: max(0, left - charged.get(name, 0)) for name, left in self.free.items()}
        more = {rule: count + released.get(rule, 0) for rule, count in self.open.items()}
        return replace(self, free=free, open=more)

    def is_valid_for(
        self, budgets: Sequence[Budget], now: Us, moved: int, laid: Mapping[str, int]
    ) -> bool:
        """Whether this room is right at `now` for these budgets, and none of them is used up."""
        is_of_now = self.moved == moved and self.at <= now and self.laid == laid
        is_of_these = self.print == budgets_fingerprint(tuple(budgets))
        return is_of_now and is_of_these and all(self.free.values())


def promises_more(kept: Mapping[str, Any], than: Mapping[str, Any]) -> bool:
    """Whether known room, as dumped, has more free of any budget than another (none: 0) has."""
    free = than.get("free", {})
    return any(left > free.get(name, 0) for name, left in kept.get("free", {}).items())


def known_room_budgets(book: Book, rules: Sequence[str]) -> list[Budget] | None:
    """The budgets of which room is to be known; None where passes over these rules always count."""
    budgets = book.group_budgets(rules)
    are_plain = all(len(book.rules[rule].queue_names) == 1 for rule in rules) and all(
        one.limit.is_per_rule and not book.may_owe(one) for one in budgets
    )
    return [one for one in budgets if not is_tallied(one.limit)] if are_plain else None


@lru_cache(maxsize=4096)
def budgets_fingerprint(budgets: tuple[Budget, ...]) -> str:
    text = " ".join(f"{one.id} {fingerprint(one)}" for one in budgets)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
