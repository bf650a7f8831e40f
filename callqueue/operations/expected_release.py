"""When a call that waits should go, and what it waits for: from the present charges of its limits
and what goes before it, by the arithmetic of a simulation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from django.db.models.functions import Coalesce
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from callqueue import tables
from callqueue.database import from_us
from callqueue.ledger.account import Account
from callqueue.limits.budgets import Book, Budget, cost_of
from callqueue.limits.kinds import SECOND, Usage
from callqueue.limits.kinds.base import MOST_JITTER
from callqueue.limits.simulation import DELIVERY, Simulated, simulate
from callqueue.operations import window_use
from callqueue.operations.ahead import CAP, Ahead
from callqueue.operations.limit_usage import in_flight_note

if TYPE_CHECKING:
    from callqueue.models import CallQueue

# after which a released attempt that no worker began says that none is there
STALLED = timedelta(seconds=10)
SOON = SECOND // 2  # what goes within this goes now


@dataclass(frozen=True)
class Pace:
    """What calls take, in seconds: from the last byte sent to the answer, and how long after its
    slot that byte was sent.
    """

    latency: float
    late: float
    is_stamped: bool = True  # whether it is known when they were sent


USUAL = Pace(latency=0.2, late=0.0)  # where none was made lately


@dataclass(frozen=True)
class Expected:
    """The instant of a release (None: nobody can say), and what it waits for."""

    instant: int | None
    reason: str


def expected(call: CallQueue, account: Account, ahead: Ahead, start: int) -> Expected:
    """When the last limit lets it go, if those before it go as fast as they may."""
    binding, pace = _used_up(call, account), _pace(account.using, call.rule)
    why = _unforeseeable(call, account, ahead, pace, binding)
    if why:
        return Expected(None, why)
    latest, label = start, binding.limit.label if binding else None
    for calls, charged in _runs(call, account, ahead, pace or USUAL).items():
        made = _simulated(call, account, ahead, calls, charged, pace or USUAL, start)
        instant = start + round(made.last_release * SECOND)
        if instant > latest:
            latest, label = instant, made.binding_limit
    reason = _reason(ahead, label, binding is not None, latest - start <= SOON)
    return Expected(latest, reason + _in_flight(call, account, binding, pace))


def _unforeseeable(
    call: CallQueue, account: Account, ahead: Ahead, pace: Pace | None, binding: Budget | None
) -> str:
    """Why nobody can say when it goes; empty where somebody can."""
    for budget in account.book.budgets[call.rule]:
        own, limit = cost_of(call.cost, budget.limit.unit), budget.limit
        if own > limit.capacity:
            values = {"cost": own, "limit": limit.label}
            return _("its cost of %(cost)d is more than %(limit)s ever admits") % values
        is_full = _queued(budget, ahead) + 1 > limit.capacity
        if own and limit.counts_in_flight and pace is None and is_full:
            return _("%s is used up, and how long a call takes is not known yet") % limit.label
    if binding is None or not (stalled := _stalled(account)):
        return ""
    reason = _(
        "%(limit)s is used up by attempts in flight, and no worker has begun %(count)d of them"
    )
    return reason % {"limit": binding.limit.label, "count": stalled}


def _runs(
    call: CallQueue, account: Account, ahead: Ahead, pace: Pace
) -> dict[int, list[tuple[Budget, Usage]]]:
    """The budgets that it counts in, with their charges, by how many calls pass them up to and with
    this one.
    """
    runs: dict[int, list[tuple[Budget, Usage]]] = {}
    for budget in account.book.budgets[call.rule]:
        if own := cost_of(call.cost, budget.limit.unit):
            calls = _calls_through(budget, ahead, own)
            runs.setdefault(calls, []).append(_single(call, account, budget, pace))
    return runs


def _simulated(
    call: CallQueue,
    account: Account,
    ahead: Ahead,
    calls: int,
    charged: list[tuple[Budget, Usage]],
    pace: Pace,
    start: int,
) -> Simulated:
    """So many calls, through these budgets alone."""
    budgets = tuple(budget for budget, _ in charged)
    rule = call.rule
    return simulate(
        Book({rule: account.book.rules[rule]}, {rule: budgets}, {rule: (rule,)}),
        rule,
        calls,
        latency=pace.latency,
        is_told=pace.is_stamped,
        start=start,
        cost={unit: max(1, round(mean)) for unit, mean in ahead.cost.items() if unit != "calls"},
        usage={budget.id: usage for budget, usage in charged},
    )


def _calls_through(budget: Budget, ahead: Ahead, own: int) -> int:
    """How many calls pass the budget up to and with this one; those of several calls' cost count as
    so many.
    """
    queued = _queued(budget, ahead)
    if budget.limit.unit != "calls":
        return queued + 1
    return round(queued * ahead.cost["calls"]) + own


def _queued(budget: Budget, ahead: Ahead) -> int:
    own = ahead.of_value.get(budget.limit.per, ahead.calls)
    return own + sum(count for name, count in ahead.others.items() if name in budget.rules)


def _single(call: CallQueue, account: Account, budget: Budget, pace: Pace) -> tuple[Budget, Usage]:
    """The budget as one that all calls pass, with its charges: of the call's own key, or of all its
    queues together.
    """
    # What is sent late ages late: to a limit that is the same as a longer way to the provider.
    limit = replace(budget.limit, per="rule", name=budget.limit.label)
    if (late := limit.jitter_us / SECOND + pace.late) <= MOST_JITTER:
        limit = replace(limit, jitter=late)
    if not budget.limit.is_per_queue:
        return replace(budget, limit=limit), window_use.usage(
            account, budget, budget.value_of(call.key, "")
        )
    queues = account.book.rules[call.rule].queue_names
    usages = [window_use.usage(account, budget, queue) for queue in queues]
    aged = sorted(charge for usage in usages for charge in usage.aged)
    level = sum(usage.level for usage in usages)
    together = Usage(sum(u.open for u in usages), aged, max(u.since for u in usages), level)
    return replace(budget, limit=limit.times(len(queues))), together


def _used_up(call: CallQueue, account: Account) -> Budget | None:
    """The limit that would let this very call go last, were it the next; None where all would let
    it go now.
    """
    latest: tuple[float, Budget] | None = None
    for budget in account.book.budgets[call.rule]:
        if not (cost := cost_of(call.cost, budget.limit.unit)):
            continue
        queues = account.book.rules[call.rule].queue_names
        instants = [
            account.meter(budget, budget.value_of(call.key, queue)).free_at(cost)
            for queue in queues
        ]
        instant = min(float("inf") if i is None else float(i) for i in instants)
        if instant > account.now and (latest is None or instant > latest[0]):
            latest = (instant, budget)
    return latest[1] if latest else None


def _reason(ahead: Ahead, label: str | None, is_used_up: bool, is_soon: bool) -> str:
    others = sum(ahead.others.values())
    count = ahead.calls + others
    before = (
        ngettext("%s call goes before it", "%s calls go before it", count) % grouped(count)
        if count
        else ""
    )
    values = {"limit": label, "before": before}
    if is_soon and not is_used_up:
        return before or _("it goes at the next pass")
    if is_used_up:
        return (
            _("%(limit)s is used up, and %(before)s") if before else _("%(limit)s is used up")
        ) % values
    if before:
        return _("%(before)s, as fast as %(limit)s allows") % values if label else before
    return _("%(limit)s is used up") % values if label else _("it goes at the next pass")


def _in_flight(call: CallQueue, account: Account, binding: Budget | None, pace: Pace | None) -> str:
    """What uses the limit up, where most of that is calls in flight; empty otherwise."""
    if binding is None or pace is None:
        return ""
    value = binding.value_of(call.key, account.book.rules[call.rule].queue_names[0])
    amount = window_use.in_flight(account, binding, value)
    if 2 * amount < binding.limit.capacity:
        return ""
    return f": {in_flight_note(amount, binding.limit.unit, pace.latency)}"


def grouped(count: int) -> str:
    return str(number_format(count, force_grouping=True))


def _pace(using: str, rule: str) -> Pace | None:
    """The pace of the rule's latest attempts; None where there are none."""
    ended = tables.attempts(using).charged().filter(rule=rule, finished_at__isnull=False)
    columns = (
        Coalesce("send_at", "released_at"),
        Coalesce("sent_at", "started_at", "released_at"),
        "finished_at",
        "sent_at",
    )
    newest = list(ended.order_by("-finished_at").values_list(*columns)[:100])
    if not newest:
        return None
    late = sum(max(0.0, (sent - slot).total_seconds()) for slot, sent, *_ in newest) / len(newest)
    latency = sum(max(0.0, (end - sent).total_seconds()) for _, sent, end, _ in newest) / len(
        newest
    )
    is_stamped = any(stamp is not None for *_, stamp in newest)
    return Pace(latency, max(0.0, late - DELIVERY), is_stamped)


def _stalled(account: Account) -> int:
    """Attempts of the group that were released a while ago and that no worker has begun."""
    unbegun = tables.attempts(account.using).unbegun().filter(rule__in=account.rules)
    return int(unbegun.filter(released_at__lt=from_us(account.now) - STALLED)[: CAP + 1].count())
