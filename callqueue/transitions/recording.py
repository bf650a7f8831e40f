"""Writes what attempts and their calls become at the attempts' ends: recorded by a worker, or lost.

In: results, within a transaction. Out: columns. Each update names what it starts from, so of two
that end the same attempt one wins and the other writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from callqueue import callbacks, clocks, database, tables
from callqueue.clocks import Reading
from callqueue.database import from_us
from callqueue.states import FINAL, LOST, Move
from callqueue.transitions import deferred
from callqueue.transitions.job import LONGEST_MESSAGE, Result

TOLERANCE = timedelta(microseconds=clocks.TOLERANCE)


def end_attempts(using: str, rows: Sequence[dict[str, Any]]) -> int:
    """Write the ends of attempts, those that are still their worker's own; the count of them. Each
    row has "pk" and "worker" before all others.
    """
    fence = "t.finished_at IS NULL AND t.worker = v.v1"
    return database.update_each(tables.CallAttempt, using, rows, fence)


def end_calls(
    using: str,
    results: Sequence[Result],
    locked: Mapping[int, tuple[int, int]],
    reading: Reading,
) -> None:
    """Write what these calls become, those that still wait for this attempt.

    `locked`: by primary key the status and the last attempt of the calls that are locked here. What
    the others become is kept for a later round.
    """
    now = from_us(reading.at)
    results = [_with_due_at(result, reading) for result in results]
    rows = [columns_of_call(one, now) for one in results if _is_out(one, locked)]
    database.update_each(tables.CallQueue, using, rows)
    if len(locked) < len(results):
        others = [one for one in results if one.job.pk not in locked]
        columns = [columns_of_call(one, now) for one in others]
        deferred.keep(using, [one.job for one in others], columns)


def lose(
    using: str, attempt_ids: Sequence[int], results: Sequence[Result], why: str, now: datetime
) -> int:
    """End these locked attempts as lost, and write what their calls become; the count of calls."""
    lost = tables.attempts(using).filter(pk__in=attempt_ids)
    lost.update(finished_at=now, outcome=LOST, error_message=why)
    rows = [columns_of_call(result, now) for result in results]
    fence = f"t.status IN ({database.listed(Move.LOSE.sources)})"
    return database.update_each(tables.CallQueue, using, rows, where=fence)


def columns_of_call(result: Result, now: datetime) -> dict[str, Any]:
    """The columns that a result gives its call, for one bulk update."""
    final = result.status in FINAL
    return {
        "pk": result.job.pk,
        "status": result.status,
        "due_at_dt": result.due_at,
        "ready": not final and result.due_at <= now,
        "failed_count": result.failed_count,
        "throttled_count": result.throttled_count,
        "error_message": result.why[:LONGEST_MESSAGE],
        "finished_at_dt": now if final else None,
        "first_sent_dt": result.job.first_sent_dt,
        "active_key": None if final else result.job.unique_key,
        "callback_pending": final
        and (bool(result.job.callback) or callbacks.owes_result(result.job.method, result.status)),
    }


def astray(result: Result, reading: Reading) -> timedelta:
    """By how much the result's instants, which are as of begin, lie before the latest that they can
    be by this reading.

    0 where that is within the tolerance: then the two clocks have gone on alike, and those of begin
    are closer. The time since is counted to just before the reading, so what is moved by this is
    never moved to before it was.
    """
    if result.ended_at is None or not result.ended_mono:
        return timedelta(0)
    passed = timedelta(seconds=max(0.0, reading.before - result.ended_mono))
    by = from_us(reading.at) - passed - result.ended_at
    return timedelta(0) if timedelta(0) <= by <= TOLERANCE else by


def _with_due_at(result: Result, reading: Reading) -> Result:
    """A retry waits as long as it was to, whatever the clock has done since."""
    if result.ended_at is None or result.due_at <= result.ended_at:
        return result
    return replace(result, due_at=result.due_at + astray(result, reading))


def _is_out(result: Result, locked: Mapping[int, tuple[int, int]]) -> bool:
    """Whether the call is locked here, and is still out with this attempt."""
    status, number = locked.get(result.job.pk, (None, None))
    return status in Move.RECORD.sources and number == result.job.number
