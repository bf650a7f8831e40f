"""The page of verbs: every write of a call's or an attempt's state, each a fenced update.

Rows are locked first and judged then, or the update itself names what it starts from: so of two
moves at once one wins, and the other changes nothing. An open attempt is inserted where it is
charged (`dispatch.release_pass`), in the transaction of its release. What a call becomes that
somebody had locked at its record is kept, and written once its row is free: its answer ages at
once, and no worker waits for somebody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db import IntegrityError, models, transaction
from django.db.models import Case, DateTimeField, F, Q, Value, When

from callqueue import callbacks, clocks, database, events, states, tables
from callqueue.clocks import Reading
from callqueue.database import from_us
from callqueue.ledger import ledger_time, ready_calls
from callqueue.ledger.ledger_time import LedgerNow, moved_sql
from callqueue.ledger.transaction import (
    Locked,
    as_ending,
    lock_calls_to_change,
    lock_calls_to_end,
    lock_free_pairs,
    lock_unbegun_of,
    untimed_transaction,
)
from callqueue.states import FINAL, LOST, Move
from callqueue.transitions import ends
from callqueue.transitions.ends import LONGEST_MESSAGE, Job, Result

if TYPE_CHECKING:
    from callqueue.models import CallQueue

MOST_DEFERRED = 1000  # calls that one round of `end_deferred` ends
TOLERANCE = timedelta(microseconds=clocks.TOLERANCE)
Row = Mapping[str, Any]


def release(
    using: str,
    by_queue: Mapping[str, Sequence[int]],
    now: datetime,
    reads: database.Columns | None = None,
    *,
    is_lazy: bool = True,
) -> list[Row]:
    """Release calls, by the queue that each goes by, at an instant of wall time. In the transaction
    that charges them, and has them locked in a state that may be released. A released call is due
    by then: one that is due later was postponed since. If `is_lazy`, as where none is begun with
    its charge, a crash of the database may lose a release: its call waits as before, and its
    message finds nothing to begin. With `reads`, returns these columns of the calls ("c").
    """
    table, found = tables.name(using, "CallQueue"), list[Row]()
    at = database.as_parameter(using, now)
    for queue, ids in by_queue.items():
        which = f"WHERE c.id IN ({database.listed(ids)})"
        update = (
            f"UPDATE {table} AS c SET status = {states.DISPATCHED}, queue = %s, "
            "due_at_dt = CASE WHEN due_at_dt > %s THEN %s ELSE due_at_dt END, "
            f"dispatched_at_dt = %s, last_attempt = last_attempt + 1, ready = FALSE {which}"
        )
        if reads is None:
            lazily = database.lazy_commit_sql(using) if is_lazy else ""
            database.run(using, f"{update}{lazily}", [queue, at, at, at])
        else:
            found += reads.rows_of_update(update, [queue, at, at, at], f"FROM {table} c {which}")
    return found


def begin(using: str, rows: Sequence[Row], worker: str, moved: int) -> set[int]:
    """Take attempts that were read to be free, or this worker's; the ids of those that it has now.
    One that somebody has locked is passed over. Each row has "pk" first.
    `moved`: how far the ledger was moved when the clock was read for them. It is part of the fence:
    who finds a jump mends the leases that are there by then.
    """
    fence = (
        "(t.started_at IS NULL OR t.worker = %s) AND t.finished_at IS NULL "
        f"AND COALESCE({moved_sql(using, held=True)}, 0) = %s"
    )
    ids = {row["pk"] for row in rows}
    if database.update_free(tables.CallAttempt, using, rows, fence, [worker, moved]) == len(ids):
        return ids
    mine = tables.attempts(using).filter(pk__in=ids, worker=worker, finished_at__isnull=True)
    return set(mine.values_list("pk", flat=True))


def tell_when_sent(using: str, rows: Sequence[Row]) -> int:
    """Write sent_at of open attempts still their worker's; the count. Rows: pk, worker, sent_at."""
    return _update_if_own(using, rows)


