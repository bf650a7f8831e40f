"""The only place that knows database vendors: the clock, row locks, bulk statements, vacuum, row
estimates.

PostgreSQL, MariaDB/MySQL and SQLite behave alike behind these functions. No driver is imported.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, TypeVar

from django.db import (
    InterfaceError,
    InternalError,
    NotSupportedError,
    OperationalError,
    connections,
    models,
    transaction,
)
from django.db.models import Func, QuerySet
from django.db.models.expressions import DatabaseDefault
from django.db.models.sql import Query

from callqueue import conf, events

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
DEADLOCKS = 10  # deadlocks after which a victim gives up
M = TypeVar("M", bound=models.Model)
T = TypeVar("T")
ahead = timedelta(
    0
    # by how much this process sees a later time than the database: a test's, see
    # callqueue.testing.travel
)


class ClockNow(Func):
    """The database's clock, in UTC, at the statement and not at the transaction's beginning."""

    template = "CURRENT_TIMESTAMP"
    output_field = models.DateTimeField()

    def as_postgresql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        later = f" + INTERVAL '{ahead // MICROSECOND} microseconds'" if ahead else ""
        # CLOCK_TIMESTAMP() may differ from row to row, so no index could be used to compare with
        # it.
        return self.as_sql(compiler, connection, template=f"STATEMENT_TIMESTAMP(){later}", **extra)

    def as_mysql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        later = f" + INTERVAL {ahead // MICROSECOND} MICROSECOND" if ahead else ""
        return self.as_sql(compiler, connection, template=f"UTC_TIMESTAMP(6){later}", **extra)

    def as_sqlite(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        later = f", '{ahead.total_seconds():+.6f} seconds'" if ahead else ""
        # six digits, as Django's
        template = f"STRFTIME('%%%%Y-%%%%m-%%%%d %%%%H:%%%%M:%%%%f000', 'NOW'{later})"
        return self.as_sql(compiler, connection, template=template, **extra)


class Slot(Func):
    """Which slot an instant is in, by number from 0: of slots `width` microseconds long, the first
    of which begins at `begin`.
    """

    output_field = models.BigIntegerField()

    def __init__(self, instant: Any, begin: int, width: int, **extra: Any) -> None:
        super().__init__(instant, **extra)
        self.begin, self.width = begin, width

    def as_sql(self, compiler: Any, connection: Any, **extra: Any) -> Any:  # type: ignore[override]
        micros = (
            micros_sql(connection.alias, "\0").replace("%", "%%").replace("\0", "%(expressions)s")
        )
        template = f"(({micros} - {self.begin}) {'DIV' if connection.vendor == 'mysql' else '/'} {self.width})"
        return super().as_sql(compiler, connection, template=template, **extra)


_MICROS = {
    # EXTRACT computes in numeric, which takes longer
    "postgresql": "(DATE_PART('epoch', {0}) * 1000000)::bigint",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {0})",
    # Whole seconds are written without a fraction there.
    "sqlite": "(CAST(STRFTIME('%%s', {0}) AS INTEGER) * 1000000 + CAST(SUBSTR({0} || '.000000', 21, 6) AS INTEGER))",
}


def joined_sql(connection: Any, *parts: str) -> str:
    """Texts and columns as one text; NULL where one of them is."""
    if connection.vendor == "mysql":
        return f"CONCAT({', '.join(parts)})"
    return " || ".join(f"CAST({part} AS text)" for part in parts)


def micros_sql(using: str, instant: str) -> str:
    """An instant as a statement with parameters writes it, in microseconds since the epoch: quicker
    to read than a datetime.
    """
    return _MICROS[connections[using].vendor].format(instant)


def slot_sql(using: str, instant: str, begin: int, width: int) -> str:
    """Which slot of time an instant is in, by number, as a statement with parameters writes it (see
    Slot).
    """
    return f"(({micros_sql(using, instant)} - {begin}) {'DIV' if is_mysql(using) else '/'} {width})"


def json_number_sql(using: str, column: str, name: str) -> tuple[str, list[Any]]:
    """A whole number that a JSON column has under a name, as a statement selects it, and its
    parameters; NULL without one.
    """
    vendor = connections[using].vendor
    if vendor == "postgresql":
        return f"CAST({column} ->> CAST(%s AS text) AS bigint)", [name]
    extracted = f"JSON_EXTRACT({column}, %s)"
    sql = (
        f"CAST(JSON_UNQUOTE({extracted}) AS SIGNED)"
        if vendor == "mysql"
        else f"CAST({extracted} AS INTEGER)"
    )
    return sql, ["$." + json.dumps(name, ensure_ascii=False)]


def loaded(value: Any) -> Any:
    """JSON, from what the driver returned for its column."""
    return json.loads(value) if isinstance(value, str | bytes) else value


def clock(using: str) -> datetime:
    """The database's clock now, aware. On SQLite that is this host's, and costs no statement."""
    connection = connections[using]
    if connection.vendor == "sqlite":
        return datetime.now(UTC) + ahead
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT CLOCK_TIMESTAMP()"
            if connection.vendor == "postgresql"
            else "SELECT UTC_TIMESTAMP(6)"
        )
        now: datetime = cursor.fetchone()[0]
    return (now if now.tzinfo else now.replace(tzinfo=UTC)) + ahead


def to_us(instant: datetime) -> int:
    """An aware datetime as whole microseconds since the epoch."""
    return (instant - EPOCH) // timedelta(microseconds=1)


def from_us(instant: int) -> datetime:
    """Whole microseconds since the epoch as an aware datetime."""
    return EPOCH + timedelta(microseconds=instant)


def rows(using: str, sql: str, params: Sequence[Any] = ()) -> list[Any]:
    """What a statement of this app's own returns: for those that run at every pass, where building
    a queryset would show.
    """
    with connections[using].cursor() as cursor:
        cursor.execute(sql, params)
        found: list[Any] = cursor.fetchall()
        return found


class Columns:
    """Columns of joined tables, by alias, as a statement of this app's own selects them and their
    fields understand them.
    """

    def __init__(
        self, using: str, tables: Mapping[str, tuple[type[models.Model], Sequence[str]]]
    ) -> None:
        self.using, connection = using, connections[using]
        self.names: list[str] = []
        self._converters: list[tuple[int, Any, Any]] = []
        self._listed = listed = list[tuple[str, str, Any]]()
        for alias, (model, names) in tables.items():
            for name in names:
                field: Any = model._meta.get_field(name)
                column = field.get_col(alias)
                listed.append(
                    (
                        alias,
                        connection.ops.quote_name(column.target.column),
                        getattr(field, "selected", None),
                    )
                )
                own = [
                    *connection.ops.get_db_converters(column),
                    *column.get_db_converters(connection),
                ]
                self._converters += [(len(self.names), converter, column) for converter in own]
                self.names.append(f"{alias}.{name}")

    @property
    def sql(self) -> str:
        """The columns; what may be sealed with its row's identity, where there are keys."""
        own = conf.current().encryption_keys
        connection = connections[self.using]
        return ", ".join(
            f"{alias}.{name}" if selected is None or not own else selected(connection, alias)
            for alias, name, selected in self._listed
        )

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[list[Any]]:
        """What the statement returns, which selects these columns first."""
        connection, found = (
            connections[self.using],
            [list(row) for row in rows(self.using, sql, params)],
        )
        for row in found:
            for place, converter, column in self._converters:
                row[place] = converter(row[place], column, connection)
        return found

    def mapped(self, sql: str, params: Sequence[Any], *more: str) -> list[dict[str, Any]]:
        """The same by the columns' names, "alias.name"; `more` names what the statement selects
        after them.
        """
        names = [*self.names, *more]
        return [dict(zip(names, row, strict=True)) for row in self.rows(sql, params)]


