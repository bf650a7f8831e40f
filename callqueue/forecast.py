"""What a call waits for, its place, and when it goes; of what waits a bounded part is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from django.db.models import Q
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from callqueue import conf, database, states, tables
from callqueue.clocks import Reading
from callqueue.database import from_us, quoted, rows
from callqueue.ledger import account as ledger
from callqueue.ledger import holds, ledger_time, rule_rows, settings
from callqueue.ledger.ready_calls import READY
from callqueue.limits.budgets import Book, cost_of, key_part
from callqueue.look import LimitLook, RuleLook, alive, estimate, look, words
from callqueue.look.estimate import Gate
from callqueue.look.model import FOREVER
from callqueue.sending.validation import check_key

if TYPE_CHECKING:
    from callqueue.models import CallQueue

CAP = 100_000  # calls ahead that are counted; no time is given past it
SOON_S = 0.5  # what goes within this goes now

Pairs = Sequence[tuple[LimitLook, Gate]]


@dataclass(frozen=True)
class Forecast:
    """`reason`: what the call waits for, or why `release_at` is None. `position` is from 1 on."""

    reason: str
    position: int | None = None
    release_at: datetime | None = None


def has_room(using: str, rule: str, key: Any = "") -> bool:
    """Whether limits and holds would let a call of cost 1 go now; those that wait do not count."""
    config = conf.current()
    text = check_key(key)
    config.rule(rule)  # else UnknownRule
    with database.one_snapshot(using):
        reading = ledger_time.read(using)
        now, book = reading.at, settings.book_in_force(using).moved_by(reading.moved)
        group = book.groups[rule]
        account = _read_account(using, book, group, reading, text)
        held = holds.in_force(using, group, from_us(now))
    queues = [q for q in book.rules[rule].queue_names if not held.blocking_hold(rule, text, q)]
    return _fits(account, rule, text, 1, queues)


def forecast(call: CallQueue, *, tells_why_held: bool = True) -> Forecast:
    """The forecast of one call, as of now. `position` is None where it does not wait, or more than
    CAP go before it. `tells_why_held`: whether a hold's reason is said; a hold itself always is.
    """
    using = call._state.db or "default"
    with database.one_snapshot(using):
        return _forecast(call, using, tells_why_held)


def _forecast(call: CallQueue, using: str, tells_why_held: bool) -> Forecast:
    if call.status == states.DISPATCHED:
        return Forecast(_text_of_dispatched(call, using))
    if call.status not in states.WAITING:
        return Forecast(_("it is %s") % call.get_status_display())
    if call.rule not in conf.current().rules:
        return Forecast(_("the rule %r is not in CALLQUEUE['RULES'] any more") % call.rule)
    seen = look(using, rules=[call.rule], key=call.key)
    now, rule = seen.wall_time, seen.rule(call.rule)
    hold = rule.hold_on(call.key)
    why = f": {hold.reason}" if hold is not None and tells_why_held else ""
    ahead = _count_ahead(call, seen.book, using)
    position = None if ahead.calls > CAP else ahead.calls + 1
    if hold is not None and hold.until is None:
        return Forecast(_("held until it is resumed") + why, position)
    # the process that waits for a permit makes the passes itself, where nothing goes before it
    needs_dispenser = call.method != states.PERMIT or ahead.calls > 0
    if needs_dispenser and alive.has_fallen_silent(seen.signs):
        silence = words.duration(alive.silence_s(seen.signs, now) or 0.0)
        text = _("no dispenser has been seen for %s: nothing is released until one runs")
        return Forecast(text % silence, position)
    if position is None:
        return Forecast(_("more than %s calls go before it") % words.count(CAP))
    seconds, reason = _expected_wait(call, rule, ahead)
    if seconds is None:
        return Forecast(reason, position)
    until = now if hold is None or hold.until is None else hold.until
    released_at = max(now, until) + timedelta(seconds=seconds)
    if hold is not None:
        reason = _("held") + why
    elif call.due_at_dt >= released_at and call.due_at_dt > now:
        reason = _("it is not due yet")
    if not needs_dispenser:
        pass
    elif not seen.signs:
        reason += _("; no dispenser has been seen yet: the time holds if one starts now")
    elif not seen.dispensers:
        reason += _("; no dispenser runs: the time holds if one starts now")
    return Forecast(reason, position, max(released_at, call.due_at_dt))


def _read_account(
    using: str, book: Book, group: tuple[str, ...], reading: Reading, key: str
) -> ledger.Account:
    """What the group is charged with, of the key too: a few statements, no lock."""
    kept = rule_rows.passes_and_memos(using, group)
    memo = ledger.Memo.load(group, kept, book.version, reading.moved)
    account = ledger.read(using, book, group, reading.at, memo)
    account.read_keys([key])
    return account


def _fits(account: ledger.Account, rule: str, key: str, cost: Any, queues: Sequence[str]) -> bool:
    """Whether the cost fits now in every limit of the rule, on one of these queues at least."""
    book = account.book
    return any(
        all(
            account.meter(b, b.value_of(key, queue)).free_at(b.charge_of(cost)) == account.now
            for b in book.budgets[rule]
            if b.charge_of(cost)
        )
        for queue in queues
    )


def _text_of_dispatched(call: CallQueue, using: str) -> str:
    attempt = tables.attempts(using).filter(call_id=call.pk, number=call.last_attempt).first()
    queue = call.queue or _("the default queue")
    if attempt is None or attempt.finished_at is not None:
        return str(_("it is %s") % call.get_status_display())
    now = ledger_time.now(using)
    values = {
        "queue": queue,
        "since": _duration_in_words(now - (attempt.started_at or attempt.released_at)),
        "until": _duration_in_words((attempt.lease_until or now) - now),
    }
    if attempt.started_at is None:
        return str(
            _(
                "it was dispatched to %(queue)s %(since)s ago, and no worker has begun it; "
                "it is taken back in %(until)s"
            )
            % values
        )
    return str(
        _(
            "it is under way: a worker of %(queue)s began it %(since)s ago; "
            "without an answer it is given up in %(until)s"
        )
        % values
    )


def _duration_in_words(passed: timedelta) -> str:
    return words.duration(max(0.0, passed.total_seconds()))


# --- when it goes


def _expected_wait(call: CallQueue, rule: RuleLook, ahead: Ahead) -> tuple[float | None, str]:
    """In how many seconds limits let the call go (None: nobody can say), what it waits for."""
    pairs = [
        (limit, _gate_for_call(call, limit, gate, ahead))
        for limit, gate in zip(rule.limits, rule.gates, strict=True)
        if cost_of(call.cost, limit.budget.limit.unit)
    ]
    binding = _binding_limit(call, rule)
    if why := _why_unforeseeable(call, rule, pairs, ahead, binding):
        return None, why
    gates = [gate for _limit, gate in pairs]
    calls = ahead.calls + 1
    seconds = rule.seconds_to_release(calls, gates)
    place = estimate.place_of_slowest(gates, calls, rule.now)
    label = pairs[place][0].name if place is not None and seconds and seconds > SOON_S else ""
    reason = _reason(gates, ahead, binding, label)
    note = binding.in_flight_note(rule.pace.latency) if binding else ""
    return seconds, f"{reason}: {note}" if note else reason


def _gate_for_call(call: CallQueue, limit: LimitLook, gate: Gate, ahead: Ahead) -> Gate:
    """The limit's gate for this call, behind the calls before it, at the mean cost of them all."""
    kind, before = limit.budget.limit, ahead.calls
    if kind.is_keyed:
        gate, before = replace(gate, sizes=()), ahead.of_value.get(kind.per, before)
    return replace(
        gate, cost=(before * gate.cost + cost_of(call.cost, kind.unit)) / (ahead.calls + 1)
    )


