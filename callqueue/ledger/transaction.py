"""The two transactions in which states are written, done again after a jump or a deadlock, and who
locks which rows in what order: in one place, so that no two can wait for each other.

`transaction`: for whoever writes an instant that counts. Nobody moves the ledger before it ends, so
it must not wait for an application's rows, and where the server can it ends one whose process is
frozen. `untimed_transaction`: for whoever writes none (cancel, requeue, void, holds' ends), and may
wait. A database that is away is the caller's (`database.persist`).

Whoever acts for the application waits for calls first, then for their attempts, by primary key.
Everybody else passes over a call that somebody has locked.

Rows are locked by primary keys alone, and judged afterwards: with a condition, MariaDB and MySQL
may lock another index's entries first, and wait for a row while others wait for the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import OperationalError

from callqueue import clocks, database, tables
from callqueue.clocks import Reading
from callqueue.database import from_us, instant_us
from callqueue.ledger import ledger_time
from callqueue.states import Move

if TYPE_CHECKING:
    from callqueue.models import CallAttempt, CallQueue

T = TypeVar("T")
LOOKS = 20  # at a clock that jumps again and again, before it is taken for a database that is away


@dataclass(frozen=True)
class EndingCall:
    """A call whose attempt ends, as it is by now, locked."""

    status: int
    last_attempt: int
    callback: str | None
    postponed_to: datetime | None  # its due instant, where other code has put that off meanwhile


@dataclass(frozen=True)
class Locked:
    reading: Reading
    calls: Mapping[int, EndingCall]  # by primary key: of those asked for, the ones that were free

    @property
    def now(self) -> datetime:
        return from_us(self.reading.at)

    @property
    def wall(self) -> datetime:
        return from_us(self.reading.wall)


def transaction(
    using: str,
    work: Callable[[Locked], T],
    *,
    calls: Sequence[int] | None = None,
    lazily: bool = False,
) -> T:
    """Do `work` in a transaction, with those of `calls` locked that are free (None: none is); again
    after a jump or a deadlock. `lazily`: its commit returns before it is on disk.
    """

    def once() -> T:
        with database.writing(using):
            if calls is None:
                locked = Locked(ledger_time.read_held(using, lazily=lazily), {})
            else:
                free, reading = lock_calls_to_end(using, calls, lazily=lazily)
                locked = Locked(reading, free)
            ledger_time.check_for_jump(using, locked.reading)
            return work(locked)

    return again_after_jump(using, once)


def again_after_jump(using: str, once: Callable[[], T]) -> T:
    """Do `once`, a transaction that asks `ledger_time.check_for_jump`; again after a jump or a
    deadlock. OperationalError where the clock jumps LOOKS times.
    """
    for _ in range(LOOKS):
        try:
            return database.again_after_deadlock(using, once)
        except ledger_time.Jumped:
            ledger_time.watch(using).settle()
    raise OperationalError("the database's clock cannot be followed")


def untimed_transaction(using: str, work: Callable[[], T]) -> T:
    """Do `work` in a transaction, or in the application's; again after a deadlock."""

    def once() -> T:
        with database.writing(using):
            return work()

    return database.again_after_deadlock(using, once)


@dataclass(frozen=True)
class Pair:
    attempt: CallAttempt
    call: CallQueue | None  # None: it is gone, or waits for another attempt


def lock_calls_to_change(using: str, pks: Iterable[int], *columns: str) -> list[Any]:
    """Lock these calls, waiting for whoever has them; their primary keys and these columns."""
    rows = tables.calls(using).filter(pk__in=list(pks)).order_by("pk")
    return list(database.locked(rows, wait=True).values_list("pk", *columns))


def as_ending(call: CallQueue) -> EndingCall:
    due, released = call.due_at_dt, call.dispatched_at_dt
    is_postponed = released is not None and due > released
    return EndingCall(call.status, call.last_attempt, call.callback, due if is_postponed else None)


def lock_unbegun_of(using: str, call_ids: Iterable[int]) -> list[tuple[int, int, int]]:
    """Lock what nobody has begun of locked calls, after begins: (attempt's id, call's, number)."""
    unbegun = tables.attempts(using).unbegun().filter(call_id__in=list(call_ids))
    pks = list(unbegun.values_list("pk", flat=True))
    rows = database.locked(tables.attempts(using).filter(pk__in=pks).order_by("pk"), wait=True)
    found = rows.values_list("pk", "call_id", "number", "started_at", "finished_at")
    return [
        (pk, call, number)
        for pk, call, number, started, finished in found
        if started is None and finished is None
    ]


def lock_calls_to_end(
    using: str, pks: Sequence[int], *, lazily: bool = False
) -> tuple[dict[int, EndingCall], Reading]:
    """Lock those of these calls that nobody else has; and the clock, as `read_held` does. One
    statement, where any is free. In a transaction.
    """
    before, more = clocks.monotonic(), ledger_time.transaction_end_sql(using, lazily=lazily)
    found = database.rows(
        using,
        "SELECT id, status, last_attempt, callback, "
        "CASE WHEN due_at_dt > dispatched_at_dt THEN due_at_dt END, "
        f"{ledger_time.reading_sql(using, held=True)}{more} "
        f"FROM {tables.name(using, 'CallQueue')} WHERE id IN ({database.listed(pks)}) "
        f"ORDER BY id{database.skip_locked_sql(using)}",
    )
    if found:
        shown = found[0][5 : 5 + len(ledger_time.READING_COLUMNS)]
        reading = ledger_time.held_reading_of(using, before, *shown)
    else:
        reading = ledger_time.read_held(using, lazily=lazily)
    return {
        pk: EndingCall(status, number, callback, None if due is None else from_us(instant_us(due)))
        for pk, status, number, callback, due, *_ in found
    }, reading


def lock_free_pairs(using: str, attempt_ids: Iterable[int], *, begun: bool) -> list[Pair]:
    """Lock open attempts, begun or not, with calls: the pairs of which nobody has locked either."""
    rows = database.locked(tables.attempts(using).filter(pk__in=list(attempt_ids)).order_by("pk"))
    found = [
        one for one in rows if one.finished_at is None and (one.started_at is not None) == begun
    ]
    wanted = {attempt.call_id for attempt in found}
    calls, busy = _lock_free_calls(using, wanted) if wanted else ({}, set())
    return [
        Pair(attempt, _call_waiting_for(attempt, calls.get(attempt.call_id)))
        for attempt in found
        if attempt.call_id not in busy
    ]


def _lock_free_calls(using: str, pks: set[int]) -> tuple[dict[int, CallQueue], set[int]]:
    """Calls that nobody else has locked, and the primary keys of those that somebody has."""
    listed = tables.calls(using).filter(pk__in=pks)
    free = {call.pk: call for call in database.locked(listed.defer("call_data").order_by("pk"))}
    away = pks - free.keys()
    busy = set(listed.filter(pk__in=away).values_list("pk", flat=True)) if away else set()
    return free, busy


def _call_waiting_for(attempt: CallAttempt, call: CallQueue | None) -> CallQueue | None:
    if call is None or call.last_attempt != attempt.number:
        return None
    return call if call.status in Move.VOID.sources else None