def clock_sql(using: str) -> str:
    """The database's clock as a statement of this app's own selects it; NULL on SQLite, whose own
    shows milliseconds only.

    On PostgreSQL it is read when the row is: not before the row was locked, where it had to wait
    for that.
    """
    return _clock_sql(using, ahead)


@lru_cache
def _clock_sql(using: str, ahead: timedelta) -> str:
    if connections[using].vendor == "sqlite":
        return "NULL"
    if connections[using].vendor == "postgresql":
        return "CLOCK_TIMESTAMP()" + (
            f" + INTERVAL '{ahead // MICROSECOND} microseconds'" if ahead else ""
        )
    return str(Query(None).get_compiler(using).compile(ClockNow())[0])


def run(using: str, sql: str, params: Sequence[Any] = ()) -> int:
    """Run a statement of this app's own that returns no rows; the count of rows it changed."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql, params)
        return int(cursor.rowcount)


def places(values: Sequence[Any]) -> str:
    """The placeholders of a list of values: "%s, %s"."""
    return ", ".join(["%s"] * len(values))


def quoted(using: str, name: str) -> str:
    """A table's or column's name, quoted."""
    return str(connections[using].ops.quote_name(name))


def instant_us(value: Any) -> int:
    """Microseconds from what a driver returned for an instant: aware, naive in UTC, or text."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return to_us(value if value.tzinfo else value.replace(tzinfo=UTC))


def skip_locked(using: str) -> str:
    """What makes a SELECT lock its rows and pass over locked ones, on this database."""
    features = connections[using].features
    if not features.has_select_for_update:
        return ""
    return (
        " FOR UPDATE SKIP LOCKED" if features.has_select_for_update_skip_locked else " FOR UPDATE"
    )


def sharing(using: str) -> str:
    """What makes a SELECT keep its rows from being locked by others, who may share them, until the
    transaction ends.
    """
    return {"postgresql": " FOR KEY SHARE", "mysql": " LOCK IN SHARE MODE"}.get(
        connections[using].vendor, ""
    )


def is_mysql(using: str) -> bool:
    """Whether the database is MariaDB or MySQL, whose SELECT wants a table even where none is
    read.
    """
    return connections[using].vendor == "mysql"


def in_transaction(using: str) -> bool:
    """Whether this thread is inside a transaction on the database."""
    return bool(connections[using].in_atomic_block)


def is_nested(using: str) -> bool:
    """Whether the transaction that this thread is in is inside another."""
    return bool(connections[using].savepoint_ids)


def as_parameter(using: str, instant: datetime) -> Any:
    """An aware datetime as this database takes it in a statement written by hand."""
    return connections[using].ops.adapt_datetimefield_value(instant)


# MySQL's for a packet too large, and for text that the column's character set has not: mysqlclient
# calls them operational.
_OF_VALUES = {1153, 1366}


def may_pass(error: BaseException) -> bool:
    """Whether what failed may be written as it is later: the database is away, busy, locked or
    read-only. What is wrong with the values themselves (DataError, IntegrityError, ValueError, ...)
    stays wrong.
    """
    is_passing = isinstance(error, OperationalError | InterfaceError | InternalError)
    return is_passing and not _OF_VALUES.intersection(
        code for code in error.args if isinstance(code, int)
    )


@contextmanager
def writing(using: str) -> Iterator[None]:
    """A transaction that writes. On SQLite it takes the write lock at once, so that no later
    statement can deadlock.
    """
    connection: Any = connections[using]
    if connection.vendor != "sqlite" or connection.in_atomic_block:
        with transaction.atomic(using=using):
            yield
        return
    # which sets transaction_mode: a thread's first statement may be this one
    connection.ensure_connection()
    mode, connection.transaction_mode = connection.transaction_mode, "IMMEDIATE"
    try:
        with transaction.atomic(using=using):
            connection.transaction_mode = mode
            yield
    finally:
        connection.transaction_mode = mode


def again_after_deadlock(using: str, work: Callable[[], T]) -> T:
    """Do work that is a transaction of its own, and again where the database chose it as a
    deadlock's victim, undone whole.

    InnoDB locks gaps in a unique index, so that no order of ours keeps clear of others' there.
    Inside of a transaction of the application's, which is undone with it, the error is the
    application's.
    """
    for _ in range(0 if in_transaction(using) else DEADLOCKS):
        try:
            return work()
        except OperationalError as error:
            code = getattr(error.__cause__, "sqlstate", None) or getattr(
                error.__cause__, "pgcode", None
            )  # psycopg 3's name, and 2's
            if error.args[:1] != (_DEADLOCK,) and code != "40P01":
                raise
    return work()


