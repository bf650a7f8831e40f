"""What long windows hold, and when it leaves: for drain times and forecasts. The ledger's tallies
know how much is charged, exactly; history knows how it is spread over the window, by stretches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.db.models import Q, QuerySet

from callqueue import tables
from callqueue.database import from_us, to_us
from callqueue.ledger.account import Account
from callqueue.ledger.window_tallies import COARSE
from callqueue.limits.budgets import Budget, cost_of
from callqueue.limits.kinds import SECOND, Usage
from callqueue.operations.history import HOUR, LONG, MINUTE, QUARTER

Stretches = Sequence[tuple[int, int]]  # so many calls, at an instant


def stretches(using: str, budgets: Iterable[Budget], now: int) -> dict[str, Stretches]:
    """By budget, the calls that its window holds, the oldest first. One statement, if there are
    any budgets.
    """
    wanted = [(budget, _width(budget.limit.window_us // SECOND)) for budget in budgets]
    if not wanted:
        return {}
    by_rule: dict[tuple[str, int], list[tuple[int, int]]] = {}
    rows = _totals(using, wanted, now).order_by("start")
    for rule, width, start, sent in rows.values_list("rule", "width", "start", "sent"):
        at = min(now, (start + width) * SECOND)
        by_rule.setdefault((rule, width), []).append((at, sent))
    found: dict[str, Stretches] = {}
    for budget, width in wanted:
        listed = [one for rule in charging(budget) for one in by_rule.get((rule, width), ())]
        found[budget.id] = sorted(one for one in listed if one[0] > budget.limit.horizon(now))
    return found


def _totals(using: str, wanted: Sequence[tuple[Budget, int]], now: int) -> QuerySet[Any]:
    """The totals of all that charges these budgets: of each width since the earliest horizon."""
    since: dict[int, int] = {}
    for budget, width in wanted:
        start = budget.limit.horizon(now) // SECOND - width
        since[width] = min(start, since.get(width, start))
    asked = Q()
    for width, start in since.items():
        asked |= Q(width=width, start__gt=start)
    rules = {rule for budget, _ in wanted for rule in charging(budget)}
    return tables.totals(using).filter(asked, key="", rule__in=sorted(rules))


def usage(account: Account, budget: Budget, value: str) -> Usage:
    """What a budget is charged with, for one value of its `per`: all that its tally says, of a
    tallied one. Two statements at most.
    """
    limit, now = budget.limit, account.now
    if budget.id not in account.tallies:
        return account.usage(budget, value)
    account.tallies[budget.id].advance()
    used, since = account.meter(budget, value).used, limit.horizon(now)
    if limit.is_keyed and limit.capacity <= COARSE and not limit.is_calendar:
        return Usage(in_flight(account, budget, value), _one_by_one(account, budget, value), since)
    spread: Mapping[str, Stretches] = {}
    if not limit.is_keyed and not limit.is_calendar:
        spread = stretches(account.using, [budget], now)
    return Usage(0, _shared_out(used, spread.get(budget.id, ()), now), since)


def in_flight(account: Account, budget: Budget, value: str) -> int:
    """How much of a budget's charge is of open attempts."""
    if budget.id not in account.tallies:
        return account.open.get((budget.id, value), 0)
    rows = _attempts(account.using, budget, value).open().values_list("key", "queue", "cost")
    return sum(
        cost_of(cost, budget.limit.unit)
        for key, queue, cost in rows[: COARSE + 1]
        if budget.value_of(key, queue) == value
    )


def _one_by_one(account: Account, budget: Budget, value: str) -> list[tuple[int, int]]:
    """What the answered attempts of one key charge, and from when that ages."""
    limit = budget.limit
    ended = _attempts(account.using, budget, value).filter(
        finished_at__gt=from_us(limit.horizon(account.now))
    )
    return sorted(
        (limit.aged_from(None if sent is None else to_us(sent), to_us(end)), spent)
        for key, cost, sent, end in ended.values_list("key", "cost", "sent_at", "finished_at")
        if budget.value_of(key, "") == value and (spent := cost_of(cost, limit.unit))
    )


def _attempts(using: str, budget: Budget, value: str) -> Any:
    """The attempts that may be charged for this value. Those of a part of keys are found among all
    keys that mention it.
    """
    rows = tables.attempts(using).charged().filter(rule__in=charging(budget)).order_by()
    if not budget.limit.is_keyed or not value:
        return rows
    part = json.dumps({budget.limit.per: value}, ensure_ascii=False, separators=(",", ":"))[1:-1]
    mentions = Q(key__contains=part)
    return rows.filter(mentions | Q(key=value) if budget.limit.per == "key" else mentions)


def _shared_out(used: int, spread: Stretches, now: int) -> list[tuple[int, int]]:
    """So much in all, shared out as the calls are; where nothing is known of those, as of now."""
    whole = sum(count for _, count in spread)
    if not whole:
        return [(now, used)] if used else []
    found, seen, given = [], 0, 0
    for at, count in spread:
        seen += count
        part = used * seen // whole - given
        given += part
        found.append((at, part))
    return [one for one in found if one[1]]


def _width(seconds: int) -> int:
    if seconds <= 2 * HOUR:
        return MINUTE
    return QUARTER if seconds <= 30 * HOUR else LONG


def charging(budget: Budget) -> list[str]:
    """The rules that charge it, and those that did and still count."""
    return [*budget.rules, *(name for name, _ in budget.former)]
