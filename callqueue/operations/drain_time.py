"""How long a rule's backlog takes to drain, as a status report says it: an estimate from its
limits, and from what is ahead of it.
"""

from __future__ import annotations

from collections import Counter

from callqueue import tables
from callqueue.database import to_us
from callqueue.ledger import holds
from callqueue.ledger.tallies import is_tallied
from callqueue.limits.budgets import Budget, cost_of, key_part
from callqueue.limits.kinds import SECOND, Limit
from callqueue.operations.status_snapshot import Snapshot

SAMPLE = 100  # waiting calls whose mean cost is taken for all


def drain_s(seen: Snapshot, name: str, hold: holds.InForce | None) -> float | None:
    """Seconds until everything that waits under the rule is answered; None where nobody can say.

    `hold` is the one on the whole rule. Without limits the pace of the last minute tells.
    """
    count, rate = seen.waiting.by_rule[name], seen.rates[name]
    if not count:
        return 0.0
    held = _held_s(seen, hold)
    if held is None:
        return None
    taken = [_drain_s_of(seen, name, budget) for budget in seen.book.budgets[name]]
    if None in taken:
        return None
    known = [seconds for seconds in taken if seconds is not None]
    held_keys = _held_keys_s(seen, name)
    if held_keys is None or not (known or rate.per_second):
        return None
    free = held + (max(known) + rate.latency if known else count / rate.per_second)
    return max(free, held_keys)


def _held_keys_s(seen: Snapshot, name: str) -> float | None:
    """Seconds until the last hold on a key ends that has calls waiting, of those that go next; None
    where it does not end by itself.
    """
    keys = seen.next_keys.get(name, Counter())
    on_keys = [h for h in seen.held.by_rule.get(name, ()) if h.per not in ("rule", "queue")]
    waits = [_held_s(seen, hold) for hold in on_keys if any(map(hold.is_on_key, keys))]
    return None if None in waits else max((s for s in waits if s is not None), default=0.0)


def _held_s(seen: Snapshot, hold: holds.InForce | None) -> float | None:
    """Seconds until the hold ends; None where it does not end by itself."""
    if hold is None:
        return 0.0
    return None if hold.until is None else max(0.0, (to_us(hold.until) - seen.now) / SECOND)


def _drain_s_of(seen: Snapshot, name: str, budget: Budget) -> float | None:
    """Seconds until the backlog has passed this budget."""
    limit = budget.limit
    each = _mean_cost(seen, name, limit.unit)
    if not each:
        return 0.0
    if limit.is_keyed:
        value, calls = _heaviest(seen, name, limit.per)
    else:
        queues = seen.book.rules[name].queue_names if limit.is_per_queue else ("",)
        value, calls = queues[0], _ahead(seen, name, budget) / len(queues)
    meter = seen.account(name).meter(budget, value)
    return limit.seconds_until_gone(meter, calls * each, seen.now, _charged_s(seen, name, limit))


def _charged_s(seen: Snapshot, name: str, limit: Limit) -> float:
    """For how many seconds a call is charged before it ages, as the latest answers show; 0 where
    none does.
    """
    rate = seen.rates[name]
    is_told = rate.is_stamped and not seen.book.rules[name].redirects
    if limit.ages_unanswered and is_told and not is_tallied(limit):
        return min(rate.latency, limit.jitter_us / SECOND)
    return rate.latency


def _ahead(seen: Snapshot, name: str, budget: Budget) -> int:
    """Calls that pass the budget before this rule is drained: all of higher rules; of its equals as
    many, taking turns.
    """
    waiting, rules = seen.waiting.by_rule, seen.book.rules
    own = ahead = waiting[name]
    for other in budget.rules:
        if other != name and other in waiting:
            if rules[other].priority > rules[name].priority:
                ahead += waiting[other]
            elif rules[other].priority == rules[name].priority:
                ahead += min(own, waiting[other])
    return ahead


def _heaviest(seen: Snapshot, name: str, per: str) -> tuple[str, float]:
    """The value of the calls' key with most calls waiting, and how many those are."""
    shares: Counter[str] = Counter()
    for key, count in seen.next_keys[name].items():
        shares[key_part(key, per)] += count
    if not shares:
        return "", 0
    value, count = shares.most_common(1)[0]
    counted = shares.total()
    if counted < seen.next_count:
        return value, count
    return value, count * max(1.0, seen.waiting.by_rule[name] / counted)


def _mean_cost(seen: Snapshot, name: str, unit: str) -> float:
    """What a waiting call costs in this unit, from those that go next."""
    if unit == "calls":
        return 1.0
    ready = tables.calls(seen.using).waiting().filter(ready=True, rule=name)
    first = ready.order_by("-priority", "due_at_dt", "id").values_list("cost", flat=True)[:SAMPLE]
    costs = [cost_of(cost, unit) for cost in first]
    return sum(costs) / len(costs) if costs else 0.0
