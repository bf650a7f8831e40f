"""What each vendor has other words for than the others; statements, the locks that they take and
the transactions that they run in; and reads that step through an index from value to value, so that
they cost what they return and not what the table holds ("skip scans").

In all scans `where` and `order` are SQL of this app's own, with their values in `params`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from django.db import OperationalError, connections, models, transaction
from django.db.models import Q, QuerySet

from callqueue import conf

M = TypeVar("M", bound=models.Model)
T = TypeVar("T")
TOGETHER = 250  # SELECTs that one statement joins; SQLite joins 500
DEADLOCKS = 10  # times that a victim tries again
_MYSQL_DEADLOCK, _POSTGRESQL_DEADLOCK = 1213, "40P01"
_IN_ERROR = 3  # psycopg, and psycopg2, of a transaction that an error has undone


@dataclass(frozen=True)
class Dialect:
    """A vendor's SQL. MariaDB and MySQL speak alike. `{0}`, `{1}`: expressions, or a number."""

    name: str
    # the clock in UTC as of this row, after it waited for the row's lock; and later by microseconds
    clock: str
    later: str
    micros: str  # of an instant since the epoch
    divided: str  # of whole numbers
    position: str  # f(text, part): where it begins, 0 where nowhere
    joined: str  # a text, a value, a text and a text as one text; NULL where one of them is
    number: str  # the whole number at a place (the parameter) in a JSON column, or NULL
    vacuum: tuple[str, ...]  # of a table, one after the other
    vacuum_full: tuple[str, ...]
    sharing: str = ""  # at the end of a SELECT: others may share its rows, and nobody may lock them
    # a column of a SELECT: the transaction's commit returns before it is on disk; and the server
    # ends the transaction once its process has been silent for so many seconds
    lazily: str = ""
    silent: str = ""

    def json_path(self, name: str) -> str:
        return name if self.name == "postgresql" else "$." + json.dumps(name, ensure_ascii=False)


_ALL = (
    Dialect(
        "postgresql",
        clock="CLOCK_TIMESTAMP()",
        later=" + INTERVAL '{0} microseconds'",
        micros="(DATE_PART('epoch', {0}) * 1000000)::bigint",  # EXTRACT's numeric takes longer
        divided="/",
        position="strpos",
        joined="{0} || CAST({1} AS text) || {2} || {3}",
        number="CAST({0} ->> CAST(%s AS text) AS bigint)",
        vacuum=("VACUUM (ANALYZE) {0}", "VACUUM {0}"),
        vacuum_full=("VACUUM (FULL, ANALYZE) {0}",),
        sharing=" FOR KEY SHARE",
        lazily=", set_config('synchronous_commit', 'off', true)",
        silent=", set_config('idle_in_transaction_session_timeout', '{0}s', true)",
    ),
    Dialect(
        "mysql",
        clock="UTC_TIMESTAMP(6)",
        later=" + INTERVAL {0} MICROSECOND",
        micros="TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {0})",
        divided="DIV",
        position="instr",
        joined="CONCAT({0}, {1}, {2}, {3})",
        number="CAST(JSON_UNQUOTE(JSON_EXTRACT({0}, %s)) AS SIGNED)",
        vacuum=("ANALYZE TABLE {0}",),
        vacuum_full=("OPTIMIZE TABLE {0}",),
        sharing=" LOCK IN SHARE MODE",
    ),
    Dialect(
        "sqlite",
        clock="NULL",  # it has milliseconds only
        later="",
        micros=(  # whole seconds come without a fraction
            "(CAST(STRFTIME('%%s', {0}) AS INTEGER) * 1000000"
            " + CAST(SUBSTR({0} || '.000000', 21, 6) AS INTEGER))"
        ),
        divided="/",
        position="instr",
        joined="{0} || CAST({1} AS text) || {2} || {3}",
        number="CAST(JSON_EXTRACT({0}, %s) AS INTEGER)",
        vacuum=("PRAGMA optimize",),
        vacuum_full=("VACUUM",),
    ),
)
_BY_VENDOR = {one.name: one for one in _ALL}


def dialect(using: str) -> Dialect:
    """The dialect of a database that may have this app's tables; a project may have others."""
    return _BY_VENDOR[connections[using].vendor]


def is_postgresql(using: str) -> bool:
    return str(connections[using].vendor) == "postgresql"


def is_mysql(using: str) -> bool:
    return str(connections[using].vendor) == "mysql"


def is_sqlite(using: str) -> bool:
    return str(connections[using].vendor) == "sqlite"


# --- Statements


