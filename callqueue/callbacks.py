"""Tells the application that calls have ended: the signals, and the callback tasks it named.

A callback is owed (`callback_pending`) from the statement that ends the call until its message is
sent, so a crash in between makes it come twice rather than never. Signals go once, in the process
that ended the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from callqueue import broker, conf, database, events, states, tables

LEFT = timedelta(
    seconds=10
)  # what the process that ended a call has to send its callback, before a dispenser does
MOST = 500  # callbacks that are sent at once


def announce(using: str, call_ids: Sequence[int], status: int) -> None:
    """Signals and callbacks for calls that have just ended in `status`; calls that did not are
    passed over.
    """
    rows = tables.calls(using).filter(pk__in=call_ids, status=status)
    told = rows.values_list("pk", "rule", "error_message", "callback_pending")
    owed = []
    for pk, rule, error, pending in database.persist(
        using, lambda: list(told.all()), during="callback"
    ):
        name = conf.NAMES_OF_STATUS[status]
        if status == states.FAILED:
            events.tell("call_failed", call_id=pk, status=name, rule=rule, reason=error)
        elif status == states.UNKNOWN:
            events.tell("call_unknown", call_id=pk, status=name, rule=rule, reason=error)
        events.notify(events.call_finished, call_id=pk, status=name)
        if pending:
            owed.append(pk)
    if owed:
        database.persist(using, lambda: deliver(using, owed), during="callback")


def deliver(using: str, call_ids: Sequence[int]) -> int:
    """Send the callbacks that are owed of these calls; the count of them. A broker that is away:
    later.
    """
    return _send(using, _owed(using).filter(pk__in=call_ids))


def deliver_owed(using: str) -> int:
    """The same for any calls whose own process has not sent them: it died, or the broker was
    away.
    """
    return _send(using, _owed(using).filter(finished_at_dt__lt=database.clock(using) - LEFT))


def _owed(using: str) -> Any:
    return tables.calls(using).filter(callback_pending=True, status__in=states.FINAL)


def _send(using: str, owed: Any) -> int:
    """Send callbacks, whose rows are locked until it is written that they are sent: what others are
    sending is passed over.
    """
    from celery import current_app

    is_eager = (
        current_app.conf.task_always_eager
    )  # the tasks run within send, and a transaction of ours is no place for them
    with nullcontext() if is_eager else database.locking(using):
        rows = owed if is_eager else database.locked(owed)
        sent = []
        for pk, callback, status in rows.order_by("pk").values_list("pk", "callback", "status")[
            :MOST
        ]:
            try:
                broker.send_by_name(current_app, str(callback), (pk, conf.NAMES_OF_STATUS[status]))
            except BaseException as error:
                events.tell("broker_away", during="callback", error=type(error).__name__)
                if broker.is_its_own(current_app, str(callback)):
                    continue
                break
            sent.append(pk)
        _owed(using).filter(pk__in=sent).update(callback_pending=False)
    return len(sent)


def has_listeners(status: int) -> bool:
    """Whether anyone wants to be told of calls that end in `status`, log lines for failures
    included.
    """
    return status in (states.FAILED, states.UNKNOWN) or bool(events.call_finished.receivers)
