"""Work that keeps nobody waiting: done in a thread of its own, which may be left behind."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

from callqueue import database

MOST_LEFT = 64  # threads of one name that are left behind at once, at most


class Errand:
    """Work that is begun at once, in a thread of its own. RuntimeError where there are no more."""

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


class TooMany(LeftBehind):
    """MOST_LEFT of this name have not ended: this one was not begun."""


def within(seconds: float, name: str, work: Callable[[], Any]) -> Any:
    """What `work` returns or raises. LeftBehind if it takes longer; TooMany while MOST_LEFT do."""
    _left.difference_update([errand for errand in tuple(_left) if not errand.is_under_way])
    if sum(errand.name == name for errand in tuple(_left)) >= MOST_LEFT:
        raise TooMany(f"{MOST_LEFT} before this one have had no answer yet")
    errand = Errand(name, work)
    if not errand.done.wait(seconds):
        _left.add(errand)
        raise LeftBehind(f"no answer within {seconds:g} seconds")
    if errand.error is not None:
        raise errand.error
    return errand.result


_left: set[Errand] = set()  # any thread changes it
