"""On which connection a permit's statements are made: never in a transaction of the caller's.

A charge must be there for everybody before the call is made, and must stay when the caller's
transaction is rolled back. Inside one, a permit's work is done by the process's keeper: a thread
with a connection of its own, that all permits use in turn. The transaction in which a test runs is
none of the caller's: there all is on one connection.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from django.db import connections

from callqueue import database
from callqueue.exceptions import CallQueueError

T = TypeVar("T")
PATIENCE = 10.0  # seconds for which a write waits for rows that perhaps its caller has locked
IDLE = 1.0  # seconds for which a keeper that has nothing to do keeps its connection
# seconds after which one that is still at the same work is left to it: the next work gets another
# keeper
STUCK = 2.0


def apart(using: str, work: Callable[[], T]) -> T:
    """What `work` returns, or raises. CallQueueError on SQLite inside `transaction.atomic()`."""
    if not is_in_callers_transaction(using):
        return work()
    if connections[using].vendor == "sqlite":
        raise CallQueueError(
            "a permit cannot be taken inside transaction.atomic() on SQLite, which lets one"
            " connection write at a time: take it outside, or send the call through the queue"
        )
    done = _kept(using, work)
    try:
        done.wait(None)
    except BaseException:
        done.wait(None)  # nobody may go on beside it
        raise
    return done.result()


def write_apart(using: str, work: Callable[[], Any]) -> None:
    """Do some work that nobody waits for for ever: what waits for rows that the caller's own
    transaction has locked is done once that has ended. On SQLite it is done within that.
    """
    if not is_in_callers_transaction(using) or connections[using].vendor == "sqlite":
        work()
        return
    done = _kept(using, work)
    if done.wait(PATIENCE):
        done.result()


def is_in_callers_transaction(using: str) -> bool:
    """Whether this thread is in a transaction that is not a test's alone."""
    if not database.in_transaction(using):
        return not connections[using].get_autocommit()
    blocks = getattr(connections[using], "atomic_blocks", [])
    return not (blocks and getattr(blocks[0], "_from_testcase", False))


class _Work(Generic[T]):
    """Work for a keeper, in its caller's context, and what has become of it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work, self._context = work, copy_context()
        self._is_over = threading.Event()
        self._done: list[T] = []
        self.failed: BaseException | None = None

    def do(self) -> None:
        try:
            self._done.append(self._context.run(self._work))
        except BaseException as error:
            self.failed = error
        finally:
            self._is_over.set()

    def wait(self, seconds: float | None) -> bool:
        """Whether it is over within so many seconds."""
        return self._is_over.wait(seconds)

    def result(self) -> T:
        """What it returned; raises what it raised."""
        if self.failed is not None:
            raise self.failed
        return self._done[0]


class _Keeper:
    """A thread with a connection to one database, that does one piece of work after the other, and
    ends soon after the last.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self.waiting: deque[_Work[Any]] = deque()
        self.news = threading.Event()
        self.began: float | None = None  # what it is at now; None: nothing
        self.connection: Any = None
        self.thread = threading.Thread(target=self._run, name="callqueue-permits", daemon=True)

    @property
    def is_stuck(self) -> bool:
        """Whether it has been at one piece of work for so long that others go to another keeper:
        perhaps it waits for rows that its caller has locked.
        """
        return self.began is not None and time.monotonic() - self.began > STUCK

    def _run(self) -> None:
        self.connection = connections[self.using]
        try:
            while (work := self._next()) is not None:
                if self.connection.connection is not None and not self.connection.is_usable():
                    self._disconnect()  # it was cut since it was used last
                work.do()
                if work.failed is not None:
                    self._disconnect()
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        with suppress(Exception):  # whatever a broken one says: it is not used again
            self.connection.close()

    def _next(self) -> _Work[Any] | None:
        """The next work; None once there has been none for a while: it is a keeper no more."""
        with _lock:
            self.began = None
            is_keeper = _keepers.get(self.using) is self
            if not self.waiting:
                self.news.clear()
        if is_keeper and not self.news.is_set():
            self.news.wait(IDLE)
        with _lock:
            if self.waiting:
                self.began = time.monotonic()
                return self.waiting.popleft()
            if _keepers.get(self.using) is self:
                del _keepers[self.using]
            return None


def _kept(using: str, work: Callable[[], T]) -> _Work[T]:
    """Have the process's keeper do some work, after what it has to do before that."""
    wanted = _Work(work)
    with _lock:
        keeper = _keepers.get(using)
        if keeper is None or keeper.is_stuck:
            following = _Keeper(using)
            following.thread.start()  # it waits for the lock
            if keeper is not None:
                following.waiting, keeper.waiting = keeper.waiting, following.waiting
            keeper = _keepers[using] = following
        keeper.waiting.append(wanted)
        keeper.news.set()
    return wanted


def _close() -> None:
    """The process ends: so do its keepers, once nothing is left to do."""
    with _lock:
        ending = list(_keepers.values())
        _keepers.clear()
        for keeper in ending:
            keeper.news.set()
    for keeper in ending:
        keeper.thread.join(IDLE)


def _forked() -> None:
    """A forked child has none of its parent's threads. It closes none of its connections either, as
    some drivers do whose objects are collected: it keeps them.
    """
    _of_parents.extend(_keepers.values())
    _keepers.clear()
    _lock.release()


_lock = threading.Lock()
_keepers: dict[str, _Keeper] = {}  # by database: those that take on work
_of_parents: list[_Keeper] = []
atexit.register(_close)
if hasattr(os, "register_at_fork"):  # no child begins with a lock that another thread had
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forked)
