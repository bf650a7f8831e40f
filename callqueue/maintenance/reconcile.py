"""Reconciles UNKNOWN calls: asks a rule's `reconcile` hook what became of a call that was sent and
never answered.

In: calls that are UNKNOWN, whose rule has a hook. Out: what the hook says, as the call's state:
done, failed, or to be made again. The hook may use the network, so it is asked in a worker and
never inside a transaction; it is asked again after a minute, then less and less often, and no more
than MOST times.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db.models import F, Q
from django.utils.module_loading import import_string

from callqueue import callbacks, conf, database, events, states, tables, texts
from callqueue.database import from_us
from callqueue.exceptions import IllegalTransition, InvalidCall
from callqueue.handlers import HTTP_METHODS
from callqueue.ledger import row_locks
from callqueue.outcome import GiveUp, RetryLater, Succeeded
from callqueue.security.scrubbing import clean, payload_of
from callqueue.sending import disclosure
from callqueue.transitions import ended

if TYPE_CHECKING:
    from callqueue.models import CallQueue

# seconds until a hook that did not know is asked again of the same call; doubled each time
FIRST = 60.0
LONGEST = 6 * 3600.0
MOST = 10  # times that a hook is asked of a call
BATCH = 20  # calls that one round asks of


def reconcile(call: CallQueue) -> int:
    """Ask now what became of a call, and believe it; the call's status then, to which the instance
    is brought up to date.

    IllegalTransition where it is not UNKNOWN, InvalidCall where its rule has no hook. What the hook
    raises is raised.
    """
    using = call._state.db or "default"
    hook = _hooks().get(call.rule)
    if call.status != states.UNKNOWN:
        raise IllegalTransition(
            f"call {call.pk} is {call.get_status_display()}; only unknown ones are reconciled"
        )
    if hook is None:
        raise InvalidCall("rule", f"{call.rule!r} has no reconcile hook to ask")
    _believe(using, call, _imported(hook)(call))
    call.refresh_from_db(using=using)
    return call.status


def ask_due(using: str, most: int = BATCH) -> int:
    """Ask of the calls whose time it is, at most so many; the count of those that are UNKNOWN no
    more. Not in a transaction.
    """
    if not _hooks():
        return 0
    due = _due(using).order_by(F("reconcile_at").asc(nulls_first=True), "pk")[:most]
    settled = 0
    for call in database.persist(using, lambda: list(due.all()), during="reconcile"):
        if database.persist(using, partial(_claim, using, call), during="reconcile"):
            settled += _ask(using, call)
    return settled


def queues_wanted(using: str) -> list[str]:
    """A queue for each rule that has calls to be asked of: its workers can do it. No statement
    where no rule has a hook.
    """
    if not _hooks():
        return []
    rules = set(_due(using).order_by().values_list("rule", flat=True).distinct())
    return sorted({conf.current().rules[rule].queue_names[0] for rule in rules})


def _hooks() -> dict[str, Any]:
    return {
        name: rule.reconcile
        for name, rule in conf.current().rules.items()
        if rule.reconcile is not None
    }


def _due(using: str) -> Any:
    """UNKNOWN calls that a hook may be asked of now."""
    rows = tables.calls(using).unknown().filter(rule__in=list(_hooks()), reconcile_count__lt=MOST)
    return rows.filter(Q(reconcile_at__isnull=True) | Q(reconcile_at__lte=database.ClockNow()))


def _claim(using: str, call: CallQueue) -> bool:
    """Whether it is this worker that asks: the next time is set before the hook is asked, in one
    update.
    """
    wait = timedelta(seconds=min(LONGEST, FIRST * 2**call.reconcile_count))
    mine = (
        type(call)
        .objects.using(using)
        .unknown()
        .filter(pk=call.pk, reconcile_count=call.reconcile_count)
    )
    with database.writing(using):
        free, reading = row_locks.calls_to_end(using, [call.pk])
        at = from_us(reading.at) + wait
        return bool(free and mine.update(reconcile_count=call.reconcile_count + 1, reconcile_at=at))


def _ask(using: str, call: CallQueue) -> bool:
    try:
        answer = _imported(_hooks()[call.rule])(call)
        return database.persist(using, lambda: _believe(using, call, answer), during="reconcile")
    except BaseException as error:
        why = _clean(call, texts.worded(error))[:300]
        events.tell("reconcile_failed", call_id=call.pk, rule=call.rule, reason=why)
        return False


def _believe(using: str, call: CallQueue, answer: Any) -> bool:
    """Make the call what the hook said it is; False where that changes nothing."""
    if answer is None:
        events.tell(
            "call_reconciled",
            call_id=call.pk,
            rule=call.rule,
            status="unknown",
            reason="the hook cannot tell yet",
        )
        return False
    if isinstance(answer, RetryLater):
        changed, status, why = _make_again(using, call, answer), "new", _clean(call, answer.why)
    elif isinstance(answer, Succeeded):
        changed, status, why = _end(using, call, states.DONE, ""), "done", "the provider has it"
    elif isinstance(answer, GiveUp):
        why = _clean(call, answer.why)
        changed, status = _end(using, call, states.FAILED, why), "failed"
    else:
        raise TypeError(
            f"the hook returned {type(answer).__name__}; it may return Succeeded, RetryLater, GiveUp or None"
        )
    if changed:
        events.tell("call_reconciled", call_id=call.pk, rule=call.rule, status=status, reason=why)
    return changed


def _clean(call: CallQueue, text: str) -> str:
    """What a hook said, without the call's secrets and, where it is not encrypted, its payload."""
    data: Any = call.call_data if isinstance(call.call_data, dict) else {}
    params, method = data.get("params"), str(data.get("method"))
    payload = [] if method in HTTP_METHODS else payload_of(method, params)
    return clean(text, disclosure.values_of(method, params, rule=call.rule, key=call.key), payload)


def _end(using: str, call: CallQueue, status: int, why: str) -> bool:
    rows = (
        type(call).objects.using(using).unknown().filter(pk=call.pk, last_attempt=call.last_attempt)
    )
    changed = bool(rows.update(**ended(status), error_message=why[:2000]))
    if changed:
        callbacks.announce(using, [call.pk], status)
    return changed


def _make_again(using: str, call: CallQueue, answer: RetryLater) -> bool:
    """Requeue it, under the idempotency key it always had; after `after` seconds where the hook
    says so.

    Unlike anybody else's requeue this one leaves the count of questions as it is: a hook cannot go
    round for ever.
    """
    rows = type(call).objects.using(using)
    after = answer.after.total_seconds() if isinstance(answer.after, timedelta) else answer.after
    with database.writing(using):
        questions = rows.filter(pk=call.pk).values_list("reconcile_count", flat=True).first()
        changed = bool(rows.unknown().filter(pk=call.pk, last_attempt=call.last_attempt).requeue())
        if changed:
            rows.filter(pk=call.pk).update(reconcile_count=questions)
        if changed and after:
            due = database.clock(using) + timedelta(seconds=after)
            rows.filter(pk=call.pk, status=states.NEW).update(due_at_dt=due, ready=False)
    return changed


def _imported(hook: Any) -> Any:
    return import_string(hook) if isinstance(hook, str) else hook
