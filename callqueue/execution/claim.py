"""Begin: takes released attempts for this worker, and reads what is needed to make their calls.

An attempt that another worker has begun, that was voided, or whose call was cancelled, changed or
deleted is left out; so is one that somebody has locked, rather than to let the others wait. Where
the database can (PostgreSQL), one statement takes and reads; elsewhere one reads and another takes.
It brings the database's clock along, which the worker's own monotonic time is then mapped onto.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from callqueue import clocks, conf, database, events, states, tables, texts, transitions
from callqueue.clocks import Reading
from callqueue.database import from_us
from callqueue.execution import fitness
from callqueue.fields import UNREADABLE
from callqueue.ledger import agreement, clock_jumps
from callqueue.transitions import Job

_OF_ATTEMPT = (
    "id", "number", "queue", "send_at", "released_at", "started_at", "finished_at", "call",
    "cost", "worker",
)  # fmt: skip
_OF_CALL = (
    "status", "last_attempt", "rule", "key", "cost", "call_data", "method", "failed_count",
    "throttled_count", "unique_key", "callback", "first_sent_dt", "due_at_dt", "expires_at_dt",
    "idempotency_key", "trace_context",
)  # fmt: skip
_READING = ("clock", "moved")  # what a statement selects of the clock


def name_worker() -> str:
    """A name for one begin of one message: of two begins of it, one begins an attempt."""
    return f"{texts.storable(socket.gethostname())[:60]}:{os.getpid()}:{secrets.token_hex(6)}"


def begin(using: str, attempt_ids: Sequence[int], worker: str = "") -> list[Job]:
    """Take these attempts, those that are still to be begun or that this worker has; in the order
    in which to send them.

    A database that is away is waited for, for as long as a release is good for.
    """
    name, seconds = worker or name_worker(), conf.current().release_lease
    return database.persist(
        using, lambda: _begin(using, attempt_ids, name), seconds=seconds, during="begin"
    )


def _begin(using: str, attempt_ids: Sequence[int], worker: str) -> list[Job]:
    before = clocks.monotonic()
    at_once = database.returns_updated(using)
    find = _take_at_once if at_once else _read
    rows = find(using, attempt_ids, worker)
    clock, steady_from = _read_clock(using, rows, before)
    jobs = [_job(row, worker, clock, steady_from) for row in rows]
    _leave_to_others(using, jobs)
    if not at_once:
        released = {row["a.id"]: row["a.released_at"] for row in rows}
        taken = _take(using, jobs, worker, released)
        jobs = [job for job in jobs if job.attempt_id in taken]
    if len(jobs) < len(attempt_ids):
        _refuse(using, attempt_ids, len(attempt_ids) - len(jobs))
    if clock_jumps.watch(using).wants_look and not database.in_transaction(using):
        clock_jumps.watch(using).look()
    return sorted(jobs, key=lambda job: job.send_at or from_us(clock.at))


def _leave_to_others(using: str, jobs: Sequence[Job]) -> None:
    """Say of jobs whose rule is not in these settings that somebody else can make them, where a
    dispenser knows it: a deployment is under way. No statement without any.
    """
    strange = [job for job in jobs if job.rule is None and job.unfit != fitness.EXPIRED]
    known = agreement.known_rules(using) if strange else ()
    for job in strange:
        if job.rule_name in known:
            job.unfit = fitness.NEWER


def _refuse(using: str, attempt_ids: Sequence[int], count: int) -> None:
    """Give back what of these is still to be begun, and say how many were not begun here."""
    give_back(using, attempt_ids)
    why = "already begun, voided or out of date"
    events.emit("attempt_refused", attempts=count, reason=why)


def give_back(using: str, attempt_ids: Sequence[int]) -> int:
    """Void what is still to be begun of these: it never reaches the wire, and a call that waits for
    it waits for a release again.

    What somebody has locked (a cancel that has not committed yet) is left as it is; the count of
    those.
    """
    unbegun = tables.attempts(using).unbegun().filter(pk__in=list(attempt_ids))
    left = unbegun.values_list("pk", flat=True)
    if not (seen := list(left)):
        return 0
    transitions.void(using, seen)
    return len(left.all())


def _take_at_once(using: str, attempt_ids: Sequence[int], worker: str) -> list[dict[str, Any]]:
    """The fence where one statement can take and read: an attempt is begun by the one update that
    finds it unbegun, or begun by this worker, since the answer to a first try may have been lost.
    Those that this worker has begun, with their calls and the clock.

    The lease that it writes ends no earlier than the worker's own (`_job`), so nobody recovers what
    may still be sent.
    """
    columns, attempts, calls = _columns(using)
    clock, ids = f"({database.clock_sql(using)})", database.listed(attempt_ids)
    config = conf.current()
    ahead = f"GREATEST(INTERVAL '0', a.send_at - {clock}, a.send_at - a.released_at)"
    lease = "make_interval(secs => COALESCE(CAST(CAST(%s AS jsonb) ->> c.rule AS float8), %s))"
    # As a CASE the fence fits no partial index: rows are found by their keys, not by reading all
    # open attempts.
    fence = (
        "CASE WHEN (a.started_at IS NULL OR a.worker = %s) AND a.finished_at IS NULL "
        f"AND c.status = {states.DISPATCHED} AND c.last_attempt = a.number THEN 1 ELSE 0 END = 1"
    )
    return columns.mapped(
        f"WITH free AS ({database.free_ids(using, attempts, ids)}) "
        f"UPDATE {attempts} a SET started_at = {clock}, worker = %s, "
        f"lease_until = {clock} + {ahead} + {lease} "
        f"FROM free, {calls} c WHERE a.id = free.id AND c.id = a.call_id AND {fence} "
        f"RETURNING {columns.sql}, {clock}, {clock_jumps.moved_sql(using)}",
        [worker, config.leases, config.lease(None), worker],
        *_READING,
    )


def _read(using: str, attempt_ids: Sequence[int], worker: str) -> list[dict[str, Any]]:
    """The attempts that this worker can begin, their calls and the clock."""
    columns, attempts, calls = _columns(using)
    sql = (
        f"SELECT {columns.sql}, {database.clock_sql(using)}, {clock_jumps.moved_sql(using)} "
        f"FROM {attempts} a JOIN {calls} c ON c.id = a.call_id "
        f"WHERE a.id IN ({database.listed(attempt_ids)}) ORDER BY a.id"
    )
    return [row for row in columns.mapped(sql, [], *_READING) if _can_begin(row, worker)]


def _can_begin(row: Mapping[str, Any], worker: str) -> bool:
    is_free = row["a.started_at"] is None or row["a.worker"] == worker
    is_waited_for = (
        row["c.status"] == states.DISPATCHED and row["c.last_attempt"] == row["a.number"]
    )
    return is_free and row["a.finished_at"] is None and is_waited_for


@lru_cache
def _columns(using: str) -> tuple[database.Columns, str, str]:
    """What is read of an attempt "a" and its call "c", and the two tables, quoted."""
    wanted = {"a": (tables.CallAttempt, _OF_ATTEMPT), "c": (tables.CallQueue, _OF_CALL)}
    attempts, calls = (tables.name(using, model) for model in ("CallAttempt", "CallQueue"))
    return database.Columns(using, wanted), attempts, calls


def _read_clock(
    using: str, rows: Sequence[Mapping[str, Any]], before: float
) -> tuple[Reading, datetime]:
    """The database's clock as the rows brought it, narrowed by earlier readings; and from when on
    it is known to be steady.
    """
    if rows:
        shown, moved = (rows[0][name] for name in _READING)
        reading = clock_jumps.brought(using, before, shown, moved)
    else:
        reading = clock_jumps.read(using)
    narrowed, steady_from = clock_jumps.watch(using).take(reading)
    return narrowed, from_us(steady_from)


def slot(
    send_at: datetime | None, released_at: datetime, clock: Reading, steady_from: datetime
) -> datetime | None:
    """When to send: never later than the slot was ahead at release; and exactly that, if the clock
    may have jumped since.
    """
    if send_at is None:
        return None
    latest = from_us(clock.at) + (send_at - released_at)
    return min(send_at, latest) if steady_from <= released_at else latest


def _job(row: Mapping[str, Any], worker: str, clock: Reading, steady_from: datetime) -> Job:
    data = row["c.call_data"]
    is_readable = (
        isinstance(data, Mapping) and data != UNREADABLE and isinstance(data.get("params"), Mapping)
    )
    rule = conf.current().rules.get(row["c.rule"])
    job = Job(
        attempt_id=row["a.id"],
        number=row["a.number"],
        queue=row["a.queue"],
        send_at=row["a.send_at"],
        pk=row["a.call"],
        rule_name=row["c.rule"],
        key=row["c.key"],
        cost=row["c.cost"],
        method=str(data.get("method", "")).lower() if is_readable else row["c.method"],
        params=data["params"] if is_readable else {},
        failed_count=row["c.failed_count"],
        throttled_count=row["c.throttled_count"],
        unique_key=row["c.unique_key"],
        callback=row["c.callback"],
        first_sent_dt=row["c.first_sent_dt"],
        due_at_dt=row["c.due_at_dt"],
        idempotency_key=str(row["c.idempotency_key"]),
        worker=worker,
        clock=clock,
        trace_context=row["c.trace_context"],
        charged=row["a.cost"],
        rule=rule,
    )
    job.lease_ends = clock.before + _seconds_ahead(job) + conf.current().lease(rule)
    job.unfit = fitness.reason_against(job, is_readable, row["c.expires_at_dt"])
    job.send_at = slot(job.send_at, row["a.released_at"], clock, steady_from)
    return job


def _seconds_ahead(job: Job) -> float:
    """For how many seconds its slot is still to open, as it was written down at its release."""
    opens = job.slot_opens()
    return 0.0 if opens is None else max(0.0, opens - job.clock.after)


def _take(
    using: str, jobs: Sequence[Job], worker: str, released: Mapping[int, datetime]
) -> set[int]:
    """The fence where a statement cannot take and read at once: take attempts that were read
    before; the ids of those that this worker has begun.

    When they were released is part of it: the lease is by a clock that may have jumped meanwhile,
    and the ledger moved.
    """
    if not jobs:
        return set()
    rows = [_begun(job, released[job.attempt_id]) for job in jobs]
    fence = (
        "(t.started_at IS NULL OR t.worker = %s) AND t.finished_at IS NULL AND t.released_at = v.v4"
    )
    count = database.update_free(tables.CallAttempt, using, rows, fence, [worker])
    ids = {job.attempt_id for job in jobs}
    if count == len(ids):
        return ids
    mine = tables.attempts(using).filter(pk__in=ids, worker=worker, finished_at__isnull=True)
    return set(mine.values_list("pk", flat=True))


def _begun(job: Job, released_at: datetime) -> dict[str, Any]:
    """The columns of an attempt that is begun. `released_at` is its own: a part of the fence."""
    started_at = from_us(job.clock.at)
    seconds = max(0.0, job.lease_ends - job.clock.before)
    return {
        "pk": job.attempt_id,
        "started_at": started_at,
        "worker": job.worker,
        "lease_until": started_at + timedelta(seconds=seconds),
        "released_at": released_at,
    }