def without_waiting_for_disk(using: str) -> str:
    """Put at the end of a statement that changes rows, it lets the transaction's commit return
    before it is on disk, where that can be: a crash soon after may undo it, whole.
    """
    if connections[using].vendor == "postgresql":
        return " RETURNING set_config('synchronous_commit', 'off', true)"
    return ""


PAUSES = 0.02, 2.0  # seconds before the third try, and the longest between two


def persist(using: str, work: Callable[[], T], *, during: str, seconds: float = 10.0) -> T:
    """What `work` returns; done anew, whole, where the database went away under it or would not
    have it beside other work.

    For work that may be repeated although it was done: the answer to a commit may be lost. At once
    on a new connection, then with growing pauses, until so many seconds have passed since it first
    failed. Inside somebody else's transaction it is done once: what broke that stays broken.
    """
    end, pause = math.inf, 0.0
    while True:
        try:
            return work()
        except Exception as error:
            end = min(end, time.monotonic() + seconds)
            if not may_pass(error) or in_transaction(using) or time.monotonic() + pause >= end:
                raise
            if pause == PAUSES[0]:
                events.tell("database_away", during=during, error=type(error).__name__)
        connections[using].close()
        time.sleep(pause)
        pause = min(PAUSES[1], max(PAUSES[0], 2 * pause))


def close_failed() -> None:
    """Close this thread's connections that have failed, so that whoever asks next has new ones."""
    for connection in connections.all(initialized_only=True):
        connection.close_if_unusable_or_obsolete()


def close_all() -> None:
    """Close all of this thread's connections, those apart that are in a transaction."""
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()


_kept: dict[tuple[int, str], list[Any]] = {}  # by process and alias, the one used last at the end


@contextmanager
def kept_connection(using: str) -> Iterator[None]:
    """Keep a connection from one message to the next, whatever thread or greenlet that one comes
    to.

    Celery closes every connection of Django's after every task; setting one up again costs more
    than the statements of a call. What it does not see it does not close. A connection that failed
    is dropped, and so is that of a block that raised: a time limit may have struck in the middle of
    an answer. One that died meanwhile shows at its first statement (`persist`). Not inside a
    transaction.
    """
    stored = _kept.setdefault((os.getpid(), using), [])
    if connections[using].in_atomic_block or connections[using].vendor == "sqlite":
        yield
        return
    with suppress(IndexError):
        kept = stored.pop()
        connections[using].close()
        connections[using] = kept
    connection = connections[using]
    if connection.connection is not None and connection.errors_occurred:
        connection.close()
    try:
        yield
    except BaseException:
        connection.close()
        raise
    else:
        if (
            connections[using] is connection
            and not connection.in_atomic_block
            and not connection.errors_occurred
        ):
            connection.close_at = None
            if not connection.allow_thread_sharing:
                connection.inc_thread_sharing()
            del connections[using]
            stored.append(connection)


@contextmanager
def locking(using: str) -> Iterator[None]:
    """A transaction for `locked` rows, which ends with the block; nothing on a database that has no
    row locks.
    """
    with (
        transaction.atomic(using=using)
        if connections[using].features.has_select_for_update
        else nullcontext()
    ):
        yield


def locked(rows: QuerySet[M], *, wait: bool = False) -> QuerySet[M]:
    """Lock the rows that nobody else has locked and pass over the rest; with `wait`, wait for all
    of them.
    """
    features = connections[rows.db].features
    if not features.has_select_for_update:
        return rows
    if wait or not features.has_select_for_update_skip_locked:
        return rows.select_for_update()
    return rows.select_for_update(skip_locked=True)


def free_ids(using: str, table: str, ids: str) -> str:
    """A query that locks the rows of these ids (as `listed` gives them) that nobody else has
    locked, and gives their ids.
    """
    return f"SELECT id FROM {table} WHERE id IN ({ids}) ORDER BY id{skip_locked(using)}"


def within_idle_seconds(using: str, seconds: int) -> str:
    """Selected by a transaction's first statement, it lets the server end the transaction once its
    process has been silent for so long: one that is frozen must not hold its rules for ever. Of
    this transaction only; "" where there is no such thing, and where the transaction is somebody
    else's, who may be silent for as long as he likes.
    """
    if connections[using].vendor == "postgresql" and not connections[using].savepoint_ids:
        return f", set_config('idle_in_transaction_session_timeout', '{seconds}s', true)"
    return ""


def update_each(
    model: type[models.Model],
    using: str,
    rows: Sequence[Mapping[str, Any]],
    where: str = "",
    params: Sequence[Any] = (),
    *,
    before: str = "",
) -> int:
    """Update many rows by primary key with values of their own, in one statement; the count of rows
    changed.

    Each row maps field names to values and has "pk"; all have the same names in the same order.
    `where` is a further condition on columns of the table, in SQL of this app's own, its values in
    `params`. In MariaDB the count leaves out rows that already had the values. `before` is put
    before the statement.
    """
    if not rows:
        return 0
    connection = connections[using]
    names = ("pk", *(name for name in rows[0] if name != "pk"))
    shape = _shape(using, model, names)
    values = [[row[name] for name in names] for row in rows]
    for i, field in shape.sealed:
        for one in values:
            one[i] = field.bound(one[i], one[0])
    update = _update_sql(using, model, names, where)
    if connection.vendor == "postgresql":
        source, bound = shape.recordset(connection, values)
    else:
        bound = [
            f.get_db_prep_save(v, connection)
            for one in values
            for f, v in zip(shape.fields, one, strict=True)
        ]
        source = _listed_rows(connection.vendor, len(shape.fields), len(values))
    with connection.cursor() as cursor:
        cursor.execute(before + update.replace(_SOURCE, source, 1), [*bound, *params])
        if cursor.rowcount >= 0:
            return int(cursor.rowcount)
        cursor.execute("SELECT CHANGES()")  # sqlite3 counts no statement that begins with WITH
        return int(cursor.fetchone()[0])


