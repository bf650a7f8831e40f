"""What a call waits for, its place in the queue, and when it should go; honest where nobody can
say.

In: a call. Out: a Forecast, from the present charges of the ledger and what waits ahead of the
call, by the arithmetic of simulate.py. Reads a bounded part of the waiting set, whatever its size;
changes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db.models import F, Q
from django.db.models.functions import Coalesce
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from callqueue import conf, states, tables
from callqueue.database import clock, from_us, quoted, rows, to_us
from callqueue.ledger import account as ledger
from callqueue.ledger import agreement, holds
from callqueue.ledger.ready_calls import READY
from callqueue.limits.budgets import Book, Budget, cost_of, key_part
from callqueue.limits.kinds import SECOND, Usage
from callqueue.limits.simulation import DELIVERY, simulate
from callqueue.operations import ledger_view
from callqueue.operations.attempt_sums import AttemptSums
from callqueue.operations.ledger_view import LedgerView
from callqueue.sending.validation import check_key

if TYPE_CHECKING:
    from callqueue.models import CallQueue

CAP = 100_000  # calls ahead that are counted; no time is given past it
SAMPLE = 200  # calls ahead whose costs are read
COUNTING = 0.1  # seconds spent on counting what large windows hold; the rest of it is estimated
SILENT = timedelta(seconds=60)  # without a sign of life after which no dispenser is taken to run
STALLED = timedelta(
    seconds=10
)  # after which a released attempt that no worker began says that none is there
SOON = SECOND // 2  # what goes within this goes now


@dataclass(frozen=True)
class Forecast:
    """Why a call waits. `position` counts from 1; `release_at` is None where no time can be given,
    and `reason` says why.
    """

    reason: str
    position: int | None = None
    release_at: datetime | None = None


def has_room(using: str, rule: str, key: Any = "") -> bool:
    """Whether a call of cost 1 would be released now under this rule and key: room in every limit,
    and no hold.
    """
    config = conf.current()
    text = check_key(key)
    config.rule(rule)
    now = to_us(clock(using))
    book = agreement.book_in_force(using)
    group = book.groups[rule]
    account = ledger.read(
        using, book, group, now, ledger.Memo.load(group, agreement.memos(using, group))
    )
    account.read_keys([text])
    if holds.in_force(using, group, from_us(now)).blocking(rule, text):
        return False
    return ledger.fits(account, rule, text, 1)


def forecast(call: CallQueue, *, tells_why_held: bool = True) -> Forecast:
    """The forecast of one call, as of now. `position` is None where more than CAP calls go before
    it.

    `tells_why_held`: whether the reader may know a hold's reason; that there is a hold, and until
    when, is said to all.
    """
    using = call._state.db or "default"
    if call.status not in states.WAITING:
        return Forecast(_("it is %s") % call.get_status_display())
    config = conf.current()
    if call.rule not in config.rules:
        return Forecast(_("the rule %r is not in CALLQUEUE['RULES'] any more") % call.rule)
    now = clock(using)
    book = agreement.book_in_force(using)
    group = book.groups[call.rule]
    hold = _hold_on(call, book, holds.in_force(using, group, now))
    why = f": {hold.reason}" if hold is not None and tells_why_held else ""
    ahead = _count_ahead(call, book, using)
    position = None if ahead.calls > CAP else ahead.calls + 1
    if hold is not None and hold.until is None:
        return Forecast(_("held until it is resumed") + why, position)
    if silence := _silence(using, now):
        return Forecast(silence, position)
    if position is None:
        return Forecast(_("more than %s calls go before it") % _grouped(CAP))
    sums = AttemptSums(using, to_us(now), time.monotonic() + COUNTING)
    account = ledger_view.look(
        using,
        book,
        group,
        to_us(now),
        ledger.Memo.load(group, agreement.memos(using, group)),
        sums=sums,
    )
    account.read_keys([call.key])
    start = now if hold is None or hold.until is None else hold.until
    expected = _expected(call, account, ahead, to_us(start))
    if expected.instant is None:
        return Forecast(expected.reason, position)
    instant = max(from_us(expected.instant), call.due_at_dt)
    if hold is not None:
        reason = _("held") + why
    elif call.due_at_dt >= from_us(expected.instant) and call.due_at_dt > now:
        reason = _("it is not due yet")
    else:
        reason = expected.reason
    return Forecast(reason + _unseen(using), position, instant)


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


@dataclass(frozen=True)
class Pace:
    """What calls take, in seconds: from the last byte sent to the answer, and how long after its
    slot that byte was sent.
    """

    latency: float
    late: float


USUAL = Pace(latency=0.2, late=0.0)  # where none was made lately


@dataclass(frozen=True)
class Expected:
    """The instant of a release (None: nobody can say), and what it waits for."""

    instant: int | None
    reason: str


# --- what goes before it


def _count_ahead(call: CallQueue, book: Book, using: str) -> Ahead:
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
    return count


def _in_turns(call: CallQueue, using: str, pers: set[str]) -> tuple[int, dict[str, int]]:
    """The same where keys take turns: of each other key as many as of its own, and one; by value of
    each `per` too.
    """
    higher = _by_key(call, using, "priority > %s")
    same = _by_key(call, using, "priority = %s")
    own = _waiting(call, using).filter(priority=call.priority, key=call.key)
    before = Q(due_at_dt__lt=call.due_at_dt) | Q(due_at_dt=call.due_at_dt, pk__lt=call.pk)
    mine = own.filter(before)[: CAP + 1].count()
    ahead = Counter(higher)
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


# --- when it goes


def _expected(call: CallQueue, account: LedgerView, ahead: Ahead, start: int) -> Expected:
    """When the last limit lets it go, if those before it go as fast as they may."""
    runs: dict[int, list[tuple[Budget, Usage]]] = {}
    binding = _used_up(call, account)
    pace = _pace(account.using, call.rule)
    for budget in account.book.budgets[call.rule]:
        own = cost_of(call.cost, budget.limit.unit)
        if not own:
            continue
        if own > budget.limit.capacity:
            return Expected(
                None,
                _("its cost of %(cost)d is more than %(limit)s ever admits")
                % {"cost": own, "limit": budget.limit.label},
            )
        is_full = _queued(budget, ahead) + 1 > budget.limit.capacity
        if budget.limit.counts_in_flight and pace is None and is_full:
            return Expected(
                None,
                _("%s is used up, and how long a call takes is not known yet") % budget.limit.label,
            )
        runs.setdefault(_calls_through(budget, ahead, own), []).append(
            _single(call, account, budget, pace or USUAL)
        )
    if binding is not None and (stalled := _stalled(account)):
        reason = _(
            "%(limit)s is used up by attempts in flight, and no worker has begun %(count)d of them"
        )
        return Expected(None, reason % {"limit": binding.limit.label, "count": stalled})
    latest, label = start, binding.limit.label if binding else None
    for calls, charged in runs.items():
        made = simulate(
            Book(
                {call.rule: account.book.rules[call.rule]},
                {call.rule: tuple(b for b, _ in charged)},
                {call.rule: (call.rule,)},
            ),
            call.rule,
            calls,
            latency=(pace or USUAL).latency,
            start=start,
            cost={
                unit: max(1, round(mean)) for unit, mean in ahead.cost.items() if unit != "calls"
            },
            usage={budget.id: usage for budget, usage in charged},
        )
        instant = start + round(made.last_release * SECOND)
        if instant > latest:
            latest, label = instant, made.binding_limit
    return Expected(latest, _reason(ahead, label, binding is not None, latest - start <= SOON))


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


def _single(
    call: CallQueue, account: LedgerView, budget: Budget, pace: Pace
) -> tuple[Budget, Usage]:
    """The budget as one that all calls pass, with its charges: of the call's own key, or of all its
    queues together.
    """
    # What is sent late ages late: to a limit that is the same as a longer way to the provider.
    limit = replace(
        budget.limit,
        per="rule",
        name=budget.limit.label,
        jitter=min(60.0, budget.limit.jitter + pace.late),
    )
    if not budget.limit.is_per_queue:
        return replace(budget, limit=limit), account.usage(budget, budget.value_of(call.key, ""))
    queues = account.book.rules[call.rule].queue_names
    usages = [account.usage(budget, queue) for queue in queues]
    aged = sorted(charge for usage in usages for charge in usage.aged)
    level = sum(usage.level for usage in usages)
    together = Usage(sum(u.open for u in usages), aged, max(u.since for u in usages), level)
    return replace(budget, limit=limit.times(len(queues))), together


def _used_up(call: CallQueue, account: LedgerView) -> Budget | None:
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
        ngettext("%s call goes before it", "%s calls go before it", count) % _grouped(count)
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
    return _("%(before)s, as fast as %(limit)s allows") % values if label else before


def _grouped(count: int) -> str:
    return str(number_format(count, force_grouping=True))


# --- what is known


def _hold_on(call: CallQueue, book: Book, held: holds.Held) -> holds.InForce | None:
    """The hold that keeps it back: on its rule or key, the longest; or, where all of its queues are
    held, the first to end.
    """
    on_call = [
        h for h in held.by_rule.get(call.rule, ()) if h.per == "rule" or _is_on_key(h, call.key)
    ]
    on_queues = [
        held.blocking(call.rule, None, queue) for queue in book.rules[call.rule].queue_names
    ]
    if all(h is not None and h.per == "queue" for h in on_queues):
        on_call.append(min((h for h in on_queues if h is not None), key=_end))
    return max(on_call, key=_end, default=None)


def _is_on_key(hold: holds.InForce, key: str) -> bool:
    return hold.per not in ("rule", "queue") and key_part(key, hold.per) == hold.value


def _end(hold: holds.InForce) -> float:
    return float("inf") if hold.until is None else hold.until.timestamp()


def _silence(using: str, now: datetime) -> str:
    """What to say where dispensers have run and none does now; empty otherwise."""
    seen_at = (
        tables.dispensers(using).order_by("-seen_at").values_list("seen_at", flat=True).first()
    )
    if seen_at is None or seen_at > now - SILENT:
        return ""
    minutes = round((now - seen_at).total_seconds() / 60)
    return str(
        _("no dispenser has been seen for %d minutes: nothing is released until one runs") % minutes
    )


def _unseen(using: str) -> str:
    return (
        ""
        if tables.dispensers(using).exists()
        else _("; no dispenser has been seen yet: the time holds if one starts now")
    )


def _pace(using: str, rule: str) -> Pace | None:
    """The pace of the rule's latest attempts; None where there are none."""
    ended = tables.attempts(using).charged().filter(rule=rule, finished_at__isnull=False)
    columns = (
        Coalesce("send_at", "released_at"),
        Coalesce("sent_at", "started_at", "released_at"),
        "finished_at",
    )
    newest = list(ended.order_by("-finished_at").values_list(*columns)[:100])
    if not newest:
        return None
    late = sum(max(0.0, (sent - slot).total_seconds()) for slot, sent, _ in newest) / len(newest)
    latency = sum(max(0.0, (end - sent).total_seconds()) for _, sent, end in newest) / len(newest)
    return Pace(latency, max(0.0, late - DELIVERY))


def _stalled(account: LedgerView) -> int:
    """Attempts of the group that were released a while ago and that no worker has begun."""
    unbegun = tables.attempts(account.using).unbegun().filter(rule__in=account.rules)
    return int(unbegun.filter(released_at__lt=from_us(account.now) - STALLED)[: CAP + 1].count())


def _waiting(call: CallQueue, using: str) -> Any:
    return type(call).objects.using(using).waiting().filter(rule=call.rule).order_by()
