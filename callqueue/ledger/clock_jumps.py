"""Watches the database's clock with this process's monotonic one, and moves the ledger along when
that clock jumps.

The ledger's instants are on the database's clock. If it is set forward, charges would seem older
than they are; if it is set back, they would stay for hours. So whoever sees a jump first moves what
the ledger still counts, under a lock, and writes down by how much. Nothing is ever moved to before
its own time. Instants are microseconds, monotonic ones seconds.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import Any

from django.db.models import F

from callqueue import clocks, database, events, tables
from callqueue.clocks import ClockEstimate, Reading
from callqueue.database import to_us
from callqueue.ledger import clock_shift
from callqueue.ledger.clock_shift import Jump
from callqueue.ledger.rule_rows import FRAME as FRAME
from callqueue.ledger.rule_rows import MOVING, OF_NO_RULE

SETTLED = 0.75  # seconds in which all dispensers that run have looked at the clock


class Jumped(Exception):
    """The clock has jumped since this process's last reading, and the ledger is still to be moved
    along: look, then try again.
    """


class Watch:
    """This process's last reading of one database's clock, by which the next one is judged.
    `since`: when the first was made.
    """

    def __init__(self, using: str) -> None:
        self.using, self.pid = using, os.getpid()
        self.last: Reading | None = None  # as narrow as the readings of the last seconds make it
        self.since: float | None = None
        self.narrowed = ClockEstimate()
        self.steady_from: int | None = None
        # by how much the ledger is ahead of what this process saw, since it took that over
        self._ahead = 0
        self._suspicious = False
        self._looking, self._keeping = threading.Lock(), threading.Lock()

    def look(self) -> int:
        """Read the clock; where it has jumped since the last reading, have the ledger moved along.
        Not inside a transaction.
        """
        with self._looking:
            reading, last = read(self.using), self.last
            jump = last.jump_to(reading) if last else 0
            if jump and last:
                reading, self._suspicious = self._follow(last)
            with self._keeping:
                if not self._suspicious:
                    self._keep(reading)
            return jump

    def settle(self) -> None:
        """Look, and where this process is too young to know what a jump is, look again until it is
        not. Not in a transaction.
        """
        self.look()
        for _ in range(20):
            if not self._suspicious:
                return
            time.sleep(SETTLED / 10)
            self.look()

    def credited(self, reading: Reading) -> int | None:
        """What the clock may be taken to show at this reading; None where it has jumped: look
        before anything is counted.

        Never later than it showed, and never by more later than the last time than this process saw
        time go by.
        """
        with self._keeping:
            last = self.last
            if last is not None and last.jump_to(reading):
                self._suspicious = True
                return None
            self._keep(reading)
            return reading.at if last is None else last.credit(reading)

    def take(self, reading: Reading) -> tuple[Reading, int]:
        """Follow one reading more: as narrow as others make it, and the instant since when the
        clock is known to be steady.

        An instant that was written down before that may be of another frame. Readings far apart
        prove little. A jump is left for a look to deal with.
        """
        with self._keeping:
            last = self.last
            jumped = last is not None and last.jump_to(reading) != 0
            self._suspicious |= jumped
            is_next = (
                last is not None
                and last.moved == reading.moved
                and reading.after - last.before <= clocks.FRESH
            )
            if self.steady_from is None or jumped or not is_next:
                self.steady_from = reading.at
            return reading if jumped else self._keep(reading), self.steady_from

    @property
    def wants_look(self) -> bool:
        """Whether a look is needed before a reading can be judged."""
        return self.last is None or self._suspicious

    def settles_in(self) -> float:
        """Seconds until this process may make its first pass beside others: if the clock has just
        jumped, only they can have seen it. Looks, where it has not yet.
        """
        if self.since is None:
            self.look()
        return max(0.0, (self.since or 0.0) + SETTLED - clocks.monotonic())

    def _follow(self, last: Reading) -> tuple[Reading, bool]:
        """Move the ledger by what of a jump it has not been moved by yet; the reading, and whether
        it is too early to judge it.

        The locks keep off passes (the rules' rows) and whoever writes an instant that is counted
        (the frame's).
        """
        with database.writing(self.using):
            make_frame(self.using)
            stored = tables.rule_states(self.using).order_by("rule")
            found = {row.rule: row for row in database.locked(stored, wait=True)}
            rules = [row for rule, row in found.items() if rule not in OF_NO_RULE]
            reading = read(self.using)
            by = self._unfollowed(last, reading)
            if by:
                width = (reading.after - reading.before) + (last.after - last.before)
                gap = round((reading.after - last.before) * 1_000_000)
                jump = Jump(reading.at, by, round(width * 1_000_000), gap)
                count = clock_shift.shift(self.using, jump, rules)
                stored.filter(rule=FRAME).update(passes=F("passes") + 1, served=F("served") + by)
        if by:
            events.emit("clock_jumped", seconds=by / 1_000_000, attempts=count)
        return replace(reading, moved=reading.moved + (by or 0)), by is None

    def _unfollowed(self, last: Reading, reading: Reading) -> int | None:
        """By how much the ledger is to be moved; None where it is too early to tell.

        Whoever is new may have come after a jump that others deal with only now. If they do, it
        takes over what they say; if nobody has after a while, there are no others. Who is not new
        takes over only that the ledger is ahead, which is safe, where others have moved it and the
        clock did not go back before his eyes: so no two move it to and fro. Whatever of that they
        take back is no jump either.
        """
        by, since = last.jump_to(reading), self.since or 0.0
        if not by or last.moved == reading.moved:
            return None if by and reading.before - since <= SETTLED else by
        if last.before - since <= SETTLED:
            return 0
        if by > 0:
            rest = by - self._ahead
            self._ahead = max(0, -rest)
            return rest if rest > clocks.TOLERANCE else 0
        if last.jump_to(replace(reading, moved=last.moved)) < 0:
            return by
        self._ahead -= by
        return 0

    def _keep(self, reading: Reading) -> Reading:
        if self.last is not None and self.last.moved != reading.moved:
            self.narrowed = ClockEstimate()  # those before are of another frame
        self.last = self.narrowed.add(reading)
        self.since = reading.before if self.since is None else self.since
        return self.last


def read(using: str) -> Reading:
    """A reading of the database's clock."""
    before = clocks.monotonic()
    [(shown, moved)] = database.rows(
        using, f"SELECT {database.clock_sql(using)}, {moved_sql(using)}"
    )
    return brought(using, before, shown, moved)


def moved_sql(using: str, *, held: bool = False) -> str:
    """How far the ledger was moved, as a statement selects it beside the clock: no reading is worth
    anything without it.

    `held`: and nobody moves it until the transaction ends, see `held`; to be selected before the
    clock.
    """
    table = tables.name(using, "RuleState")
    sharing = database.sharing(using) if held else ""
    return f"(SELECT served FROM {table} WHERE rule = '{FRAME}'{sharing})"


def moving_sql(using: str) -> str:
    """Which attempts are still to be moved, as a statement selects it beside how far the ledger
    was.
    """
    return f"(SELECT memo FROM {tables.name(using, 'RuleState')} WHERE rule = '{MOVING}')"


def brought(using: str, before: float, shown: Any, moved: int | None) -> Reading:
    """The reading that a statement made after `before` brought along. The clock of SQLite, which
    brings none, is this host's.
    """
    at = to_us(database.clock(using)) if shown is None else database.instant_us(shown)
    return Reading(at, before, clocks.monotonic(), moved or 0)


def held(using: str, *, lazily: bool = False) -> Reading:
    """A reading inside a transaction, until whose end nobody moves the ledger: for whoever writes
    an instant that is counted. `lazily`: the commit need not wait for the disk.
    """
    before, more = clocks.monotonic(), database.lazily_sql(using) if lazily else ""
    [(moved, shown, *_)] = database.rows(
        using, f"SELECT {moved_sql(using, held=True)}, {database.clock_sql(using)}{more}"
    )
    return brought_held(using, before, shown, moved)


def brought_held(using: str, before: float, shown: Any, moved: int | None) -> Reading:
    """The reading that another statement brought, inside a transaction: with `moved_sql` held."""
    if moved is None:
        make_frame(using)
        return held(using)
    reading = brought(using, before, shown, moved)
    # What MariaDB shows is when the statement began, which may have waited for somebody who moved
    # the ledger.
    waited = reading.after - before > clocks.TOLERANCE / 1_000_000
    return read(using) if waited and database.is_mysql(using) else reading


def check(using: str, reading: Reading) -> None:
    """Jumped where the clock has not gone on as it should until this reading: settle outside the
    transaction, and try again.
    """
    if watch(using).credited(reading) is None and not database.is_nested(using):
        raise Jumped


def make_frame(using: str) -> None:
    """Make the rows that jumps are written down in, where they are missing."""
    made = [tables.RuleState(rule=name) for name in (FRAME, MOVING)]
    tables.rule_states(using).bulk_create(made, ignore_conflicts=True)


_watches: dict[str, Watch] = {}


def watch(using: str) -> Watch:
    """This process's watch over a database; a forked child has one of its own."""
    found = _watches.get(using)
    if found is None or found.pid != os.getpid():
        found = _watches[using] = Watch(using)
    return found


def forget_readings() -> None:
    """Watch anew, as if this process began just now: who set the clock on purpose says so."""
    _watches.clear()
