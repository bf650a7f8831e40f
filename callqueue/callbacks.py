"""Tells the application that calls have ended: the signals, and the callback tasks it named.

A callback is owed (`callback_pending`) from the statement that ends the call until its message is
sent, so a crash in between makes it come twice rather than never. Signals go once, in the process
that ended the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from celery import current_app

from callqueue import broker, conf, database, events, states, tables

if TYPE_CHECKING:
    from callqueue.managers import CallQueueQuerySet

# what the process that ended a call has to send its callback, before a dispenser does
LEFT = timedelta(seconds=10)
MOST = 500  # callbacks that are sent at once
TELL_RESULTS = "callqueue.tell_results"
# how a task's call ends without its run's telling the result backend, or perhaps without
UNTOLD = (states.FAILED, states.CANCELLED, states.EXPIRED, states.UNKNOWN)


def announce(using: str, call_ids: Sequence[int], status: int) -> None:
    """Signals and callbacks for those of these calls that have just ended in `status`."""
    rows = tables.calls(using).filter(pk__in=call_ids, status=status)
    told = rows.values_list("pk", "rule", "error_message", "callback_pending")
    owed = []
    for pk, rule, why, is_owed in database.persist(
        using, lambda: list(told.all()), during="callback"
    ):
        _tell(pk, status, rule, why)
        if is_owed:
            owed.append(pk)
    if owed:
        database.persist(using, lambda: deliver(using, owed), during="callback")


def deliver(using: str, call_ids: Sequence[int]) -> int:
    """Send the callbacks that are owed of these calls; the count. A broker away: later."""
    return _send(using, _owed(using).filter(pk__in=call_ids))


def deliver_owed(using: str) -> int:
    """Send the callbacks of calls whose own process has not sent them, since it died or the broker
    was away; the count of them.
    """
    return _send(using, _owed(using).filter(finished_at_dt__lt=database.clock(using) - LEFT))


def owes_result(method: str, status: int) -> bool:
    """Whether a result backend is to be told that a call of this method ended in `status`."""
    return method == "celery_task" and tells_results(status)


def tells_results(status: int) -> bool:
    """Whether a result backend is to be told of tasks that ended in `status`."""
    return status in UNTOLD and bool(current_app.conf.result_backend)


def has_listeners(status: int) -> bool:
    """Whether anyone wants to be told of ends in `status`, log lines included."""
    return status in (states.FAILED, states.UNKNOWN) or bool(events.call_finished.receivers)


def _tell(pk: int, status: int, rule: str, why: str) -> None:
    """The log line of a call that went wrong, and the signal."""
    name = conf.NAMES_OF_STATUS[status]
    if status in (states.FAILED, states.UNKNOWN):
        told = "call_failed" if status == states.FAILED else "call_unknown"
        events.emit(told, call_id=pk, status=name, rule=rule, reason=why)
    events.notify(events.call_finished, call_id=pk, status=name)


def _owed(using: str) -> CallQueueQuerySet:
    return tables.calls(using).final().filter(callback_pending=True)


def _send(using: str, owed: CallQueueQuerySet) -> int:
    """Send callbacks, whose rows are locked until it is written that they are sent: what others are
    sending is passed over.
    """
    # Eager tasks run within send, and a transaction of ours is no place for them.
    is_eager = current_app.conf.task_always_eager
    with nullcontext() if is_eager else database.locking(using):
        rows = owed if is_eager else database.locked(owed)
        due = rows.order_by("pk").values_list("pk", "callback", "status", "method")[:MOST]
        sent = _sent(using, list(due))
        _owed(using).filter(pk__in=sent).update(callback_pending=False)
    return len(sent)


def _sent(using: str, due: Sequence[tuple[int, str | None, int, str]]) -> list[int]:
    """Send these callbacks, each (call, task, status, method), until the broker refuses one; the
    calls of those that were sent. A task that names a broker of its own keeps none of the others
    back. What a result backend is to be told goes first, in one message.
    """
    sent: list[int] = []
    untold = [pk for pk, _, status, method in due if owes_result(method, status)]
    if untold and not _is_sent(TELL_RESULTS, (untold, using)):
        return sent
    for pk, task, status, _ in due:
        if task and not _is_sent(task, (pk, conf.NAMES_OF_STATUS[status])):
            if broker.is_its_own(current_app, task):
                continue
            break
        sent.append(pk)
    return sent


def _is_sent(task: str, args: tuple[Any, ...]) -> bool:
    """Whether the broker has taken the message."""
    try:
        broker.send_by_name(current_app, task, args)
    except BaseException as error:
        is_own = broker.is_its_own(current_app, task)
        why = type(error).__name__ if is_own else broker.why_away(current_app, error)
        events.emit("broker_away", during="callback", error=why)
        return False
    return True