def update_free(
    model: type[models.Model],
    using: str,
    records: Sequence[Mapping[str, Any]],
    where: str,
    params: Sequence[Any] = (),
) -> int:
    """`update_each`, passing over rows that somebody else has locked; not for PostgreSQL, whose
    UPDATE can do so by itself.
    """
    connection: Any = connections[using]
    if connection.vendor == "sqlite" or not records:
        return update_each(model, using, records, where, params)
    if connection.mysql_is_mariadb and not connection.in_atomic_block:
        try:
            return update_each(model, using, records, where, params, before=_NO_WAIT)
        except OperationalError as error:
            if error.args[:1] != (_LOCK_WAIT_TIMEOUT,):
                raise
    with writing(using):
        sql = free_ids(
            using, quoted(using, model._meta.db_table), listed(record["pk"] for record in records)
        )
        free = {pk for (pk,) in rows(using, sql)}
        return update_each(
            model, using, [record for record in records if record["pk"] in free], where, params
        )


# MariaDB only, and for this one statement
_NO_WAIT = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "
_LOCK_WAIT_TIMEOUT, _DEADLOCK = 1205, 1213
_SOURCE = "{source}"


@lru_cache(maxsize=256)
def _update_sql(using: str, model: type[models.Model], names: tuple[str, ...], where: str) -> str:
    """The statement of `update_each`, with a place for the rows: `v.v0` is the primary key, `v.v1`
    and on the values.
    """
    connection, shape = connections[using], _shape(using, model, names)
    quote = connection.ops.quote_name
    key, *columns = [quote(field.column) for field in shape.fields]
    # As a CASE the condition fits no partial index: rows are found by their keys, not by reading
    # all that it is true of.
    table, condition = (
        quote(model._meta.db_table),
        f" AND CASE WHEN {where} THEN 1 ELSE 0 END = 1" if where else "",
    )
    own = "t." if connection.vendor == "mysql" else ""
    sets = ", ".join(f"{own}{column} = v.v{i}" for i, column in enumerate(columns, start=1))
    if connection.vendor == "postgresql":
        return f"UPDATE {table} AS t SET {sets} FROM {_SOURCE} WHERE t.{key} = v.v0{condition}"
    if connection.vendor == "mysql":
        # Each row by its key: reading a small table whole would wait for rows that concern nobody
        # here.
        return f"UPDATE {_SOURCE} STRAIGHT_JOIN {table} t FORCE INDEX (PRIMARY) ON t.{key} = v.v0 SET {sets} WHERE 1 = 1{condition}"
    listed = ", ".join(f"v{i}" for i in range(len(shape.fields)))
    return f"WITH v ({listed}) AS ({_SOURCE}) UPDATE {table} AS t SET {sets} FROM v WHERE t.{key} = v.v0{condition}"


def _listed_rows(vendor: str, width: int, count: int) -> str:
    """So many rows of so many parameters, as a table where there are no recordsets."""
    if vendor != "mysql":
        return "VALUES " + ", ".join(["(" + ", ".join(["%s"] * width) + ")"] * count)
    first = "SELECT " + ", ".join(f"%s AS v{i}" for i in range(width))
    return (
        "("
        + " UNION ALL ".join([first, *["SELECT " + ", ".join(["%s"] * width)] * (count - 1)])
        + ") v"
    )


def delete_each(model: type[models.Model], using: str, pks: Sequence[int]) -> int:
    """Delete rows by primary key, with nothing that Django would look for beside them; the count of
    them.
    """
    table = quoted(using, model._meta.db_table)
    if not is_mysql(using):
        return run(using, f"DELETE FROM {table} WHERE id IN ({listed(pks)})")
    gone = 0
    for at in range(0, len(pks), 500):  # as in `_update_sql`: each by its key
        ids = " UNION ALL ".join(f"SELECT {int(pk)} AS id" for pk in pks[at : at + 500])
        gone += run(
            using,
            f"DELETE t FROM ({ids}) v STRAIGHT_JOIN {table} t FORCE INDEX (PRIMARY) ON t.id = v.id",
        )
    return gone


def insert_each(
    model: type[models.Model], using: str, records: Sequence[Mapping[str, Any]]
) -> list[int | None]:
    """Insert rows, field names to values, in one statement; their primary keys, in the same order.

    Every field without a database default is to be given. A database that does not return what it
    inserts gives None for each.
    """
    connection = connections[using]
    if connection.vendor != "postgresql" or not records:
        return [
            made.pk
            for made in model._default_manager.using(using).bulk_create(
                [model(**record) for record in records]
            )
        ]
    return [
        pk for (pk,) in _inserted(connection, model, tuple(records[0]), records, [model._meta.pk])
    ]


def returns_updated(using: str) -> bool:
    """Whether an UPDATE can return columns of all tables that it joins."""
    return connections[using].vendor == "postgresql"


def returns_inserted(using: str) -> bool:
    """Whether rows that are inserted together get their primary keys: MySQL, unlike MariaDB, does
    not say.
    """
    return bool(connections[using].features.can_return_rows_from_bulk_insert)


def passes_over_conflicts(using: str) -> bool:
    """Whether `insert_objects` knows `unless_there` here. A conflict that a snapshot hides is a
    serialization error then.
    """
    return connections[using].vendor == "postgresql"


