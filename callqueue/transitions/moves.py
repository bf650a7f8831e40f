"""The moves of calls that no attempt's end makes: dispatch, requeue, cancel, void, expire, fail,
reconcile.

Each but the first, whose calls a pass has locked, locks the calls' rows first, in the order that
`row_locks` gives for all, judges them once they are locked, and changes those that are in a state
which `states.Move` names for the verb. So of two moves at once one wins, and the other changes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db import IntegrityError, models, transaction
from django.db.models import Case, F, Q, Value, When

from callqueue import callbacks, database, events, states, tables
from callqueue.ledger import row_locks
from callqueue.states import Move
from callqueue.transitions.job import LONGEST_MESSAGE

if TYPE_CHECKING:
    from callqueue.models import CallQueue


def dispatch(using: str, by_queue: Mapping[str, Sequence[int]], now: int) -> None:
    """Release calls, by the queue that each goes by, at an instant in microseconds. To be called in
    the transaction that charges them, and has them locked in a state that may be released.

    A release may be lost in a crash of the database: its call then waits as before, and its
    message finds nothing to begin. What was begun is not lost with it, since begin waits for the
    disk, and for all that was committed before.
    """
    lazily = database.without_waiting_for_disk(using)
    table = tables.name(using, "CallQueue")
    at = database.as_parameter(using, database.from_us(now))
    for queue, ids in by_queue.items():
        database.run(
            using,
            f"UPDATE {table} SET status = {states.DISPATCHED}, queue = %s, dispatched_at_dt = %s, "
            f"last_attempt = last_attempt + 1, ready = FALSE "
            f"WHERE id IN ({database.listed(ids)}){lazily}",
            [queue, at],
        )


def requeue(using: str, pks: Sequence[int], move: Move = Move.REQUEUE) -> int:
    """Send these calls once more, those that the move may start from; the count of them.

    A call is left out while another unfinished call carries its unique key.
    """
    count = database.again_after_deadlock(using, lambda: _requeued(using, pks, move))
    if count:
        events.emit("call_requeued", calls=count, first=pks[0])
    return count


def cancel(using: str, pks: Sequence[int]) -> int:
    """End these calls, those that no worker has begun; the count of them. Announced on commit."""
    gone = database.again_after_deadlock(using, lambda: _cancelled(using, pks))
    if gone:
        events.emit("call_cancelled", calls=len(gone), first=gone[0])
        transaction.on_commit(
            lambda: callbacks.announce(using, gone, states.CANCELLED), using=using
        )
    return len(gone)


def undo(using: str, attempt_ids: Sequence[int]) -> int:
    """Void attempts that no worker has begun, and say so; the count of calls."""
    count = void(using, attempt_ids)
    if count:
        events.emit("attempts_voided", calls=count)
    return count


def undo_released(using: str, rules: Sequence[str], since: datetime) -> int:
    """Void what was released of these rules since then and not begun, and say so; the count."""
    released = tables.attempts(using).unbegun().filter(rule__in=rules, released_at__gte=since)
    ids = list(released.values_list("pk", flat=True))
    return undo(using, ids) if ids else 0


def void(using: str, attempt_ids: Iterable[int]) -> int:
    """Void attempts that no worker has begun, and let their calls wait again; the count of calls.
    What somebody has locked is passed over.
    """
    with database.writing(using):
        pairs = row_locks.free_pairs(using, attempt_ids, begun=False)
        _void_locked(using, [pair.attempt.pk for pair in pairs])
        calls = tables.calls(using).filter(pk__in=[pair.call.pk for pair in pairs if pair.call])
        untried = When(failed_count=0, throttled_count=0, then=Value(states.NEW))
        return int(calls.update(status=Case(untried, default=Value(states.ERROR)), ready=True))


def void_permits(using: str, rule: str, owner: str) -> int:
    """Void the permits that this waiter was granted and has not begun its call under; the count."""
    with database.writing(using):
        rows = tables.attempts(using).open().filter(rule=rule, call__isnull=True, worker=owner)
        ids = list(database.locked(rows, wait=True).values_list("pk", flat=True))
        _void_locked(using, ids)
    return len(ids)


def end_overdue(using: str, overdue: Any, by: str, move: Move, **columns: Any) -> list[int]:
    """End these calls by a move that has one end, and announce them; the primary keys of those that
    nobody else had locked.

    `by`: the column that makes them overdue, which must not have changed meanwhile.
    """
    seen = dict(overdue.values_list("pk", by))
    if not seen:
        return []
    (end,) = move.targets
    calls = tables.calls(using)
    with database.writing(using):
        rows = database.locked(calls.filter(pk__in=list(seen)).order_by("pk"))
        free = [
            pk
            for pk, status, value in rows.values_list("pk", "status", by)
            if status in move.sources and value == seen[pk]
        ]
        calls.filter(pk__in=free).update(**ended(end), **columns)
    callbacks.announce(using, free, end)
    return free


def fail(using: str, reasons: Mapping[int, str]) -> None:
    """End waiting calls that can never be released, each with its reason. To be called in a
    transaction that has them locked; announces nothing.
    """
    waiting = tables.calls(using).filter(status__in=Move.FAIL.sources)
    for pk, why in reasons.items():
        waiting.filter(pk=pk).update(**ended(states.FAILED), error_message=why)


def settle(using: str, call: CallQueue, status: int, why: str) -> bool:
    """End an UNKNOWN call as the rule's hook said, DONE or FAILED, and announce it; False where it
    has gone on since it was read.
    """
    columns = {**ended(status), "error_message": why[:LONGEST_MESSAGE]}
    changed = bool(_unsettled(using, call).update(**columns))
    if changed:
        callbacks.announce(using, [call.pk], status)
    return changed


def send_again(using: str, call: CallQueue, after: float) -> bool:
    """Requeue an UNKNOWN call since the rule's hook said so, to be due after so many seconds; False
    where it has gone on since it was read.

    Unlike anybody else's requeue this one leaves the count of the hook's questions as it is: a hook
    cannot go round for ever.
    """
    calls = tables.calls(using).filter(pk=call.pk)
    with database.writing(using):
        questions = calls.values_list("reconcile_count", flat=True).first()
        if not _unsettled(using, call).exists() or not requeue(using, [call.pk], Move.RECONCILE):
            return False
        calls.update(reconcile_count=questions)
        if after:
            due = database.clock(using) + timedelta(seconds=after)
            calls.filter(status=states.NEW).update(due_at_dt=due, ready=False)
    return True


def ended(status: int) -> dict[str, Any]:
    """The columns of a call that every final state sets."""
    has_none = Q(callback__isnull=True) | Q(callback="")
    if callbacks.tells_results(status):
        has_none &= ~Q(method="celery_task")
    return {
        "status": status,
        "finished_at_dt": database.ClockNow(),
        "active_key": None,
        "ready": False,
        "callback_pending": Case(When(has_none, then=Value(False)), default=Value(True)),
        "callback_at": None,
    }


def _requeued(using: str, pks: Sequence[int], move: Move) -> int:
    """Make these calls NEW, those that the move may start from; the count of them."""
    calls = tables.calls(using)
    with database.writing(using):
        found = row_locks.calls_to_change(using, pks, "unique_key", "status")
        keys = [(pk, unique_key) for pk, unique_key, status in found if status in move.sources]
        keyless = [pk for pk, unique_key in keys if unique_key is None]
        count = calls.filter(pk__in=keyless).update(**_as_new())
        # Keys are waited for as rows are: in an order that is the same for all.
        for unique_key, pk in sorted((key, pk) for pk, key in keys if key is not None):
            with suppress(IntegrityError), transaction.atomic(using=using):
                # unless another unfinished call carries the key
                count += calls.filter(pk=pk).update(active_key=unique_key, **_as_new())
    return count


def _as_new() -> dict[str, Any]:
    """The columns of a call that is sent once more."""
    now = database.ClockNow()
    return {
        "status": states.NEW,
        "ready": True,
        "due_at_dt": now,
        "expires_at_dt": Case(
            When(expires_at_dt__lte=now, then=Value(None)),
            default=F("expires_at_dt"),
            output_field=models.DateTimeField(),
        ),
        "finished_at_dt": None,
        "failed_count": 0,
        "throttled_count": 0,
        "callback_pending": False,
        "callback_at": None,
        "reconcile_at": None,
        "reconcile_count": 0,
    }


def _cancelled(using: str, pks: Sequence[int]) -> list[int]:
    """Make these calls CANCELLED, those that no worker has begun; their primary keys, sorted."""
    with database.writing(using):
        found = row_locks.calls_to_change(using, pks, "status", "last_attempt")
        last = {pk: number for pk, status, number in found if status == states.DISPATCHED}
        unbegun = row_locks.unbegun_of(using, last) if last else []
        _void_locked(using, [pk for pk, _, _ in unbegun])
        gone = [pk for pk, status, _ in found if status in states.CANCELLABLE]
        gone += [call for _, call, number in unbegun if last[call] == number]
        tables.calls(using).filter(pk__in=gone).update(**ended(states.CANCELLED))
    return sorted(gone)


def _void_locked(using: str, ids: Sequence[int]) -> None:
    """Void attempts that are locked, and of which nothing was sent."""
    tables.attempts(using).filter(pk__in=ids).update(
        finished_at=database.ClockNow(),
        outcome=states.VOIDED,
        charged=F("cost"),
        correction_pending=True,
    )


def _unsettled(using: str, call: CallQueue) -> Any:
    """The row of an UNKNOWN call, where it has not gone on since it was read."""
    unknown = tables.calls(using).filter(status__in=Move.RECONCILE.sources)
    return unknown.filter(pk=call.pk, last_attempt=call.last_attempt)
