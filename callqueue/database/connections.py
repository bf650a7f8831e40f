"""Connections: work is done anew when one is lost; one is kept between a worker's messages, since
Celery closes all after every task, and to set one up costs more than a call's statements.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from django.db import DatabaseError, InterfaceError, InternalError, OperationalError, connections

from callqueue import events
from callqueue.database.statements import in_transaction, is_postgresql, is_sqlite, rows

T = TypeVar("T")
PAUSES = 0.02, 2.0  # seconds before the third try, and the longest between two
# MySQL's codes for a packet too large, and for text that the column's character set has not:
# mysqlclient calls them operational.
_OF_VALUES = {1153, 1366}
kept: dict[tuple[int, str], list[Any]] = {}  # by process and alias, the one used last at the end


def is_transient(error: BaseException) -> bool:
    """Whether the same write may succeed later: not where the values themselves are wrong."""
    is_passing = isinstance(error, OperationalError | InterfaceError | InternalError)
    codes = {code for code in error.args if isinstance(code, int)}
    return is_passing and not _OF_VALUES & codes


def persist(using: str, work: Callable[[], T], *, during: str, seconds: float = 10.0) -> T:
    """What `work` returns; done anew, whole, where the database went away or refused it.

    For work that may be repeated although it was done: the answer to a commit may be lost. The
    second try is at once on a new connection (an event tells if it fails, and `during` what), later
    ones after pauses, until `seconds` from the first failure. In another's transaction: one try.
    """
    end, pause = math.inf, 0.0
    while True:
        try:
            return work()
        except Exception as error:
            end = min(end, time.monotonic() + seconds)
            if not is_transient(error) or in_transaction(using) or time.monotonic() + pause >= end:
                raise
            if pause == PAUSES[0]:
                events.emit("database_away", during=during, error=type(error).__name__)
        connections[using].close()
        time.sleep(pause)
        pause = min(PAUSES[1], max(PAUSES[0], 2 * pause))


@contextmanager
def kept_connection(using: str) -> Iterator[None]:
    """Keep a connection from one message to the next, whatever thread or greenlet that comes to.

    Celery does not close what it does not see. A connection that failed is dropped, and so is that
    of a block that raised: a time limit may have struck in the middle of an answer. One that died
    meanwhile shows at its first statement (`persist`).
    """
    if in_transaction(using) or is_sqlite(using):
        yield
        return
    connection = _take_kept(using)
    try:
        yield
    except BaseException:
        connection.close()
        raise
    is_sound = not connection.in_atomic_block and not connection.errors_occurred
    if connections[using] is connection and is_sound:
        _put_back(using, connection)


def _take_kept(using: str) -> Any:
    """This thread's connection, from now on the one kept last if any is; closed if it failed."""
    with suppress(IndexError):
        last = _kept_connections(using).pop()
        connections[using].close()
        connections[using] = last
    connection = connections[using]
    if connection.connection is not None and connection.errors_occurred:
        connection.close()
    return connection


def _put_back(using: str, connection: Any) -> None:
    connection.close_at = None
    if not connection.allow_thread_sharing:
        connection.inc_thread_sharing()
    del connections[using]
    _kept_connections(using).append(connection)


def _kept_connections(using: str) -> list[Any]:
    # Looked up at each use: what is put into a list that was closed since, nobody would find again.
    return kept.setdefault((os.getpid(), using), [])


def is_still_usable(using: str, raw: Any) -> bool:
    """Whether the raw connection still is `raw` (None: any), answers, and is in no transaction."""
    now = raw_connection(using)
    if now is None or raw not in (None, now) or in_transaction(using):
        return False
    try:
        return bool(rows(using, "SELECT 1"))
    except DatabaseError:
        return False


def close_kept(using: str) -> None:
    """Close the connections that this process keeps and nobody has in use."""
    for connection in kept.pop((os.getpid(), using), []):
        connection.close()


def close_failed() -> None:
    """Close this thread's connections that failed or are too old; who asks next has new ones."""
    for connection in connections.all(initialized_only=True):
        connection.close_if_unusable_or_obsolete()


def close_all() -> None:
    """Close this thread's connections, except those in a transaction."""
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()


def set_connect_timeout(using: str, seconds: int) -> None:
    """Let connecting take no longer than this, unless the settings say how long it may take."""
    if not is_sqlite(using):
        options = connections[using].settings_dict.setdefault("OPTIONS", {})
        options.setdefault("connect_timeout", seconds)


def raw_connection(using: str) -> Any:
    """The driver's connection of this thread; None where there is none now."""
    return connections[using].connection


def is_standby(using: str) -> bool:
    """Whether this is a copy of another server, and may lag. Only PostgreSQL tells."""
    return is_postgresql(using) and bool(rows(using, "SELECT pg_is_in_recovery()")[0][0])
