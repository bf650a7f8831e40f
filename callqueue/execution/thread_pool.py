"""Runs the calls of a message side by side: as few threads as keep them moving.

A thread costs more than a fast call, so the first does one call after the other; another joins when
nothing has ended for a few milliseconds, and where calls are known to be slow all have a thread
from the start. What has ended is handed over soon: the limits wait for it. A thread ends when no
job is left, and so does a connection to a database that a hook opened in it.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from callqueue import database, events
from callqueue.transitions import Job, Result

STALL = 0.003  # seconds without an end after which another thread joins
# seconds without an end after which what has ended is handed over, when all jobs are begun
QUIET = 0.004
AGE = 0.012  # seconds after which what has ended is handed over in any case
# seconds after which it is while jobs are still to begin: fast calls are best recorded together
PENDING_AGE = 0.05
# seconds between two lines that say that there are no more threads, and for which that is believed
MINUTE = 60.0
NAME = "callqueue-calls"  # of each thread
UNSERVED = 1.0  # seconds after which a job that no thread can be had for is handed back


def most() -> float:
    """How many jobs this process has threads for, as far as is known: as many as it had when no
    other was to be had, for a minute.
    """
    is_full = time.monotonic() - refusal.at < MINUTE
    return max(1, refusal.count) if is_full else math.inf


class Batch:
    """The jobs of one message and what came of them. Each thread that leaves puts the batch into
    `bell`; no end does, since waking costs.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        work: Callable[[Job], Result],
        bell: queue.SimpleQueue[Batch | None],
    ) -> None:
        self.jobs, self.pending, self.work, self.bell = jobs, deque(jobs), work, bell
        self.ended: list[Result] = []
        self.raised: list[BaseException] = []
        self.count, self.seen, self.taken, self.threads = len(jobs), 0, 0, 0
        self.first = self.last = self.moved = 0.0
        self.refused_at = math.inf  # when no thread was to be had for it first

    def begin(self, threads: int) -> None:
        """Have `threads` more begin; others join while jobs are pending and none end."""
        for _ in range(min(max(1, threads), len(self.pending))):
            if not self._join():
                break
        self.moved = time.monotonic()

    def _join(self) -> bool:
        """Let one more thread work on it; False where the system gives this process no more. One
        that is done may be followed by another.
        """
        try:
            threading.Thread(target=self.drain, name=NAME, daemon=True).start()
        except (RuntimeError, MemoryError) as error:
            refusal.note(len(self.pending), error)
            self.refused_at = min(self.refused_at, time.monotonic())
            return False
        self.threads += 1
        return True

    def unserved(self) -> list[Job]:
        """The jobs that have waited in vain for a thread, taken herewith: another process may have
        one, and their leases run.
        """
        taken: list[Job] = []
        if time.monotonic() - self.refused_at >= UNSERVED:
            with suppress(IndexError):
                while True:
                    taken.append(self.pending.popleft())
        return taken

    def look(self) -> list[Result]:
        """What has ended and was not taken, once it is time to hand it over: whoever takes it says
        so in `taken`. Where jobs are pending and none has ended of late, another thread joins.
        """
        now, count = time.monotonic(), len(self.ended)
        if count > self.seen:
            self.first = self.first if self.seen > self.taken else now
            self.last = self.moved = now
            self.seen = count
        elif self.pending and self.threads < self.count and now - self.moved >= STALL:
            self._join()
            self.moved = now
        is_due = (
            self.seen + len(self.raised) == self.count
            or (not self.pending and now - self.last >= QUIET)
            or now - self.first >= (PENDING_AGE if self.pending else AGE)
        )
        return self.ended[self.taken : self.seen] if is_due else []

    @property
    def is_over(self) -> bool:
        """Whether all has been taken, but for what raised."""
        return self.taken + len(self.raised) >= self.count

    @property
    def is_restless(self) -> bool:
        """Whether to look again within `STALL`, though no thread may have left by then."""
        return bool(self.pending) or len(self.ended) > self.taken

    def drain(self) -> None:
        """Do pending jobs until there are none: what a thread does."""
        while True:
            try:
                job = self.pending.popleft()
            except IndexError:
                database.close_all()
                self.bell.put(self)
                return
            try:
                database.close_failed()
                self.ended.append(self.work(job))
            except BaseException as error:  # else the job would never seem to have ended
                self.raised.append(error)


class _Refusal:
    """That this process was given no more threads: when, how many had calls then, and when it was
    said last.
    """

    def __init__(self) -> None:
        self.at = self.said_at = -math.inf
        self.count = 0

    def note(self, waiting: int, error: Exception) -> None:
        self.at = time.monotonic()
        self.count = sum(one.name == NAME for one in threading.enumerate())
        if self.at - self.said_at >= MINUTE:
            self.said_at = self.at
            events.emit("threads_exhausted", waiting=waiting, error=str(error))


refusal = _Refusal()
