"""On which connection a permit's statements are made: never in a transaction of the caller's.

A charge must be there for everybody before the call is made, and must stay when the caller's
transaction is rolled back. Inside one, a permit works in a thread of its own, with a connection of
its own. The transaction in which a test runs is none of the caller's: there all is on one
connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

from django.db import connections

from callqueue import database
from callqueue.exceptions import CallQueueError

T = TypeVar("T")
PATIENCE = 10.0  # seconds for which a write waits for rows that perhaps its caller has locked


def apart(using: str, work: Callable[[], T]) -> T:
    """What `work` returns, or raises. CallQueueError on SQLite inside `transaction.atomic()`."""
    if not is_in_callers_transaction(using):
        return work()
    if connections[using].vendor == "sqlite":
        raise CallQueueError(
            "a permit cannot be taken inside transaction.atomic() on SQLite, which lets one"
            " connection write at a time: take it outside, or send the call through the queue"
        )
    thread, done = _in_thread(using, work)
    try:
        thread.join()
    except BaseException:
        thread.join()  # nobody may go on beside it
        raise
    return done()


def write_apart(using: str, work: Callable[[], Any]) -> None:
    """Do some work that nobody waits for for ever: what waits for rows that the caller's own
    transaction has locked is done once that has ended. On SQLite it is done within that.
    """
    if not is_in_callers_transaction(using) or connections[using].vendor == "sqlite":
        work()
        return
    thread, done = _in_thread(using, work)
    thread.join(PATIENCE)
    if not thread.is_alive():
        done()


def is_in_callers_transaction(using: str) -> bool:
    """Whether this thread is in a transaction that is not a test's alone."""
    if not database.in_transaction(using):
        return not connections[using].get_autocommit()
    blocks = getattr(connections[using], "atomic_blocks", [])
    return not (blocks and getattr(blocks[0], "_from_testcase", False))


def _in_thread(using: str, work: Callable[[], T]) -> tuple[threading.Thread, Callable[[], T]]:
    """Work in a thread that has begun, and how to have what it returned, or raised."""
    done: list[T] = []
    failed: list[BaseException] = []
    context = copy_context()

    def run() -> None:
        try:
            done.append(context.run(work))
        except BaseException as error:
            failed.append(error)
        finally:
            connections[using].close()

    def result() -> T:
        if failed:
            raise failed[0]
        return done[0]

    thread = threading.Thread(target=run, name="callqueue-permit", daemon=True)
    thread.start()
    return thread, result