def _binding_limit(call: CallQueue, rule: RuleLook) -> LimitLook | None:
    """The limit that would let this call go last, were it next; None where all would now."""
    waits: list[tuple[float, LimitLook]] = []
    for one in rule.limits:
        cost = cost_of(call.cost, one.budget.limit.unit)
        if cost and one.free < cost:
            at = one.emptiest.free_at(cost)
            waits.append((FOREVER if at is None else at, one))
    return max(waits, key=itemgetter(0), default=(0.0, None))[1]


def _why_unforeseeable(
    call: CallQueue, rule: RuleLook, pairs: Pairs, ahead: Ahead, binding: LimitLook | None
) -> str:
    """Why nobody can say when the call goes, in words; empty where somebody can."""
    for one, gate in pairs:
        kind, own = one.budget.limit, cost_of(call.cost, one.budget.limit.unit)
        if own > kind.capacity:
            values = {"cost": own, "limit": one.name}
            return _("its cost of %(cost)d is more than %(limit)s ever admits") % values
        is_full = gate.amount_with(ahead.calls + 1) > one.free
        if kind.counts_in_flight and not rule.pace.latency and is_full:
            return _("%s is used up, and how long a call takes is not known yet") % one.name
    if binding is not None and rule.stalls:
        text = _(
            "%(limit)s is used up by attempts in flight, and no worker has begun %(count)d of them"
        )
        return text % {"limit": binding.name, "count": rule.flight.unbegun}
    if rule.why_unknown == "no_workers":
        queues = [one.queue or _("the default queue") for one in rule.stalls]
        return _("nobody takes calls from %s") % words.join_names(queues)
    if rule.why_unknown == "stuck":
        return _("nothing is sent of its rule, though nothing that is known keeps its calls back")
    return ""


