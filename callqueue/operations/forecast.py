"""What a call waits for, its place in the queue, and when it should go; honest where nobody can
say.

In: a call. Out: a Forecast, from the present charges of the ledger and what waits ahead of the
call. Changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext as _

from callqueue import conf, database, states, tables
from callqueue.database import clock, from_us, to_us
from callqueue.ledger import account as ledger
from callqueue.ledger import agreement, holds
from callqueue.limits.budgets import Book
from callqueue.operations import ahead, formatting
from callqueue.operations.expected_release import expected, grouped
from callqueue.sending.validation import check_key

if TYPE_CHECKING:
    from callqueue.models import CallQueue

SILENT = timedelta(seconds=60)  # without a sign of life after which no dispenser is taken to run


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
    with database.one_view(using):
        now = to_us(clock(using))
        book = agreement.book_in_force(using)
        group = book.groups[rule]
        account = _account(using, book, group, now, text)
        is_held = holds.in_force(using, group, from_us(now)).blocking(rule, text)
    return not is_held and _fits(account, rule, text, 1)


def forecast(call: CallQueue, *, tells_why_held: bool = True) -> Forecast:
    """The forecast of one call, as of now. `position` is None where more calls go before it than
    are counted (CAP in `ahead`).

    `tells_why_held`: whether the reader may know a hold's reason; that there is a hold, and until
    when, is said to all.
    """
    using = call._state.db or "default"
    with database.one_view(using):
        return _forecast(call, using, tells_why_held)


def _forecast(call: CallQueue, using: str, tells_why_held: bool) -> Forecast:
    if call.status == states.DISPATCHED:
        return Forecast(_dispatched(call, using))
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
    before = ahead.count_ahead(call, book, using)
    position = None if before.calls > ahead.CAP else before.calls + 1
    if hold is not None and hold.until is None:
        return Forecast(_("held until it is resumed") + why, position)
    if silence := _silence(using, now):
        return Forecast(silence, position)
    if position is None:
        return Forecast(_("more than %s calls go before it") % grouped(ahead.CAP))
    account = _account(using, book, group, to_us(now), call.key)
    start = now if hold is None or hold.until is None else hold.until
    release = expected(call, account, before, to_us(start))
    if release.instant is None:
        return Forecast(release.reason, position)
    instant = max(from_us(release.instant), call.due_at_dt)
    if hold is not None:
        reason = _("held") + why
    elif call.due_at_dt >= from_us(release.instant) and call.due_at_dt > now:
        reason = _("it is not due yet")
    else:
        reason = release.reason
    return Forecast(reason + _unseen(using), position, instant)


def _account(using: str, book: Book, group: tuple[str, ...], now: int, key: str) -> ledger.Account:
    """What is charged now to the limits of a group of rules, for this key."""
    memo = ledger.Memo.load(group, agreement.memos(using, group), book.agreement)
    account = ledger.read(using, book, group, now, memo)
    account.read_keys([key])
    return account


def _fits(account: ledger.Account, rule: str, key: str, cost: Any) -> bool:
    """Whether a call of this cost fits into every limit of its rule now, on one of the rule's
    queues at least.
    """
    book, charge = account.book, account.book.charge_of(rule, cost)
    return any(
        all(
            account.meter(b, b.value_of(key, queue)).free_at(b.charge_of(charge)) == account.now
            for b in book.budgets[rule]
            if b.charge_of(charge)
        )
        for queue in book.rules[rule].queue_names
    )


# --- what is known


def _dispatched(call: CallQueue, using: str) -> str:
    """Where a call is that was released, since when, and until when that may last."""
    attempt = tables.attempts(using).filter(call_id=call.pk, number=call.last_attempt).first()
    queue = call.queue or _("the default queue")
    if attempt is None or attempt.finished_at is not None:
        return str(_("it is %s") % call.get_status_display())
    now = clock(using)
    values = {
        "queue": queue,
        "since": _ago(now - (attempt.started_at or attempt.released_at)),
        "until": _ahead(attempt.lease_until, now),
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


def _ago(passed: timedelta) -> str:
    return formatting.duration(max(0.0, passed.total_seconds()))


def _ahead(instant: datetime | None, now: datetime) -> str:
    return _ago(timedelta(0) if instant is None else instant - now)


def _hold_on(call: CallQueue, book: Book, held: holds.Held) -> holds.InForce | None:
    """The hold that keeps it back: on its rule or key, the longest; or, where all of its queues are
    held, the first to end.
    """
    on_call = [
        h for h in held.by_rule.get(call.rule, ()) if h.per == "rule" or h.is_on_key(call.key)
    ]
    on_queues = [
        held.blocking(call.rule, None, queue) for queue in book.rules[call.rule].queue_names
    ]
    if all(h is not None and h.per == "queue" for h in on_queues):
        on_call.append(min((h for h in on_queues if h is not None), key=attrgetter("end")))
    return max(on_call, key=attrgetter("end"), default=None)


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
