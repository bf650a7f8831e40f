"""How the backlogs of rules drain, from what is known of all of them: one statement more, for what
their long windows hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from django.db.models import Q

from callqueue import tables
from callqueue.limits.budgets import Book, Budget, cost_of
from callqueue.limits.kinds import SECOND, Meter, Usage
from callqueue.operations import backlog as waiting
from callqueue.operations import histograms
from callqueue.operations.backlog import Backlog
from callqueue.operations.draining import Drain, Gate
from callqueue.operations.history import HOUR, LONG, MINUTE, QUARTER, Lately
from callqueue.operations.in_flight import InFlight

SAMPLE = 100  # waiting calls whose mean cost is taken for all


def drains(
    using: str,
    book: Book,
    now: int,
    backlogs: Mapping[str, Backlog],
    flights: Mapping[str, InFlight],
    lately: Mapping[str, Lately],
    held: Mapping[str, float],
) -> dict[str, Drain]:
    """By rule, how its backlog drains; rules that have none are left out."""
    names = [name for name, one in backlogs.items() if one.ready]
    budgets = {b.id: b for name in names for b in book.budgets[name]}
    used = _used(using, budgets.values(), now)
    found = {}
    for name in names:
        quarter = lately[name].quarter
        found[name] = Drain(
            calls=backlogs[name].ready,
            gates=[
                gate
                for budget in book.budgets[name]
                if (gate := _gate(using, book, name, budget, backlogs, flights, used, now))
            ],
            now=now,
            latency=histograms.mean(quarter.answers) or 0.0,
            pace=lately[name].minute.sent / 60,
            held=held.get(name, 0.0),
        )
    return found


def _gate(
    using: str,
    book: Book,
    name: str,
    budget: Budget,
    backlogs: Mapping[str, Backlog],
    flights: Mapping[str, InFlight],
    used: Mapping[str, list[tuple[int, int]]],
    now: int,
) -> Gate | None:
    limit = budget.limit
    cost = 1.0 if limit.unit == "calls" else _mean_cost(using, name, limit.unit)
    if not cost:
        return None
    if limit.is_keyed:
        sizes = backlogs[name].sizes
        if limit.per != "key":
            sizes = waiting.sizes_of(waiting.of_keys(using, name), limit.per)
        return Gate(limit, limit.meter(Usage(since=limit.horizon(now)), now), sizes, cost=cost)
    before, beside = _others(book, name, budget, backlogs)
    lanes = len(book.rules[name].queue_names) if limit.is_per_queue else 1
    meter = _meter(budget, flights, used.get(budget.id, ()), now)
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


def _used(using: str, budgets: object, now: int) -> dict[str, list[tuple[int, int]]]:
    """What the windows of these budgets hold that are longer than a minute: (instant, calls) of
    stretches, the oldest first.
    """
    wanted: dict[str, tuple[Budget, int]] = {}
    for budget in budgets:  # type: ignore[attr-defined]
        limit = budget.limit
        if limit.is_plain and limit.window_us > 60 * SECOND:
            wanted[budget.id] = (budget, _width(limit.window_us // SECOND))
    if not wanted:
        return {}
    asked = Q()
    for budget, width in wanted.values():
        since = budget.limit.horizon(now) // SECOND - width
        asked |= Q(rule__in=budget.rules, width=width, start__gt=since)
    rows = tables.totals(using).filter(asked, key="").order_by("start")
    by_rule: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for rule, width, start, sent in rows.values_list("rule", "width", "start", "sent"):
        at = min(now, (start + width) * SECOND)
        by_rule.setdefault((rule, width), []).append((at, sent))
    return {
        name: sorted(one for rule in budget.rules for one in by_rule.get((rule, width), ()))
        for name, (budget, width) in wanted.items()
    }


def _width(seconds: int) -> int:
    if seconds <= 2 * HOUR:
        return MINUTE
    return QUARTER if seconds <= 30 * HOUR else LONG


def _mean_cost(using: str, name: str, unit: str) -> float:
    """What a waiting call costs in this unit, from those that go next."""
    ready = tables.calls(using).waiting().filter(ready=True, rule=name)
    first = ready.order_by("-priority", "due_at_dt", "id").values_list("cost", flat=True)[:SAMPLE]
    costs = [cost_of(cost, unit) for cost in first]
    return sum(costs) / len(costs) if costs else 0.0
