"""Reconciles UNKNOWN calls: asks a rule's `reconcile` hook what became of a call that was sent and
never answered.

In: calls that are UNKNOWN, whose rule has a hook. Out: what the hook says, as the call's state:
done, failed, or to be made again. The hook may use the network, so it is asked in a worker and
never inside a transaction; it is asked again after a minute, then less and less often, and no more
than MOST times. One worker at a time asks of a rule, so a hook that hangs keeps one slot and no
second one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.exceptions import SoftTimeLimitExceeded
from django.db import DatabaseError, InterfaceError
from django.db.models import F, Q
from django.utils.module_loading import import_string

from callqueue import clocks, conf, database, events, states, tables, texts, transitions
from callqueue.database import EPOCH
from callqueue.exceptions import IllegalTransition, InvalidCall
from callqueue.ledger import ledger_time, rule_rows
from callqueue.ledger.ledger_time import LedgerNow
from callqueue.ledger.transaction import Locked, transaction
from callqueue.outcome import GiveUp, RetryLater, Succeeded
from callqueue.security.withholding import clean, payload_of
from callqueue.sending import disclosure

if TYPE_CHECKING:
    from callqueue.models import CallQueue

# seconds until a hook that did not know is asked again of the same call; doubled each time
FIRST = 60.0
LONGEST = 6 * 3600.0
MOST = 10  # times that a hook is asked of a call
BATCH = 20  # calls of a rule that one round asks of
ROUND = 5.0  # seconds after which a round asks of no other call
TURN = timedelta(minutes=1)  # for which a rule is one worker's to ask of, unless it says so again
RENEWAL = 20.0  # seconds after which it does


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
    """Ask of the calls whose time it is, at most so many of each rule, for ROUND seconds; the count
    of those that are UNKNOWN no more. Not in a transaction.
    """
    settled, end = 0, clocks.monotonic() + ROUND
    for rule in database.persist(using, partial(_free_rules, using), during="reconcile"):
        if clocks.monotonic() < end:
            with _turn(using, rule) as is_ours:
                settled += _ask_of(using, rule, most, end) if is_ours else 0
    return settled


def queues_wanted(using: str) -> list[str]:
    """A queue for each rule that has calls to be asked of, and that nobody asks of now: its workers
    can do it. No statement where no rule has a hook.
    """
    return sorted({conf.current().queue_of(rule) for rule in _free_rules(using)})


def _free_rules(using: str) -> list[str]:
    """The rules that have calls to be asked of, and that nobody asks of now: first those that were
    asked of longest ago.
    """
    if not _hooks():
        return []
    due = set(_due(using).order_by().values_list("rule", flat=True).distinct())
    rows = tables.rule_states(using).filter(rule__in=due, reconciling_until__isnull=False)
    until: dict[str, Any] = dict(rows.values_list("rule", "reconciling_until"))
    now = ledger_time.now(using)
    free = [rule for rule in due if until.get(rule, EPOCH) <= now]
    return sorted(free, key=lambda rule: (until.get(rule, EPOCH), rule))


@contextmanager
def _turn(using: str, rule: str) -> Iterator[bool]:
    """Whether this worker asks of the rule: then nobody else does until the block ends, however
    long that takes, or until TURN after its process has.
    """
    mine = database.persist(using, partial(_take_turn, using, rule), during="reconcile")
    if mine is None:
        yield False
        return
    ended, latest = threading.Event(), [mine]
    keeper = threading.Thread(
        target=_keep_turn, args=(using, rule, latest, ended), name="callqueue-turn", daemon=True
    )
    keeper.start()
    try:
        yield True
    finally:
        ended.set()
        with suppress(DatabaseError, InterfaceError):  # then it lapses
            _turns(using, rule).filter(reconciling_until=latest[0]).update(
                reconciling_until=ledger_time.now(using)
            )


def _turns(using: str, rule: str) -> Any:
    return tables.rule_states(using).filter(rule=rule)


def _take_turn(using: str, rule: str) -> datetime | None:
    """Until when the rule is this worker's; None where it is another's."""
    rule_rows.ensure(using, {rule})
    now = ledger_time.now(using)
    free = Q(reconciling_until__isnull=True) | Q(reconciling_until__lte=now)
    return (
        now + TURN
        if _turns(using, rule).filter(free).update(reconciling_until=now + TURN)
        else None
    )


def _keep_turn(using: str, rule: str, latest: list[datetime], ended: threading.Event) -> None:
    """Say again and again that the rule is this worker's: what a thread of its own does, on a
    connection of its own, while a hook takes its time.
    """
    while not ended.wait(RENEWAL):
        with suppress(DatabaseError, InterfaceError):
            until = ledger_time.now(using) + TURN
            if (
                _turns(using, rule)
                .filter(reconciling_until=latest[0])
                .update(reconciling_until=until)
            ):
                latest[0] = until
        database.close_all()


def _ask_of(using: str, rule: str, most: int, end: float) -> int:
    """Ask of the rule's calls whose time it is, until it is late; how many are UNKNOWN no more."""
    due = _due(using).filter(rule=rule).order_by(F("reconcile_at").asc(nulls_first=True), "pk")
    settled = 0
    for call in database.persist(using, lambda: list(due[:most]), during="reconcile"):
        if clocks.monotonic() < end and database.persist(
            using, partial(_claim, using, call), during="reconcile"
        ):
            settled += _ask(using, call)
    return settled


def _hooks() -> dict[str, Any]:
    return {
        name: rule.reconcile
        for name, rule in conf.current().rules.items()
        if rule.reconcile is not None
    }


def _due(using: str) -> Any:
    """UNKNOWN calls that a hook may be asked of now."""
    unknown = tables.calls(using).unknown().exclude(method=states.PERMIT)  # whose call no hook sees
    rows = unknown.filter(rule__in=list(_hooks()), reconcile_count__lt=MOST)
    return rows.filter(Q(reconcile_at__isnull=True) | Q(reconcile_at__lte=LedgerNow()))


def _claim(using: str, call: CallQueue) -> bool:
    """Whether this worker asks: one update sets the next time before the hook is asked."""
    wait = timedelta(seconds=min(LONGEST, FIRST * 2**call.reconcile_count))
    mine = (
        type(call)
        .objects.using(using)
        .unknown()
        .filter(pk=call.pk, reconcile_count=call.reconcile_count)
    )

    def work(locked: Locked) -> bool:
        asked = {"reconcile_count": call.reconcile_count + 1, "reconcile_at": locked.now + wait}
        return bool(locked.calls and mine.update(**asked))

    return transaction(using, work, calls=[call.pk])


def _ask(using: str, call: CallQueue) -> bool:
    try:
        answer = _imported(_hooks()[call.rule])(call)
        return database.persist(using, lambda: _believe(using, call, answer), during="reconcile")
    except BaseException as error:
        why = _clean(call, texts.worded(error))[:300]
        events.emit("reconcile_failed", call_id=call.pk, rule=call.rule, reason=why)
        if isinstance(error, SoftTimeLimitExceeded):  # the task's, which has to end
            raise
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
    """What a hook said, without the call's secrets and its own strings."""
    data: Any = call.call_data if isinstance(call.call_data, dict) else {}
    params, method = data.get("params"), str(data.get("method"))
    payload = payload_of(method, params)
    return clean(text, disclosure.values_of(method, params, rule=call.rule, key=call.key), payload)


def _seconds(after: float | timedelta | None) -> float:
    return after.total_seconds() if isinstance(after, timedelta) else after or 0.0


def _imported(hook: Any) -> Any:
    return import_string(hook) if isinstance(hook, str) else hook
