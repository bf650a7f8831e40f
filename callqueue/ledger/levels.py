"""The levels of token buckets as passes remember them: brought up to an instant after which nothing
that is still open can leave.

In: a memo and what a bucket is charged with. Out: the usage since the level that is kept, and the
new level in the memo. Pure but for the memo. Instants are microseconds.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import NamedTuple

from callqueue.ledger.memo import Memo
from callqueue.ledger.tally_rows import fingerprint
from callqueue.limits.budgets import Budget
from callqueue.limits.kinds import Usage


class Level(NamedTuple):
    """What a bucket held at an instant, in tokens times the period; `print`: of what budget."""

    at: int
    level: int
    print: str


def kept(memo: Memo, budget: Budget, value: str, since: int, now: int) -> Level | None:
    """What an earlier pass kept of the bucket, where it is of this very budget, and of no earlier
    than `since` and no later than `now`.
    """
    found = memo.levels.get(_name(budget, value))
    level = Level(*found) if found else None
    if level is None or level.print != fingerprint(budget):
        return None
    return level if since <= level.at <= now else None


def brought_up(
    memo: Memo, budget: Budget, value: str, usage: Usage, oldest_open: int, now: int
) -> Usage:
    """The usage since the level that is kept from an earlier pass; and keep the level of the oldest
    instant that an open attempt may still age from, or be charged more from.
    """
    known = kept(memo, budget, value, usage.since, now)
    if known:
        newer = [charge for charge in usage.aged if charge[0] > known.at]
        usage = replace(usage, aged=newer, since=known.at, level=known.level)
    if oldest_open > usage.since:
        before = [charge for charge in usage.aged if charge[0] <= oldest_open]
        level = budget.limit.level(replace(usage, open=0, aged=before), oldest_open)
        kept_now = Level(oldest_open, level, fingerprint(budget))
        memo.levels[_name(budget, value)] = list(kept_now)
    return usage


def forget_others(memo: Memo, budgets: Container[str]) -> None:
    """Keep no level of other budgets than these: what this pass released is missing from it."""
    memo.levels = {
        name: level for name, level in memo.levels.items() if name.partition(_BETWEEN)[0] in budgets
    }


_BETWEEN = "\x1f"


def _name(budget: Budget, value: str) -> str:
    """The bucket as the memo names it."""
    return f"{budget.id}{_BETWEEN}{value}"
