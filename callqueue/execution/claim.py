"""Begin: takes released attempts for this worker, and reads what is needed to make their calls.
An attempt that another worker has begun, that was voided, or whose call was cancelled, changed or
deleted is left out; so is one that somebody has locked, rather than to let the others wait. One
statement reads, and brings the database's clock along; another takes what was read.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from django.db import DatabaseError, InterfaceError, OperationalError
from django.utils.module_loading import import_string

from callqueue import clocks, conf, database, events, states, tables, texts, transitions
from callqueue.clocks import Mono, Reading
from callqueue.database import from_us
from callqueue.execution.starvation import why_starved
from callqueue.fields import UNREADABLE
from callqueue.handlers import HTTP_METHODS, known_methods, method_of
from callqueue.ledger import ledger_time, settings
from callqueue.transitions import Job

# what is read of an attempt, and of its call
OF_ATTEMPT = (
    "id", "number", "rule", "key", "queue", "cost", "send_at", "released_at", "started_at",
    "worker",
)  # fmt: skip
READS = (
    "id", "rule", "key", "cost", "method", "failed_count", "throttled_count", "unique_key",
    "callback", "first_sent_dt", "due_at_dt", "trace_context", "status", "last_attempt",
    "call_data", "expires_at_dt", "idempotency_key", "dispatched_at_dt",
)  # fmt: skip
# the columns, each with its name in a row of both
_OF_ATTEMPT = [(name, f"a.{name}") for name in OF_ATTEMPT]
_OF_CALL = [(name, f"c.{name}") for name in READS]
# seconds for which a begin whose answer was lost may come through yet
DOUBT = 5.0
# why a job is unfit; for other reasons than these its call fails
EXPIRED = "expired"
NEWER = "only other processes' settings have its rule: their workers can make it"
STARVED = "nothing was sent: this worker's process may have no more descriptors"


def new_worker_name() -> str:
    """A new name for each begin of a message: so of two begins, one alone has an attempt."""
    return f"{texts.storable(socket.gethostname())[:60]}:{os.getpid()}:{secrets.token_hex(6)}"


def begin(
    using: str, attempt_ids: Sequence[int], worker: str = "", lease: float | None = None
) -> list[Job]:
    """Take those of these attempts that are still to be begun, or that this worker has: the answer
    to a first try may have been lost. Returns them in the order in which to send them; gives back
    the rest. `lease`: seconds for which they are taken; None: as their rules say. Waits for a
    database that is away, for as long as a release is good for. After a try that failed it waits
    DOUBT for what is locked: a late commit may begin that, and nobody else would make it.
    """
    name, seconds, doubt_ends = worker or new_worker_name(), conf.current().release_lease, 0.0

    def once() -> list[Job]:
        nonlocal doubt_ends
        try:
            return _begin_once(using, attempt_ids, name, lease, doubt_ends)
        except (DatabaseError, InterfaceError):
            doubt_ends = doubt_ends or clocks.monotonic() + DOUBT
            raise

    return database.persist(using, once, seconds=seconds, during="begin")


def _begin_once(
    using: str, attempt_ids: Sequence[int], worker: str, lease: float | None, doubt_ends: float
) -> list[Job]:
    """One try. OperationalError, until `doubt_ends` (monotonic): an earlier one may yet commit."""
    before = clocks.monotonic()
    found = _read_attempts_with_calls(using, attempt_ids)
    clock, steady_from = _read_clock(using, found, before)
    wall = from_us(clock.wall)
    rows = [row for row in found if _can_begin(row, worker, wall)]
    jobs = _jobs_of_rows(using, rows, clock, steady_from, lease)
    taken = set[int]()
    if jobs:
        begun = [_columns_when_begun(job, worker) for job in jobs]
        taken = transitions.begin(using, begun, worker, clock.moved)
    jobs = [job for job in jobs if job.attempt.id in taken]
    _mark_those_of_newer_settings(using, jobs)
    if len(jobs) < len(attempt_ids):
        locked = give_back(using, attempt_ids)
        if clocks.monotonic() < doubt_ends and (
            locked or _has_begun_others(using, attempt_ids, worker, jobs)
        ):
            raise OperationalError("an earlier try's begin may be committed yet")
        count, why = len(attempt_ids) - len(jobs), "already begun, voided or out of date"
        events.emit("attempt_refused", attempts=count, reason=why)
    if ledger_time.watch(using).wants_look and not database.in_transaction(using):
        ledger_time.watch(using).look()
    return sorted(jobs, key=lambda job: job.attempt.send_at or from_us(clock.at))


def take_begun(
    using: str, rows: Sequence[Mapping[str, Any]], reading: Reading, lease: float | None = None
) -> list[Job]:
    """The jobs of attempts that were begun with their charge, by a pass of this process; in the
    order in which to send them. `rows`: columns as begin reads them; `lease`: as for `begin`.
    """
    clock, steady_from = ledger_time.watch(using).keep_and_narrow(reading)
    jobs = _jobs_of_rows(using, rows, clock, from_us(steady_from), lease)
    return sorted(jobs, key=lambda job: job.attempt.send_at or from_us(clock.at))


def _mark_those_of_newer_settings(using: str, jobs: Sequence[Job]) -> None:
    """Mark jobs as NEWER whose rule is known to dispensers, and not in these settings."""
    strange = [job for job in jobs if job.rule is None and job.unfit != EXPIRED]
    known = settings.known_rules(using) if strange else ()
    for job in strange:
        if job.call.rule in known:
            job.unfit = NEWER


def give_back(using: str, attempt_ids: Sequence[int]) -> int:
    """Void what is still to be begun of these; the count of what stays, since it is locked."""
    unbegun = tables.attempts(using).unbegun().filter(pk__in=list(attempt_ids))
    left = unbegun.values_list("pk", flat=True)
    if not (seen := list(left)):
        return 0
    transitions.void(using, seen)
    return len(left.all())


def _has_begun_others(
    using: str, attempt_ids: Sequence[int], worker: str, jobs: Sequence[Job]
) -> bool:
    """Whether this worker has begun others of these: by a commit that came while it looked."""
    mine = tables.attempts(using).open().filter(pk__in=list(attempt_ids), worker=worker)
    return mine.exclude(pk__in=[job.attempt.id for job in jobs]).exists()


def _read_attempts_with_calls(using: str, attempt_ids: Sequence[int]) -> list[dict[str, Any]]:
    columns, attempts, calls = _columns_and_tables(using)
    sql = (
        f"SELECT {columns.sql}, {ledger_time.reading_sql(using)} "
        f"FROM {attempts} a JOIN {calls} c ON c.id = a.call_id "
        f"WHERE a.id IN ({database.listed(attempt_ids)}) ORDER BY a.id"
    )
    return columns.rows_by_name(sql, [], *ledger_time.READING_COLUMNS)


@lru_cache
def _columns_and_tables(using: str) -> tuple[database.Columns, str, str]:
    wanted = {
        "a": (tables.CallAttempt, (*OF_ATTEMPT, "finished_at")),
        "c": (tables.CallQueue, READS),
    }
    attempts, calls = (tables.name(using, model) for model in ("CallAttempt", "CallQueue"))
    return database.Columns(using, wanted), attempts, calls


def _can_begin(row: Mapping[str, Any], worker: str, wall: datetime) -> bool:
    is_free = row["a.started_at"] is None or row["a.worker"] == worker
    is_waited_for = (
        row["c.status"] == states.DISPATCHED
        and row["c.last_attempt"] == row["a.number"]
        # else other code has postponed it since
        and row["c.due_at_dt"] <= max(wall, row["c.dispatched_at_dt"] or wall)
    )
    return is_free and row["a.finished_at"] is None and is_waited_for and _is_as_charged(row)


def _is_as_charged(row: Mapping[str, Any]) -> bool:
    """Whether the call is what the attempt was charged as: other code may have changed it since."""
    if row["a.rule"] != row["c.rule"] or row["a.key"] != row["c.key"]:
        return False
    charged, costs = row["a.cost"], row["c.cost"]
    return charged == costs or repr(charged) == repr(costs)  # NaN, of other code, is not itself


def _read_clock(
    using: str, rows: Sequence[Mapping[str, Any]], before: Mono
) -> tuple[Reading, datetime]:
    """(The rows' reading, or without rows a new one, narrowed; since when the clock is steady.)"""
    if rows:
        shown = [rows[0][name] for name in ledger_time.READING_COLUMNS]
        reading = ledger_time.reading_of(using, before, *shown)
    else:
        reading = ledger_time.read(using)
    narrowed, steady_from = ledger_time.watch(using).keep_and_narrow(reading)
    return narrowed, from_us(steady_from)


def send_at_by_clock(
    send_at: datetime | None, released_at: datetime, clock: Reading, steady_from: datetime
) -> datetime | None:
    """When to send (None: now): as far ahead as at release; if steady, no later than `send_at`."""
    if send_at is None:
        return None
    latest = from_us(clock.at) + (send_at - released_at)
    return min(send_at, latest) if steady_from <= released_at else latest


def _jobs_of_rows(
    using: str,
    rows: Sequence[Mapping[str, Any]],
    clock: Reading,
    steady_from: datetime,
    lease: float | None,
) -> list[Job]:
    """Each attempt as a job, its send_at by this clock. `lease`: seconds; None: its rule's."""
    config, jobs = conf.current(), list[Job]()
    attempts, calls = tables.CallAttempt, tables.CallQueue
    for row in rows:
        attempt = database.object_from_row(attempts, using, {n: row[at] for n, at in _OF_ATTEMPT})
        call = database.object_from_row(calls, using, {n: row[at] for n, at in _OF_CALL})
        job = Job(attempt, call, clock, config.rules.get(call.rule))
        opens = job.slot_opens_at()
        ahead = 0.0 if opens is None else max(0.0, opens - clock.after)
        seconds = config.begun_lease(job.rule) if lease is None else lease
        job.lease_ends_at = clock.before + ahead + seconds
        job.unfit = _why_unfit(job)
        attempt.send_at = send_at_by_clock(attempt.send_at, attempt.released_at, clock, steady_from)
        jobs.append(job)
    return jobs


def _columns_when_begun(job: Job, worker: str) -> dict[str, Any]:
    """The columns of an attempt that begin writes; sets the worker in the job, too."""
    started_at = from_us(job.clock.at)
    seconds = max(0.0, job.lease_ends_at - job.clock.before)
    job.attempt.worker = worker
    return {
        "pk": job.attempt.id,
        "started_at": started_at,
        "worker": worker,
        "lease_until": started_at + timedelta(seconds=seconds),
    }


# --- Whether it can still be made here


def _why_unfit(job: Job) -> str | None:
    """Why the job cannot be made; None: it can. Gives its call the method that its data names."""
    call, data = job.call, job.call.call_data
    is_readable = isinstance(data, Mapping) and isinstance(data.get("params"), Mapping)
    if is_readable:
        call.method = method_of(data, call.method)
    if call.expires_at_dt is not None and call.expires_at_dt <= from_us(job.clock.wall):
        return EXPIRED
    if job.rule is None:
        return f"the rule {call.rule!r} is not in CALLQUEUE['RULES'] any more"
    if call.failed_count and transitions.is_key_stale(job, from_us(job.clock.wall)):
        return transitions.STALE  # it waited for longer than its backoff: in a hold, or a backlog
    if data == UNREADABLE:
        return (
            "its call_data cannot be read; "
            "is the key that encrypted it missing from ENCRYPTION_KEYS?"
        )
    if not is_readable:
        return "its call_data is no dict with 'method' and 'params'; send would have refused it"
    if call.method not in HTTP_METHODS and call.method not in {*known_methods(), states.PERMIT}:
        return f"there is no handler for the method {call.method!r} any more"
    return None


def import_error_of_hooks(job: Job) -> str | None:
    """Why hooks cannot be imported; None: they can. In no transaction: modules may do anything."""
    for name in ("classify", "settle"):
        path = getattr(job.rule, name)
        try:
            if path is not None:
                imported_hook(path)
        except SoftTimeLimitExceeded:  # it has struck this task, whatever was being read
            raise
        except BaseException as error:
            if why_starved(error):
                return STARVED
            return f"the rule's {name} cannot be imported: {texts.worded(error)}"
    return None


@lru_cache
def imported_hook(path: str | Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = import_string(path) if isinstance(path, str) else path
    return found
