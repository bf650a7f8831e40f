"""How the backlogs of rules drain, from what is known of all of them, and what their long windows
hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Q

from callqueue import tables
from callqueue.database import loaded
from callqueue.ledger.ready_calls import READY
from callqueue.limits.budgets import Book, Budget, cost_of
from callqueue.limits.kinds import SECOND, Meter, Usage
from callqueue.operations import backlog as waiting
from callqueue.operations import histograms
from callqueue.operations.backlog import Backlog
from callqueue.operations.draining import Drain, Gate
from callqueue.operations.history import HOUR, LONG, MINUTE, QUARTER, Lately
from callqueue.operations.in_flight import InFlight
from callqueue.operations.standing import HoldNow, belated
from callqueue.operations.waiting_counts import each

SAMPLE = 100  # waiting calls of a rule whose mean cost is taken for all
SAMPLED = 4000  # of all rules together, or ten of each


@dataclass(frozen=True)
class Known:
    """What is known of all rules: `held`, the seconds for which a whole rule is; `holds`, all."""

    using: str
    book: Book
    now: int
    backlogs: Mapping[str, Backlog]
    flights: Mapping[str, InFlight]
    lately: Mapping[str, Lately]
    holds: Mapping[str, Sequence[HoldNow]]
    held: Mapping[str, float]


def drains(known: Known) -> dict[str, Drain]:
    """By rule, how its backlog drains; rules that have none are left out. Three statements at most:
    what windows hold; where limits are in other units than calls, what calls cost; where limits or
    holds are on parts of keys, which keys wait.
    """
    book, now = known.book, known.now
    names = [name for name, one in known.backlogs.items() if one.ready]
    used = _used(known, {b.id: b for name in names for b in book.budgets[name]}.values())
    keys = waiting.of_keys(known.using, [name for name in names if _wants_keys(known, name)])
    costs = _mean_costs(known, names)
    found = {}
    for name in names:
        gates = [
            _gate(known, name, budget, used.get(budget.id, ()), keys.get(name, ()), cost)
            for budget in book.budgets[name]
            if (cost := costs.get((name, budget.limit.unit), 1.0))
        ]
        found[name] = Drain(
            calls=known.backlogs[name].ready,
            gates=gates,
            now=now,
            latency=histograms.mean(known.lately[name].quarter.answers) or 0.0,
            pace=known.lately[name].minute.sent / 60,
            held=known.held.get(name, 0.0),
            belated=belated(known.holds.get(name, ()), keys.get(name, ()), now),
        )
    return found


def _wants_keys(known: Known, name: str) -> bool:
    """Whether it matters which keys have calls waiting, and not only how many each."""
    limits = (budget.limit for budget in known.book.budgets[name])
    return any(limit.is_keyed and limit.per != "key" for limit in limits) or any(
        hold.is_on_keys for hold in known.holds.get(name, ())
    )


def _gate(
    known: Known,
    name: str,
    budget: Budget,
    used: Sequence[tuple[int, int]],
    keys: Sequence[tuple[str, int]],
    cost: float,
) -> Gate:
    limit, book, now = budget.limit, known.book, known.now
    if limit.is_keyed:
        sizes = known.backlogs[name].sizes
        if limit.per != "key":
            sizes = waiting.sizes_of(keys, limit.per)
        return Gate(limit, limit.meter(Usage(since=limit.horizon(now)), now), sizes, cost=cost)
    before, beside = _others(book, name, budget, known.backlogs)
    lanes = len(book.rules[name].queue_names) if limit.is_per_queue else 1
    meter = _meter(budget, known.flights, used, now)
    return Gate(limit, meter, lanes=lanes, before=before, beside=beside, cost=cost)


def _meter(
    budget: Budget,
    flights: Mapping[str, InFlight],
    used: Sequence[tuple[int, int]],
    now: int,
) -> Meter:
    """What is charged to a budget now, as far as history tells: what is in flight, and by
    stretches what its window holds.
    """
    limit = budget.limit
    is_open = sum(flights.get(rule, InFlight()).count for rule in budget.rules)
    aged = [one for one in used if one[0] > limit.horizon(now)]
    charged = min(is_open, limit.capacity) if limit.is_plain else 0
    return limit.meter(Usage(charged, aged, limit.horizon(now)), now)


def _others(
    book: Book, name: str, budget: Budget, backlogs: Mapping[str, Backlog]
) -> tuple[int, int]:
    """Calls of rules that share the budget: of higher ones, which go before; and of equals, which
    take turns.
    """
    own, before, beside = book.rules[name].priority, 0, 0
    for other in budget.rules:
        if other != name and other in backlogs:
            if book.rules[other].priority > own:
                before += backlogs[other].ready
            elif book.rules[other].priority == own:
                beside += backlogs[other].ready
    return before, beside


def _used(known: Known, budgets: Iterable[Budget]) -> dict[str, list[tuple[int, int]]]:
    """What the windows of these budgets hold that are longer than a minute: (instant, calls) of
    stretches, the oldest first.
    """
    now = known.now
    wanted: dict[str, tuple[Budget, int]] = {}
    for budget in budgets:
        limit = budget.limit
        if limit.is_plain and limit.window_us > 60 * SECOND:
            wanted[budget.id] = (budget, _width(limit.window_us // SECOND))
    if not wanted:
        return {}
    asked = Q()
    for budget, width in wanted.values():
        since = budget.limit.horizon(now) // SECOND - width
        asked |= Q(rule__in=_charging(budget), width=width, start__gt=since)
    rows = tables.totals(known.using).filter(asked, key="").order_by("start")
    by_rule: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for rule, width, start, sent in rows.values_list("rule", "width", "start", "sent"):
        at = min(now, (start + width) * SECOND)
        by_rule.setdefault((rule, width), []).append((at, sent))
    return {
        name: sorted(one for rule in _charging(budget) for one in by_rule.get((rule, width), ()))
        for name, (budget, width) in wanted.items()
    }


def _width(seconds: int) -> int:
    if seconds <= 2 * HOUR:
        return MINUTE
    return QUARTER if seconds <= 30 * HOUR else LONG


def _charging(budget: Budget) -> list[str]:
    """The rules that charge it, and those that did and still count."""
    return [*budget.rules, *(name for name, _ in budget.former)]


def _mean_costs(known: Known, names: Sequence[str]) -> dict[tuple[str, str], float]:
    """By rule and unit, what a waiting call costs, from those that go next; empty where all limits
    are of calls.
    """
    units = {(name, budget.limit.unit) for name in names for budget in known.book.budgets[name]}
    others = sorted({name for name, unit in units if unit != "calls"})
    if not others:
        return {}
    most = max(10, min(SAMPLE, SAMPLED // len(others)))
    first = (
        f"SELECT %s, cost FROM (SELECT cost FROM {tables.name(known.using, 'CallQueue')} "
        f"WHERE {READY} ORDER BY priority DESC, due_at_dt, id LIMIT {most}) AS going_next"
    )
    costs: dict[str, list[Any]] = {}
    for name, cost in each(known.using, first, [(name, name) for name in others]):
        costs.setdefault(name, []).append(loaded(cost))
    return {
        (name, unit): 1.0
        if unit == "calls"
        else sum(cost_of(cost, unit) for cost in costs.get(name, ())) / len(costs.get(name, "-"))
        for name, unit in units
    }
