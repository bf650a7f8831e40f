"""The two transactions in which states are written, the policy by which they are done again, and
who locks which rows in them, in what order, and who waits: in one place, so that no two
transactions can wait for each other.

Whoever writes an instant that counts takes `transaction`: the clock is read in it, and nobody moves
the ledger before it ends. Whoever writes none (cancel, requeue, void, holds' ends) takes `untimed`:
it may wait for an application's rows, which nobody may with the ledger's frame in hand. A jump of
the clock and a deadlock are dealt with here; a database that is away is the caller's
(`database.persist`), since he knows for how long it may be waited for.

Whoever acts for the application (cancel, requeue) may wait: for calls first, as an application that
has selected a call for update does by itself, then for their attempts, each in the order of their
primary keys. Everybody else (dispensers, workers, recovery, cleanup) waits for no call: one that
somebody has locked is passed over, and its turn comes later.

Rows are locked by their primary keys alone, and judged afterwards: with a condition in the
statement, MariaDB and MySQL may go by another index, lock its entries first, and wait for a row
while others wait for the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import OperationalError

from callqueue import clocks, database, tables
from callqueue.clocks import Reading
from callqueue.database import from_us
from callqueue.ledger import ledger_time
from callqueue.states import Move

if TYPE_CHECKING:
    from callqueue.models import CallAttempt, CallQueue

T = TypeVar("T")
LOOKS = 20  # at a clock that jumps again and again, before it is taken for a database that is away


@dataclass(frozen=True)
class Locked:
    """The time; by primary key, the status and last attempt of the calls that it has locked."""

    reading: Reading
    calls: Mapping[int, tuple[int, int]]

    @property
    def now(self) -> datetime:
        """Ledger time."""
        return from_us(self.reading.at)

    @property
    def wall(self) -> datetime:
        """What the database's clock shows."""
        return from_us(self.reading.wall)


def transaction(
    using: str,
    work: Callable[[Locked], T],
    *,
    calls: Sequence[int] | None = None,
    lazily: bool = False,
) -> T:
    """What `work` returns, done in a transaction with these calls locked; and again, whole, where
    the clock has jumped or it was a deadlock's victim. `lazily`: its commit need not wait for the
    disk.
    """

    def once() -> T:
        with database.writing(using):
            if calls is None:
                locked = Locked(ledger_time.held(using, lazily=lazily), {})
            else:
                free, reading = calls_to_end(using, calls, lazily=lazily)
                locked = Locked(reading, free)
            ledger_time.check(using, locked.reading)
            return work(locked)

    return timed(using, once)


def timed(using: str, once: Callable[[], T]) -> T:
    """What `once` returns, a transaction that asks `ledger_time.check`; and again, whole, where the
    clock has jumped or it was a deadlock's victim.
    """
    for _ in range(LOOKS):
        try:
            return database.again_after_deadlock(using, once)
        except ledger_time.Jumped:
            ledger_time.watch(using).settle()
    raise OperationalError("the database's clock cannot be followed")


def untimed(using: str, work: Callable[[], T]) -> T:
    """What `work` returns, done in a transaction, and again, whole, where it was a deadlock's
    victim. Part of the application's transaction, where there is one.
    """

    def once() -> T:
        with database.writing(using):
            return work()

    return database.again_after_deadlock(using, once)


@dataclass(frozen=True)
class Pair:
    """An attempt and its call, locked. None: the call is gone, or waits for another attempt."""

    attempt: CallAttempt
    call: CallQueue | None


def calls_to_change(using: str, pks: Iterable[int], *columns: str) -> list[Any]:
    """Waiting for whoever has them; their keys and these columns. In a transaction."""
    rows = tables.calls(using).filter(pk__in=list(pks)).order_by("pk")
    return list(database.locked(rows, wait=True).values_list("pk", *columns))


def unbegun_of(using: str, call_ids: Iterable[int]) -> list[tuple[int, int, int]]:
    """Lock what no worker has begun of calls that are locked already: (attempt, call, number).

    A begin that is under way is waited for.
    """
    unbegun = tables.attempts(using).unbegun().filter(call_id__in=list(call_ids))
    pks = list(unbegun.values_list("pk", flat=True))
    rows = database.locked(tables.attempts(using).filter(pk__in=pks).order_by("pk"), wait=True)
    found = rows.values_list("pk", "call_id", "number", "started_at", "finished_at")
    return [
        (pk, call, number)
        for pk, call, number, started, finished in found
        if started is None and finished is None
    ]


def calls_to_end(
    using: str, pks: Sequence[int], *, lazily: bool = False
) -> tuple[dict[int, tuple[int, int]], Reading]:
    """Lock these calls, those that nobody else has locked: by primary key (status, last attempt);
    and the clock, as `ledger_time.held` reads it. One statement, where any of them is free.

    To be called in a transaction.
    """
    before, more = clocks.monotonic(), database.dialect(using).lazily if lazily else ""
    found = database.rows(
        using,
        "SELECT id, status, last_attempt, "
        f"{ledger_time.moved_sql(using, held=True)}, {database.clock_sql(using)}{more} "
        f"FROM {tables.name(using, 'CallQueue')} WHERE id IN ({database.listed(pks)}) "
        f"ORDER BY id{database.skip_locked(using)}",
    )
    if found:
        moved, shown = found[0][3:5]
        reading = ledger_time.brought_held(using, before, shown, moved)
    else:
        reading = ledger_time.held(using, lazily=lazily)
    return {pk: (status, last_attempt) for pk, status, last_attempt, *_ in found}, reading


def free_pairs(using: str, attempt_ids: Iterable[int], *, begun: bool) -> list[Pair]:
    """Lock these attempts, those that are open and begun or not, with their calls: the pairs of
    which nobody has locked either.

    To be called in a transaction.
    """
    rows = database.locked(tables.attempts(using).filter(pk__in=list(attempt_ids)).order_by("pk"))
    found = [
        one for one in rows if one.finished_at is None and (one.started_at is not None) == begun
    ]
    wanted = {attempt.call_id for attempt in found}
    calls, busy = _free_calls(using, wanted) if wanted else ({}, set())
    return [
        Pair(attempt, _own(attempt, calls.get(attempt.call_id)))
        for attempt in found
        if attempt.call_id not in busy
    ]


def _free_calls(using: str, pks: set[int]) -> tuple[dict[int, CallQueue], set[int]]:
    listed = tables.calls(using).filter(pk__in=pks)
    free = {call.pk: call for call in database.locked(listed.defer("call_data").order_by("pk"))}
    away = pks - free.keys()
    busy = set(listed.filter(pk__in=away).values_list("pk", flat=True)) if away else set()
    return free, busy


def _own(attempt: CallAttempt, call: CallQueue | None) -> CallQueue | None:
    """The call, where this attempt is the one that it waits for."""
    if call is None or call.last_attempt != attempt.number:
        return None
    return call if call.status in Move.VOID.sources else None
