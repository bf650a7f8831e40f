"""How far every limit is used now, as a pass would see it. A handful of statements."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from django.db.models import Q
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from callqueue import states, tables
from callqueue.clocks import Us
from callqueue.database import as_parameter, from_us, instant_us, part_sql, to_us, union_all
from callqueue.history import sums
from callqueue.ledger import account as ledger
from callqueue.ledger import rule_rows, tallies
from callqueue.ledger.tallies import COARSE, is_tallied
from callqueue.limits.budgets import Book, Budget, cost_of
from callqueue.limits.kinds import SECOND, Limit, Meter, Usage
from callqueue.look import words

PARTS = 240  # of a short window, which are told apart
Spread = Sequence[tuple[Us, int]]  # so many calls, ended at an instant


@dataclass(frozen=True)
class LimitLook:
    """One limit of one rule; where it is per queue, of all queues together."""

    budget: Budget
    allowed: int  # in the unit that the limit counts, as are `used`, `free` and `in_flight`
    used: int
    free: int
    value: str  # of a limit per key, the one asked about, else the one that uses most of it
    in_flight: int  # of what is used, what is not answered yet
    opens_at: Us | None  # where nothing is free, when something is again; None: with an answer
    meter: Meter  # what is charged and when it leaves, to estimate by
    emptiest: Meter  # the same of the queue that the next call goes by, where it is per queue

    @property
    def name(self) -> str:
        return self.budget.limit.label

    @property
    def is_full(self) -> bool:
        return self.free <= 0

    def in_flight_note(self, latency: float) -> str:
        """That calls in flight, `latency` s each, use it up; empty: not full, or not by them."""
        if self.free or not latency or 2 * self.in_flight < self.used:
            return ""
        return in_flight_note(self.in_flight, self.budget.limit.unit, latency)


def in_flight_note(amount: int, unit: str, latency: float) -> str:
    values = {"count": amount, "unit": unit, "each": words.duration(latency)}
    if unit != "calls":
        text = _("used up by %(count)d %(unit)s of calls in flight, which take %(each)s each")
    else:
        text = ngettext(
            "used up by %(count)d call in flight, which takes %(each)s",
            "used up by %(count)d calls in flight, which take %(each)s each",
            amount,
        )
    return str(text % values)


def read(
    using: str,
    book: Book,
    names: Sequence[str],
    now: Us,
    moved: int,
    backlog: Mapping[str, int],
    *,
    key: str | None = None,
) -> tuple[dict[str, list[LimitLook]], Mapping[str, str]]:
    """The limits of each of these rules, in the settings' order; those per key for `key` (None: for
    what uses most). And by rule, the id of the budget for which its next call waited in the last
    pass. `backlog`: by rule, the most calls that anybody asks about; of a limit that has room for
    them it is not read when its charges leave.
    """
    groups = {book.groups[name] for name in names}
    rules = sorted(rule for group in groups for rule in group)
    if not rules:
        return {}, {}
    memo = _read_memo(using, book, groups, moved)
    account = ledger.read(using, book, rules, now, memo, is_whole=True)
    if key is None:
        tallies.load_fullest(using, account.tallies.values())
    else:
        account.read_keys([key])
    values = {budget.id: _charged_values(account, budget, key) for budget in account.budgets}
    long = [
        budget
        for budget in account.budgets
        if _needs_spread(account, budget) and not _has_room_for(account, budget, backlog)
    ]
    spread = _read_spread(using, long, now)
    for budget_id, ends in _read_ends(account, long).items():
        spread[budget_id] = [*ends, *spread.get(budget_id, ())]
    found = {
        one.id: _limit_look(account, one, values[one.id], spread.get(one.id, ()), key is not None)
        for one in account.budgets
    }
    listed = {name: [found[budget.id] for budget in book.budgets[name]] for name in names}
    return listed, account.memo.binding


def _read_memo(
    using: str, book: Book, groups: Iterable[tuple[str, ...]], moved: int
) -> ledger.Memo:
    """What the groups' last passes left, as one; no tallies that former rules are part of."""
    groups = list(groups)
    memos = rule_rows.passes_and_memos(using, [rule for group in groups for rule in group])
    found = ledger.Memo()
    for group in groups:
        remembered = {rule: memos[rule] for rule in group if rule in memos}
        memo = ledger.Memo.load(group, remembered, book.version, moved)
        found.levels |= memo.levels
        found.binding |= memo.binding
        # What former rules used is taken away by recounts only.
        found.tallies |= {n: kept for n, kept in memo.tallies.items() if not kept["has_former"]}
    return found


