"""Wakes an idle dispenser at the commit of a `send`, instead of at its next look. PostgreSQL only;
elsewhere it just waits.

A NOTIFY takes a lock that all commits share, so busy senders must not make one each. An idle
dispenser therefore shows that it sleeps by holding an advisory lock, and the trigger on the table
of calls notifies only while that is held. A look that is missed in any way (a pooler in between,
another dispenser that holds the lock) is made up for by the next one, POLL seconds later.
"""

from __future__ import annotations

import threading
import time

from callqueue import database

SHORT = 0.01  # seconds: a shorter wait is not worth being woken from
DEAF = 0.2  # seconds for which it may not notice that it is to stop
REST = 0.05  # seconds for which senders wake nobody after a dispenser was woken for nothing twice


class Listener:
    """What a dispenser waits by, in the one thread that runs it."""

    def __init__(self, using: str) -> None:
        self.using = using
        self._is_armed = self._was_for_nothing = False
        self._not_before = 0.0
        self._connection: object | None = None

    def wait(self, stop: threading.Event, seconds: float) -> set[str]:
        """Wait so long, or until a call is sent: the rules that may have calls now, "" for any."""
        if seconds < SHORT or time.monotonic() < self._not_before:
            self.disarm()
        elif self._is_listening():
            if self._is_armed:
                return self._hear(min(seconds, DEAF))
            self._is_armed = database.raise_flag(self.using)
            if self._is_armed:
                return {""}  # for what was sent between the last look and now
        stop.wait(seconds)
        return set()

    def _hear(self, seconds: float) -> set[str]:
        """Wait for a sender's word. After two for nothing, senders are let be for a while."""
        told = database.wait_for_word(self.using, seconds)
        if told:
            if self._was_for_nothing:
                self._not_before = time.monotonic() + REST
            self._was_for_nothing = True
        return told

    def has_served(self) -> None:
        """The last word was not for nothing."""
        self._was_for_nothing = False

    def disarm(self) -> None:
        """Let senders be: there is work, and nobody sleeps."""
        if self._is_armed and self._connection is database.raw_connection(self.using):
            database.lower_flag(self.using)
        self._is_armed = False

    def close(self) -> None:
        """Leave the connection as it was."""
        self.disarm()
        if self._connection is not None and self._connection is database.raw_connection(self.using):
            database.stop_listening(self.using)
        self._connection = None

    def _is_listening(self) -> bool:
        """Whether the connection of now hears of calls; a new connection is told to."""
        raw = database.raw_connection(self.using)
        if raw is None or raw is not self._connection:
            self._is_armed, self._connection = False, None
            if raw is not None and database.start_listening(self.using):
                self._connection = raw
        return self._connection is not None
