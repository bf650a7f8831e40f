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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from django.utils.module_loading import import_string

from callqueue import clocks, conf, database, events, states, tables, texts
from callqueue.database import from_us, to_us
from callqueue.fields import UNREADABLE
from callqueue.handlers import methods
from callqueue.ledger import clock_jumps, row_locks
from callqueue.limits.budgets import redirects_in
from callqueue.limits.rules import Rule

EXPIRED = "expired"
_OF_ATTEMPT = (
    "id",
    "number",
    "queue",
    "send_at",
    "released_at",
    "started_at",
    "finished_at",
    "call",
    "cost",
    "worker",
)
_OF_CALL = (
    "status", "last_attempt", "rule", "key", "cost", "call_data", "method", "failed_count", "throttled_count", "unique_key",
    "callback", "first_sent_dt", "due_at_dt", "expires_at_dt", "idempotency_key",
    "trace_context",
)  # fmt: skip


_READING = ("clock", "moved")  # what a statement selects of the clock


@dataclass(frozen=True)
class Clock:
    """The database's clock, read between two instants of this process's monotonic time
    (seconds).
    """

    at: datetime
    before: float
    after: float

    def latest(self, instant: float) -> datetime:
        """The latest that the database's clock can have shown at this monotonic instant."""
        return from_us(to_us(self.at) + round((instant - self.before) * 1_000_000))

    def monotonic_at(self, when: datetime) -> float:
        """A monotonic instant at which the database's clock has certainly reached `when`."""
        return self.after + (to_us(when) - to_us(self.at)) / 1_000_000


@dataclass
class Job:
    """A begun attempt and its call. `lease_ends` is monotonic. `unfit`: why it cannot be made any
    more.

    `charged`: what it was charged at its release; `redirects`: how many it may follow, since so
    many are charged with it. `is_left`: it is not to be sent any more, unless it `is_through` its
    gate: it has been, or is about to be.
    """

    attempt_id: int
    number: int
    queue: str
    send_at: datetime | None
    pk: int
    rule_name: str
    key: str
    cost: Any
    method: str
    params: Mapping[str, Any]
    failed_count: int
    throttled_count: int
    unique_key: str | None
    callback: str | None
    first_sent_dt: datetime | None
    due_at_dt: datetime
    idempotency_key: str
    worker: str
    clock: Clock
    trace_context: str | None = None
    charged: Any = 1
    redirects: int = 0
    rule: Rule | None = None
    lease_ends: float = 0.0
    unfit: str | None = None
    is_left: bool = False
    is_through: bool = False

    @property
    def sound_rule(self) -> Rule:
        """The rule, of a job that is fit."""
        assert self.rule is not None
        return self.rule


def name_worker() -> str:
    """A name that whoever begins a message has to himself: of two begins of the same message, one
    begins an attempt.
    """
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
    rows = (
        _take_at_once(using, attempt_ids, worker) if at_once else _read(using, attempt_ids, worker)
    )
    clock, steady_from = _read_clock(using, rows, before)
    released = {row["a.id"]: row["a.released_at"] for row in rows}
    jobs = [_job(row, worker, clock) for row in rows]
    for job, released_at in (
        (job, released[job.attempt_id]) for job in jobs if job.send_at is not None
    ):
        job.send_at = _slot(job, released_at, steady_from)
    if not at_once:
        taken = _take(using, jobs, worker, released)
        jobs = [job for job in jobs if job.attempt_id in taken]
    if len(jobs) < len(attempt_ids):
        give_back(using, attempt_ids)
        events.tell(
            "attempt_refused",
            attempts=len(attempt_ids) - len(jobs),
            reason="already begun, voided or out of date",
        )
    if clock_jumps.watch(using).wants_look and not database.in_transaction(using):
        clock_jumps.watch(using).look()
    first = min((job.clock.at for job in jobs), default=None)
    return sorted(jobs, key=lambda job: job.send_at or first or job.clock.at)


def give_back(using: str, attempt_ids: Sequence[int]) -> int:
    """Void what is still to be begun of these: it never reaches the wire, and a call that waits for
    it waits for a release again.

    What somebody has locked (a cancel that has not committed yet) is left as it is; the count of
    those.
    """
    unbegun = (
        tables.attempts(using)
        .unbegun()
        .filter(pk__in=list(attempt_ids))
        .values_list("pk", flat=True)
    )
    if not (left := list(unbegun)):
        return 0
    row_locks.take_back(using, left)
    return len(unbegun.all())


@lru_cache
def imported(path: str | Callable[..., Any]) -> Callable[..., Any]:
    """A callable, or what a dotted path names."""
    found: Callable[..., Any] = import_string(path) if isinstance(path, str) else path
    return found


