"""Work that keeps nobody waiting: done in a thread of its own, which may be left behind.

The loops that release calls and record answers have to go round, whatever the project's own code,
a broker or a statement of mere interest does meanwhile. In: such work. Out: what it returned or
raised, to whoever waits for it, and for as long as he does.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import DatabaseError, InterfaceError

from callqueue import database, events

MOST_LEFT = 64  # threads of one name that are left behind at once
MOST_WAITING = 10_000  # announcements that wait for those before them, at most


class Errand:
    """Work that is begun at once, in a thread of its own. Raises RuntimeError where the system has
    no more threads.
    """

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        self.name = name
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=lambda: self._run(lambda: context.run(work)),
            name=f"callqueue-{name}",
            daemon=True,
        )
        self._thread.start()

    @property
    def is_under_way(self) -> bool:
        """Whether its thread is at it: not in a process that was forked off meanwhile."""
        return not self.done.is_set() and self._thread.is_alive()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.result = work()
        except BaseException as error:
            self.error = error
        finally:
            database.close_all()
            self.done.set()


class LeftBehind(Exception):
    """Work took longer than it may. It may still be done, some time."""


def within(seconds: float, name: str, work: Callable[[], Any]) -> Any:
    """What `work` returned, or raised. LeftBehind where it takes longer, and its thread ends
    whenever it does; and at once while MOST_LEFT of this name have not ended.
    """
    _left[:] = [errand for errand in _left if errand.is_under_way]
    if sum(errand.name == name for errand in _left) >= MOST_LEFT:
        raise LeftBehind(f"{MOST_LEFT} before this one have had no answer yet")
    errand = Errand(name, work)
    if not errand.done.wait(seconds):
        _left.append(errand)
        raise LeftBehind(f"no answer within {seconds:g} seconds")
    if errand.error is not None:
        raise errand.error
    return errand.result


class Announcer:
    """Runs the project's own code (receivers, callbacks) for a loop, in the order in which it is
    handed over; `rings` is called when all of it was run. Has a thread only while there is some.
    """

    def __init__(self, using: str, rings: Callable[[], object] = lambda: None) -> None:
        self.using, self.rings = using, rings
        self.owed = 0
        self._waiting: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._errand: Errand | None = None

    def put(self, work: Callable[[], object]) -> None:
        """Have this run, soon. Where too much waits it is not: callbacks stay owed all the same."""
        with self._lock:
            if self.owed >= MOST_WAITING:
                events.emit("listener_failed", receiver="announce", error="too many wait")
                return
            self.owed += 1
            self._waiting.append(work)
            if self._errand is None or not self._errand.is_under_way:
                try:
                    self._errand = Errand("announcer", self._run)
                except RuntimeError:  # no more threads: the next one tries again
                    self._errand = None

    def wait(self, seconds: float) -> None:
        """Wait until all is announced, for so long."""
        if self._errand is not None:
            self._errand.done.wait(seconds)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._errand = None
                    break
                work = self._waiting.popleft()
            self._announce(work)
            with self._lock:
                self.owed -= 1
        self.rings()

    def _announce(self, work: Callable[[], object]) -> None:
        try:
            with database.kept_connection(self.using):
                work()
        except (DatabaseError, InterfaceError) as error:
            # The ends are recorded: what is still owed of them is for a dispenser.
            events.emit("database_away", during="announce", error=type(error).__name__)
        except BaseException as error:
            events.emit("listener_failed", receiver="announce", error=type(error).__name__)
        finally:
            database.close_all()  # what a listener opened


@contextmanager
def announcing(announcer: Announcer) -> Iterator[None]:
    """In this block the thread leaves the project's own code to the announcer: not inside a
    transaction, of which another thread sees nothing.
    """
    if database.in_transaction(announcer.using):
        yield
        return
    with events.handed_over(announcer.put):
        yield


_left: list[Errand] = []
