"""A dispenser among the others: it gives signs of life, and agrees with them on the limits in
force.

In: the book of its settings. Out: the book that its passes go by. Where the database has forgotten
a sign of life, its ledger is not to be trusted, and everything is held.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from django.db import DatabaseError, InterfaceError

from callqueue.dispatch.next_look import AGREE
from callqueue.ledger import agreement
from callqueue.limits.budgets import Book
from callqueue.maintenance import recovery

# seconds between two tries to agree with the others in the end, while a pass that goes by what was
# in force before does not end
SLOWLY = 0.2


class Membership:
    """What one dispenser has told the others, and agreed on with them."""

    def __init__(self, using: str, name: str, settings: Callable[[], Book]) -> None:
        self.using, self.name, self.settings = using, name, settings
        self.seat = agreement.Seat(using, name)
        self.is_outdated = True
        self.runs = False  # it goes on running, so that its signs of life prove something
        self.kind, self.broker = "", ""  # as DispenserState has them
        self._own: Book | None = None
        self._join_at, self._pause = 0.0, AGREE
        self._last_sign: recovery.Sign | None = None

    @property
    def book(self) -> Book | None:
        """What is in force, as far as this dispenser knows."""
        return self.seat.book

    def heartbeat(self) -> None:
        """Give a sign of life, and see whether the others still agree."""
        self._give_sign()
        self.is_outdated |= self.seat.look()

    def follow_settings(self, *, at_once: bool = False) -> Book | None:
        """Notice changed settings, here or elsewhere, and agree with the other dispensers: the book
        that is in force from now on, None where nothing has changed.

        `at_once`: do not wait between two tries to agree.
        """
        own = self.settings()
        is_time = at_once or time.monotonic() >= self._join_at
        if own is self._own and not (self.is_outdated and is_time):
            return None
        self._give_sign()
        book = self.seat.join(own)
        self._own, self.is_outdated = own, not self.seat.is_complete
        self._join_at = time.monotonic() + self._pause
        self._pause = AGREE if self.seat.is_complete else min(SLOWLY, 2 * self._pause)
        return book

    def start_over(self) -> None:
        """The database was away: others could give no sign of life either."""
        self.seat.look_afresh()

    def leave(self) -> None:
        """What its settings hold of the limits counts no more. A database that is away is left to
        notice by the silence.
        """
        self.is_outdated = True
        with suppress(DatabaseError, InterfaceError):
            self.seat.leave()

    def _give_sign(self) -> None:
        last = self._last_sign
        if last is not None and recovery.has_gone_back(self.using, self.name, last):
            recovery.hold_everything(self.using)
        sign = recovery.beat(self.using, self.name, self.kind, self.broker)
        self._last_sign = sign if self.runs else None