def rows(using: str, sql: str, params: Sequence[Any] = ()) -> list[Any]:
    """Run a statement; all the rows that it returns."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql, params)
        found: list[Any] = cursor.fetchall()
        return found


def union_all(using: str, selects: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
    """What these SELECTs return, each with its parameters, TOGETHER of them in a statement."""
    found: list[Any] = []
    for chunk in (selects[at : at + TOGETHER] for at in range(0, len(selects), TOGETHER)):
        sql = " UNION ALL ".join(select for select, _ in chunk)
        found += rows(using, sql, [value for _, params in chunk for value in params])
    return found


def run(using: str, sql: str, params: Sequence[Any] = ()) -> int:
    """Run a statement that returns no rows; the count of rows that it changed."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql, params)
        return int(cursor.rowcount)


class Columns:
    """Columns of joined tables, by alias: the SQL that selects them, and their values as read."""

    def __init__(
        self, using: str, tables: Mapping[str, tuple[type[models.Model], Sequence[str]]]
    ) -> None:
        self.using = using
        self.names: list[str] = []
        # alias, quoted name, and of a sealed column what selects it
        self._listed: list[tuple[str, str, Any]] = []
        self._converters: list[tuple[int, Any, Any]] = []  # place, converter, column
        for alias, (model, names) in tables.items():
            for name in names:
                self._add_column(alias, name, model._meta.get_field(name))

    def _add_column(self, alias: str, name: str, field: Any) -> None:
        connection, column = connections[self.using], field.get_col(alias)
        quoted_name = connection.ops.quote_name(column.target.column)
        self._listed.append((alias, quoted_name, getattr(field, "selected_sql", None)))
        converters = [
            *connection.ops.get_db_converters(column),
            *column.get_db_converters(connection),
        ]
        place = len(self.names)
        self._converters += [(place, converter, column) for converter in converters]
        self.names.append(f"{alias}.{name}")

    @property
    def sql(self) -> str:
        """The columns. With encryption keys, a sealed one comes with its row's identity."""
        own = conf.current().encryption_keys
        connection = connections[self.using]
        return ", ".join(
            f"{alias}.{name}" if selected is None or not own else selected(connection, alias)
            for alias, name, selected in self._listed
        )

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[list[Any]]:
        connection = connections[self.using]
        found = [list(row) for row in rows(self.using, sql, params)]
        for row in found:
            for place, converter, column in self._converters:
                row[place] = converter(row[place], column, connection)
        return found

    def rows_by_name(self, sql: str, params: Sequence[Any], *more: str) -> list[dict[str, Any]]:
        """All rows by the columns' names, "alias.name"; `more` names what else is selected."""
        names = [*self.names, *more]
        return [dict(zip(names, row, strict=True)) for row in self.rows(sql, params)]

    def rows_of_update(
        self, update: str, params: Sequence[Any], source: str
    ) -> list[dict[str, Any]]:
        """Run an UPDATE of locked rows; these by name. `source`: FROM and WHERE that find them."""
        if is_postgresql(self.using):
            return self.rows_by_name(f"{update} RETURNING {self.sql}", params)
        run(self.using, update, params)
        return self.rows_by_name(f"SELECT {self.sql} {source}", ())


def json_value(value: Any) -> Any:
    """The value of a JSON column, which some drivers give as text."""
    return json.loads(value) if isinstance(value, str | bytes) else value


@cache
def quoted(using: str, name: str) -> str:
    return str(connections[using].ops.quote_name(name))


def placeholders(values: Sequence[Any]) -> str:
    return ", ".join(["%s"] * len(values))


def listed(ids: Iterable[int]) -> str:
    """Integers as SQL lists them, NULL for none: quicker than to bind hundreds one by one."""
    return ", ".join(str(int(one)) for one in ids) or "NULL"


def json_number_sql(using: str, column: str, name: str) -> tuple[str, list[Any]]:
    """SQL with parameters: the whole number under a name in a JSON column, or NULL."""
    words = dialect(using)
    return words.number.format(column), [words.json_path(name)]


def locked(rows: QuerySet[M], *, wait: bool = False) -> QuerySet[M]:
    """The rows, locked where rows can be: those that nobody else has locked; with `wait`, all."""
    features = connections[rows.db].features
    if not features.has_select_for_update:
        return rows
    return rows.select_for_update(
        skip_locked=features.has_select_for_update_skip_locked and not wait
    )


def skip_locked_sql(using: str) -> str:
    """SQL for the end of a SELECT: lock its rows, pass over locked ones; where a database can."""
    features = connections[using].features
    if not features.has_select_for_update:
        return ""
    return (
        " FOR UPDATE SKIP LOCKED" if features.has_select_for_update_skip_locked else " FOR UPDATE"
    )


def lock_ids_if_free_sql(using: str, table: str, ids: str) -> str:
    """A SELECT that locks those of these ids (as `listed` writes them) that nobody has locked."""
    return f"SELECT id FROM {table} WHERE id IN ({ids}) ORDER BY id{skip_locked_sql(using)}"


