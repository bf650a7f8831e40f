"""A dispenser among the others: it gives signs of life, and goes by the settings that are in force.

In: the book of its settings. Out: the book that its passes go by. Where the database has forgotten
a sign of life, its ledger is not to be trusted, and everything is held.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from django.db import DatabaseError, InterfaceError

from callqueue.ledger.settings import Party
from callqueue.limits import in_force
from callqueue.limits.budgets import Book
from callqueue.maintenance import recovery


class Membership:
    """What one dispenser tells the others, and hears from them."""

    def __init__(self, using: str, name: str, settings: Callable[[], Book]) -> None:
        self.using, self.name, self.settings = using, name, settings
        self.party = Party(using)
        self.is_outdated = True
        self.runs = False  # it goes on running, so that its signs of life prove something
        self.kind, self.broker, self.digest = "", "", ""  # as DispenserState has them
        self._own: Book | None = None
        self._last_sign: recovery.Sign | None = None

    @property
    def book(self) -> Book | None:
        """What is in force, as far as this dispenser knows."""
        return self.party.book

    def heartbeat(self) -> None:
        """Give a sign of life, and see whether the settings in force have changed."""
        self._give_sign()
        self.is_outdated |= self.party.heartbeat()

    def follow_settings(self) -> Book | None:
        """Notice changed settings, here or elsewhere: the book that is in force from now on, None
        where nothing has changed.
        """
        own = self.settings()
        if own is self._own and not self.is_outdated:
            return None
        if self._own is None:  # this process may have had a dispenser before
            self.party.digest = recovery.stated_by(self.using, self.name)
        self.digest = in_force.digest_of(in_force.opinion_of(own))
        self._give_sign()
        book = self.party.join(own)
        self._own, self.is_outdated = own, False
        return book

    def leave(self) -> None:
        """What its settings hold of the limits counts no more. A database that is away is left to
        notice by the silence.
        """
        self.is_outdated, self.digest = True, ""
        with suppress(DatabaseError, InterfaceError):
            recovery.take_leave(self.using, self.name)
            self.party.leave()

    def _give_sign(self) -> None:
        last = self._last_sign
        if last is not None and recovery.has_gone_back(self.using, self.name, last):
            recovery.hold_everything(self.using)
        sign = recovery.beat(self.using, self.name, self.kind, self.broker, self.digest)
        self._last_sign = sign if self.runs else None
