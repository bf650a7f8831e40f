"""Ledger time: what the database's clock shows, less how far the ledger was moved.

All that the ledger compares is written in it. Appointments are wall time (`database.clock`,
`ClockNow`): when a call is due, expires or has ended, and the calendar. Instants are microseconds,
monotonic ones seconds.

If the clock is set forward, charges seem older than they are; if it is set back, they stay for
hours. So whoever sees a jump first changes `moved` by as much, and mends what was written before
anybody saw it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db.models import Case, DateTimeField, DurationField, ExpressionWrapper, F, Value, When
from django.db.models.lookups import GreaterThan

from callqueue import clocks, database, events, states, tables
from callqueue.clocks import ClockEstimate, Mono, Reading, Us
from callqueue.database import MICROSECOND, ClockNow, from_us, to_us
from callqueue.ledger.rule_rows import SILENT
from callqueue.limits.kinds import SECOND
from callqueue.states import PERMIT

# the keys of the two rows, whose sum is how far the ledger was moved: who writes an instant that
# counts shares the first one until he has committed, so who only agrees adds to the other
ROW, OF_AGREED = 1, 2
SETTLED = 0.75  # seconds in which all dispensers that run have looked at the clock
OLD = 50.0  # seconds after which what clocks may drift apart is more than TOLERANCE
# microseconds that readings of two processes may be apart in what they make of a jump
MISSED = SECOND
AGREED = 1  # microseconds by which ledger time is set back to tell all that it stays as it is
JUMPS = 1000  # of what it is moved by for a jump this is the unit, in microseconds
# what lies so far in the future was written before the clock was set back: no statement that writes
# an instant waits for as long
AHEAD = timedelta(seconds=60)
RETRIES = 1000  # that wait for their backoff and are brought back with the clock, at most


class LedgerNow(ClockNow):
    def as_postgresql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        sql, params = super().as_postgresql(compiler, connection, **extra)
        return f"({sql} - {_moved_or_0_sql(connection.alias)} * INTERVAL '1 microsecond')", params

    def as_mysql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        sql, params = super().as_mysql(compiler, connection, **extra)
        return f"({sql} - INTERVAL {_moved_or_0_sql(connection.alias)} MICROSECOND)", params

    def as_sqlite(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        sql, params = super().as_sqlite(compiler, connection, **extra)
        by = f"PRINTF('%%+.6f seconds', -{_moved_or_0_sql(connection.alias)} / 1000000.0)"
        return f"{sql[:-1]}, {by})", params


def now(using: str) -> datetime:
    """Ledger time. One statement."""
    return from_us(read(using).at)


def moved(using: str) -> int:
    """How far the ledger was moved: microseconds. One statement."""
    [(moved,)] = database.rows(using, f"SELECT {_moved_or_0_sql(using)}")
    return int(moved)


def to_wall(using: str, instant: datetime) -> datetime:
    """An instant of ledger time as the database's clock shows it. One statement."""
    return instant + moved(using) * MICROSECOND


def moved_sql(using: str, *, held: bool = False) -> str:
    """How far the ledger was moved, for a SELECT, before the clock. `held`: nobody moves it, but
    for within somebody else's transaction, which may take its time.
    """
    is_held = held and not database.is_nested(using)
    sharing = database.dialect(using).sharing if is_held else ""
    one = f"SELECT moved FROM {tables.name(using, 'LedgerState')} WHERE id ="
    return f"(({one} {ROW}{sharing}) + COALESCE(({one} {OF_AGREED}), 0))"


def _moved_or_0_sql(using: str) -> str:
    return f"COALESCE({moved_sql(using)}, 0)"


def read(using: str) -> Reading:
    reading = _read(using)
    return _read(using) if _has_waited(using, reading) else reading


def _read(using: str) -> Reading:
    before = clocks.monotonic()
    [(shown, moved)] = database.rows(
        using, f"SELECT {database.clock_sql(using)}, {moved_sql(using)}"
    )
    return reading_of(using, before, shown, moved)


def reading_of(using: str, before: Mono, shown: Any, moved: int | None) -> Reading:
    """The reading of a statement that selected the clock, or None: SQLite's is this host's."""
    wall = to_us(database.clock(using)) if shown is None else database.instant_us(shown)
    return Reading(wall - (moved or 0), before, clocks.monotonic(), moved or 0)