def record(
    using: str, results: Sequence[Result], rows: Sequence[Row], locked: Locked
) -> Sequence[Result]:
    """Write the ends of attempts that are still their worker's own, and what their calls become;
    the results that stand then, those of an earlier try included whose answer was lost.
    Each row has "pk" and "worker". What a call becomes that somebody has locked is kept for later.
    """
    count = _update_if_own(using, rows)
    if count < len(rows):
        results = _only_written(using, results, rows)
    results = [_with_due_at_corrected(result, locked.reading) for result in results]
    ended = [
        ends.with_later_changes(columns_of_call(one, locked.wall), locked.calls[one.job.call.id])
        for one in results
        if ends.awaits_attempt(locked.calls.get(one.job.call.id), one.job.attempt.number)
    ]
    database.update_each(tables.CallQueue, using, ended)
    others = [one for one in results if one.job.call.id not in locked.calls]
    if others:
        columns = [columns_of_call(one, locked.wall) for one in others]
        defer_ends(using, [one.job for one in others], columns)
    return results


def defer_ends(using: str, jobs: Sequence[Job], columns: Sequence[dict[str, Any]]) -> None:
    """Keep what these jobs' calls become, for `end_deferred`: somebody has locked their rows."""
    rows = [
        tables.BelatedEnding(
            attempt_id=job.attempt.id,
            call_id=job.call.id,
            number=job.attempt.number,
            columns=_as_json(one),
        )
        for job, one in zip(jobs, columns, strict=True)
    ]
    # An earlier try may have kept them, whose answer was lost.
    tables.BelatedEnding.objects.using(using).bulk_create(rows, ignore_conflicts=True)


def end_deferred(using: str) -> int:
    """Write and announce what `defer_ends` kept of calls that are free, and wait yet; the count."""
    kept = tables.BelatedEnding.objects.using(using)
    ids = list(kept.order_by("pk").values_list("pk", flat=True)[:MOST_DEFERRED])
    if not ids:
        return 0

    def work() -> list[dict[str, Any]]:
        rows = list(database.locked(kept.filter(pk__in=ids).order_by("pk")))
        wanted = [row.call_id for row in rows]
        free, _ = lock_calls_to_end(using, wanted)
        there = set(tables.calls(using).filter(pk__in=wanted).values_list("pk", flat=True))
        settled = [row.pk for row in rows if row.call_id in free or row.call_id not in there]
        kept.filter(pk__in=settled).delete()
        ended = [
            ends.with_later_changes(_from_json(row), free[row.call_id])
            for row in rows
            if ends.awaits_attempt(free.get(row.call_id), row.number)
        ]
        database.update_each(tables.CallQueue, using, ended)
        return ended

    ended = untimed_transaction(using, work)
    for status in {columns["status"] for columns in ended} & set(FINAL):
        pks = [one["pk"] for one in ended if one["status"] == status]
        callbacks.log_and_announce(using, pks, status)
    return len(ended)


def _as_json(columns: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in columns.items()
    }


def _from_json(row: Any) -> dict[str, Any]:
    field: Any = tables.CallQueue._meta.get_field
    return {
        name: field("id" if name == "pk" else name).to_python(value)
        for name, value in row.columns.items()
    }


def _update_if_own(using: str, rows: Sequence[Row]) -> int:
    """Update the open attempts that are still these rows' workers'; the count."""
    is_open = "t.finished_at IS NULL"
    return database.update_each(tables.CallAttempt, using, rows, is_open, unchanged="worker")


def _only_written(using: str, results: Sequence[Result], rows: Sequence[Row]) -> Sequence[Result]:
    """Those of the results that are in their attempts' rows, written now or by an earlier try."""
    names = ("worker", "outcome", "error_message")
    ended = tables.attempts(using).filter(pk__in=[row["pk"] for row in rows])
    stored = {pk: said for pk, *said in ended.values_list("pk", *names)}
    return [
        result
        for result, row in zip(results, rows, strict=True)
        if stored.get(row["pk"]) == [row[name] for name in names]
    ]


