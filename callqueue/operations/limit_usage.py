"""How far the limits of a rule are used, as a status report shows them: of the whole rule, and of
the keys with most calls waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from django.db.models import Count
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from callqueue import conf, tables
from callqueue.ledger import holds
from callqueue.limits.budgets import Budget, key_part
from callqueue.operations import formatting, waiting_counts
from callqueue.operations.ledger_view import LedgerView
from callqueue.operations.status_snapshot import Snapshot


@dataclass(frozen=True)
class LimitOverview:
    """One limit. Where it is per queue, of all queues together; where it is per key, of the key
    that used most of it.

    `value` is that key. `configured` is the rate in the settings; it differs from `rate` where an
    operator changed it. `rules` share it. `budget` is the limit itself, as it is in force.
    `is_estimate`: there was no time to count all its use. `in_flight`: how much of `used` is of
    calls in flight that stay charged until they are answered, and `latency`: how many seconds those
    take, 0 where nobody knows.
    """

    id: str
    name: str
    kind: str
    per: str
    unit: str
    rate: str
    configured: str
    capacity: int
    used: int
    free: int
    budget: Budget
    value: str = ""
    rules: tuple[str, ...] = ()
    is_estimate: bool = False
    in_flight: int = 0
    latency: float = 0.0

    @property
    def note(self) -> str:
        """What it is used up by, where that is calls in flight; empty otherwise."""
        if self.free or not self.latency or 2 * self.in_flight < self.used:
            return ""
        return in_flight_note(self.in_flight, self.unit, self.latency)


def in_flight_note(amount: int, unit: str, latency: float) -> str:
    """What uses up a limit: so many calls in flight (or of another unit), of so many seconds."""
    values = {"count": amount, "unit": unit, "each": formatting.duration(latency)}
    if unit != "calls":
        text = _("used up by %(count)d %(unit)s of calls in flight, which take %(each)s each")
    else:
        text = ngettext(
            "used up by %(count)d call in flight, which takes %(each)s",
            "used up by %(count)d calls in flight, which take %(each)s each",
            amount,
        )
    return str(text % values)


@dataclass(frozen=True)
class KeyOverview:
    """One key of a rule: its calls waiting and in flight, its limits, and the hold on it.
    `is_least`: more wait than counted.
    """

    key: str
    waiting: int
    in_flight: int
    limits: Sequence[LimitOverview]
    hold: holds.InForce | None
    is_least: bool = False


def of_rule(seen: Snapshot, name: str) -> list[LimitOverview]:
    """The limits of a rule, in the settings' order."""
    account, latency = seen.account(name), seen.rates[name].latency
    return [
        _overview(account, budget, _values(seen, account, budget), latency)
        for budget in seen.book.budgets[name]
    ]


def of_keys(seen: Snapshot, name: str) -> list[KeyOverview]:
    """The keys of a rule with most calls waiting; none where none are asked for, or the rule has no
    limit per key.
    """
    if not seen.keys or name not in seen.next_keys:
        return []
    most = [key for key, _ in seen.next_keys[name].most_common(seen.keys)]
    counts = waiting_counts.of_keys(seen.using, name, most, seen.priorities.get(name, ()))
    in_flight = _in_flight(seen.using, name, most)
    account, latency = seen.account(name), seen.rates[name].latency
    budgets = [budget for budget in seen.book.budgets[name] if budget.limit.is_keyed]
    on_rule = seen.held.by_rule.get(name, ())
    return [
        KeyOverview(
            key=key,
            waiting=min(waiting_counts.OF_KEY, counts[key]),
            in_flight=in_flight[key],
            limits=[_overview(account, b, [key_part(key, b.limit.per)], latency) for b in budgets],
            hold=next((hold for hold in on_rule if hold.is_on_key(key)), None),
            is_least=counts[key] > waiting_counts.OF_KEY,
        )
        for key in most
    ]


def _values(seen: Snapshot, account: LedgerView, budget: Budget) -> Sequence[str]:
    """The values of a budget's `per` that it has charges of."""
    if budget.limit.is_per_rule:
        return [""]
    if budget.limit.is_per_queue:
        return seen.book.queues_of(budget)
    return account.values(budget)


def _overview(
    account: LedgerView, budget: Budget, values: Sequence[str], latency: float
) -> LimitOverview:
    limit = budget.limit
    meters = [account.meter(budget, value) for value in values]
    is_summed = limit.is_per_queue
    used = (sum if is_summed else max)([meter.used for meter in meters] or [0])
    free = (sum if is_summed else min)([meter.free for meter in meters] or [limit.capacity])
    in_flight = (sum if is_summed else max)(
        [account.open.get((budget.id, v), 0) for v in values] or [0]
    )
    fullest = max(zip((m.used for m in meters), values, strict=True), default=(0, ""))[1]
    return LimitOverview(
        id=budget.known_as,
        name=limit.label,
        kind=type(limit).__name__,
        per=limit.per,
        unit=limit.unit,
        rate=limit.rate_text,
        configured=_configured(budget),
        capacity=limit.capacity * (len(meters) if is_summed else 1),
        used=used,
        free=free,
        budget=budget,
        value="" if is_summed else fullest,
        rules=budget.rules,
        is_estimate=any((budget.id, value) in account.estimated for value in values),
        in_flight=in_flight,
        latency=latency,
    )


def _configured(budget: Budget) -> str:
    """The rate of this budget in the settings; that in force where the settings know it no more."""
    settings = conf.current().book.budgets
    rates = {b.id: b.limit.rate_text for rule in budget.rules for b in settings.get(rule, ())}
    return rates.get(budget.known_as, budget.limit.rate_text)


def _in_flight(using: str, name: str, keys: Sequence[str]) -> Counter[str]:
    found = tables.attempts(using).open().filter(rule=name, key__in=keys)
    return Counter(dict(found.order_by().values_list("key").annotate(count=Count("pk"))))