def read_held(using: str, *, lazily: bool = False) -> Reading:
    """A reading in a transaction, until whose end nobody moves the ledger."""
    before, more = clocks.monotonic(), ends_sql(using, lazily=lazily)
    [(moved, shown, *_)] = database.rows(
        using, f"SELECT {moved_sql(using, held=True)}, {database.clock_sql(using)}{more}"
    )
    return held_reading_of(using, before, shown, moved)


def ends_sql(using: str, *, lazily: bool) -> str:
    """SQL for the columns of a SELECT that holds a reading: how its transaction ends."""
    more = database.dialect(using).lazily if lazily else ""
    return f"{more}{database.within_idle_seconds(using, SILENT)}"


def held_reading_of(using: str, before: Mono, shown: Any, moved: int | None) -> Reading:
    """As `reading_of`, of one that selected `moved_sql(held=True)`, in a transaction."""
    if moved is None:
        ensure_rows(using)
        return read_held(using)
    reading = reading_of(using, before, shown, moved)
    return read(using) if _has_waited(using, reading) else reading


def _has_waited(using: str, reading: Reading) -> bool:
    # What MariaDB shows is when the statement began, which may have waited while others moved the
    # ledger: ledger time would be early.
    waited = reading.after - reading.before > clocks.TOLERANCE / 1_000_000
    return waited and database.is_mysql(using)


def set_back(using: str, reading: Reading, by_us: int) -> Reading:
    """Set ledger time back; the reading as it is then. With the rows of LedgerState locked."""
    tables.ledger_state(using).filter(pk=ROW).update(moved=F("moved") + by_us)
    return replace(reading, at=reading.at - by_us, moved=reading.moved + by_us)


def ensure_rows(using: str) -> None:
    made = [tables.LedgerState(pk=pk) for pk in (ROW, OF_AGREED)]
    tables.ledger_state(using).bulk_create(made, ignore_conflicts=True)


# --- Where the clock jumps


class Jumped(Exception):
    """The clock has jumped, or may have before this process's first reading: settle, try again."""


class Late(NamedTuple):
    """Others have set ledger time back too far, or the clock was since: nobody has followed."""

    since: Mono  # found first
    by: int  # microseconds below 0
    reading: Reading  # by which it was found last


