"""Ledger time: what the database's clock shows, less how far the ledger was moved.

Whatever the ledger compares is written in it: the instants of attempts, holds, opinions, signs of
life, and what passes remember. It goes on as time does, though the clock be set: then the one
number `moved` is changed (`clock_jumps`), and no instant. Appointments are wall time: when a call
is due, or expires, or has ended, and the calendar.

Three ways to the same now, one for each language: `now` in Python, `LedgerNow` in an expression of
the ORM, and the reading that a statement brings along which selects `moved_sql` beside the clock.
The other clock, `database.clock` and `ClockNow`, is wall time.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from django.db.models import F

from callqueue import clocks, database, tables
from callqueue.clocks import Mono, Reading
from callqueue.database import MICROSECOND, ClockNow, from_us, to_us

ROW = 1  # the key of the only row


class LedgerNow(ClockNow):
    """Ledger time when the statement begins: of what any reading would be without a watch."""

    def as_postgresql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        sql, params = super().as_postgresql(compiler, connection, **extra)
        return f"({sql} - {_moved(connection.alias)} * INTERVAL '1 microsecond')", params

    def as_mysql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        sql, params = super().as_mysql(compiler, connection, **extra)
        return f"({sql} - INTERVAL {_moved(connection.alias)} MICROSECOND)", params

    def as_sqlite(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        sql, params = super().as_sqlite(compiler, connection, **extra)
        by = f"PRINTF('%%+.6f seconds', -{_moved(connection.alias)} / 1000000.0)"
        return f"{sql[:-1]}, {by})", params


def now(using: str) -> datetime:
    """Ledger time. One statement."""
    return from_us(read(using).at)


def moved(using: str) -> int:
    """How far the ledger was moved: microseconds. One statement."""
    return tables.ledger_state(using).values_list("moved", flat=True).first() or 0


def of_wall(using: str, instant: datetime) -> datetime:
    """An instant that somebody named, in ledger time. One statement."""
    return instant - moved(using) * MICROSECOND


def to_wall(using: str, instant: datetime) -> datetime:
    """An instant of ledger time as the database's clock shows it. One statement."""
    return instant + moved(using) * MICROSECOND


def moved_sql(using: str, *, held: bool = False) -> str:
    """How far the ledger was moved, as a statement selects it beside the clock: no reading is worth
    anything without it.

    `held`: and nobody moves it until the transaction ends, see `held`; to be selected before the
    clock.
    """
    sharing = database.sharing(using) if held else ""
    return f"(SELECT moved FROM {tables.name(using, 'LedgerState')} WHERE id = {ROW}{sharing})"


def _moved(using: str) -> str:
    return f"COALESCE({moved_sql(using)}, 0)"


def read(using: str) -> Reading:
    """A reading of the database's clock."""
    before = clocks.monotonic()
    [(shown, moved)] = database.rows(
        using, f"SELECT {database.clock_sql(using)}, {moved_sql(using)}"
    )
    return brought(using, before, shown, moved)


def brought(using: str, before: Mono, shown: Any, moved: int | None) -> Reading:
    """The reading that a statement made after `before` brought along. The clock of SQLite, which
    brings none, is this host's.
    """
    wall = to_us(database.clock(using)) if shown is None else database.instant_us(shown)
    return Reading(wall - (moved or 0), before, clocks.monotonic(), moved or 0)


def held(using: str, *, lazily: bool = False) -> Reading:
    """A reading inside a transaction, until whose end nobody moves the ledger: for whoever writes
    an instant that is counted. `lazily`: the commit need not wait for the disk.
    """
    before, more = clocks.monotonic(), database.lazily_sql(using) if lazily else ""
    [(moved, shown, *_)] = database.rows(
        using, f"SELECT {moved_sql(using, held=True)}, {database.clock_sql(using)}{more}"
    )
    return brought_held(using, before, shown, moved)


def brought_held(using: str, before: Mono, shown: Any, moved: int | None) -> Reading:
    """The reading that another statement brought, inside a transaction: with `moved_sql` held."""
    if moved is None:
        make_frame(using)
        return held(using)
    reading = brought(using, before, shown, moved)
    # What MariaDB shows is when the statement began, which may have waited for somebody who moved
    # the ledger.
    waited = reading.after - before > clocks.TOLERANCE / 1_000_000
    return read(using) if waited and database.is_mysql(using) else reading


def move(using: str, reading: Reading, by: int) -> Reading:
    """Set ledger time back by so much, so that it goes on as it did; the reading in that frame.
    With all rules' rows locked, and the frame's.
    """
    tables.ledger_state(using).update(moved=F("moved") + by)
    return replace(reading, at=reading.at - by, moved=reading.moved + by)


def make_frame(using: str) -> None:
    """Make the row that keeps how far the ledger was moved, where it is missing."""
    made = [tables.LedgerState(pk=ROW)]
    tables.ledger_state(using).bulk_create(made, ignore_conflicts=True)
