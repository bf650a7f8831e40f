"""Announces that calls have ended: the log lines, the signals, and the callback tasks they name.

A Celery task announces, so the project's own code keeps no loop from going round. Ends are owed
(`callback_pending`) from the statement that ends the call until they are announced, so what is lost
in between comes late rather than never. A task claims what it announces, and holds no lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery import current_app
from django.db.models import F, Q

from callqueue import aside, broker, conf, database, events, states, tables
from callqueue.handlers import method_of
from callqueue.ledger.transaction import untimed_transaction
from callqueue.texts import in_one_line

if TYPE_CHECKING:
    from callqueue.managers import CallQueueQuerySet

# how long a worker has to announce an end, before a dispenser asks again; and how long a callback
# that was refused waits for its next try
LEFT = timedelta(seconds=10)
CLAIMED = timedelta(seconds=60)  # for which no other task announces what one has claimed
SENDING = 20.0  # seconds for which a task announces what it has claimed; receivers have as many
# seconds after which a callback that runs in this process is left to itself
RUNNING = 5.0
MOST = 500  # calls that are claimed at once
FEW = 20  # and where their callbacks run in this process
READ = 50  # calls whose data is read at once: it may be large
MOST_OWED = 5000  # calls that a dispenser asks for at once
ASKED = timedelta(minutes=10)  # after which at the latest an end that is owed is asked for again
AHEAD = 2 * ASKED  # an instant that is further ahead was written before the clock was set back
# ends of a task's call of which its run has not told the result backend, or perhaps has not
UNTOLD = (states.FAILED, states.CANCELLED, states.EXPIRED, states.UNKNOWN)
_LOGGED = {states.FAILED: "call_failed", states.UNKNOWN: "call_unknown"}

TellResults = Callable[[str, Sequence[int]], object]  # see integrations.queued_result.write_ends


def log_and_announce(using: str, call_ids: Sequence[int], status: int) -> None:
    """Log these ends, if FAILED or UNKNOWN; have workers announce those with callback_pending."""
    rows = tables.calls(using).filter(pk__in=call_ids, status=status)
    if status not in _LOGGED:
        rows = rows.filter(callback_pending=True)
    told = rows.values_list("pk", "rule", "error_message", "callback_pending")
    ended = database.persist(using, lambda: list(told.all()), during="callback")
    for pk, rule, why, _ in ended:
        log_end(pk, status, rule, why)
    ask_to_announce(using, [(pk, rule) for pk, rule, _, is_owed in ended if is_owed])


def log_end(pk: int, status: int, rule: str, why: str) -> None:
    if status in _LOGGED:
        name = conf.NAMES_OF_STATUS[status]
        events.log(_LOGGED[status], call_id=pk, status=name, rule=rule, reason=why)


def ask_to_announce(using: str, ended: Iterable[tuple[int, str]]) -> None:
    """Ask the workers of each rule's queue to announce these ends, (call, rule) each."""
    config, by_queue = conf.current(), dict[str, list[int]]()
    for pk, rule in ended:
        by_queue.setdefault(config.queue_of(rule), []).append(pk)
    for queue, pks in by_queue.items():
        most = FEW if broker.is_bypassed() else MOST
        for at in range(0, len(pks), most):
            broker.send_beside(broker.ANNOUNCE, (pks[at : at + most], using), queue=queue)


def ask_for_owed_ends(using: str) -> None:
    """Have those ends announced that nobody has: a message was lost, or the broker away. Asks again
    after as long as an end has been owed, ASKED at most: a queue with no worker delays no other.
    """
    ask_to_announce(using, untimed_transaction(using, lambda: _take_ends_to_ask_for(using)))


def announce_owed_ends(using: str, call_ids: Sequence[int], tell_results: TellResults) -> int:
    """Announce what these calls owe, for SENDING or so; the count of those that owe nothing more.
    Signals go with the first try, for as long again at most. A refused callback is tried again
    LEFT later, after all that were not tried yet.
    """
    late = time.monotonic() + SENDING
    owed = _owed_calls(using).filter(pk__in=call_ids)
    due, claim = database.persist(using, lambda: _claim_owed(using, owed), during="callback")
    if not due:
        return 0
    sent, refused = _send_owed(using, due, late, tell_results)
    tried = {*sent, *refused}
    _notify_receivers([one for one in due if one.pk in tried and not one.callback_heard])
    mine = [one.pk for one in due]
    database.persist(
        using, lambda: _conclude_claim(using, mine, claim, sent, refused), during="callback"
    )
    return len(sent)


def owes_result(method: str, status: int) -> bool:
    return method == "celery_task" and tells_results(status)


def tells_results(status: int) -> bool:
    """Whether a result backend is to be told of tasks that ended in `status`."""
    return status in UNTOLD and bool(current_app.conf.result_backend)


def has_receivers(status: int) -> bool:
    return bool(
        events.call_finished.receivers
        or (status == states.FAILED and events.call_failed.receivers)
        or (status == states.UNKNOWN and events.call_unknown.receivers)
    )


def _signals_of(status: int) -> list[Any]:
    own = {states.FAILED: events.call_failed, states.UNKNOWN: events.call_unknown}
    return [own[status], events.call_finished] if status in own else [events.call_finished]


def _notify_receivers(calls: Sequence[Any]) -> None:
    """Send these ends' signals: here in a transaction or eagerly; else aside, SENDING at most."""
    told = [(signal, call) for call in calls for signal in _signals_of(call.status)]
    heard = [(signal, call) for signal, call in told if signal.receivers]
    is_here = current_app.conf.task_always_eager or database.in_any_transaction()
    if heard and is_here:
        _send_signals(heard)
    elif heard:
        try:
            aside.within(SENDING, "receivers", lambda: _send_signals(heard))
        except Exception as error:  # or no thread can be had
            events.emit("listener_failed", receiver="announce", error=type(error).__name__)