class Watch:
    """This process's last reading of one database's clock, by which the next one is judged."""

    def __init__(self, using: str) -> None:
        self.using, self.pid = using, os.getpid()
        self.last: Reading | None = None  # as narrow as the readings of the last seconds make it
        # when the first had been made, which may have had to connect; or the first after so long
        # that drift may hide a jump
        self.since: Mono | None = None
        self._moved_then: int | None = None  # how far the ledger was when that one was made
        self.narrowed = ClockEstimate()
        self.steady_from: Us | None = None
        self._suspicious = False
        self._late: Late | None = None
        self._looking, self._keeping = threading.Lock(), threading.Lock()

    def look(self) -> int:
        """Read the clock; after a jump, have ledger time go on as it did. Not in a transaction."""
        with self._looking:
            reading, last = read(self.using), self.last
            self._doubt(reading)
            jump = last.jump_to(reading) if last else 0
            suspicious = False
            if last and (jump or self._put_forward(reading)):
                reading, suspicious = self._follow(last)
            self._suspicious = suspicious
            with self._keeping:
                if not self._suspicious:
                    self._late = None
                    self._keep(reading)
            return jump

    def settle(self) -> None:
        """Look until this process is old enough to know what a jump is. Within somebody's
        transaction nothing is moved: there it leaves others the time to.
        """
        if database.in_transaction(self.using):
            if self.last is None:
                time.sleep(self.settles_in())
            return
        for _ in range(20):
            self.look()
            if not self._suspicious and not self.settles_in():
                self.agree()
                return
            time.sleep(SETTLED / 10)

    def credited(self, reading: Reading) -> Us | None:
        """What ledger time may be taken for at this reading; None after a jump, or after so long
        that drift may hide one: look first.

        Never later than it was read, and never by more later than the last time than this process
        saw time go by.
        """
        with self._keeping:
            last = self.last
            jumped = last is not None and (last.jump_to(reading) or self._put_forward(reading))
            if jumped or self._doubt(reading):
                self._suspicious = True
                return None
            self._keep(reading)
            return reading.at if last is None else last.credit(reading)

    def take(self, reading: Reading) -> tuple[Reading, Us]:
        """Follow one more reading: as narrow as others make it, and since when the clock is steady.

        An instant that was written before that may be by a wrong time. A jump is left for a look.
        """
        with self._keeping:
            last = self.last
            jumped = last is not None and last.jump_to(reading) != 0
            jumped |= self._put_forward(reading) > 0
            self._suspicious |= jumped
            is_next = last is not None and reading.after - last.before <= clocks.FRESH
            if self.steady_from is None or jumped or not is_next:
                self.steady_from = reading.at
            return reading if jumped else self._keep(reading), self.steady_from

    def agree(self) -> None:
        """Say that ledger time stays as it is, where nobody has since this process came; shorten
        what a clock that was set back unseen has left in the future. Not in a transaction.
        """
        if self.is_agreed or self.last is None:
            return
        self.look()  # what it read long ago says nothing of a jump since
        if self.is_agreed or self._suspicious:
            return
        own = tables.ledger_state(self.using).filter(pk=OF_AGREED)
        if not own.update(moved=F("moved") + AGREED):
            ensure_rows(self.using)  # it may be the very first
            own.update(moved=F("moved") + AGREED)
        self.look()
        if self.is_agreed and not self._suspicious:  # else the clock was set back just then
            with database.writing(self.using):
                database.end_if_silent(self.using, SILENT)
                _shorten_what_is_ahead(self.using, self.last)

    @property
    def is_agreed(self) -> bool:
        """Whether somebody has moved the ledger since this process came, or said that it stays.
        Before that it writes nothing that counts: who has looked before a jump that came before
        this process, and not since, would take ledger time back to where that is too early.
        """
        return self.last is not None and self.last.moved != self._moved_then

    @property
    def wants_look(self) -> bool:
        """Whether a look is needed before a reading can be judged."""
        return self.last is None or self._suspicious

    def settles_in(self) -> float:
        """Seconds until its first pass beside others: only they can have seen a jump before."""
        is_old = self.last is not None and clocks.monotonic() - self.last.after > OLD
        if self.since is None or is_old:
            self.look()
        return max(0.0, (self.since or 0.0) + SETTLED - clocks.monotonic())

    def _follow(self, last: Reading) -> tuple[Reading, bool]:
        """Have ledger time go on as it did; the reading, and whether it is too early to judge."""
        # The lock keeps off all who write an instant that is counted, but for passes. Those write
        # by no wrong time, and one that is frozen would keep back everybody.
        with database.writing(self.using):
            database.end_if_silent(self.using, SILENT)
            ensure_rows(self.using)
            list(database.locked(tables.ledger_state(self.using).order_by("pk"), wait=True))
            reading = read(self.using)
            by = self._unfollowed(last, reading)
            if by:
                jump = Jump.between(last, reading, by)
                # No two moves make up for each other, so that whoever was away sees that some were.
                more = AGREED if by != AGREED else 0
                reading = set_back(self.using, reading, by + more)
                if by == AGREED:
                    if self._has_been_late():
                        _end_charges(self.using, from_us(reading.at))
                    _shorten_what_is_ahead(self.using, reading)
                else:
                    mend(self.using, jump, reading)
        if by and by != AGREED:
            events.emit("clock_jumped", seconds=by / SECOND)
            if by > 0 and (late_by := last.jump_to(reading)) < 0:
                self._late = Late(reading.before, late_by, reading)
                return reading, True
        return reading, by is None

    def _unfollowed(self, last: Reading, reading: Reading) -> int | None:
        """By how much ledger time is to be set back; None where it is too early to tell.

        Who is new may have come after a jump that others still deal with. It takes over what they
        say and is new once more, unless the clock was set forward before its eyes: whether it was
        set back, too, is in what they say or will be. If nobody moves it for a while, there are no
        others. Who is not new goes by what it saw. Where others have moved ledger time and it is
        late now, they erred, or the clock was set back since. To make up for that would leave what
        others have written meanwhile too early: once all have had the time to see it, all are told
        to leave it (AGREED).
        """
        by, since = -(-last.jump_to(reading) // JUMPS) * JUMPS, self.since or 0.0
        if forward := self._put_forward(reading):
            return max(by, -(-forward // JUMPS) * JUMPS)
        if last.moved == reading.moved:
            return None if by and reading.before - since <= SETTLED else by
        seen = last.jump_to(replace(reading, at=reading.wall - last.moved))
        is_new = last.before - since <= SETTLED and reading.before - since <= 2 * SETTLED
        if is_new and seen <= 0:
            self.since = None
            return 0
        if by >= 0:
            return by
        late = self._late or Late(reading.before, by, reading)
        is_same = abs(by - late.by) <= clocks.TOLERANCE
        if reading.before - late.reading.before > SETTLED or not is_same:
            late = Late(reading.before, by, reading)  # meanwhile it was not, or by something else
        self._late = late._replace(by=by, reading=reading)
        return AGREED if by >= -MISSED or self._has_been_late() else None

    def _has_been_late(self) -> bool:
        """Whether ledger time was late for so long that all who run have seen it."""
        return self._late is not None and self._late.reading.before - self._late.since > SETTLED

    def _put_forward(self, reading: Reading) -> int:
        """By how much the clock was set forward since ledger time was found late, and nobody has
        followed: what others have written by the late time would be too early.
        """
        if self._late is None:
            return 0
        late = self._late.reading
        clock = late.jump_to(replace(reading, at=reading.wall - late.moved))
        return max(0, min(clock, late.jump_to(reading)))

    def _keep(self, reading: Reading) -> Reading:
        if self.last is not None and self.last.moved != reading.moved:
            self.narrowed = ClockEstimate()  # those before may be by a wrong time
        self._doubt(reading)
        self.last = self.narrowed.add(reading)
        if self.since is None:
            self.since, self._moved_then = reading.after, reading.moved
        return self.last

    def _doubt(self, reading: Reading) -> bool:
        """Whether it is new from now on, and leaves jumps to others: drift may hide one by now."""
        last, since = self.last, self.since
        is_old = last is not None and reading.after - last.before > OLD
        if last and since is not None and is_old and since <= last.after and last.is_off(reading):
            self.since, self._moved_then = reading.after, reading.moved
            return True
        return False


def check(using: str, reading: Reading) -> None:
    """Raise Jumped where the clock has jumped until this reading, or this process is too young to
    know. Whoever writes an instant that counts asks this: what the young wrote just after a clock
    was set back would be too early for ever.
    """
    found = watch(using)
    is_known = found.credited(reading) is not None and not found.settles_in()
    if not (is_known and found.is_agreed) and not database.is_nested(using):
        raise Jumped


_watches: dict[str, Watch] = {}


def watch(using: str) -> Watch:
    """This process's watch over a database; a forked child has one of its own."""
    found = _watches.get(using)
    if found is None or found.pid != os.getpid():
        found = _watches[using] = Watch(using)
    return found


def forget_readings(*, is_new: bool = True) -> None:
    """Watch anew, after the clock was set on purpose. `is_new`: as if this process began now."""
    for using in list(_watches):
        _watches[using] = Watch(using)
        if not is_new:
            _watches[using].since = Mono(-math.inf)


@dataclass(frozen=True)
class Jump:
    """The clock jumped. Microseconds."""

    by: int
    doubt: int  # what `by` may be too high
    gap: int  # the time in which it did

    @classmethod
    def between(cls, last: Reading, reading: Reading, by: int) -> Jump:
        width = (reading.after - reading.before) + (last.after - last.before)
        gap = reading.after - last.before
        return cls(by, round(width * SECOND), round(gap * SECOND))


def mend(using: str, jump: Jump, reading: Reading) -> None:
    """Mend what was written by the wrong time. With the rows of LedgerState locked.

    `reading` is in the right time. The same few statements, however much the ledger counts.
    Releases, ends and holds are right: who writes them asks `check` first, or is a pass
    (`Watch.credited`). Begins and signs of life are left. They are found by what they say: between
    the last good reading and now, and off by the jump. What was truly written then gets no shorter
    lease.
    """
    now, off = from_us(reading.at), timedelta(microseconds=jump.doubt - jump.by)
    first = from_us(
        reading.at + (jump.by - jump.gap if jump.by < 0 else max(0, jump.by - jump.gap))
    )
    last = from_us(reading.at + jump.by + jump.doubt)

    def right(rows: Any, name: str, *others: str) -> None:
        then = When(**{f"{name}__lte": now - off}, then=F(name) + off)
        fixed = Case(then, default=Value(now), output_field=DateTimeField())
        wrong = rows.filter(**{f"{name}__gt": first, f"{name}__lte": last})
        wrong.update(**{name: fixed}, **{other: F(other) + off for other in others})

    right(tables.attempts(using).open(), "started_at", "lease_until")
    # Ledger time may be late by what readings erred: what ended just now would count for longer.
    _end_charges(using, now, ahead=timedelta(microseconds=jump.doubt + clocks.TOLERANCE))
    right(tables.dispensers(using), "seen_at")
    right(tables.opinions(using), "seen_at")
    right(tables.opinions(using), "lapsed_at")
    if jump.by < 0:
        _bring_back(using, jump, reading)


def _end_charges(using: str, now: datetime, *, ahead: timedelta | None = None) -> None:
    """Have charges that end in the future end now, those that do so by no more than `ahead`."""
    rules = list(tables.rule_states(using).values_list("pk", flat=True))
    rows = tables.attempts(using).filter(rule__in=rules, finished_at__gt=now)
    if ahead is not None:
        rows = rows.filter(finished_at__lte=now + ahead)
    sent_at = Case(When(sent_at__gt=now, then=Value(now)), default=F("sent_at"))
    rows.update(finished_at=now, sent_at=sent_at)


def _shorten_what_is_ahead(using: str, last: Reading) -> None:
    """Where ledger time stays late after the clock was set back, have leases and holds last from
    now on, for as long as they were to. Each once, whoever else does this too. Nothing is done
    where the clock was set since the `last` reading. In a transaction that a freeze ends.

    Now is when each statement runs, and no earlier than what is read here: whoever is frozen in
    between takes nothing for the future that has begun meanwhile.
    """
    seen = read(using)
    if last.jump_to(seen):
        return
    now, ahead, least = LedgerNow(), LedgerNow() + AHEAD, Value(from_us(seen.at) + AHEAD)
    for rows, began, ends in (
        (tables.attempts(using).open(), "started_at", "lease_until"),
        (tables.holds(using), "began_at", "until"),
    ):
        changed = {ends: F(ends) - _since_now(began), began: now}  # MySQL goes by this order
        rows.filter(**{f"{began}__gt": ahead}).filter(**{f"{began}__gt": least}).update(**changed)
    # A release stays when it was: one whose lease ends before it was seen to already.
    unbegun = tables.attempts(using).open().filter(started_at=None, released_at__gt=ahead)
    unbegun = unbegun.filter(released_at__gt=least)
    lasts = ExpressionWrapper(F("lease_until") - F("released_at"), DurationField())
    longer = unbegun.filter(GreaterThan(F("lease_until"), F("released_at")))
    longer = longer.filter(GreaterThan(_since_now("released_at"), lasts))
    longer.update(lease_until=F("lease_until") - _since_now("released_at"))


def _since_now(name: str) -> Any:
    return ExpressionWrapper(F(name) - LedgerNow(), DurationField())


def _bring_back(using: str, jump: Jump, reading: Reading) -> None:
    """Bring backoffs and permits' deadlines back, so that they get no longer; those that were over
    unseen, too. Appointments stay, and locked calls.
    """
    waiting, now = tables.calls(using).waiting(), from_us(reading.wall)
    retries = waiting.filter(status=states.ERROR, ready=False)
    for rows, name in ((retries, "due_at_dt"), (waiting.filter(method=PERMIT), "expires_at_dt")):
        first = rows.filter(**{f"{name}__gt": now}).order_by(name)
        seen = tables.calls(using).filter(pk__in=list(first.values_list("pk", flat=True)[:RETRIES]))
        free = list(database.locked(seen.order_by("pk")).values_list("pk", flat=True))
        sooner = F(name) + timedelta(microseconds=jump.by)
        rows.filter(pk__in=free).update(**{name: sooner})
