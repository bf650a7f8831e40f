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

from callqueue import conf, database, events, states, tables, texts, transitions
from callqueue.database import from_us
from callqueue.exceptions import IllegalTransition, InvalidCall
from callqueue.handlers import HTTP_METHODS
from callqueue.ledger import row_locks
from callqueue.outcome import GiveUp, RetryLater, Succeeded
from callqueue.security.scrubbing import clean, payload_of
from callqueue.sending import disclosure

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
    """Whether this worker asks: one update sets the next time before the hook is asked."""
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
        events.emit("reconcile_failed", call_id=call.pk, rule=call.rule, reason=why)
        return False


def _believe(using: str, call: CallQueue, answer: Any) -> bool:
    """Make the call what the hook said it is, and say so; False where that changes nothing."""
    facts = {"call_id": call.pk, "rule": call.rule}
    if answer is None:
        why = "the hook cannot tell yet"
        events.emit("call_reconciled", **facts, status="unknown", reason=why)
        return False
    status, why = _reading_of(call, answer)
    if isinstance(answer, RetryLater):
        changed = transitions.send_again(using, call, _seconds(answer.after))
    else:
        changed = transitions.settle(using, call, status, why if status == states.FAILED else "")
    if changed:
        name = conf.NAMES_OF_STATUS[status]
        events.emit("call_reconciled", **facts, status=name, reason=why)
    return changed


def _reading_of(call: CallQueue, answer: Any) -> tuple[int, str]:
    """The state that a hook's answer means, and why; TypeError where it means none."""
    if isinstance(answer, Succeeded):
        return states.DONE, "the provider has it"
    if isinstance(answer, RetryLater):
        return states.NEW, _clean(call, answer.why)
    if isinstance(answer, GiveUp):
        return states.FAILED, _clean(call, answer.why)
    raise TypeError(
        f"the hook returned {type(answer).__name__}; "
        "it may return Succeeded, RetryLater, GiveUp or None"
    )


def _clean(call: CallQueue, text: str) -> str:
    """What a hook said, without the call's secrets and, where it is not encrypted, its payload."""
    data: Any = call.call_data if isinstance(call.call_data, dict) else {}
    params, method = data.get("params"), str(data.get("method"))
    payload = [] if method in HTTP_METHODS else payload_of(method, params)
    return clean(text, disclosure.values_of(method, params, rule=call.rule, key=call.key), payload)


def _seconds(after: float | timedelta | None) -> float:
    return after.total_seconds() if isinstance(after, timedelta) else after or 0.0


def _imported(hook: Any) -> Any:
    return import_string(hook) if isinstance(hook, str) else hook