def insert_objects(
    model: type[M], using: str, objects: Sequence[M], *, batch_size: int, unless_there: bool = False
) -> Sequence[M]:
    """As bulk_create, for models that need nothing of what makes it slow: no inheritance, no given
    keys. Those inserted.

    `unless_there`: of a single object, where no unique index refuses it.
    """
    made: list[M] = []
    connection = connections[using]
    fields: list[Any] = [field for field in model._meta.concrete_fields if not field.primary_key]
    for at in range(0, len(objects), batch_size):
        batch = objects[at : at + batch_size]
        left_out = [
            f
            for f in fields
            if f.has_db_default() and all(_is_default(getattr(o, f.attname)) for o in batch)
        ]
        given = [field for field in fields if field not in left_out]
        mixed = any(
            hasattr(getattr(o, f.attname), "resolve_expression")
            for f in given
            if f.has_db_default()
            for o in batch
        )
        if connection.vendor != "postgresql" or mixed:
            made += model._default_manager.using(using).bulk_create(batch)
            continue
        back = [model._meta.pk, *left_out]
        names = tuple(field.name for field in given)
        records = [{field.name: getattr(one, field.attname) for field in given} for one in batch]
        for field in given:
            if hasattr(field, "bound"):
                for one, record in zip(batch, records, strict=True):
                    record[field.name] = field.bound(
                        record[field.name], getattr(one, field.bound_to)
                    )
        found = _inserted(
            connection,
            model,
            names,
            records,
            back,
            " ON CONFLICT DO NOTHING" if unless_there else "",
        )
        batch = batch[: len(found)]
        for one, values in zip(batch, found, strict=True):
            for field, value in zip(back, values, strict=True):
                setattr(one, field.attname, value)
            one._state.adding, one._state.db = False, using
        made += batch
    return made


def _is_default(value: Any) -> bool:
    return isinstance(value, DatabaseDefault)


def _inserted(
    connection: Any,
    model: type[M],
    names: tuple[str, ...],
    records: Sequence[Mapping[str, Any]],
    back: Sequence[Any],
    conflicts: str = "",
) -> list[Any]:
    """Insert rows into PostgreSQL; the columns asked for, of each in turn."""
    quote, shape = connection.ops.quote_name, _shape(connection.alias, model, names)
    source, values = shape.recordset(connection, [list(record.values()) for record in records])
    columns = ", ".join(quote(field.column) for field in shape.fields)
    given = ", ".join(f"v.v{i}" for i in range(len(names)))
    returned = ", ".join(quote(field.column) for field in back)
    sql = f"INSERT INTO {quote(model._meta.db_table)} ({columns}) SELECT {given} FROM {source}{conflicts} RETURNING {returned}"
    return rows(connection.alias, sql, values)


def listed(ids: Iterable[int]) -> str:
    """Integers as a statement lists them; binding hundreds of them one by one takes longer than
    finding their rows.
    """
    return ", ".join(str(int(one)) for one in ids) or "NULL"


@dataclass(frozen=True)
class _Shape:
    """Some fields of a model, as rows of values are written: asking Django for their types takes
    longer than writing them.
    """

    fields: tuple[Any, ...]
    unready: tuple[
        tuple[int, Any], ...
    ]  # the fields whose values are prepared before they are written as JSON
    names: tuple[str, ...]
    types: str
    sealed: tuple[
        tuple[int, Any], ...
    ]  # those that are bound to their row, where it is known by its primary key

    def recordset(self, connection: Any, listed: Sequence[list[Any]]) -> tuple[str, list[Any]]:
        """The rows as PostgreSQL reads them from one parameter: binding each value apart would cost
        as much again.
        """
        for one in listed:
            for i, field in self.unready:
                one[i] = _bare(field.get_db_prep_save(one[i], connection))
        document = json.dumps(
            [dict(zip(self.names, one, strict=True)) for one in listed], default=str
        )
        # The limit is for the planner, who would expect 100 rows and read a small table whole to
        # find them.
        source = f"(SELECT * FROM json_to_recordset(CAST(%s AS json)) AS r({self.types}) LIMIT {len(listed)}) AS v"
        return source, [document]


@lru_cache(maxsize=256)
def _shape(using: str, model: type[models.Model], names: tuple[str, ...]) -> _Shape:
    """The fields of these names ("pk" is the primary key), in this order."""
    connection = connections[using]
    fields: list[Any] = [
        model._meta.pk if name == "pk" else model._meta.get_field(name) for name in names
    ]
    unready = tuple((i, field) for i, field in enumerate(fields) if type(field) not in _PLAIN)
    columns = tuple(f"v{i}" for i in range(len(fields)))
    types = ""
    if connection.vendor == "postgresql":
        types = ", ".join(
            f"{column} {field.rel_db_type(connection)}"
            for column, field in zip(columns, fields, strict=True)
        )
    sealed = tuple(
        (i, field)
        for i, field in enumerate(fields)
        if getattr(field, "bound_to", "") == model._meta.pk.name
    )
    return _Shape(tuple(fields), unready, columns, types, sealed)


# What needs no preparation to be written as JSON.
_PLAIN = (
    *(
        models.BigAutoField,
        models.BigIntegerField,
        models.PositiveIntegerField,
        models.PositiveSmallIntegerField,
    ),
    *(
        models.SmallIntegerField,
        models.ForeignKey,
        models.BooleanField,
        models.CharField,
        models.TextField,
    ),
    *(models.DateTimeField, models.UUIDField, models.JSONField),
)


def _bare(value: Any) -> Any:
    """What a driver's wrapper of JSON wraps: psycopg's Jsonb, psycopg2's Json."""
    return getattr(value, "obj", getattr(value, "adapted", value))


def distinct_next(
    using: str,
    table: str,
    column: str,
    where: str,
    params: Sequence[Any],
    *,
    after: Any,
    down: bool,
    count: int,
) -> list[Any]:
    """The next `count` distinct values of a column past `after` among the rows that `where` picks,
    in order.

    PostgreSQL steps from value to value in the index, so that the cost depends on `count` and not
    on the rows; MariaDB does the same by itself for DISTINCT; SQLite reads the index. `where` is
    SQL of this app's own, its values in `params`.
    """
    connection = connections[using]
    name, table = connection.ops.quote_name(column), connection.ops.quote_name(table)
    than, order = ("<", "DESC") if down else (">", "ASC")
    if connection.vendor == "postgresql":
        first = f"SELECT {name} FROM {table} WHERE {where} AND {name} {than} %s ORDER BY {name} {order} LIMIT 1"
        step = f"SELECT c.{name} FROM {table} c WHERE {where} AND c.{name} {than} k.v ORDER BY c.{name} {order} LIMIT 1"
        sql = (
            f"WITH RECURSIVE k(v) AS (({first}) UNION ALL SELECT ({step}) FROM k WHERE k.v IS NOT NULL) "
            "SELECT v FROM k WHERE v IS NOT NULL LIMIT %s"
        )
        values = [*params, after, *params, count]
    else:
        sql = f"SELECT DISTINCT {name} FROM {table} WHERE {where} AND {name} {than} %s ORDER BY {name} {order} LIMIT %s"
        values = [*params, after, count]
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return [row[0] for row in cursor.fetchall()]


