"""How the backlogs of rules drain: from what is known of all of them, and what their long windows
hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from callqueue import tables
from callqueue.database import loaded
from callqueue.ledger.ready_calls import READY
from callqueue.ledger.tallies import is_tallied
from callqueue.limits.budgets import Book, Budget, cost_of
from callqueue.limits.kinds import SECOND, Meter, Usage
from callqueue.operations import backlog as waiting
from callqueue.operations import histograms, window_use
from callqueue.operations.attempts_now import InFlight, Rate
from callqueue.operations.backlog import Backlog, each
from callqueue.operations.draining import Drain, Gate
from callqueue.operations.history import DAY, Lately
from callqueue.operations.standing import HoldNow, belated

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
    rates: Mapping[str, Rate]
    holds: Mapping[str, Sequence[HoldNow]]
    held: Mapping[str, float]


def drains(known: Known) -> dict[str, Drain]:
    """By rule, how its backlog drains; rules that have none are left out. Three statements at most:
    what windows hold that the backlog may fill; where limits are in other units than calls, what
    calls cost; where limits or holds are on parts of keys, which keys wait.
    """
    book, now = known.book, known.now
    names = [name for name, one in known.backlogs.items() if one.ready]
    long = {b.id: b for name in names for b in book.budgets[name] if _is_long(b)}
    narrow = [budget for budget in long.values() if _may_fill(known, budget)]
    used = window_use.stretches(known.using, narrow, now)
    keys = waiting.of_keys(known.using, [name for name in names if _wants_keys(known, name)])
    costs = _mean_costs(known, names)
    found = {}
    for name in names:
        latency = _latency(known, name)
        gates = [
            replace(
                _gate(known, name, budget, used.get(budget.id, ()), keys.get(name, ())),
                cost=cost,
                charged_s=_charged_s(known, name, budget, latency),
            )
            for budget in book.budgets[name]
            if (cost := costs.get((name, budget.limit.unit), 1.0))
        ]
        found[name] = Drain(
            calls=known.backlogs[name].ready,
            gates=gates,
            now=now,
            latency=latency,
            pace=known.rates[name].per_second,
            held=known.held.get(name, 0.0),
            belated=belated(known.holds.get(name, ()), keys.get(name, ()), now),
        )
    return found


def _is_long(budget: Budget) -> bool:
    return budget.limit.is_plain and budget.limit.window_us > 60 * SECOND


def _may_fill(known: Known, budget: Budget) -> bool:
    """Whether all that was sent within a day, is in flight and waits may be more than the limit's
    window allows. If not, nothing waits for it, and it does not matter when its calls were sent.
    """
    rules = window_use.charging(budget)
    if budget.limit.horizon(known.now) < known.now - DAY * SECOND or not all(
        rule in known.lately for rule in rules
    ):
        return True
    waits = sum(known.backlogs[rule].ready for rule in budget.rules if rule in known.backlogs)
    sent = sum(known.lately[rule].day.sent for rule in rules)
    return sent + waits + _charged(known.flights, budget) > budget.limit.capacity


def _charged(flights: Mapping[str, InFlight], budget: Budget) -> int:
    """How many calls in flight charge it."""
    return sum(flights.get(rule, InFlight()).count for rule in budget.rules)


def _latency(known: Known, name: str) -> float:
    """Seconds that a call takes: of the last minute's, or of the last quarter of an hour's; 0 where
    none was answered.
    """
    return known.rates[name].latency or histograms.mean(known.lately[name].quarter.answers) or 0.0


def _charged_s(known: Known, name: str, budget: Budget, latency: float) -> float:
    """For how many seconds a call is charged before it ages; 0 where nobody knows."""
    limit = budget.limit
    is_told = known.rates[name].is_stamped and not known.book.rules[name].redirects
    if limit.ages_unanswered and is_told and not is_tallied(limit):
        return min(latency, limit.jitter_us / SECOND)
    return latency


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
) -> Gate:
    limit, book, now = budget.limit, known.book, known.now
    if limit.is_keyed:
        sizes = known.backlogs[name].sizes
        if limit.per != "key":
            sizes = waiting.sizes_of(keys, limit.per)
        return Gate(limit, limit.meter(Usage(since=limit.horizon(now)), now), sizes)
    before, beside = _others(book, name, budget, known.backlogs)
    lanes = len(book.rules[name].queue_names) if limit.is_per_queue else 1
    meter = _meter(budget, known.flights, used, now)
    return Gate(limit, meter, lanes=lanes, before=before, beside=beside)


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
    charged = min(_charged(flights, budget), limit.capacity) if limit.is_plain else 0
    return limit.meter(Usage(charged, used, limit.horizon(now)), now)


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