def _reason(gates: Sequence[Gate], ahead: Ahead, binding: LimitLook | None, label: str) -> str:
    """`label`: the slowest limit for it and those before, "" if soon; `binding`: for it alone."""
    others = max((round(g.before) + min(ahead.calls + 1, g.beside) for g in gates), default=0)
    count = ahead.calls + others
    before = (
        ngettext("%s call goes before it", "%s calls go before it", count) % words.count(count)
        if count
        else ""
    )
    # what is full now matters little to a call that another limit holds for longer
    if binding is not None and (not before or label in ("", binding.name)):
        text = _("%(limit)s is used up, and %(before)s") if before else _("%(limit)s is used up")
        return text % {"limit": binding.name, "before": before}
    if before:
        text = _("%(before)s, as fast as %(limit)s allows") if label else "%(before)s"
        return text % {"limit": label, "before": before}
    if label:
        return _("%(limit)s is used up") % {"limit": label}
    return _("it goes at the next pass")


# --- what goes before it


@dataclass(frozen=True)
class Ahead:
    """Calls of its rule before a call, and how many of them share its value of a `per`."""

    calls: int
    of_value: Mapping[str, int]


def _count_ahead(call: CallQueue, book: Book, using: str) -> Ahead:
    pers = {b.limit.per for b in book.budgets[call.rule] if b.limit.is_keyed}
    return (
        Ahead(*_ahead_in_turns(call, using, pers))
        if pers
        else Ahead(_ahead_in_order(call, using), {})
    )


def _ahead_in_order(call: CallQueue, using: str) -> int:
    """How many calls go before it by priority, then by when due; more than CAP: not exactly."""
    same = Q(priority=call.priority)
    parts = [
        Q(priority__gt=call.priority),
        same & Q(due_at_dt__lt=call.due_at_dt),
        same & Q(due_at_dt=call.due_at_dt, pk__lt=call.pk),
    ]
    count = 0
    for ready in (True, False):
        found = _waiting_of_rule(call, using).filter(ready=ready)
        for part in parts:
            if not ready:  # what becomes due later than this one does not go before it
                part &= Q(due_at_dt__lte=call.due_at_dt)
            count += found.filter(part)[: CAP + 1].count()
    return count


def _ahead_in_turns(call: CallQueue, using: str, pers: set[str]) -> tuple[int, dict[str, int]]:
    """How many calls go before it where keys take turns: of its priority at most one more of each
    other key than of its own. And by `per`, how many of all share its value.
    """
    higher = _ready_by_key(call, using, "priority > %s")
    same = _ready_by_key(call, using, "priority = %s")
    own = _waiting_of_rule(call, using).filter(priority=call.priority, key=call.key)
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


def _ready_by_key(call: CallQueue, using: str, priorities: str) -> Counter[str]:
    """By key, how many of its rule's ready calls, CAP + 1 in all. `priorities`: SQL, %s its own."""
    key = quoted(using, "key")
    found = rows(
        using,
        f"SELECT {key}, COUNT(*) FROM (SELECT {key} FROM {quoted(using, call._meta.db_table)} "
        f"WHERE {READY} AND {priorities} LIMIT {CAP + 1}) ahead GROUP BY {key}",
        [call.rule, call.priority],
    )
    return Counter({text: int(count) for text, count in found})


def _waiting_of_rule(call: CallQueue, using: str) -> Any:
    return type(call).objects.using(using).waiting().filter(rule=call.rule).order_by()