def _charged_values(account: ledger.Account, budget: Budget, key: str | None) -> Sequence[str]:
    """Values of its `per`: [""]; all queues; keys charged, if tallied the fullest; or `key`'s."""
    if key is not None and budget.limit.is_keyed:
        return [budget.value_of(key, "")]
    if budget.limit.is_per_rule:
        return [""]
    if budget.limit.is_per_queue:
        return account.book.queues_of(budget)
    if budget.id in account.tallies:
        return account.tallies[budget.id].fullest_loaded_values()
    return sorted({value for name, value in {**account.open, **account.aged} if name == budget.id})


def _needs_spread(account: ledger.Account, budget: Budget) -> bool:
    """Whether to read when its tally's amount leaves: it is tallied, per rule, and no calendar."""
    limit = budget.limit
    return budget.id in account.tallies and limit.is_per_rule and not limit.is_calendar


def _has_room_for(account: ledger.Account, budget: Budget, backlog: Mapping[str, int]) -> bool:
    calls = sum(backlog.get(rule, 0) for rule in budget.rules)
    return budget.limit.unit == "calls" and calls < account.meter(budget, "").free


def _limit_look(
    account: ledger.Account,
    budget: Budget,
    values: Sequence[str],
    spread: Spread,
    is_of_key: bool,
) -> LimitLook:
    """Its use by these values (`is_of_key`: a key's). `spread`: when what its tally holds ended."""
    limit, is_summed = budget.limit, budget.limit.is_per_queue
    meters = {value: account.meter(budget, value) for value in values}
    fullest = max(values, key=lambda value: meters[value].used, default="")
    in_flight = [account.open.get((budget.id, value), 0) for value in values]
    free = (sum if is_summed else min)([one.free for one in meters.values()] or [limit.capacity])
    used = (sum if is_summed else max)([one.used for one in meters.values()] or [0])
    most_in_flight = max(in_flight, default=0)
    meter = _meter_of_value(account, budget, fullest, meters, spread, most_in_flight)
    if is_of_key and budget.id in account.tallies and _is_small_and_keyed(limit):
        usage = Usage(
            most_in_flight, _read_ageing(account, budget, fullest), limit.horizon(account.now)
        )
        meter = limit.meter(usage, account.now)
    emptiest = meter
    if is_summed and _all_rules_use_all_queues(account, budget):
        value = min(values, key=lambda value: _opening_order(meters[value]), default="")
        own = account.open.get((budget.id, value), 0)
        emptiest = _meter_of_value(account, budget, value, meters, spread, own)
    return LimitLook(
        budget=budget,
        allowed=limit.capacity * (max(1, len(values)) if is_summed else 1),
        used=used,
        free=free,
        value="" if is_summed else fullest,
        in_flight=(sum if is_summed else max)(in_flight or [0]),
        opens_at=None if free else emptiest.known_free_at(1),
        meter=meter,
        emptiest=emptiest,
    )


def _opening_order(meter: Meter) -> tuple[float, int]:
    at = meter.free_at(1)
    return (math.inf if at is None else at, meter.used)


def _all_rules_use_all_queues(account: ledger.Account, budget: Budget) -> bool:
    queues = set(account.book.queues_of(budget))
    return all(set(account.book.rules[rule].queue_names) == queues for rule in budget.rules)


def _meter_of_value(
    account: ledger.Account,
    budget: Budget,
    value: str,
    meters: Mapping[str, Meter],
    spread: Spread,
    in_flight: int,
) -> Meter:
    """Its meter, all free if not charged; a tally knows how much, `spread` when that leaves."""
    limit, now = budget.limit, account.now
    if value not in meters:
        return limit.meter_with(limit.capacity, now)
    if not is_tallied(limit) or limit.keeps_level:
        return meters[value]
    aged = _shared_out(max(0, meters[value].used - in_flight), spread, now)
    return limit.meter(Usage(in_flight, aged, limit.horizon(now)), now)


def _is_small_and_keyed(limit: Limit) -> bool:
    return limit.is_keyed and limit.capacity <= COARSE and not limit.is_calendar


