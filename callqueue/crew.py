"""Runs the calls of one message side by side: as few threads as keep them moving, none of them touching the database.

A thread costs more than a fast call, so the first does one call after the other; another joins when nothing has ended for a
few milliseconds, and where calls are known to be slow all have a thread from the start. What has ended is handed over soon: the
limits wait for it. The threads live on for the next message.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

STALL = 0.003  # seconds without an end after which another thread joins
QUIET = 0.004  # seconds without an end after which what has ended is handed over, when all jobs are begun
AGE = 0.012  # seconds after which it is handed over in any case
PENDING_AGE = 0.05  # the same before that: fast calls are best recorded together

J = TypeVar("J")
R = TypeVar("R")


class _Shift(Generic[J, R]):
    """The jobs of one message. Whoever waits for them is woken when a thread leaves, not at every end: waking costs."""

    def __init__(self, jobs: Sequence[J], work: Callable[[J], R]) -> None:
        self.pending, self.work, self.ended = deque(jobs), work, deque[R]()
        self.left = queue.SimpleQueue[None]()
        self.threads = 0

    def drain(self) -> None:
        """Do pending jobs until there are none: what a thread of the crew does."""
        while True:
            try:
                job = self.pending.popleft()
            except IndexError:
                self.left.put(None)
                return
            self.ended.append(self.work(job))

    def wait(self, timeout: float | None) -> None:
        """Until a thread has left, or for so long."""
        with suppress(queue.Empty):
            self.left.get(timeout=timeout)


def run(jobs: Sequence[J], work: Callable[[J], R], *, hands: int = 1) -> Iterator[list[R]]:
    """Do `work` on every job and yield what it returned, in lists, soon after it ended. `work` must not raise.

    `hands` threads begin; more join while jobs are pending and none end.
    """
    if len(jobs) == 1:
        yield [work(jobs[0])]
        return
    shift = _Shift(jobs, work)
    for _ in range(max(1, min(hands, len(jobs)))):
        _crew().join(shift)
    missing, ended, first, last = len(jobs), list[R](), 0.0, 0.0
    while missing:
        shift.wait(STALL if shift.pending or ended else None)
        now, count = time.monotonic(), len(shift.ended)
        if count:
            first, last = (first if ended else now), now
            ended += [shift.ended.popleft() for _ in range(count)]
            missing -= count
        elif shift.pending and shift.threads < len(jobs):
            _crew().join(shift)
        is_quiet = not shift.pending and now - last >= QUIET
        if ended and (not missing or is_quiet or now - first >= (PENDING_AGE if shift.pending else AGE)):
            yield ended
            ended = []


class _Crew:
    """Threads that wait for shifts; as many as were ever needed at once."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._shifts: queue.SimpleQueue[_Shift[object, object]] = queue.SimpleQueue()
        self._idle = 0
        self._lock = threading.Lock()

    def join(self, shift: _Shift[J, R]) -> None:
        """Let one more thread work on the shift."""
        shift.threads += 1
        with self._lock:
            new = self._idle == 0
            if not new:
                self._idle -= 1
        self._shifts.put(shift)  # type: ignore[arg-type]
        if new:
            threading.Thread(target=self._live, name="callqueue-crew", daemon=True).start()

    def _live(self) -> None:
        while True:
            self._shifts.get().drain()
            with self._lock:
                self._idle += 1


_the_crew: _Crew | None = None


def _crew() -> _Crew:
    """This process's crew; a forked child makes one of its own."""
    global _the_crew
    if _the_crew is None or _the_crew.pid != os.getpid():
        _the_crew = _Crew()
    return _the_crew