def in_transaction(using: str) -> bool:
    return bool(connections[using].in_atomic_block)


def in_any_transaction() -> bool:
    return any(one.in_atomic_block for one in connections.all(initialized_only=True))


def is_nested(using: str) -> bool:
    """Whether the transaction that this thread is in is inside another."""
    return bool(connections[using].savepoint_ids)


@contextmanager
def writing(using: str) -> Iterator[None]:
    """A transaction that writes, or a savepoint in one. SQLite's takes the write lock at once, to
    deadlock with nobody. OperationalError where it was undone in between, unseen.
    """
    connection: Any = connections[using]
    if connection.in_atomic_block:
        with transaction.atomic(using=using):
            yield
        return
    atomic = transaction.atomic(using=using)
    with _sqlite_transaction(connection, "IMMEDIATE") if is_sqlite(using) else atomic:
        yield
        if _is_undone(connection):
            raise OperationalError("the transaction was undone in between")


@contextmanager
def index_scans(using: str) -> Iterator[None]:
    """A transaction whose reads go by an index wherever there is one that serves them."""
    # PostgreSQL reads the whole table for rows that it takes for many, which may lie at its end.
    with transaction.atomic(using=using):
        if is_postgresql(using):
            rows(using, "SELECT set_config('enable_seqscan', 'off', true)")
        yield
        # What is set ends with this transaction, not with a request's around it.
        transaction.set_rollback(True, using=using)


def _is_undone(connection: Any) -> bool:
    """Whether the transaction is undone, by an error that was swallowed or with its connection."""
    # Django would say that it is committed, and so would a server.
    raw = connection.connection
    if connection.needs_rollback or connection.closed_in_transaction or raw is None:
        return True
    if connection.vendor == "sqlite":
        return not raw.in_transaction
    return connection.vendor == "postgresql" and bool(raw.info.transaction_status == _IN_ERROR)


@contextmanager
def one_snapshot(using: str) -> Iterator[None]:
    """Statements that only read, and see what was committed before the first of them: so nothing
    that changes between two of them is counted by both, or by none. Inside a transaction of the
    caller's they see what it lets them see.
    """
    connection: Any = connections[using]
    if connection.in_atomic_block or not connection.get_autocommit():
        yield
    elif is_sqlite(using):
        with _sqlite_transaction(connection, "DEFERRED"):
            yield
    elif is_mysql(using):
        _set_repeatable_read(connection)  # the next transaction
        with transaction.atomic(using=using):
            yield
    else:
        with transaction.atomic(using=using):
            _set_repeatable_read(connection)
            yield


