"""On which connection a permit's statements are made: never in a transaction of the caller's.

A charge must be there for everybody before the call is made, and must stay when the caller's
transaction is rolled back. Inside one, a permit's work is done by the process's keeper: a thread
with a connection of its own. A test's own transaction is none of the caller's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import Context, copy_context
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from django.db import connections

from callqueue import database
from callqueue.exceptions import CallQueueError

T = TypeVar("T")
# what is to be done, its caller's context, and the future of what comes of it
_Work = tuple[Callable[[], Any], Context, Future[Any]]
Works = SimpleQueue[_Work]
PATIENCE = 10.0  # seconds for which a write waits for rows that perhaps its caller has locked
IDLE = 1.0  # seconds for which a keeper that has nothing to do keeps its connection
# seconds after which a keeper that is still at the same work is left to it: what comes next is for
# another keeper
STUCK = 2.0


def run_apart(using: str, work: Callable[[], T]) -> T:
    """Do `work` outside the caller's transaction; its result. In one on SQLite: CallQueueError."""
    if not is_in_callers_transaction(using):
        return work()
    if database.is_sqlite(using):
        raise CallQueueError(
            "a permit cannot be taken inside transaction.atomic() on SQLite, which lets one"
            " connection write at a time: take it outside, or send the call through the queue"
        )
    done = _hand_to_keeper(using, work)
    try:
        wait([done])
    except BaseException:
        wait([done])  # nobody may go on beside it
        raise
    return done.result()


def write_apart(using: str, work: Callable[[], Any]) -> None:
    """As `run_apart`, but go on without it after PATIENCE; on SQLite do it in the transaction."""
    if not is_in_callers_transaction(using) or database.is_sqlite(using):
        work()
        return
    done = _hand_to_keeper(using, work)
    if wait([done], PATIENCE).done:
        done.result()


def is_in_callers_transaction(using: str) -> bool:
    """Whether this thread has no autocommit, or a transaction that did not begin as a test's."""
    if not database.in_transaction(using):
        return not connections[using].get_autocommit()
    blocks = getattr(connections[using], "atomic_blocks", [])
    return not (blocks and getattr(blocks[0], "_from_testcase", False))


class _Keeper:
    """A thread with a connection to one database; it ends soon after its last piece of work."""

    def __init__(self, using: str, waiting: Works) -> None:
        self.using, self.waiting = using, waiting
        self.began_at: float | None = None  # its work in hand, monotonic; None: it has none
        self.connection: Any = None
        threading.Thread(target=self._run, name="callqueue-permits", daemon=True).start()

    @property
    def is_stuck(self) -> bool:
        """Whether its work takes longer than STUCK: perhaps that waits for rows of its caller's."""
        return self.began_at is not None and time.monotonic() - self.began_at > STUCK

    def _run(self) -> None:
        self.connection = connections[self.using]
        try:
            while (wanted := self._next_work()) is not None:
                self._do_work(*wanted)
        finally:
            self._disconnect()

    def _next_work(self) -> _Work | None:
        """The next piece of work; None after IDLE without one: it is no keeper any more."""
        with suppress(Empty):
            return self.waiting.get(timeout=IDLE)
        with _lock, suppress(Empty):
            if _keepers.get(self.using) is self and self.waiting.empty():
                del _keepers[self.using]
            return self.waiting.get_nowait()
        return None

    def _do_work(self, work: Callable[[], Any], context: Context, done: Future[Any]) -> None:
        self.began_at = time.monotonic()
        if self.connection.connection is not None and not self.connection.is_usable():
            self._disconnect()  # it was cut since it was used last
        try:
            found = context.run(work)
        except BaseException as error:
            self._disconnect()
            done.set_exception(error)
        else:
            done.set_result(found)
        self.began_at = None

    def _disconnect(self) -> None:
        with suppress(Exception):  # whatever a broken one says: it is not used again
            self.connection.close()


def _hand_to_keeper(using: str, work: Callable[[], T]) -> Future[T]:
    """Queue the work. A keeper that is stuck leaves all that it has not begun to a new one."""
    done = Future[T]()
    with _lock:
        keeper = _keepers.get(using)
        if keeper is None or keeper.is_stuck:
            following = _Keeper(using, Works() if keeper is None else keeper.waiting)
            if keeper is not None:
                keeper.waiting = Works()
            keeper = _keepers[using] = following
        keeper.waiting.put((work, copy_context(), done))
    return done


def _after_fork() -> None:
    """Have a child forget the keepers, and leave their connections open: they are the parent's."""
    _of_parents.extend(_keepers.values())
    _keepers.clear()
    _lock.release()


_lock = threading.Lock()
_keepers: dict[str, _Keeper] = {}  # by database: those that take on work
_of_parents: list[_Keeper] = []
if hasattr(os, "register_at_fork"):  # no child begins with a lock that another thread had
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_fork
    )
