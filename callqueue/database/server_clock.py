"""The database's clock: the only clock whose instants the app compares.

`clock` reads it, `clock_sql` and `ClockNow` read it within a statement. Instants leave as aware
datetimes, or as whole microseconds since the epoch. `ahead` is the testing kit's: every reading of
this process is later by it (see callqueue.testing.travel).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from django.db import connections, models
from django.db.models import Func
from django.db.models.sql import Query
from django.utils.deconstruct import deconstructible

from callqueue.clocks import Us

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
# Read it and set it in this module only: a copy that was imported does not follow.
ahead = timedelta(0)


def clock(using: str) -> datetime:
    """The database's clock now, aware. On SQLite that is this host's, and costs no statement."""
    connection = connections[using]
    if connection.vendor == "sqlite":
        return datetime.now(UTC) + ahead
    is_postgresql = connection.vendor == "postgresql"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {'CLOCK_TIMESTAMP()' if is_postgresql else 'UTC_TIMESTAMP(6)'}")
        now: datetime = cursor.fetchone()[0]
    return (now if now.tzinfo else now.replace(tzinfo=UTC)) + ahead


def clock_sql(using: str) -> str:
    """The database's clock, for a handwritten SELECT. NULL on SQLite, whose clock in SQL has
    milliseconds only.

    PostgreSQL reads it for each row, after it waited for the row's lock.
    """
    return _clock_sql(using, ahead)


@lru_cache
def _clock_sql(using: str, ahead: timedelta) -> str:
    vendor = connections[using].vendor
    if vendor == "sqlite":
        return "NULL"
    if vendor == "postgresql":
        return f"CLOCK_TIMESTAMP(){_postgresql_interval(ahead)}"
    return str(Query(None).get_compiler(using).compile(ClockNow())[0])


# The path that migrations name.
@deconstructible(path="callqueue.database.ClockNow")
class ClockNow(Func):
    """The database's clock in UTC when the statement begins, not when the transaction began."""

    template = "CURRENT_TIMESTAMP"
    output_field = models.DateTimeField()

    def as_postgresql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        # CLOCK_TIMESTAMP() may differ from row to row, so that no index could be compared with it.
        template = f"STATEMENT_TIMESTAMP(){_postgresql_interval(ahead)}"
        return self.as_sql(compiler, connection, template=template, **extra)

    def as_mysql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        later = f" + INTERVAL {ahead // MICROSECOND} MICROSECOND" if ahead else ""
        return self.as_sql(compiler, connection, template=f"UTC_TIMESTAMP(6){later}", **extra)

    def as_sqlite(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        later = f", '{ahead.total_seconds():+.6f} seconds'" if ahead else ""
        # Six digits of a second, as Django writes them.
        template = f"STRFTIME('%%%%Y-%%%%m-%%%%d %%%%H:%%%%M:%%%%f000', 'NOW'{later})"
        return self.as_sql(compiler, connection, template=template, **extra)


def _postgresql_interval(ahead: timedelta) -> str:
    return f" + INTERVAL '{ahead // MICROSECOND} microseconds'" if ahead else ""


# --- Instants as numbers


def to_us(instant: datetime) -> Us:
    """An aware datetime as whole microseconds since the epoch."""
    return Us((instant - EPOCH) // MICROSECOND)


def from_us(instant: Us) -> datetime:
    """Whole microseconds since the epoch as an aware datetime."""
    return EPOCH + timedelta(microseconds=instant)


def instant_us(value: Any) -> Us:
    """Microseconds since the epoch from what a driver returned: a datetime, else UTC, or text."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return to_us(value if value.tzinfo else value.replace(tzinfo=UTC))


def as_parameter(using: str, instant: datetime) -> Any:
    """An aware datetime as a parameter of a handwritten statement."""
    return connections[using].ops.adapt_datetimefield_value(instant)


_MICROS = {
    # EXTRACT computes in numeric, which takes longer.
    "postgresql": "(DATE_PART('epoch', {0}) * 1000000)::bigint",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {0})",
    # SQLite has whole seconds without a fraction.
    "sqlite": (
        "(CAST(STRFTIME('%%s', {0}) AS INTEGER) * 1000000"
        " + CAST(SUBSTR({0} || '.000000', 21, 6) AS INTEGER))"
    ),
}


def micros_sql(using: str, instant: str) -> str:
    """SQL, for a statement with parameters: an instant in microseconds since the epoch. A number is
    quicker to read than a datetime.
    """
    return _MICROS[connections[using].vendor].format(instant)


def slot_sql(using: str, instant: str, begin: int, width: int) -> str:
    """SQL, for a statement with parameters: the number of the time slot that an instant is in.

    Slot 0 begins at `begin`; every slot is `width` long, both in microseconds.
    """
    divided = "DIV" if connections[using].vendor == "mysql" else "/"
    return f"(({micros_sql(using, instant)} - {begin}) {divided} {width})"
