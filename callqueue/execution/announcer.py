"""Announces the ends of a flight's calls in a thread of its own: a receiver of signals that takes
its time, or a broker that is away, delays no record and no lease.

In: calls whose ends are recorded. Out: signals and callbacks, in the order of the ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from django.db import DatabaseError, InterfaceError

from callqueue import callbacks, database, events


class Announcer:
    """`rings` is called when all is announced. The thread begins with the first call."""

    def __init__(self, rings: Callable[[], object]) -> None:
        self.rings = rings
        self.inbox: queue.SimpleQueue[tuple[str, Sequence[int], int]] = queue.SimpleQueue()
        self.owed = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def announce(self, using: str, call_ids: Sequence[int], status: int) -> None:
        """What `callbacks.announce` does, a little later."""
        with self._lock:
            self.owed += 1
        self.inbox.put((using, call_ids, status))
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="callqueue-announcer", daemon=True)
            with suppress(RuntimeError):  # no more threads: the next call tries again
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            using, call_ids, status = self.inbox.get()
            try:
                with database.kept_connection(using):
                    callbacks.announce(using, call_ids, status)
            except (DatabaseError, InterfaceError) as error:
                # The ends are recorded: what is still owed of them is for a dispenser.
                why = type(error).__name__
                events.emit("database_away", during="announce", error=why, calls=len(call_ids))
            except BaseException as error:
                events.emit("listener_failed", receiver="announce", error=type(error).__name__)
            finally:
                database.close_all()  # what a listener opened
                with self._lock:
                    self.owed -= 1
                if not self.owed:
                    self.rings()
