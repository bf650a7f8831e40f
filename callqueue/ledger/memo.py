"""What passes remember of a group of rules, as the row of its first rule keeps it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from callqueue.clocks import Us
from callqueue.ledger.tally_rows import fingerprint
from callqueue.limits.budgets import Budget
from callqueue.limits.kinds import Usage

_BETWEEN = "\x1f"


@dataclass
class Memo:
    """What passes remember of a group of rules.

    It is believed only while every row of the group has had as many passes since as `version` says,
    and names this group, by this version of the settings, as the last that had one: whoever else
    released from one of the rules, or told its tallies anything, in whatever group, has made it
    void; and so has a rule that shared a budget by another version, and has no row in the group.

    `levels`: of token buckets, (instant, level, fingerprint) by scope. `tallies`: by budget, what
    their `Kept` says. `in_turn`: the rules whose keys took turns. `gathering`: by rule whose keys
    have begun to, the last key and priority that was looked at for it. `binding`: by rule, the
    budget that kept its next call back, by id; for who looks. `room`: the known room, as
    `KnownRoom` dumps it.
    """

    levels: dict[str, list[Any]] = field(default_factory=dict)
    tallies: dict[str, Any] = field(default_factory=dict)
    in_turn: list[str] = field(default_factory=list)
    gathering: dict[str, Any] = field(default_factory=dict)
    binding: dict[str, str] = field(default_factory=dict)
    room: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        group: Sequence[str],
        kept: Mapping[str, tuple[int, Mapping[str, Any]]],
        settings: int,
    ) -> Memo:
        """From the group's rows: by rule how many passes there were, and the memo. `settings`: the
        version in force.
        """
        stored = kept[min(group)][1] if min(group) in kept else {}
        version = {rule: passes for rule, (passes, _) in kept.items()}
        own = name_of(group, settings)
        if (
            stored.get("version") != version
            or set(kept) != set(group)
            or any(memo.get("group") != own for _, memo in kept.values())
        ):
            return cls()
        return cls(
            dict(stored["levels"]),
            dict(stored["tallies"]),
            list(stored["in_turn"]),
            dict(stored["gathering"]),
            dict(stored.get("binding", {})),
            dict(stored.get("room", {})),
        )

    def dump(self, version: Mapping[str, int], settings: int) -> dict[str, Any]:
        """As JSON for the first row, once the rows have had so many passes."""
        return {
            "version": dict(version),
            "group": name_of(version, settings),
            **vars(self),
        }


def name_of(group: Iterable[str], settings: int) -> list[int | str]:
    """How a rule's row names the group that had the last pass, and the version it went by."""
    return [settings, *sorted(group)]


class Level(NamedTuple):
    """What a token bucket held at an instant after which nothing that is still open can leave, in
    tokens times the period; `print`: of what budget.
    """

    at: Us
    level: int
    print: str


def kept_level(memo: Memo, budget: Budget, value: str, since: Us, now: Us) -> Level | None:
    """What an earlier pass kept of the bucket, where it is of this very budget, and of no earlier
    than `since` and no later than `now`.
    """
    found = memo.levels.get(_bucket_name(budget, value))
    level = Level(*found) if found else None
    if level is None or level.print != fingerprint(budget):
        return None
    return level if since <= level.at <= now else None


def brought_up(
    memo: Memo, budget: Budget, value: str, usage: Usage, oldest_open: Us, now: Us
) -> Usage:
    """The usage since the level that is kept from an earlier pass; and keep the level of the oldest
    instant that an open attempt may still age from, or be charged more from.
    """
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
    """Keep no level of other budgets than these: what this pass released is missing from it."""
    memo.levels = {
        name: level for name, level in memo.levels.items() if name.partition(_BETWEEN)[0] in budgets
    }


def _bucket_name(budget: Budget, value: str) -> str:
    """The bucket as the memo names it."""
    return f"{budget.id}{_BETWEEN}{value}"