def _set_repeatable_read(connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")


@contextmanager
def _sqlite_transaction(connection: Any, mode: str) -> Iterator[None]:
    """A transaction that SQLite begins in this mode."""
    # Connecting sets transaction_mode, and a thread's first statement may be this one.
    connection.ensure_connection()
    usual, connection.transaction_mode = connection.transaction_mode, mode
    try:
        with transaction.atomic(using=connection.alias):
            connection.transaction_mode = usual
            yield
    finally:
        connection.transaction_mode = usual


def again_after_deadlock(using: str, work: Callable[[], T]) -> T:
    """Do `work`, a transaction of its own; again, up to DEADLOCKS times, where a deadlock undid it.
    Inside a transaction of the application's, all of which is undone, the error is raised.
    """
    # InnoDB locks gaps in a unique index, so that no order of ours keeps clear of others' there.
    for _ in range(0 if in_transaction(using) else DEADLOCKS):
        try:
            return work()
        except OperationalError as error:
            if not _is_deadlock(error):
                raise
    return work()


def _is_deadlock(error: OperationalError) -> bool:
    cause = error.__cause__
    # psycopg 3's, and 2's
    code = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    return error.args[:1] == (_MYSQL_DEADLOCK,) or code == _POSTGRESQL_DEADLOCK


def lazy_commit_sql(using: str) -> str:
    """SQL for the end of a statement that changes rows: the commit returns before it is on disk, so
    a crash soon after may undo it, whole. "" on other databases than PostgreSQL.
    """
    return dialect(using).lazily.replace(",", " RETURNING", 1)


def idle_timeout_sql(using: str, seconds: int) -> str:
    """SQL after the columns of a transaction's first SELECT: the server ends the transaction once
    its process is silent for so long; a frozen one must not keep locks for ever. "" on other
    databases than PostgreSQL, and inside somebody else's transaction, which may be silent.
    """
    return "" if is_nested(using) else dialect(using).silent.format(seconds)


def set_idle_timeout(using: str, seconds: int) -> None:
    """Have the server end this transaction as `idle_timeout_sql` says, where it can."""
    if sql := idle_timeout_sql(using, seconds):
        rows(using, f"SELECT 1{sql}")


PAIRS_A_STATEMENT = 200
LAST_CHARACTER = "\U0010ffff"


def begins_with(using: str, column: str, text: str) -> Q:
    """A condition on a text column, as an index on it can use it: it begins with this text."""
    if is_postgresql(using):
        return Q(**{f"{column}__startswith": text})
    return Q(**{f"{column}__gte": text, f"{column}__lt": text + LAST_CHARACTER})


def next_distinct(
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
    """The next `count` distinct values of a column past `after`, in order, of the rows of `where`.

    PostgreSQL is told to step from value to value; MariaDB does so itself; SQLite reads the index.
    """
    name, table = quoted(using, column), quoted(using, table)
    than, order = ("<", "DESC") if down else (">", "ASC")
    if not is_postgresql(using):
        sql = (
            f"SELECT DISTINCT {name} FROM {table} WHERE {where} AND {name} {than} %s"
            f" ORDER BY {name} {order} LIMIT %s"
        )
        return [value for (value,) in rows(using, sql, [*params, after, count])]
    step = (
        f"SELECT c.{name} FROM {table} c WHERE {where} AND c.{name} {than} {{after}}"
        f" ORDER BY c.{name} {order} LIMIT 1"
    )
    sql = (
        f"WITH RECURSIVE k(v) AS (({step.format(after='%s')})"
        f" UNION ALL SELECT ({step.format(after='k.v')}) FROM k WHERE k.v IS NOT NULL)"
        " SELECT v FROM k WHERE v IS NOT NULL LIMIT %s"
    )
    return [value for (value,) in rows(using, sql, [*params, after, *params, count])]


def distinct_pairs_sql(
    using: str,
    table: str,
    columns: tuple[str, str],
    where: str,
    params: Sequence[Any],
    *,
    after: tuple[Any, Any],
    count: int,
) -> tuple[str, list[Any]]:
    """A SELECT of distinct pairs (a, b) of two columns, in order, stepped as in `next_distinct`."""
    one, two, table = (quoted(using, name) for name in (*columns, table))
    select = f"SELECT c.{one} AS a, c.{two} AS b FROM {table} c WHERE {where}"
    if not is_postgresql(using):
        past = f"(c.{one} > %s OR (c.{one} = %s AND c.{two} > %s))"
        sql = f"{select} AND {past} ORDER BY a, b LIMIT {int(count)}"
        return sql.replace("SELECT", "SELECT DISTINCT", 1), [*params, after[0], *after]
    step = f"{select} AND (c.{one}, c.{two}) > {{after}} ORDER BY c.{one}, c.{two} LIMIT 1"
    sql = (
        f"WITH RECURSIVE k(a, b) AS (({step.format(after='(%s, %s)')}) UNION ALL"
        f" SELECT n.a, n.b FROM k CROSS JOIN LATERAL ({step.format(after='(k.a, k.b)')}) n)"
        f" SELECT a, b FROM k LIMIT {int(count)}"
    )
    return sql, [*params, *after, *params]


def first_ids_of_each(
    using: str,
    table: str,
    columns: tuple[str, str],
    where: str,
    params: Sequence[Any],
    order: str,
    counts: Mapping[tuple[Any, Any], int],
) -> list[tuple[tuple[Any, Any], int]]:
    """The first rows in `order` of each pair of values, as many as `counts` says: (pair, id)."""
    one, two, table = (quoted(using, name) for name in (*columns, table))
    is_lateral = is_postgresql(using)
    matching = f"FROM {table} WHERE {where} AND {one} = {{a}} AND {two} = {{b}} ORDER BY {order}"
    found: list[tuple[tuple[Any, Any], int]] = []
    items = list(counts.items())
    for start in range(0, len(items), PAIRS_A_STATEMENT):
        chunk = items[start : start + PAIRS_A_STATEMENT]
        if is_lateral:
            listed = ", ".join(["(%s, %s, %s)"] * len(chunk))
            sql = (
                f"SELECT v.a, v.b, c.id FROM (VALUES {listed}) AS v(a, b, n) CROSS JOIN LATERAL"
                f" (SELECT id {matching.format(a='v.a', b='v.b')} LIMIT v.n) c"
            )
            values = [part for (a, b), count in chunk for part in (a, b, count)] + list(params)
        else:
            select = f"SELECT %s AS a, %s AS b, id {matching.format(a='%s', b='%s')} LIMIT %s"
            sql = " UNION ALL ".join([f"SELECT * FROM ({select}) x"] * len(chunk))
            values = [part for (a, b), count in chunk for part in (a, b, *params, a, b, count)]
        found += [((a, b), pk) for a, b, pk in rows(using, sql, values)]
    return found
