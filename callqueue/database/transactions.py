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
    # Connecting sets transaction_mode, and a thread's first statement may be this one.
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
