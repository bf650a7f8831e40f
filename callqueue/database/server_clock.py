"""The database's clock: the only clock whose instants the app compares. Instants leave as aware
datetimes, or as whole microseconds since the epoch. `ahead` is the testing kit's.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connections, models
from django.db.models import Func
from django.utils.deconstruct import deconstructible

from callqueue.clocks import Us
from callqueue.database.statements import dialect, is_sqlite, rows

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
# Read it and set it in this module only: a copy that was imported does not follow.
ahead = timedelta(0)


def clock(using: str) -> datetime:
    """The database's clock now, aware. On SQLite that is this host's, and costs no statement."""
    if is_sqlite(using):
        return datetime.now(UTC) + ahead
    now: datetime = rows(using, f"SELECT {dialect(using).clock}")[0][0]
    return (now if now.tzinfo else now.replace(tzinfo=UTC)) + ahead


def clock_sql(using: str) -> str:
    """The database's clock, for a SELECT; NULL on SQLite, whose SQL knows milliseconds only."""
    words = dialect(using)
    return words.clock + (words.later.format(ahead // MICROSECOND) if ahead else "")


# The path that migrations name.
@deconstructible(path="callqueue.database.ClockNow")
class ClockNow(Func):
    """The database's clock in UTC when the statement begins, not when the transaction began."""

    template = "CURRENT_TIMESTAMP"
    output_field = models.DateTimeField()

    def as_postgresql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        # CLOCK_TIMESTAMP() may differ from row to row, so that no index could be compared with it.
        later = f" + INTERVAL '{ahead // MICROSECOND} microseconds'" if ahead else ""
        template = f"STATEMENT_TIMESTAMP(){later}"
        return self.as_sql(compiler, connection, template=template, **extra)

    def as_mysql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        later = f" + INTERVAL {ahead // MICROSECOND} MICROSECOND" if ahead else ""
        return self.as_sql(compiler, connection, template=f"UTC_TIMESTAMP(6){later}", **extra)

    def as_sqlite(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        later = f", '{ahead.total_seconds():+.6f} seconds'" if ahead else ""
        # Six digits of a second, as Django writes them.
        template = f"STRFTIME('%%%%Y-%%%%m-%%%%d %%%%H:%%%%M:%%%%f000', 'NOW'{later})"
        return self.as_sql(compiler, connection, template=template, **extra)


# --- Instants as numbers


def to_us(instant: datetime) -> Us:
    """An aware datetime as whole microseconds since the epoch."""
    return Us((instant - EPOCH) // MICROSECOND)


def from_us(instant: Us) -> datetime:
    """Whole microseconds since the epoch as an aware datetime."""
    return EPOCH + timedelta(microseconds=instant)


def instant_us(value: Any) -> Us:
    """As `to_us`, of what a driver returned: a datetime, in UTC if it is naive, or its text."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return to_us(value if value.tzinfo else value.replace(tzinfo=UTC))


def as_parameter(using: str, instant: datetime) -> Any:
    """An aware datetime as a parameter of a handwritten statement."""
    return connections[using].ops.adapt_datetimefield_value(instant)


def micros_sql(using: str, instant: str) -> str:
    """SQL, for a statement with parameters: an instant in microseconds since the epoch."""
    return dialect(using).micros.format(instant)


def part_sql(using: str, instant: str, begin: int, width: int) -> str:
    """SQL: the number of an instant's part of time, each `width` microseconds long from `begin`."""
    words = dialect(using)
    return f"(({words.micros.format(instant)} - {begin}) {words.divided} {width})"
