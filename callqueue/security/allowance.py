"""What cleaning one answer may cost: CPU time of its own, most of it in its rule's turn.

A rule's name and a wait enter; `spend` raises once the time is used up. Whoever wrote the answer
decides what it costs to clean, and all threads of a process share one interpreter: so of a rule at
most one answer at a time takes long, others wait for it, and no other rule does.
"""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar

FREE = 0.002  # CPU seconds that any answer may take at once
MOST = 0.25  # and that it may take in its rule's turn
LARGE = 8192  # characters from which on a text is cleaned in its rule's turn from the start

clock = time.thread_time
_turns: dict[str, threading.Lock] = {}


class TooDear(Exception):
    """What there is to be cleaned takes more time than it may."""


_in_force: ContextVar[Allowance | None] = ContextVar("callqueue_allowance", default=None)


class Allowance:
    """While the block runs, this thread cleans an answer of this rule. It waits for its turn for at
    most `patience` seconds.
    """

    def __init__(self, rule: str, patience: float) -> None:
        self.rule, self.patience, self.began = rule, patience, clock()
        self.turn: threading.Lock | None = None

    def __enter__(self) -> None:
        self.token = _in_force.set(self)

    def __exit__(self, *raised: object) -> None:
        _in_force.reset(self.token)
        if self.turn is not None:
            self.turn.release()

    def spend(self, size: int) -> None:
        """Go on; see `spend` below."""
        used = clock() - self.began
        if used > MOST:
            raise TooDear
        if self.turn is not None or (used <= FREE and size < LARGE):
            return
        turn = _turns.setdefault(self.rule, threading.Lock())
        if not turn.acquire(timeout=max(0.0, self.patience)):
            self.patience = 0.0
            raise TooDear
        self.turn = turn


def spend(size: int = 0) -> None:
    """Go on with a step of cleaning, over a text of so many characters. TooDear where this thread's
    allowance is used up; without one, a step costs nothing.
    """
    if (own := _in_force.get()) is not None:
        own.spend(size)