def _send_signals(told: Sequence[tuple[Any, Any]]) -> None:
    for signal, call in told:
        of_own = {"rule": call.rule, "reason": call.error_message}
        facts = {} if signal is events.call_finished else of_own
        events.send_signal(
            signal, call_id=call.pk, status=conf.NAMES_OF_STATUS[call.status], **facts
        )


def _owed_calls(using: str) -> CallQueueQuerySet:
    return tables.calls(using).final().filter(callback_pending=True)


def _take_ends_to_ask_for(using: str) -> list[tuple[int, str]]:
    """(call, rule) of ends to ask for now, each locked and put off until it is asked for again."""
    now = database.clock(using)
    free = [_is_free(name, now) for name in ("callback_at", "callback_ask_at")]
    owed = _owed_calls(using).filter(*free, _is_past("finished_at_dt", now - LEFT)).order_by("pk")
    rows = database.locked(owed).values_list("pk", "rule", "finished_at_dt")[:MOST_OWED]
    found = [(pk, rule, ended or now) for pk, rule, ended in rows]
    again = [
        {"pk": pk, "callback_ask_at": now + min(ASKED, abs(now - ended))} for pk, _, ended in found
    ]
    database.update_each(tables.CallQueue, using, again)
    return [(pk, rule) for pk, rule, _ in found]


def _is_free(column: str, instant: datetime) -> Q:
    return Q(**{f"{column}__isnull": True}) | _is_past(column, instant)


def _is_past(column: str, instant: datetime) -> Q:
    return Q(**{f"{column}__lt": instant}) | Q(**{f"{column}__gt": instant + AHEAD})


def _claim_owed(using: str, owed: CallQueueQuerySet) -> tuple[list[Any], datetime]:
    """Claim MOST at most that nobody else announces, untried first; (they, when the claim ends)."""
    with database.writing(using):
        now = database.clock(using)
        in_turn = owed.filter(_is_free("callback_at", now)).only(
            "pk", "rule", "callback", "status", "error_message", "callback_heard"
        )
        tried_last = F("callback_at").asc(nulls_first=True)
        due = list(database.locked(in_turn.order_by(tried_last, "pk"))[:MOST])
        mine = tables.calls(using).filter(pk__in=[one.pk for one in due])
        claim = now + CLAIMED
        mine.update(callback_at=claim)
    return due, claim


def _conclude_claim(
    using: str, mine: Sequence[int], claim: datetime, sent: Sequence[int], refused: Sequence[int]
) -> None:
    """Write which were sent, refused or left. One that has gone on since owes something else."""
    claimed = _owed_calls(using).filter(callback_at=claim)
    claimed.filter(pk__in=sent).update(callback_pending=False)
    if refused:
        later = database.clock(using) + LEFT
        tried = {"callback_at": later, "callback_heard": True, "callback_ask_at": None}
        claimed.filter(pk__in=refused).update(**tried)
    if len(sent) + len(refused) < len(mine):
        claimed.filter(pk__in=mine).update(callback_at=None, callback_ask_at=None)


def _send_owed(
    using: str, due: Sequence[Any], late: float, tell_results: TellResults
) -> tuple[list[int], list[int]]:
    """Send what these calls owe: (those of which all is sent, those refused). Where a callback is
    refused, so are the later calls that name it. Calls left at `late` (monotonic) are in neither.
    """
    ended = [one.pk for one in due if tells_results(one.status)]
    untold = database.persist(using, lambda: _celery_tasks_among(using, ended), during="callback")
    left = set[int]() if _tell_backend(using, untold, tell_results) else set(untold)
    sent: list[int] = []
    bad: set[str | None] = set()
    for call in due:
        if call.pk in left or call.callback in bad:
            left.add(call.pk)
        elif time.monotonic() > late:
            continue
        elif call.callback and not _send_callback(
            call.callback, (call.pk, conf.NAMES_OF_STATUS[call.status])
        ):
            bad.add(call.callback)
            left.add(call.pk)
        else:
            sent.append(call.pk)
    return sent, sorted(left)


def _celery_tasks_among(using: str, call_ids: Sequence[int]) -> list[int]:
    """Those of these calls that are Celery tasks, by their data, which is read."""
    found: list[int] = []
    for at in range(0, len(call_ids), READ):
        rows = tables.calls(using).filter(pk__in=call_ids[at : at + READ])
        named = rows.exclude(method=states.PERMIT).values_list("pk", "method", "call_data")
        found += [pk for pk, column, data in named if method_of(data, column) == "celery_task"]
    return found


def _tell_backend(using: str, call_ids: Sequence[int], tell_results: TellResults) -> bool:
    try:
        if call_ids:
            tell_results(using, call_ids)
    except Exception as error:
        events.emit("listener_failed", receiver="result_backend", error=type(error).__name__)
        return False
    return True


def _send_callback(task: str, args: tuple[Any, ...]) -> bool:
    """Send a callback, or run it here. False: an event says why that failed; it is tried again."""
    if broker.is_bypassed():
        try:
            broker.run_by_name(current_app, task, args, seconds=RUNNING)
        except Exception as error:
            events.emit("listener_failed", receiver=task, error=in_one_line(error))
            return False
        return True
    try:
        broker.send_by_name(current_app, task, args)
    except BaseException as error:
        is_own = broker.sends_itself(current_app, task)
        why = type(error).__name__ if is_own else broker.why_away(current_app, error)
        events.emit("broker_away", during="callback", error=why)
        return False
    return True
