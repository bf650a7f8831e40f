"""Runs the calls of one message side by side: as few threads as keep them moving.

A thread costs more than a fast call, so the first does one call after the other; another joins when
nothing has ended for a few milliseconds, and where calls are known to be slow all have a thread
from the start. What has ended is handed over soon: the limits wait for it. The threads live on for
the next message; a connection to a database that a hook opened in one does not.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from callqueue import database

STALL = 0.003  # seconds without an end after which another thread joins
# seconds without an end after which what has ended is handed over, when all jobs are begun
QUIET = 0.004
AGE = 0.012  # seconds after which it is handed over in any case
PENDING_AGE = 0.05  # the same before that: fast calls are best recorded together

J = TypeVar("J")
R = TypeVar("R")


class Shift(Generic[J, R]):
    """The jobs of one message and what came of them. Whoever waits is woken when a thread leaves,
    not at every end: waking costs.

    Whatever is raised in the thread that waits, nothing is lost by it: `run` may be asked again,
    and goes on where it was.
    """

    def __init__(self, jobs: Sequence[J], work: Callable[[J], R]) -> None:
        self.pending, self.work = deque(jobs), work
        self.ended: list[R] = []
        self.raised: list[BaseException] = []
        self.count, self.taken, self.threads = len(jobs), 0, 0
        self.left = queue.SimpleQueue[None]()

    def run(self, hands: int = 1, *, until: float = math.inf) -> Iterator[list[R]]:
        """Have the work done on every job and yield what it returned, in lists, soon after it
        ended. It should not raise: what it does raise is raised here, after all the others have
        been yielded.

        `hands` threads more begin; others join while jobs are pending and none end. What was
        yielded counts as taken when the next is asked for. Ends at `until`, monotonic seconds,
        whatever is still at work then.
        """
        for _ in range(max(1, min(hands, len(self.pending)))):
            _pool().join(self)
        seen, first, last = self.taken, 0.0, 0.0
        while self.taken + len(self.raised) < self.count and (left := until - time.monotonic()) > 0:
            self._wait(min(left, STALL if self.pending or seen > self.taken else left))
            now, count = time.monotonic(), len(self.ended)
            if count > seen:
                first, last, seen = (first if seen > self.taken else now), now, count
            elif self.pending and self.threads < self.count:
                _pool().join(self)
            is_quiet = not self.pending and now - last >= QUIET
            is_old = now - first >= (PENDING_AGE if self.pending else AGE)
            if seen > self.taken and (seen + len(self.raised) == self.count or is_quiet or is_old):
                yield self.ended[self.taken : seen]
                self.taken = seen
        if self.taken < (seen := len(self.ended)):
            yield self.ended[self.taken : seen]
            self.taken = seen
        if self.raised:
            raise self.raised[0]

    def drain(self) -> None:
        """Do pending jobs until there are none: what a thread of the pool does."""
        while True:
            try:
                job = self.pending.popleft()
            except IndexError:
                database.close_all()
                self.left.put(None)
                return
            try:
                database.close_failed()
                self.ended.append(self.work(job))
            except BaseException as error:  # whoever waits for this job would wait for ever
                self.raised.append(error)

    def _wait(self, timeout: float) -> None:
        """Until a thread has left, or for so long."""
        with suppress(queue.Empty):
            self.left.get(timeout=None if timeout == math.inf else timeout)


class _Pool:
    """Threads that wait for shifts; as many as were ever needed at once. The one that worked last
    may still be connected.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._idle: list[queue.SimpleQueue[Shift[Any, Any]]] = []

    def join(self, shift: Shift[J, R]) -> None:
        """Let one more thread work on the shift."""
        shift.threads += 1
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            threading.Thread(
                target=self._live, args=(inbox,), name="callqueue-crew", daemon=True
            ).start()
        inbox.put(shift)

    def _live(self, inbox: queue.SimpleQueue[Shift[Any, Any]]) -> None:
        while True:
            inbox.get().drain()
            self._idle.append(inbox)


_the_pool: _Pool | None = None


def _pool() -> _Pool:
    """This process's pool; a forked child makes one of its own."""
    global _the_pool
    if _the_pool is None or _the_pool.pid != os.getpid():
        _the_pool = _Pool()
    return _the_pool