def _take_at_once(using: str, attempt_ids: Sequence[int], worker: str) -> list[dict[str, Any]]:
    """The fence: an attempt is begun by the one update that finds it unbegun, or begun by this
    worker: the answer to a first try may have been lost. Those that this one has begun, with their
    calls and the clock.

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
        f"CASE WHEN (a.started_at IS NULL OR a.worker = %s) AND a.finished_at IS NULL AND c.status = {states.DISPATCHED} "
        "AND c.last_attempt = a.number THEN 1 ELSE 0 END = 1"
    )
    return columns.mapped(
        f"WITH free AS ({database.free_ids(using, attempts, ids)}) "
        f"UPDATE {attempts} a SET started_at = {clock}, worker = %s, lease_until = {clock} + {ahead} + {lease} "
        f"FROM free, {calls} c WHERE a.id = free.id AND c.id = a.call_id AND {fence} "
        f"RETURNING {columns.sql}, {clock}, {clock_jumps.moved_sql(using)}",
        [worker, config.leases, config.lease(None), worker],
        *_READING,
    )


def _read(using: str, attempt_ids: Sequence[int], worker: str) -> list[dict[str, Any]]:
    """The attempts that this worker can begin, their calls and the clock."""
    columns, attempts, calls = _columns(using)
    selected = f"{columns.sql}, {database.clock_sql(using)}, {clock_jumps.moved_sql(using)}"
    ids = database.listed(attempt_ids)
    sql = f"SELECT {selected} FROM {attempts} a JOIN {calls} c ON c.id = a.call_id WHERE a.id IN ({ids}) ORDER BY a.id"
    return [row for row in columns.mapped(sql, [], *_READING) if _can_begin(row, worker)]


def _can_begin(row: Mapping[str, Any], worker: str) -> bool:
    is_open = (row["a.started_at"] is None or row["a.worker"] == worker) and row[
        "a.finished_at"
    ] is None
    return bool(
        is_open
        and row["c.status"] == states.DISPATCHED
        and row["c.last_attempt"] == row["a.number"]
    )


@lru_cache
def _columns(using: str) -> tuple[database.Columns, str, str]:
    attempts, calls = (
        database.quoted(using, model._meta.db_table)
        for model in (tables.CallAttempt, tables.CallQueue)
    )
    return (
        database.Columns(
            using, {"a": (tables.CallAttempt, _OF_ATTEMPT), "c": (tables.CallQueue, _OF_CALL)}
        ),
        attempts,
        calls,
    )


def _read_clock(
    using: str, rows: Sequence[Mapping[str, Any]], before: float
) -> tuple[Clock, datetime]:
    """The database's clock as the rows brought it, narrowed by earlier readings; and from when on
    it is known to be steady.
    """
    reading = (
        clock_jumps.brought(using, before, *(rows[0][name] for name in _READING))
        if rows
        else clock_jumps.read(using)
    )
    narrowed, steady_from = clock_jumps.watch(using).take(reading)
    return Clock(from_us(narrowed.at), narrowed.before, narrowed.after), from_us(steady_from)


def _slot(job: Job, released_at: datetime, steady_from: datetime) -> datetime:
    """When to send: never later than the slot was ahead at release; and exactly that, if the clock
    may have jumped since.
    """
    assert job.send_at is not None
    latest = job.clock.at + (job.send_at - released_at)
    return min(job.send_at, latest) if steady_from <= released_at else latest


def _job(row: Mapping[str, Any], worker: str, clock: Clock) -> Job:
    data = row["c.call_data"]
    readable = (
        isinstance(data, Mapping) and data != UNREADABLE and isinstance(data.get("params"), Mapping)
    )
    job = Job(
        attempt_id=row["a.id"],
        number=row["a.number"],
        queue=row["a.queue"],
        send_at=row["a.send_at"],
        pk=row["a.call"],
        rule_name=row["c.rule"],
        key=row["c.key"],
        cost=row["c.cost"],
        method=str(data.get("method", "")).lower() if readable else row["c.method"],
        params=data["params"] if readable else {},
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
        rule=conf.current().rules.get(row["c.rule"]),
    )
    start = max(0.0, job.clock.monotonic_at(job.send_at) - clock.after) if job.send_at else 0.0
    job.lease_ends = clock.before + start + conf.current().lease(job.rule)
    job.redirects = min(job.rule.redirects, redirects_in(row["a.cost"])) if job.rule else 0
    job.unfit = _unfitness(job, readable, row["c.expires_at_dt"])
    return job


def _unfitness(job: Job, readable: bool, expires_at: datetime | None) -> str | None:
    """Why the call cannot be made any more, if so."""
    if expires_at is not None and expires_at <= job.clock.at:
        return EXPIRED
    if job.rule is None:
        return f"the rule {job.rule_name!r} is not in CALLQUEUE['RULES'] any more"
    if not readable:
        return "its call_data cannot be read; is the key that encrypted it missing from ENCRYPTION_KEYS?"
    if job.method not in methods():
        return f"there is no handler for the method {job.method!r} any more"
    for name in ("classify", "settle"):
        path = getattr(job.rule, name)
        try:
            if path is not None:
                imported(path)
        except (
            BaseException
        ) as error:  # whatever its module does when it is read, it does to calls of this rule only
            return f"the rule's {name} cannot be imported: {texts.worded(error)}"
    return None


def _take(
    using: str, jobs: Sequence[Job], worker: str, released: Mapping[int, datetime]
) -> set[int]:
    """The fence as above, for attempts that were read before; the ids of those that this worker has
    begun.

    When they were released is part of it: the lease is by a clock that may have jumped meanwhile,
    and the ledger moved.
    """
    if not jobs:
        return set()
    rows = [
        {
            "pk": job.attempt_id,
            "started_at": job.clock.at,
            "worker": worker,
            "lease_until": job.clock.at
            + timedelta(seconds=max(0.0, job.lease_ends - job.clock.before)),
            "released_at": released[job.attempt_id],
        }
        for job in jobs
    ]
    fence = (
        "(t.started_at IS NULL OR t.worker = %s) AND t.finished_at IS NULL AND t.released_at = v.v4"
    )
    count = database.update_free(tables.CallAttempt, using, rows, fence, [worker])
    ids = {job.attempt_id for job in jobs}
    if count == len(ids):
        return ids
    mine = tables.attempts(using).filter(pk__in=ids, worker=worker, finished_at__isnull=True)
    return set(mine.values_list("pk", flat=True))
