"""What this process lacks to make calls: descriptors, threads, the kernel's memory. It takes no
more for a while, and never more than it has descriptors for. Giving back uses up no attempt.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import time
from contextlib import suppress
from functools import lru_cache

from callqueue import events

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

FIRST, LONGEST = 1.0, 10.0  # seconds for which no call is taken, at first and at most, growing
MINUTE = 60.0  # seconds between two lines that say so
# descriptors that are left to what is no call in flight: idle connections, lookups of names, other
# tasks. At least so many, and this share of the limit.
SPARE, SPARE_SHARE = 64, 1 / 8
# what the system says to a process that may have no more: descriptors, memory of the kernel's
_WANTS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Shortage:
    """Whether, and for how long, this process takes no calls for want of what they need."""

    def __init__(self) -> None:
        self._until = self._said_at = -math.inf
        self._seconds = FIRST

    def begin(self, why: str) -> None:
        """Take no calls for a while: one was given back. Longer where the last was of no help."""
        now = time.monotonic()
        if now < self._until:
            return  # one that was begun before
        is_again = now < self._until + self._seconds
        self._seconds = min(LONGEST, 2 * self._seconds) if is_again else FIRST
        self._until = now + self._seconds
        if now - self._said_at >= MINUTE:
            self._said_at = now
            events.emit("worker_starved", error=why)

    @property
    def is_on(self) -> bool:
        return time.monotonic() < self._until

    def wait_out(self, most: float | None) -> None:
        """Wait until the shortage is over, `most` seconds at most (None: however long)."""
        left = self._until - time.monotonic()
        time.sleep(max(0.0, left if most is None else min(left, most)))


shortage = Shortage()


def descriptors_for_calls() -> float:
    """The limit, less those open at first and SPARE; inf: no limit."""
    if resource is None:
        return math.inf
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return math.inf
    return max(1, limit - _open_at_first(os.getpid()) - max(SPARE, round(limit * SPARE_SHARE)))


@lru_cache(maxsize=1)
def _open_at_first(pid: int) -> int:
    """Descriptors that this process had open when first asked, before any call; 0: unknown."""
    with suppress(OSError):
        return len(os.listdir("/dev/fd"))
    return 0


def why_starved(error: BaseException | None = None) -> str | None:
    """What to say if this process may have no more, by this error or a try made here; else None."""
    why = _what_was_refused(error)
    if why is None:
        try:  # what a resolver or a library says without descriptors often names another reason
            for end in socket.socketpair():
                end.close()
        except OSError as refused:
            why = _what_was_refused(refused)
    text = f"nothing was sent: this worker's process may have no more ({why})"
    return None if why is None else text


def _what_was_refused(error: BaseException | None) -> str | None:
    """What the system refused this process, if that led to this error; else None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _WANTS:
            return str(error.strerror)
        if isinstance(error, RuntimeError) and "start new thread" in str(error):
            return "threads"
        error = error.__cause__ or error.__context__
    return None