def lose(
    using: str, attempt_ids: Sequence[int], results: Sequence[Result], why: str, locked: Locked
) -> int:
    """End these locked attempts as lost, and write what their calls become; the count of calls."""
    lost = tables.attempts(using).filter(pk__in=attempt_ids)
    lost.update(finished_at=locked.now, outcome=LOST, error_message=why)
    rows = [
        ends.with_later_changes(columns_of_call(one, locked.wall), as_ending(one.job.call))
        for one in results
    ]
    fence = f"t.status IN ({database.listed(Move.LOSE.sources)})"
    return database.update_each(tables.CallQueue, using, rows, where=fence)


def void_and_log(using: str, attempt_ids: Sequence[int]) -> int:
    """Void attempts that no worker has begun, and say so; the count of calls."""
    count = void(using, attempt_ids)
    if count:
        events.emit("attempts_voided", calls=count)
    return count


def void_begun(using: str, worker: str) -> None:
    """Void what a pass has begun for this worker, who made none. First they are written as unbegun,
    so that recovery takes back, and does not lose, what somebody has locked.
    """
    begun = tables.attempts(using).open().filter(worker=worker)
    if not (ids := list(begun.values_list("pk", flat=True))):
        return
    as_unbegun = {"worker": "", "started_at": None, "lease_until": ledger_time.now(using)}
    rows = [{"pk": pk, **as_unbegun} for pk in ids]
    fence = "t.worker = %s AND t.finished_at IS NULL"
    database.update_free(tables.CallAttempt, using, rows, fence, [worker])
    void_and_log(using, ids)


def void_released(using: str, rules: Sequence[str], since: datetime) -> int:
    """Void what was released of these rules since then and not begun, and say so; the count."""
    released = tables.attempts(using).unbegun().filter(rule__in=rules, released_at__gte=since)
    ids = list(released.values_list("pk", flat=True))
    return void_and_log(using, ids) if ids else 0


def void(using: str, attempt_ids: Iterable[int]) -> int:
    """Void attempts that no worker has begun, and let their calls wait again; the count of calls.
    What somebody has locked is passed over. A permit's waiter has to say anew that it lives, and
    what other code has postponed since is not ready.
    """
    of_permit = When(method=states.PERMIT, then=database.ClockNow())
    postponed = When(due_at_dt__gt=F("dispatched_at_dt"), then=Value(False))
    expiry = Case(of_permit, default=F("expires_at_dt"), output_field=DateTimeField())

    def work() -> int:
        pairs = lock_free_pairs(using, attempt_ids, begun=False)
        _void_locked(using, [pair.attempt.pk for pair in pairs])
        back = [pair.call.pk for pair in pairs if pair.call]
        calls = tables.calls(using).filter(pk__in=back)
        untried = When(failed_count=0, throttled_count=0, then=Value(states.NEW))
        status = Case(untried, default=Value(states.ERROR))
        ready = Case(postponed, default=Value(True))
        count = calls.update(status=status, ready=ready, expires_at_dt=expiry)
        ready_calls.tell_of_keys(using, back)
        return int(count)

    return untimed_transaction(using, work)


def end_unchanged(using: str, found: Any, column: str, move: Move, **written: Any) -> list[int]:
    """End these calls by a move that has one end, and announce them; the ids of those ended. Locked
    ones stay, and those whose `column`, for which they were found, has changed meanwhile.
    """
    seen = dict(found.values_list("pk", column))
    if not seen:
        return []
    (end,) = move.targets
    calls = tables.calls(using)

    def work() -> list[int]:
        rows = database.locked(calls.filter(pk__in=list(seen)).order_by("pk"))
        free = [
            pk
            for pk, status, value in rows.values_list("pk", "status", column)
            if status in move.sources and value == seen[pk]
        ]
        calls.filter(pk__in=free).update(**columns_of_end(end), **written)
        return free

    gone = untimed_transaction(using, work)
    callbacks.log_and_announce(using, gone, end)
    return gone


