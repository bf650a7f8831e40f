"""The budgets of an audit, each with a tally for each value of its `per`; and the events that an
attempt is to them. For the audit of a stretch of time, and for the peaks that are kept of each
minute. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from callqueue.limits.budgets import Budget, cost_of
from callqueue.operations.audit_tallies import Tally, tally_of
from callqueue.operations.audited_attempts import Seen

ENDED, BEGAN, COUNTED = range(3)  # at one instant, what ends makes room for what begins

Event = tuple[int, int, int, Seen]  # the instant, what happens then, a running number, the attempt


def events_of(seen: Seen, number: int, is_in_flight: bool) -> Iterator[Event]:
    yield seen.counted, COUNTED, number, seen
    if is_in_flight:
        yield seen.began, BEGAN, number, seen
        if seen.finished is not None:
            yield seen.finished, ENDED, number, seen


def by_rule(budgets: Iterable[AuditedBudget]) -> dict[str, list[AuditedBudget]]:
    """The budgets that each rule charges, or has charged."""
    found: dict[str, list[AuditedBudget]] = {}
    for budget in budgets:
        for rule in (*budget.budget.rules, *(name for name, _ in budget.budget.former)):
            found.setdefault(rule, []).append(budget)
    return found


def rules_in_flight(of_rule: Mapping[str, Iterable[AuditedBudget]]) -> set[str]:
    """The rules that have a limit of what is in flight."""
    return {rule for rule, budgets in of_rule.items() if any(b.is_concurrency for b in budgets)}


class AuditedBudget:
    """A budget with a tally for each value of its `per`."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.limit = budget.limit
        self.is_concurrency = budget.limit.counts_in_flight
        self.tallies: dict[str, Tally] = {}

    def see(self, instant: int, what: int, seen: Seen) -> Tally | None:
        """Count an event; the tally that it changed, where there is one."""
        if self.is_concurrency == (what == COUNTED):
            return None
        if not self.budget.counts(seen.rule, seen.released):
            return None
        cost = cost_of(seen.cost, self.limit.unit)
        if not cost:
            return None
        value = self.budget.value_of(seen.key, seen.queue)
        tally = self.tallies.get(value)
        if tally is None:
            tally = self.tallies[value] = tally_of(self.limit)
        tally.add(instant, -cost if what == ENDED else cost)
        return tally
