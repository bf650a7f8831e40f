"""What goes before a call that waits: how many calls, of which rules and keys, and what they cost.

Reads a bounded part of the waiting set, whatever its size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db.models import F, Q

from callqueue import tables
from callqueue.database import ClockNow, quoted, rows
from callqueue.ledger.ready_calls import READY
from callqueue.limits.budgets import Book, cost_of, key_part

if TYPE_CHECKING:
    from callqueue.models import CallQueue

CAP = 100_000  # calls ahead that are counted; no time is given past it
SAMPLE = 200  # calls ahead whose costs are read


@dataclass(frozen=True)
class Ahead:
    """What goes before a call: calls of its rule, those of them that share its value of a `per`,
    and calls of other rules.

    `cost`: what one of them costs, by unit, as a mean.
    """

    calls: int
    of_value: Mapping[str, int]
    others: Mapping[str, int]
    cost: Mapping[str, float]


def count_ahead(call: CallQueue, book: Book, using: str) -> Ahead:
    pers = {b.limit.per for b in book.budgets[call.rule] if b.limit.is_keyed}
    if pers:
        calls, of_value = _in_turns(call, using, pers)
    else:
        calls, of_value = _in_order(call, using), {}
    return Ahead(
        calls, of_value, _of_others(call, book, using, calls), _mean_cost(call, book, using)
    )


def _in_order(call: CallQueue, using: str) -> int:
    """The calls of the rule that go before it: by priority, then by when they were due. Each part
    has an index.
    """
    same = Q(priority=call.priority)
    parts = [
        Q(priority__gt=call.priority),
        same & Q(due_at_dt__lt=call.due_at_dt),
        same & Q(due_at_dt=call.due_at_dt, pk__lt=call.pk),
    ]
    count = 0
    for ready in (True, False):
        found = _waiting(call, using).filter(ready=ready)
        for part in parts:
            if not ready:  # what becomes due later than this one does not go before it
                part &= Q(due_at_dt__lte=call.due_at_dt)
            count += found.filter(part)[: CAP + 1].count()
    return count + _permits(call, using).total()


def _permits(call: CallQueue, using: str) -> Counter[str]:
    """The permits of the rule that wait, and go before it: how many each key has."""
    waiting = tables.permit_requests(using).filter(
        rule=call.rule, attempt_id__isnull=True, alive_until__gt=ClockNow()
    )
    earlier = Q(priority=call.priority, due_at_dt__lt=call.due_at_dt)
    found = waiting.filter(Q(priority__gt=call.priority) | earlier)
    return Counter(found.values_list("key", flat=True))


def _in_turns(call: CallQueue, using: str, pers: set[str]) -> tuple[int, dict[str, int]]:
    """The calls that go before it where keys take turns: of each other key as many as of its own,
    and one; by value of each `per` too.
    """
    higher = _by_key(call, using, "priority > %s")
    same = _by_key(call, using, "priority = %s")
    own = _waiting(call, using).filter(priority=call.priority, key=call.key)
    before = Q(due_at_dt__lt=call.due_at_dt) | Q(due_at_dt=call.due_at_dt, pk__lt=call.pk)
    mine = own.filter(before)[: CAP + 1].count()
    ahead = Counter(higher) + _permits(call, using)
    for key, count in same.items():
        ahead[key] += mine if key == call.key else min(count, mine + 1)
    of_value = {}
    for per in pers:
        value = key_part(call.key, per)
        of_value[per] = sum(count for key, count in ahead.items() if key_part(key, per) == value)
    return ahead.total(), of_value


def _by_key(call: CallQueue, using: str, which: str) -> Counter[str]:
    """How many ready calls of the rule each key has, of the first CAP of these priorities."""
    key = quoted(using, "key")
    found = rows(
        using,
        f"SELECT {key}, COUNT(*) FROM (SELECT {key} FROM {quoted(using, call._meta.db_table)} "
        f"WHERE {READY} AND {which} LIMIT {CAP + 1}) ahead GROUP BY {key}",
        [call.rule, call.priority],
    )
    return Counter({text: int(count) for text, count in found})


def _of_others(call: CallQueue, book: Book, using: str, calls: int) -> dict[str, int]:
    """Calls of the rules it shares a budget with that go before it: all of higher rules; equals
    take turns.
    """
    own, ahead = book.rules[call.rule].priority, {}
    for name in book.groups[call.rule]:
        priority = book.rules[name].priority
        if name != call.rule and priority >= own:
            most = CAP + 1 if priority > own else min(CAP, calls) + 1
            ahead[name] = (
                type(call)
                .objects.using(using)
                .waiting()
                .filter(ready=True, rule=name)[:most]
                .count()
            )
    return ahead


def _mean_cost(call: CallQueue, book: Book, using: str) -> dict[str, float]:
    found = (
        _waiting(call, using).filter(ready=True).order_by(F("priority").desc(), "due_at_dt", "id")
    )
    costs = list(found.values_list("cost", flat=True)[:SAMPLE]) or [call.cost]
    units = {b.limit.unit for b in book.budgets[call.rule]}
    return {unit: sum(cost_of(cost, unit) for cost in costs) / len(costs) for unit in units}


def _waiting(call: CallQueue, using: str) -> Any:
    return type(call).objects.using(using).waiting().filter(rule=call.rule).order_by()