def fail(using: str, reasons: Mapping[int, str]) -> None:
    """Fail calls, each with its reason. In a transaction that locked them; announces nothing."""
    waiting = tables.calls(using).filter(status__in=Move.FAIL.sources)
    alike: dict[str, list[int]] = {}
    for pk, why in reasons.items():
        alike.setdefault(why, []).append(pk)
    for why, pks in alike.items():
        waiting.filter(pk__in=pks).update(**columns_of_end(states.FAILED), error_message=why)


def requeue(using: str, pks: Sequence[int], move: Move = Move.REQUEUE) -> int:
    """Requeue those in the move's sources whose unique_key no unfinished call has; the count."""
    count = untimed_transaction(using, lambda: _requeue(using, pks, move))
    if count:
        events.emit("call_requeued", calls=count, first=pks[0])
    return count


def cancel(using: str, pks: Sequence[int]) -> int:
    """End these calls, those that no worker has begun; the count. Announced on commit."""
    gone = untimed_transaction(using, lambda: _cancel(using, pks))
    if gone:
        events.emit("call_cancelled", calls=len(gone), first=gone[0])
        transaction.on_commit(
            lambda: callbacks.log_and_announce(using, gone, states.CANCELLED), using=using
        )
    return len(gone)


def end_unknown(using: str, call: CallQueue, status: int, why: str) -> bool:
    """End a call DONE or FAILED, as the rule's hook said, announced; False: it has gone on."""
    columns = {**columns_of_end(status), "error_message": why[:LONGEST_MESSAGE]}
    changed = bool(_row_if_unknown(using, call).update(**columns))
    if changed:
        callbacks.log_and_announce(using, [call.pk], status)
    return changed


def requeue_unknown(using: str, call: CallQueue, after: float) -> bool:
    """Requeue an UNKNOWN call in `after` seconds, as its rule's hook said. False: it has gone on,
    or its unique_key is taken. `reconcile_count` stays: no hook goes round for ever.
    """
    columns: dict[str, Any] = {"reconcile_count": F("reconcile_count")}
    if after:
        due = database.clock(using) + timedelta(seconds=after)
        columns |= {"due_at_dt": due, "ready": False}

    def work() -> bool:
        is_unsettled = _row_if_unknown(using, call).exists()
        return is_unsettled and bool(_requeue(using, [call.pk], Move.RECONCILE, columns))

    if changed := untimed_transaction(using, work):
        events.emit("call_requeued", calls=1, first=call.pk)
    return changed


def columns_of_end(status: int) -> dict[str, Any]:
    """The columns of a call that every final state sets."""
    has_none = Q(callback__isnull=True) | Q(callback="")
    if callbacks.tells_results(status):
        has_none &= Q(method=states.PERMIT)  # of others, their data says what they are
    owes = Case(When(has_none, then=Value(False)), default=Value(True))
    return {
        "status": status,
        "finished_at_dt": database.ClockNow(),
        "ready": False,
        "callback_pending": True if callbacks.has_receivers(status) else owes,
        **_UNANNOUNCED,
    }


# Of the end of a call: nobody announces it, has announced some of it, or was asked to.
_UNANNOUNCED = {"callback_at": None, "callback_heard": False, "callback_ask_at": None}