def pairs_next(
    using: str,
    table: str,
    first: str,
    second: str,
    where: str,
    params: Sequence[Any],
    after: tuple[Any, Any],
    count: int,
) -> list[tuple[Any, Any]]:
    """The next `count` distinct pairs of two columns past `after` among the rows that `where`
    picks: the first column downward, the second upward. As `distinct_next`, it steps from pair to
    pair in the index.
    """
    connection = connections[using]
    one, two, table = (connection.ops.quote_name(name) for name in (first, second, table))
    same = f"SELECT c.{one} AS a, c.{two} AS b FROM {table} c WHERE {where} AND c.{one} = {{a}} AND c.{two} > {{b}}"
    lower = f"SELECT c.{one} AS a, c.{two} AS b FROM {table} c WHERE {where} AND c.{one} < {{a}}"
    orders = f" ORDER BY c.{two} LIMIT 1", f" ORDER BY c.{one} DESC, c.{two} LIMIT 1"
    if connection.vendor == "postgresql":
        step = f"({same}{orders[0]}) UNION ALL ({lower}{orders[1]}) LIMIT 1".format(
            a="k.a", b="k.b"
        )
        begin = f"({same}{orders[0]}) UNION ALL ({lower}{orders[1]}) LIMIT 1".format(a="%s", b="%s")
        sql = f"WITH RECURSIVE k(a, b) AS (({begin}) UNION ALL SELECT n.a, n.b FROM k CROSS JOIN LATERAL ({step}) n) "
        values = [*params, *after, *params, after[0], *params, *params, count]
        return [(a, b) for a, b in rows(using, f"{sql}SELECT a, b FROM k LIMIT %s", values)]
    found = rows(
        using, same.format(a="%s", b="%s").replace("SELECT", "SELECT DISTINCT") + f" ORDER BY c.{two} LIMIT %s",
        [*params, *after, count],
    )  # fmt: skip
    if len(found) < count:
        sql = (
            lower.format(a="%s").replace("SELECT", "SELECT DISTINCT")
            + f" ORDER BY c.{one} DESC, c.{two} LIMIT %s"
        )
        found = [*found, *rows(using, sql, [*params, after[0], count - len(found)])]
    return [(a, b) for a, b in found]


def first_of_each(
    using: str,
    table: str,
    columns: tuple[str, str],
    where: str,
    params: Sequence[Any],
    order: str,
    counts: Mapping[tuple[Any, Any], int],
) -> list[tuple[tuple[Any, Any], int]]:
    """For each pair of values of two columns the first so many rows in `order`: (pair, id), a
    pair's rows together.

    Reads no more rows than it returns. `where` and `order` are SQL of this app's own.
    """
    connection = connections[using]
    one, two, table = (connection.ops.quote_name(name) for name in (*columns, table))
    found: list[tuple[tuple[Any, Any], int]] = []
    items = list(counts.items())
    for start in range(0, len(items), 200):
        chunk = items[start : start + 200]
        if connection.vendor == "postgresql":
            listed = ", ".join(["(%s, %s, %s)"] * len(chunk))
            sql = (
                f"SELECT v.a, v.b, c.id FROM (VALUES {listed}) AS v(a, b, n) CROSS JOIN LATERAL "
                f"(SELECT id FROM {table} WHERE {where} AND {one} = v.a AND {two} = v.b ORDER BY {order} LIMIT v.n) c"
            )
            values = [part for (a, b), count in chunk for part in (a, b, count)] + list(params)
        else:
            select = f"SELECT %s AS a, %s AS b, id FROM {table} WHERE {where} AND {one} = %s AND {two} = %s ORDER BY {order}"
            sql = " UNION ALL ".join([f"SELECT * FROM ({select} LIMIT %s) x"] * len(chunk))
            values = [part for (a, b), count in chunk for part in (a, b, *params, a, b, count)]
        found += [((a, b), pk) for a, b, pk in rows(using, sql, values)]
    return found


def vacuum(using: str, tables: Sequence[str], *, full: bool = False) -> None:
    """Make deleted rows' space usable again. `full` rewrites the tables, locked against all use
    meanwhile.
    """
    connection = connections[using]
    names = [connection.ops.quote_name(table) for table in tables]
    if connection.vendor == "postgresql":
        # A vacuum takes the pages of indexes that it found empty out of use, and only the next one
        # lets them be used again (PostgreSQL's nbtree/README, "Placing deleted pages in the FSM").
        # That one finds little else to do.
        after = [] if full else [f"VACUUM {name}" for name in names]
        statements = [
            f"VACUUM ({'FULL, ' if full else ''}ANALYZE) {name}" for name in names
        ] + after
    elif connection.vendor == "mysql":
        statements = [f"{'OPTIMIZE' if full else 'ANALYZE'} TABLE {name}" for name in names]
    else:
        statements = ["VACUUM" if full else "PRAGMA optimize"]
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
            if connection.vendor == "mysql":
                cursor.fetchall()


_FULL_VACUUM = """
    SELECT c.relname, p.phase, CASE WHEN p.phase = 'rebuilding index' THEN p.index_rebuild_count ELSE p.heap_blks_scanned END,
        CASE WHEN p.phase = 'rebuilding index' THEN (SELECT COUNT(*) FROM pg_index i WHERE i.indrelid = p.relid)
            ELSE p.heap_blks_total END
    FROM pg_stat_progress_cluster p JOIN pg_class c ON c.oid = p.relid WHERE p.datname = current_database()"""