def _read_ageing(account: ledger.Account, budget: Budget, value: str) -> list[tuple[Us, int]]:
    """When each attempt of a value that ended within the window ages, and its cost."""
    limit = budget.limit
    charged = tables.attempts(account.using).charged()
    found = charged.filter(rule__in=budget.charging_rules).order_by()
    if value:
        part = json.dumps({limit.per: value}, ensure_ascii=False, separators=(",", ":"))[1:-1]
        mentions = Q(key__contains=part)
        found = found.filter(mentions | Q(key=value) if limit.per == "key" else mentions)
    ended = found.filter(finished_at__gt=from_us(limit.horizon(account.now)))
    return sorted(
        (limit.aged_from(None if sent is None else to_us(sent), to_us(end)), spent)
        for key, cost, sent, end in ended.values_list("key", "cost", "sent_at", "finished_at")
        if end and budget.value_of(key, "") == value and (spent := cost_of(cost, limit.unit))
    )


def _read_ends(account: ledger.Account, budgets: list[Budget]) -> dict[str, list[tuple[Us, int]]]:
    """By budget, when how many calls ended: of a short window all, by small parts of it; of others
    only the first, for which to leave a pass waits. One statement for many.
    """
    using, found = account.using, dict[str, list[tuple[Us, int]]]()
    selects, end = list[tuple[str, list[object]]](), as_parameter(using, from_us(account.now))
    for place, budget in enumerate(budgets):
        limit, since = budget.limit, budget.limit.horizon(account.now) - 1
        for rule in budget.charging_rules:
            count, grouped = "1", ""
            if _has_short_window(limit):
                part = part_sql(using, "finished_at", since, limit.window_us // PARTS + 1)
                count, grouped = "COUNT(*)", f" GROUP BY {part}"
            sql = (
                f"SELECT {place}, MIN(finished_at), {count} FROM "
                f"{tables.name(using, 'CallAttempt')} WHERE rule = %s AND finished_at > %s "
                f"AND finished_at <= %s AND outcome <> %s{grouped}"
            )
            selects.append((sql, [rule, as_parameter(using, from_us(since)), end, states.VOIDED]))
    for place, ended, count in union_all(using, selects):
        if ended is not None:
            found.setdefault(budgets[place].id, []).append((instant_us(ended), int(count)))
    return {
        budget.id: ends if _has_short_window(budget.limit) else ends[:1]
        for budget in budgets
        if (ends := sorted(found.get(budget.id, ())))
    }


def _has_short_window(limit: Limit) -> bool:
    """Whether its window is no longer than a sum's minute: sums do not tell when it empties."""
    return limit.window_us <= sums.MINUTE_S * SECOND


def _read_spread(using: str, budgets: list[Budget], now: Us) -> dict[str, list[tuple[Us, int]]]:
    """By budget, no short window's, when how many calls ended, by sums. One statement."""
    budgets = [budget for budget in budgets if not _has_short_window(budget.limit)]
    if not budgets:
        return {}
    widths = {budget.id: _sums_width(budget.limit.window_us) for budget in budgets}
    first = min(budget.limit.horizon(now) for budget in budgets) // SECOND
    rules = {rule for budget in budgets for rule in budget.charging_rules}
    stored = tables.sums(using).filter(rule__in=rules, width__in=widths.values())
    by_rule: dict[tuple[str, int], list[tuple[Us, int]]] = {}
    columns = stored.filter(start__gt=first - sums.QUARTER_S).order_by("start")
    for rule, width, start, sent in columns.values_list("rule", "width", "start", "sent"):
        at = min(now, Us((start + width) * SECOND))
        by_rule.setdefault((rule, width), []).append((at, sent))
    return {
        budget.id: sorted(
            one
            for rule in budget.charging_rules
            for one in by_rule.get((rule, widths[budget.id]), ())
            if one[0] > budget.limit.horizon(now)
        )
        for budget in budgets
    }


def _sums_width(window_us: int) -> int:
    return sums.MINUTE_S if window_us <= sums.HOUR_S * SECOND else sums.QUARTER_S


def _shared_out(used: int, spread: Spread, now: Us) -> list[tuple[Us, int]]:
    """(When, amount) of `used`, in proportion to `spread`, first at least 1; without it, now."""
    whole = sum(count for _, count in spread)
    if not whole:
        return [(now, used)] if used else []
    found, seen, given = [], 0, 0
    for at, count in spread:
        seen += count
        part = max(used * seen // whole, min(1, used)) - given
        given += part
        found.append((at, part))
    return [one for one in found if one[1]]
