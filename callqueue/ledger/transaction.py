"""The two transactions in which states are written, and the policy by which they are done again.

Whoever writes an instant that counts takes `transaction`: the clock is read in it, and nobody moves
the ledger before it ends. Whoever writes none (cancel, requeue, void, holds' ends) takes `untimed`:
it may wait for an application's rows, which nobody may with the ledger's frame in hand. A jump of
the clock and a deadlock are dealt with here; a database that is away is the caller's
(`database.persist`), since he knows for how long it may be waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from django.db import OperationalError

from callqueue import database
from callqueue.clocks import Reading
from callqueue.database import from_us
from callqueue.ledger import clock_jumps, rule_rows

T = TypeVar("T")
LOOKS = 20  # at a clock that jumps again and again, before it is taken for a database that is away


@dataclass(frozen=True)
class Locked:
    """What a transaction has in hand: the clock, and by primary key the status and the last attempt
    of the calls that it has locked.
    """

    reading: Reading
    calls: Mapping[int, tuple[int, int]]

    @property
    def now(self) -> datetime:
        """The database's clock."""
        return from_us(self.reading.at)


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
                locked = Locked(clock_jumps.held(using, lazily=lazily), {})
            else:
                free, reading = rule_rows.calls_to_end(using, calls)
                locked = Locked(reading, free)
            clock_jumps.check(using, locked.reading)
            return work(locked)

    for _ in range(LOOKS):
        try:
            return database.again_after_deadlock(using, once)
        except clock_jumps.Jumped:
            clock_jumps.watch(using).settle()
    raise OperationalError("the database's clock cannot be followed")


def untimed(using: str, work: Callable[[], T]) -> T:
    """What `work` returns, done in a transaction, and again, whole, where it was a deadlock's
    victim. Part of the application's transaction, where there is one.
    """

    def once() -> T:
        with database.writing(using):
            return work()

    return database.again_after_deadlock(using, once)
