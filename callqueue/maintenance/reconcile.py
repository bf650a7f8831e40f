"""Asks a rule's `reconcile` hook what became of an UNKNOWN call, and makes the call what it says. A
hook may use the network: it is asked in a worker, never inside a transaction, less and less often,
no more than MOST times. One worker at a time asks of a rule, so a hook that hangs keeps one slot,
and that for PATIENCE at most.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.exceptions import SoftTimeLimitExceeded
from django.db import DatabaseError, InterfaceError
from django.db.models import F, Q
from django.utils.module_loading import import_string

from callqueue import aside, clocks, conf, database, events, states, tables, texts, transitions
from callqueue.database import EPOCH
from callqueue.handlers import method_of
from callqueue.ledger import ledger_time, rule_rows
from callqueue.ledger.ledger_time import LedgerNow
from callqueue.ledger.transaction import Locked, transaction
from callqueue.outcome import GiveUp, RetryLater, Succeeded
from callqueue.security.withholding import clean_of_secrets, payload_strings
from callqueue.sending import disclosure

if TYPE_CHECKING:
    from callqueue.models import CallQueue

# seconds until a hook that did not know is asked again of the same call; doubled each time
FIRST = 60.0
LONGEST = 6 * 3600.0
MOST = 10  # times that a hook is asked of a call
BATCH = 20  # calls of a rule that one round asks of
ROUND = 5.0  # seconds after which a round asks of no other call
PATIENCE = 30.0  # seconds that a hook has to answer
TURN = timedelta(minutes=1)  # for which a rule is one worker's to ask of: longer than a round takes


def ask_hooks(using: str) -> int:
    """Ask of up to BATCH calls of each rule, of none after ROUND; how many are UNKNOWN no more."""
    settled, end = 0, clocks.monotonic() + ROUND
    for rule in database.persist(using, partial(_free_rules, using), during="reconcile"):
        if clocks.monotonic() >= end:
            break
        turn = database.persist(using, partial(_take_turn, using, rule), during="reconcile")
        if turn is None:
            continue
        try:
            settled += _ask_of_rule(using, rule, end)
        finally:
            with suppress(DatabaseError, InterfaceError):  # then it lapses
                tables.rule_states(using).filter(rule=rule, reconciling_until=turn).update(
                    reconciling_until=ledger_time.now(using)
                )
    return settled


def queues_wanted(using: str) -> list[str]:
    """The queues, each once, of rules that have calls to be asked of and nobody who asks now."""
    return sorted({conf.current().queue_of(rule) for rule in _free_rules(using)})


def _free_rules(using: str) -> list[str]:
    """Rules that have calls to be asked of and nobody who asks now; the last asked of come last."""
    if not _hooks():
        return []
    due = set(_due_calls(using).order_by().values_list("rule", flat=True).distinct())
    rows = tables.rule_states(using).filter(rule__in=due, reconciling_until__isnull=False)
    until: dict[str, Any] = dict(rows.values_list("rule", "reconciling_until"))
    now = ledger_time.now(using)
    free = [rule for rule in due if until.get(rule, EPOCH) <= now]
    return sorted(free, key=lambda rule: (until.get(rule, EPOCH), rule))


def _take_turn(using: str, rule: str) -> datetime | None:
    """Until when the rule is this worker's to ask of; None where it is another's."""
    rule_rows.ensure(using, {rule})
    now = ledger_time.now(using)
    free = Q(reconciling_until__isnull=True) | Q(reconciling_until__lte=now)
    mine = tables.rule_states(using).filter(free, rule=rule)
    return now + TURN if mine.update(reconciling_until=now + TURN) else None


def _ask_of_rule(using: str, rule: str, end: float) -> int:
    """Ask of up to BATCH calls, of none after `end` (Mono); how many are UNKNOWN no more."""
    of_rule = _due_calls(using).filter(rule=rule)
    due = of_rule.order_by(F("reconcile_at").asc(nulls_first=True), "pk")
    settled = 0
    for call in database.persist(using, lambda: list(due[:BATCH]), during="reconcile"):
        if clocks.monotonic() < end and database.persist(
            using, partial(_claim_call, using, call), during="reconcile"
        ):
            settled += _settle_by_hook(using, call)
    return settled


def _hooks() -> dict[str, Any]:
    rules = conf.current().rules.items()
    return {name: rule.reconcile for name, rule in rules if rule.reconcile is not None}


def _due_calls(using: str) -> Any:
    unknown = tables.calls(using).unknown().exclude(method=states.PERMIT)  # whose call no hook sees
    rows = unknown.filter(rule__in=list(_hooks()), reconcile_count__lt=MOST)
    return rows.filter(Q(reconcile_at__isnull=True) | Q(reconcile_at__lte=LedgerNow()))


def _claim_call(using: str, call: CallQueue) -> bool:
    """Whether this worker asks: one update sets the next time before the hook is asked."""
    wait = timedelta(seconds=min(LONGEST, FIRST * 2**call.reconcile_count))
    count = call.reconcile_count
    mine = tables.calls(using).unknown().filter(pk=call.pk, reconcile_count=count)

    def work(locked: Locked) -> bool:
        asked = {"reconcile_count": count + 1, "reconcile_at": locked.now + wait}
        return bool(locked.calls and mine.update(**asked))

    return transaction(using, work, calls=[call.pk])


def _settle_by_hook(using: str, call: CallQueue) -> bool:
    """Ask what became of the call, and believe it; whether it is UNKNOWN no more. Faults: no."""
    try:
        answer = _ask_hook(call)
        return database.persist(
            using, lambda: _apply_answer(using, call, answer), during="reconcile"
        )
    except BaseException as error:
        why = _without_secrets(call, texts.worded(error))[:300]
        events.emit("reconcile_failed", call_id=call.pk, rule=call.rule, reason=why)
        if isinstance(error, SoftTimeLimitExceeded):  # the task's, which has to end
            raise
        return False


def _ask_hook(call: CallQueue) -> Any:
    hook = _hooks()[call.rule]
    hook = import_string(hook) if isinstance(hook, str) else hook
    if database.in_any_transaction():  # a test's, of which no other thread sees anything
        return hook(call)
    return aside.within(PATIENCE, f"reconcile of {call.rule}", lambda: hook(call))


def _apply_answer(using: str, call: CallQueue, answer: Any) -> bool:
    """Make the call what the hook said; False: nothing changes. TypeError: that means no state."""
    if answer is None:
        status, why, changed = states.UNKNOWN, "the hook cannot tell yet", False
    elif isinstance(answer, Succeeded):
        status, why = states.DONE, "the provider has it"
        changed = transitions.end_unknown(using, call, status, "")
    elif isinstance(answer, GiveUp):
        status, why = states.FAILED, _without_secrets(call, answer.why)
        changed = transitions.end_unknown(using, call, status, why)
    elif isinstance(answer, RetryLater):
        status, why, after = states.NEW, _without_secrets(call, answer.why), answer.after or 0.0
        seconds = after.total_seconds() if isinstance(after, timedelta) else after
        changed = transitions.requeue_unknown(using, call, seconds)
    else:
        wanted = "it may return Succeeded, RetryLater, GiveUp or None"
        raise TypeError(f"the hook returned {type(answer).__name__}; {wanted}")
    if changed or answer is None:
        name = conf.NAMES_OF_STATUS[status]
        events.emit("call_reconciled", call_id=call.pk, rule=call.rule, status=name, reason=why)
    return changed


def _without_secrets(call: CallQueue, text: str) -> str:
    data: Any = call.call_data if isinstance(call.call_data, dict) else {}
    params, method = data.get("params"), method_of(call.call_data, call.method)
    payload = payload_strings(method, params)
    return clean_of_secrets(
        text, disclosure.secret_values_of(method, params, rule=call.rule, key=call.key), payload
    )
