"""Transactions: how they begin, how they are done again after a deadlock, and what they ask of the
server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from django.db import OperationalError, connections, transaction

T = TypeVar("T")
DEADLOCKS = 10  # deadlocks after which a victim gives up
_MYSQL_DEADLOCK, _POSTGRESQL_DEADLOCK = 1213, "40P01"


def in_transaction(using: str) -> bool:
    """Whether this thread is inside a transaction on the database."""
    return bool(connections[using].in_atomic_block)


def in_any_transaction() -> bool:
    """Whether this thread is inside a transaction on any database."""
    return any(one.in_atomic_block for one in connections.all(initialized_only=True))


def is_nested(using: str) -> bool:
    """Whether the transaction that this thread is in is inside another."""
    return bool(connections[using].savepoint_ids)


@contextmanager
def writing(using: str) -> Iterator[None]:
    """A transaction that writes. SQLite's takes the write lock at once, to deadlock with nobody."""
    connection: Any = connections[using]
    if connection.vendor != "sqlite" or connection.in_atomic_block:
        with transaction.atomic(using=using):
            yield
        return
    with _in_mode(connection, "IMMEDIATE"):
        yield


@contextmanager
def one_view(using: str) -> Iterator[None]:
    """Statements that only read, and see what was committed before the first of them: so nothing
    that changes between two of them is counted by both, or by none. Inside a transaction of the
    caller's they see what it lets them see.
    """
    connection: Any = connections[using]
    if connection.in_atomic_block or not connection.get_autocommit():
        yield
    elif connection.vendor == "sqlite":
        with _in_mode(connection, "DEFERRED"):
            yield
    elif connection.vendor == "mysql":
        _isolate(connection)  # the next transaction
        with transaction.atomic(using=using):
            yield
    else:
        with transaction.atomic(using=using):
            _isolate(connection)
            yield


def _isolate(connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")


@contextmanager
def _in_mode(connection: Any, mode: str) -> Iterator[None]:
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
    """Do work that is a transaction of its own, and again where the database chose it as a
    deadlock's victim and undid it whole.

    InnoDB locks gaps in a unique index, so that no order of ours keeps clear of others' there.
    Inside a transaction of the application's, which is undone too, the error is the application's.
    """
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


def without_waiting_for_disk(using: str) -> str:
    """SQL for the end of a statement that changes rows: the transaction's commit returns before it
    is on disk, so that a crash soon after may undo it, whole. "" on other databases than
    PostgreSQL.
    """
    return lazily_sql(using).replace(",", " RETURNING", 1)


def lazily_sql(using: str) -> str:
    """SQL for the columns of a SELECT: the commit returns before it is on disk, or ""."""
    if connections[using].vendor == "postgresql":
        return ", set_config('synchronous_commit', 'off', true)"
    return ""


def within_idle_seconds(using: str, seconds: int) -> str:
    """SQL for the columns of a transaction's first SELECT: the server ends the transaction once its
    process has been silent for so long. One that is frozen must not keep its locks for ever.

    "" on other databases than PostgreSQL, and inside a transaction of somebody else's, which may be
    silent for as long as it likes.
    """
    if connections[using].vendor == "postgresql" and not is_nested(using):
        return f", set_config('idle_in_transaction_session_timeout', '{seconds}s', true)"
    return ""
