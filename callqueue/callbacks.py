"""Tells the application that calls have ended: the signals, and the callback tasks it named.

A callback is owed (`callback_pending`) from the statement that ends the call until its message is
sent, so a crash in between makes it come twice rather than never. Who sends it claims it first, and
sends it outside of any transaction: others let it be meanwhile. Signals go once, in the process
that ended the call. In a loop that must go round, all this is left to a thread beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery import current_app
from django.db.models import Q

from callqueue import broker, conf, database, events, states, tables

if TYPE_CHECKING:
    from callqueue.managers import CallQueueQuerySet

# what the process that ended a call has to send its callback, before a dispenser does; and how long
# one that could not be sent is let be
LEFT = timedelta(seconds=10)
CLAIMED = timedelta(seconds=60)  # for which what somebody is sending is let be
SENDING = 20.0  # seconds after which no more of what is claimed is sent: well before the claim ends
MOST = 500  # callbacks that are claimed at once
TELL_RESULTS = "callqueue.tell_results"
# how a task's call ends without its run's telling the result backend, or perhaps without
UNTOLD = (states.FAILED, states.CANCELLED, states.EXPIRED, states.UNKNOWN)


def announce(using: str, call_ids: Sequence[int], status: int) -> None:
    """Signals and callbacks for those of these calls that have just ended in `status`."""
    events.hand_over(lambda: _announce(using, call_ids, status))


def _announce(using: str, call_ids: Sequence[int], status: int) -> None:
    rows = tables.calls(using).filter(pk__in=call_ids, status=status)
    told = rows.values_list("pk", "rule", "error_message", "callback_pending")
    owed = []
    for pk, rule, why, is_owed in database.persist(
        using, lambda: list(told.all()), during="callback"
    ):
        _tell(pk, status, rule, why)
        if is_owed:
            owed.append(pk)
    for at in range(0, len(owed), MOST):
        deliver(using, owed[at : at + MOST])


def deliver(using: str, call_ids: Sequence[int]) -> int:
    """Send the callbacks that are owed of these calls; the count. What cannot be sent: later."""
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
    """Claim callbacks, send them, and write that they are sent; the count of these. Those that were
    refused have their next turn a little later, after all that were not tried: none of them keeps
    back what is behind it, however long it takes.
    """
    late = time.monotonic() + SENDING
    due, claim = database.persist(using, lambda: _claimed(using, owed), during="callback")
    if not due:
        return 0
    sent, refused = _sent(using, due, late)
    mine = [pk for pk, *_ in due]
    database.persist(using, lambda: _settle(using, mine, claim, sent, refused), during="callback")
    return len(sent)


def _claimed(using: str, owed: CallQueueQuerySet) -> tuple[list[Any], datetime]:
    """Callbacks that nobody else is sending, each (call, task, status, method), and the claim to
    them. Those that were not tried yet come first.
    """
    with database.writing(using):
        now, due = database.clock(using), list[Any]()
        for free in (Q(callback_at__isnull=True), Q(callback_at__lt=now)):
            rows = database.locked(owed.filter(free).order_by("pk"))[: MOST - len(due)]
            due += rows.values_list("pk", "callback", "status", "method")
        mine = tables.calls(using).filter(pk__in=[pk for pk, *_ in due])
        mine.update(callback_at=now + CLAIMED)
    return due, now + CLAIMED


def _settle(
    using: str, mine: Sequence[int], claim: datetime, sent: Sequence[int], refused: Sequence[int]
) -> None:
    """Write which are sent, and let go of the others. A call that has gone on meanwhile has ended
    anew, or will: what it owes then is not what was sent.
    """
    claimed = _owed(using).filter(callback_at=claim)
    claimed.filter(pk__in=sent).update(callback_pending=False)
    if refused:
        claimed.filter(pk__in=refused).update(callback_at=database.clock(using) + LEFT)
    if len(sent) + len(refused) < len(mine):
        claimed.filter(pk__in=mine).update(callback_at=None)


def _sent(
    using: str, due: Sequence[tuple[int, str | None, int, str]], late: float
) -> tuple[list[int], list[int]]:
    """Send these callbacks until it is late (monotonic); the calls of those that were sent, and of
    those that were refused. A task that cannot be sent is not tried again here, and keeps none of
    the others back. What a result backend is to be told goes first, in one message.
    """
    untold = [pk for pk, _, status, method in due if owes_result(method, status)]
    is_told = not untold or _is_sent(TELL_RESULTS, (untold, using))
    left = set() if is_told else set(untold)
    sent: list[int] = []
    bad: set[str | None] = set()
    for pk, task, status, _ in due:
        if pk in left or task in bad:
            left.add(pk)
        elif time.monotonic() > late:
            continue
        elif task and not _is_sent(task, (pk, conf.NAMES_OF_STATUS[status])):
            bad.add(task)
            left.add(pk)
        else:
            sent.append(pk)
    return sent, sorted(left)


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
