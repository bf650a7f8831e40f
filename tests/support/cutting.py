"""Cuts this process's connection to the database, has it refuse a statement, or is a time limit, at
one statement of all.

In: the number of the moment, counted from 1 while the block lasts, and what happens there. Out:
whether that moment came. The connection is really cut, by the server, where there is one; what
SQLite says instead is that it is locked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from django.db import OperationalError, connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper

BEFORE, AFTER, CONFLICT = "before", "after", "conflict"
STRUCK_BEFORE, STRUCK_AFTER = "struck before", "struck after"  # by a soft time limit
CONFLICTS = {
    "postgresql": "DO $$ BEGIN RAISE EXCEPTION 'as asked' USING ERRCODE = 'serialization_failure'; END $$",
    "mysql": "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'Deadlock found, as asked'",
}


def deeds() -> list[str]:
    """What can go wrong with this database."""
    return [BEFORE] if connection.vendor == "sqlite" else [BEFORE, AFTER, CONFLICT]


@dataclass
class Cut:
    """A cut at the moment `number`. `story` is what the moment was."""

    number: int
    deed: str
    seen: int = 0
    story: str = ""

    @property
    def came(self) -> bool:
        return self.seen >= self.number


@contextmanager
def cut(number: int, deed: str) -> Iterator[Cut]:
    """Do the deed at this moment of this thread's connection."""
    made, thread, commit = Cut(number, deed), threading.get_ident(), BaseDatabaseWrapper._commit

    def statement(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        return _strike(
            made,
            sql,
            lambda: execute(sql, params, many, context),
            lambda: _refuse(context["connection"]),
        )

    def committing(self: Any) -> Any:
        if self.alias != "default" or threading.get_ident() != thread:
            return commit(self)
        return _strike(made, "COMMIT", lambda: commit(self), lambda: _roll_back(self))

    BaseDatabaseWrapper._commit = committing
    connections["default"].execute_wrappers.append(statement)
    wrapped = connections["default"]
    try:
        yield made
    finally:
        BaseDatabaseWrapper._commit = commit
        wrapped.execute_wrappers.remove(statement)
        if made.came:
            connection.close()  # whatever state it is in: the judge has another


def _strike(made: Cut, what: str, do: Any, refuse: Any) -> Any:
    made.seen += 1
    if made.seen != made.number:
        return do()
    made.story = f"{made.deed} {made.number}: {what[:300]}"
    if made.deed in (STRUCK_BEFORE, STRUCK_AFTER):
        if made.deed == STRUCK_AFTER:
            do()
        raise SoftTimeLimitExceeded
    if connection.vendor == "sqlite":
        raise OperationalError("database is locked")
    if made.deed == CONFLICT:
        return refuse()
    if made.deed == AFTER:
        do()
        kill_this_connection()
        raise OperationalError("server closed the connection unexpectedly")
    kill_this_connection()
    return do()


def kill_this_connection() -> None:
    """As a failover or a firewall would: this side knows nothing of it."""
    raw = connection.connection
    other = connection.copy("default")
    try:
        with other.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [raw.info.backend_pid])
                assert cursor.fetchone() == (True,)
            else:
                cursor.execute(f"KILL {raw.thread_id()}")
    finally:
        other.close()


def _refuse(wrapped: Any) -> None:
    """In a statement of its own: `executemany` makes none where it is given no parameters."""
    with wrapped.wrap_database_errors, wrapped.connection.cursor() as cursor:
        cursor.execute(CONFLICTS[wrapped.vendor])


def _roll_back(self: Any) -> None:
    self._rollback()
    raise OperationalError("could not serialize access, as asked")