_PLAIN_VACUUM = """
    SELECT c.relname, p.phase, CASE WHEN p.phase = 'vacuuming heap' THEN p.heap_blks_vacuumed ELSE p.heap_blks_scanned END,
        p.heap_blks_total
    FROM pg_stat_progress_vacuum p JOIN pg_class c ON c.oid = p.relid WHERE p.datname = current_database()"""


def vacuum_progress(
    using: str, tables: Sequence[str], *, full: bool = False
) -> tuple[str, str, int, int] | None:
    """Of a vacuum that runs elsewhere: table, phase, and how many of how many blocks (indexes,
    while those are rebuilt).

    None where none runs, or the database does not show it.
    """
    if connections[using].vendor != "postgresql":
        return None
    found = rows(
        using,
        f"{_FULL_VACUUM if full else _PLAIN_VACUUM} AND c.relname IN ({places(tables)})",
        list(tables),
    )
    return next(
        ((table, phase, int(done), int(total)) for table, phase, done, total in found), None
    )


def estimated_rows(using: str, table: str) -> int | None:
    """About how many rows a table has, without reading it; None where the database keeps no
    estimate.
    """
    connection = connections[using]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT reltuples::bigint FROM pg_class WHERE oid = %s::regclass", [table]
            )
        elif connection.vendor == "mysql":
            cursor.execute(
                "SELECT table_rows FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = %s",
                [table],
            )
        else:
            return None
        row = cursor.fetchone()
    return int(row[0]) if row and row[0] is not None and row[0] >= 0 else None


def sample_of(using: str, table: str, percent: float) -> str | None:
    """The table as FROM takes it, reading so many percent of its pages, always the same; None where
    none can be left out.
    """
    connection = connections[using]
    if connection.vendor != "postgresql":
        return None
    return f"{connection.ops.quote_name(table)} TABLESAMPLE SYSTEM ({percent:.6f}) REPEATABLE (1)"


def dead_rows(using: str, tables: Sequence[str]) -> dict[str, tuple[int, int]] | None:
    """Deleted rows that still take space, and live ones, of each table; None where the database
    keeps no such count.
    """
    connection = connections[using]
    if connection.vendor != "postgresql":
        return None
    sql = f"SELECT relname, n_dead_tup, n_live_tup FROM pg_stat_user_tables WHERE relname IN ({places(tables)})"
    return {name: (int(dead), int(live)) for name, dead, live in rows(using, sql, list(tables))}


def look_at_what_changed(using: str, tables: Sequence[str]) -> None:
    """Let PostgreSQL count anew what is in the tables that changed by a fifth since it last did:
    its plans go by that.

    Autovacuum does it within a minute; but it may be switched off, or behind after a bulk load.
    """
    if connections[using].vendor != "postgresql":
        return
    sql = f"SELECT relname, n_live_tup, n_mod_since_analyze FROM pg_stat_user_tables WHERE relname IN ({places(tables)})"
    for table, live, changed in rows(using, sql, list(tables)):
        if changed > 10_000 + live // 5:
            run(using, f"ANALYZE {quoted(using, table)}")


def is_standby(using: str) -> bool:
    """Whether this is a copy that follows another server, and may lag behind it."""
    return connections[using].vendor == "postgresql" and bool(
        rows(using, "SELECT pg_is_in_recovery()")[0][0]
    )


def connect_within(using: str, seconds: int) -> None:
    """Let connecting to the database's server take no longer than this, unless the settings say how
    long it may take.
    """
    connection = connections[using]
    if connection.vendor != "sqlite":
        connection.settings_dict.setdefault("OPTIONS", {}).setdefault("connect_timeout", seconds)


_STORAGE = {
    # Every call is updated three times in its life: room on the page, and a vacuum that comes by
    # the thousand rows.
    "callqueue_callqueue": "fillfactor = 80, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 2000, "
    "autovacuum_analyze_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 1",
    "callqueue_callattempt": "fillfactor = 80, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 2000, "
    "autovacuum_analyze_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 1",
    "callqueue_rulestate": "fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200",
}
# MariaDB and MySQL have no partial indexes: these stand in for those that Django leaves out there
_WHOLE_INDEXES = {
    "callqueue_ready": ("callqueue_callqueue", "rule, ready, priority DESC, due_at_dt, id, status"),
    "callqueue_ready_by_key": (
        "callqueue_callqueue",
        "rule, ready, priority, `key`, due_at_dt, id, status",
    ),
    "callqueue_later": ("callqueue_callqueue", "status, ready, due_at_dt"),
    "callqueue_expiring": ("callqueue_callqueue", "status, expires_at_dt"),
    "callqueue_finished": ("callqueue_callqueue", "status, finished_at_dt"),
    "callqueue_callbacks": ("callqueue_callqueue", "callback_pending, id"),
    "callqueue_unique_key": ("callqueue_callqueue", "unique_key"),
    "callqueue_key": ("callqueue_callqueue", "`key`, id"),
    "callqueue_open": ("callqueue_callattempt", "finished_at, rule"),
    "callqueue_aging": ("callqueue_callattempt", "rule, finished_at"),
    "callqueue_aging_by_key": ("callqueue_callattempt", "rule, `key`, finished_at"),
}


_NEW_STORAGE = {  # of tables that came later
    "callqueue_tally": "fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 500",
    "callqueue_keyturn": "fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 500",
}
_NEW_WHOLE_INDEXES = {
    "callqueue_turns_blocked": ("callqueue_keyturn", "rule, blocked_until"),
    "callqueue_corrections": ("callqueue_callattempt", "correction_pending, rule"),
}


def tune_new_tables(schema_editor: Any) -> None:
    """The same for what came later: tallies, turns of keys, corrections."""
    vendor = schema_editor.connection.vendor
    if vendor == "postgresql":
        for table, options in _NEW_STORAGE.items():
            schema_editor.execute(f"ALTER TABLE {table} SET ({options})")
    elif vendor == "mysql":
        for name, (table, columns) in _NEW_WHOLE_INDEXES.items():
            schema_editor.execute(f"CREATE INDEX {name} ON {table} ({columns})")