def _requeue(
    using: str, pks: Sequence[int], move: Move, columns: Mapping[str, Any] | None = None
) -> int:
    """Make calls NEW, with these columns; the count. No permits: their code has gone on."""
    calls, as_new = tables.calls(using), {**_columns_of_new(), **(columns or {})}
    found = lock_calls_to_change(using, pks, "unique_key", "status", "method")
    keys = [
        (pk, unique_key)
        for pk, unique_key, status, method in found
        if status in move.sources and method != states.PERMIT
    ]
    keyless = [pk for pk, unique_key in keys if unique_key is None]
    count = calls.filter(pk__in=keyless).update(**as_new)
    # Keys are waited for as rows are: in an order that is the same for all.
    for _, pk in sorted((key, pk) for pk, key in keys if key is not None):
        with suppress(IntegrityError), transaction.atomic(using=using):
            # unless another unfinished call carries the key
            count += calls.filter(pk=pk).update(**as_new)
    ready_calls.tell_of_keys(using, [pk for pk, _ in keys])
    return count


def _columns_of_new() -> dict[str, Any]:
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
        **_UNANNOUNCED,
        "reconcile_at": None,
        "reconcile_count": 0,
    }


def _cancel(using: str, pks: Sequence[int]) -> list[int]:
    found = lock_calls_to_change(using, pks, "status", "last_attempt")
    last = {pk: number for pk, status, number in found if status == states.DISPATCHED}
    # such a call ends only if its last attempt is unbegun; a begin under way is waited for
    unbegun = lock_unbegun_of(using, last) if last else []
    _void_locked(using, [pk for pk, _, _ in unbegun])
    gone = [pk for pk, status, _ in found if status in states.CANCELLABLE]
    gone += [call for _, call, number in unbegun if last[call] == number]
    tables.calls(using).filter(pk__in=gone).update(**columns_of_end(states.CANCELLED))
    return sorted(gone)


def _void_locked(using: str, attempt_ids: Sequence[int]) -> None:
    tables.attempts(using).filter(pk__in=attempt_ids).update(
        finished_at=LedgerNow(),
        outcome=states.VOIDED,
        charged=F("cost"),
        correction_pending=True,
    )


def _row_if_unknown(using: str, call: CallQueue) -> Any:
    unknown = tables.calls(using).filter(status__in=Move.RECONCILE.sources)
    return unknown.filter(pk=call.pk, last_attempt=call.last_attempt)


def columns_of_call(result: Result, now: datetime) -> dict[str, Any]:
    """The columns that a result gives its call, for one bulk update; `now` is wall time."""
    final = result.status in FINAL
    return {
        "pk": result.job.call.id,
        "status": result.status,
        "due_at_dt": result.due_at,
        "ready": False,  # until it is promoted
        "failed_count": result.failed_count,
        "throttled_count": result.throttled_count,
        "error_message": result.why[:LONGEST_MESSAGE],
        "finished_at_dt": now if final else None,
        "first_sent_dt": result.job.call.first_sent_dt,
        "callback_pending": final and owes_announcement(result),
    }


def owes_announcement(result: Result) -> bool:
    call, status = result.job.call, result.status
    return (
        bool(call.callback)
        or callbacks.owes_result(call.method, status)
        or callbacks.has_receivers(status)
    )


def clock_correction(result: Result, reading: Reading) -> timedelta:
    """What to add to the result's instants, which are by begin's clock, so that they are the latest
    possible by this reading. 0 up to TOLERANCE, as begin's clock is closer then, and where they are
    not stamped. Counted from just before the reading, so that nothing gets too early.
    """
    if result.ended_at is None or not result.ended_mono:
        return timedelta(0)
    passed = timedelta(seconds=max(0.0, reading.before - result.ended_mono))
    by = from_us(reading.at) - passed - result.ended_at
    return timedelta(0) if timedelta(0) <= by <= TOLERANCE else by


def _with_due_at_corrected(result: Result, reading: Reading) -> Result:
    """A retry waits as long as it was to, whatever the clock has done since."""
    if result.ended_at is None or result.due_at < result.job.to_wall(result.ended_at):
        return result
    moved = timedelta(microseconds=reading.moved - result.job.clock.moved)
    return replace(result, due_at=result.due_at + clock_correction(result, reading) + moved)