def tune_tables(schema_editor: Any) -> None:
    """What Django's migrations cannot say: storage and a partial unique index on PostgreSQL, whole
    indexes on MariaDB.
    """
    vendor = schema_editor.connection.vendor
    if vendor == "postgresql":
        for table, options in _STORAGE.items():
            schema_editor.execute(f"ALTER TABLE {table} SET ({options})")
        # Most calls have no key of their own: as a constraint it would hold a NULL for each of
        # them, three times in its life.
        schema_editor.execute(
            "ALTER TABLE callqueue_callqueue DROP CONSTRAINT callqueue_active_key"
        )
        schema_editor.execute(
            "CREATE UNIQUE INDEX callqueue_active_key ON callqueue_callqueue (active_key) WHERE active_key IS NOT NULL"
        )
    elif vendor == "mysql":
        for name, (table, columns) in _WHOLE_INDEXES.items():
            schema_editor.execute(f"CREATE INDEX {name} ON {table} ({columns})")


# Collations that compare text by its characters, trailing spaces too: MariaDB's, and MySQL's from
# 8.0.17 on.
_BY_CHARACTER = ("utf8mb4_nopad_bin", "utf8mb4_0900_bin")


def tell_text_apart(schema_editor: Any, tables: Sequence[str]) -> None:
    """Let MariaDB and MySQL compare the text of these tables by its characters: by default `A`, `a`
    and `a ` are one key there.

    NotSupportedError where the server cannot: it would take one key for another.
    """
    connection = schema_editor.connection
    if connection.vendor != "mysql":
        return
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT collation_name FROM information_schema.collations WHERE collation_name IN ({places(_BY_CHARACTER)})",
            list(_BY_CHARACTER),
        )
        there = [name for (name,) in cursor.fetchall()]
        if not there:
            raise NotSupportedError(
                "callqueue wants MariaDB 10.6 or MySQL 8.0.17: an older MySQL takes 'a' and 'a ' for one key"
            )
        cursor.execute(
            # a table that is right is not written anew
            "SELECT table_name FROM information_schema.tables"
            f" WHERE table_schema = DATABASE() AND table_collation <> %s AND table_name IN ({places(tables)})",
            [there[0], *tables],
        )
        wrong = [name for (name,) in cursor.fetchall()]
    for table in wrong:
        schema_editor.execute(
            f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE {there[0]}"
        )


CHANNEL = "callqueue_sent"
# the advisory lock that an idle dispenser holds; a number that nobody else will choose
_FLAG = 6_015_403_886_170_112_257
TOLD = 8  # rules that a statement's word names; where it sent calls of more, it names none
_WAKE = (
    f"""CREATE OR REPLACE FUNCTION callqueue_wake() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        rules text[];
    BEGIN
        IF NOT pg_try_advisory_xact_lock_shared({_FLAG}) THEN
            rules := ARRAY(SELECT DISTINCT rule FROM sent WHERE ready LIMIT {TOLD + 1});
            IF cardinality(rules) > {TOLD} THEN rules := ARRAY['']; END IF;
            PERFORM pg_notify('{CHANNEL}', rule) FROM unnest(rules) AS rule;
        END IF;
        RETURN NULL;
    END $$""",
    "DROP TRIGGER IF EXISTS callqueue_wake ON callqueue_callqueue",
    "CREATE TRIGGER callqueue_wake AFTER INSERT ON callqueue_callqueue REFERENCING NEW TABLE AS sent "
    "FOR EACH STATEMENT EXECUTE FUNCTION callqueue_wake()",
)


def let_calls_wake(schema_editor: Any) -> None:
    """On PostgreSQL, let inserted calls notify a dispenser that sleeps. While none does, a sender
    takes a shared lock.
    """
    if schema_editor.connection.vendor == "postgresql":
        for statement in _WAKE:
            schema_editor.execute(statement)


def let_calls_be_silent(schema_editor: Any) -> None:
    """Undo `let_calls_wake`."""
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute("DROP TRIGGER IF EXISTS callqueue_wake ON callqueue_callqueue")
        schema_editor.execute("DROP FUNCTION IF EXISTS callqueue_wake()")


def raw_connection(using: str) -> Any:
    """The driver's connection of this thread; None where there is none now."""
    return connections[using].connection


def start_listening(using: str) -> bool:
    """Hear of calls that are sent. False where that cannot be: another vendor, a transaction, or a
    pooler in between.
    """
    connection = connections[using]
    raw = connection.connection
    if connection.vendor != "postgresql" or connection.in_atomic_block or raw is None:
        return False
    if (
        rows(using, "SELECT pg_backend_pid()")[0][0] != raw.info.backend_pid
    ):  # a pooler lends us another session each time
        return False
    run(using, f"LISTEN {CHANNEL}")
    return True


def stop_listening(using: str) -> None:
    """Hear of them no more."""
    run(using, f"UNLISTEN {CHANNEL}")


def raise_flag(using: str) -> bool:
    """From now on senders notify; False where another dispenser's flag is up, or a sender has not
    committed yet.
    """
    return bool(rows(using, f"SELECT pg_try_advisory_lock({_FLAG})")[0][0])


def lower_flag(using: str) -> None:
    """From now on senders are silent."""
    rows(using, f"SELECT pg_advisory_unlock({_FLAG})")


def wait_for_word(using: str, seconds: float) -> set[str]:
    """Wait so long for the server to say anything at all: the rules that senders named; "" where it
    may be about any.

    Empty where nothing was said. Raises Django's errors, not the driver's, where the connection is
    gone.
    """
    raw = connections[using].connection
    with connections[using].wrap_database_errors:
        with selectors.DefaultSelector() as selector:
            selector.register(raw.fileno(), selectors.EVENT_READ)
            if not selector.select(seconds):
                return set()
        if callable(raw.notifies):
            said = {word.payload for word in raw.notifies(timeout=0)}
        else:
            raw.poll()
            said = {word.payload for word in raw.notifies}
            del raw.notifies[:]
    return said or {""}
