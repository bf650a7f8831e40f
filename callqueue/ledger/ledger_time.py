"""Ledger time: what the database's clock shows, less how far the ledger was moved.

All that the ledger compares is written in it. Appointments are wall time (`database.clock`,
`ClockNow`): when a call is due, expires or has ended, and the calendar. Instants are microseconds,
monotonic ones seconds.

If the clock is set forward, charges seem older than they are; if it is set back, they stay for
hours. So whoever sees a jump first changes `moved` by as much, and mends what was written before
anybody saw it. Ledger time that is early is set back by whoever finds it so. Ledger time that is
late is put forward only where nobody has agreed to it: who writes by it has agreed before.
"""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Case, DateTimeField, DurationField, ExpressionWrapper, F, Value, When
from django.db.models.lookups import GreaterThan

from callqueue import clocks, database, events, states, tables
from callqueue.clocks import ClockEstimate, Mono, Reading, Us
from callqueue.database import MICROSECOND, ClockNow, from_us, to_us
from callqueue.ledger.rule_rows import SILENT
from callqueue.limits.kinds import SECOND
from callqueue.states import PERMIT

# The keys of the two rows. ROW says how far the ledger was moved: who writes an instant that counts
# shares its lock until the commit. So who only agrees to ledger time writes the other row.
ROW, OF_AGREED = 1, 2
SETTLED = 0.75  # seconds in which all dispensers that run have looked at the clock
OLD = 50.0  # seconds after which what clocks may drift apart is more than TOLERANCE
AGREEING = (SILENT + 1) * SECOND  # microseconds in which others see that somebody has agreed
# what lies so far in the future was written before the clock was set back: no statement that writes
# an instant waits for as long
AHEAD = timedelta(seconds=60)
RETRIES = 1000  # that wait for their backoff and are brought back with the clock, at most


class LedgerNow(ClockNow):
    """Ledger time when the statement begins, as SQL."""

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
    """SQL for a SELECT, before the clock: how far the ledger was moved, NULL without a row. `held`:
    nobody moves it until the transaction ends; not so within another, which may take its time.
    """
    is_held = held and not database.is_nested(using)
    sharing = database.dialect(using).sharing if is_held else ""
    return f"(SELECT moved FROM {tables.name(using, 'LedgerState')} WHERE id = {ROW}{sharing})"


def reading_sql(using: str, *, held: bool = False) -> str:
    """The columns of a SELECT that `reading_of` takes. `held`: as for `moved_sql`."""
    agreed = f"FROM {tables.name(using, 'LedgerState')} WHERE id = {OF_AGREED})"
    return (
        f"{moved_sql(using, held=held)}, (SELECT agreements {agreed}, "
        f"(SELECT agreed_at {agreed}, {database.clock_sql(using)}"
    )


READING_COLUMNS = ("moved", "agreements", "agreed_at", "clock")  # of `reading_sql`


def _moved_or_0_sql(using: str) -> str:
    return f"COALESCE({moved_sql(using)}, 0)"


def read(using: str) -> Reading:
    reading = _read(using)
    return _read(using) if _has_waited(using, reading) else reading


def _read(using: str) -> Reading:
    before = clocks.monotonic()
    [shown] = database.rows(using, f"SELECT {reading_sql(using)}")
    return reading_of(using, before, *shown)


def reading_of(
    using: str,
    before: Mono,
    moved: int | None,
    agreements: int | None,
    agreed_at: int | None,
    shown: Any,
) -> Reading:
    """The reading of what `reading_sql` selected. None: no row yet (0), or SQLite (read here)."""
    wall = to_us(database.clock(using)) if shown is None else database.instant_us(shown)
    at, agreed_at = wall - (moved or 0), Us(agreed_at or 0)
    return Reading(at, before, clocks.monotonic(), moved or 0, agreements or 0, agreed_at)


def read_held(using: str, *, lazily: bool = False) -> Reading:
    """A reading; until its transaction ends (`transaction_end_sql`) nobody moves the ledger."""
    before, more = clocks.monotonic(), transaction_end_sql(using, lazily=lazily)
    [shown] = database.rows(using, f"SELECT {reading_sql(using, held=True)}{more}")
    return held_reading_of(using, before, *shown[: len(READING_COLUMNS)])


def transaction_end_sql(using: str, *, lazily: bool) -> str:
    """SQL for columns, or "": a silent transaction ends; `lazily`: commit waits for no disk."""
    more = database.dialect(using).lazily if lazily else ""
    return f"{more}{database.idle_timeout_sql(using, SILENT)}"


def held_reading_of(using: str, before: Mono, moved: int | None, *shown: Any) -> Reading:
    """As `reading_of`, of `reading_sql(held=True)`; makes missing rows; reads anew after a wait."""
    if moved is None:
        ensure_rows(using)
        return read_held(using)
    reading = reading_of(using, before, moved, *shown)
    return read(using) if _has_waited(using, reading) else reading


def _has_waited(using: str, reading: Reading) -> bool:
    # What MariaDB shows is when the statement began, which may have waited while others moved the
    # ledger: ledger time would be early.
    waited = reading.after - reading.before > clocks.TOLERANCE / 1_000_000
    return waited and database.is_mysql(using)


def set_back(using: str, reading: Reading, by_us: int) -> Reading:
    """Set ledger time back (below 0: forward) and a microsecond more: no two moves make up for each
    other unseen. The reading as it is then. With the rows of LedgerState locked.
    """
    by_us += 1
    tables.ledger_state(using).filter(pk=ROW).update(moved=F("moved") + by_us)
    return replace(reading, at=reading.at - by_us, moved=reading.moved + by_us)


def _agree(using: str, reading: Reading) -> Reading:
    """Say that this is what to go by; the reading as it is then. With the row OF_AGREED locked."""
    own = tables.ledger_state(using).filter(pk=OF_AGREED)
    own.update(agreements=F("agreements") + 1, agreed_at=reading.at)
    return replace(reading, agreements=reading.agreements + 1, agreed_at=reading.at)


def ensure_rows(using: str) -> None:
    made = [tables.LedgerState(pk=pk) for pk in (ROW, OF_AGREED)]
    tables.ledger_state(using).bulk_create(made, ignore_conflicts=True)


# --- Where the clock jumps


class Jumped(Exception):
    """The clock has jumped, or may have before this process's first reading: settle, try again."""


class Watch:
    """This process's last reading of one database's clock, by which the next one is judged."""

    def __init__(self, using: str) -> None:
        self.using, self.pid = using, os.getpid()
        self.last: Reading | None = None  # as narrow as the readings of the last seconds make it
        # since when it is new: from its first reading, which may have had to connect; anew from one
        # by which it took over what others say, or before which drift may have hidden a jump
        self.since: Mono | None = None
        self._agreements_then = 0  # how many that reading saw
        self._must_settle = False  # before it agrees: it is not new for the first time
        self.narrowed = ClockEstimate()
        self.steady_from: Us | None = None  # ledger time; see `keep_and_narrow`
        self._suspicious = False  # there may be a jump that no look has dealt with
        self._looking, self._keeping = threading.Lock(), threading.Lock()

    def look(self) -> int:
        """Read the clock, follow a jump; how many µs early (below 0: late). In no transaction."""
        with self._looking:
            reading = read(self.using)
            self._be_new_if_doubtful(reading)
            off = self._us_early(reading)
            followed = self._follow_jump() if off else reading
            with self._keeping:
                self._suspicious = followed is None
                if followed is not None:
                    self._keep(followed)
            return off

    def settle(self) -> None:
        """Look until this process is old enough to know what a jump is, then agree. Gives up after
        20 looks. In a transaction it does not agree; without a reading, it leaves others time.
        """
        if database.in_transaction(self.using):
            if self.last is None:
                time.sleep(self.seconds_to_settle())
            return
        for _ in range(20):
            self.look()
            if not self._suspicious and not self.seconds_to_settle():
                self.agree()
                return
            time.sleep(SETTLED / 10)

    def keep_and_credit(self, reading: Reading) -> Us | None:
        """What ledger time may be taken for at this reading, which is kept: no later than it was
        read, nor further from the last one than this process saw time go by. None, and nothing is
        kept, after a jump or after so long that drift may hide one: look first.
        """
        with self._keeping:
            last = self.last
            if self._us_early(reading) or self._be_new_if_doubtful(reading):
                self._suspicious = True
                return None
            self._keep(reading)
            return reading.at if last is None else last.credit(reading)

    def keep_and_narrow(self, reading: Reading) -> tuple[Reading, Us]:
        """Keep one more reading; it, as narrow as others make it, and since when the clock is known
        to be steady: what was written before may be by a wrong time. After a jump it is not kept.
        """
        with self._keeping:
            last, jumped = self.last, self._us_early(reading) != 0
            self._suspicious |= jumped
            is_next = last is not None and reading.after - last.before <= clocks.FRESH
            if self.steady_from is None or jumped or not is_next:
                self.steady_from = reading.at
            return reading if jumped else self._keep(reading), self.steady_from

    def agree(self) -> None:
        """Agree to ledger time as it is, where nobody has since this process was new; mend what a
        clock that was set back unseen has left in the future. Not in a transaction.
        """
        if self.is_agreed or self.last is None or (self._must_settle and self.seconds_to_settle()):
            return
        with database.writing(self.using):
            database.set_idle_timeout(self.using, SILENT)
            own = tables.ledger_state(self.using).filter(pk=OF_AGREED)
            if not list(database.locked(own, wait=True)):
                ensure_rows(self.using)  # it may be the very first
                list(database.locked(own, wait=True))
            reading = read(self.using)  # what it read long ago says nothing of a jump since
            if self.keep_and_credit(reading) is None or self.is_agreed:
                return
            reading = _agree(self.using, reading)
        with self._keeping:
            self._keep(reading)
        with database.writing(self.using):
            database.set_idle_timeout(self.using, SILENT)
            _mend_what_is_ahead(self.using, reading)

    @property
    def is_agreed(self) -> bool:
        """Whether somebody has agreed to ledger time since this process was new (once or again).
        Before that it writes nothing that counts: after a jump that only others saw, they may still
        put ledger time forward, and what this process wrote would be too early.
        """
        if (last := self.last) is None or last.agreements == self._agreements_then:
            return False
        # Who has agreed to a time that is still to come did so before the clock was set back, and
        # has committed it since: that says nothing of the time as it is.
        return last.agreed_at <= last.at

    @property
    def wants_look(self) -> bool:
        """Whether a look is needed before a reading can be judged."""
        return self.last is None or self._suspicious

    def seconds_to_settle(self) -> float:
        """Seconds until it may judge: only others know of a jump before it was new. May look."""
        is_old = self.last is not None and clocks.monotonic() - self.last.after > OLD
        if self.since is None or is_old:
            self.look()
        return max(0.0, (self.since or 0.0) + SETTLED - clocks.monotonic())

    def _is_new(self, off: int, last: Reading, reading: Reading) -> bool:
        """Whether what it saw last may be of nobody's time, or drift may have hidden a jump."""
        age = reading.before - (self.since or 0.0)
        # It goes by a reading that is not of its first seconds.
        if self._is_new_again or last.before - (self.since or 0.0) > SETTLED:
            return age <= SETTLED
        # That reading may be wrong. Early: it is new for longer where others moved the ledger.
        if off > 0:
            return age <= (SETTLED if last.moved == reading.moved else 2 * SETTLED)
        # Late: what others have agreed to since stands.
        return age <= SETTLED or last.agreements != reading.agreements

    @property
    def _is_new_again(self) -> bool:  # and has kept no reading since
        return self.last is not None and self.since is not None and self.last.after < self.since

    def _us_early(self, reading: Reading) -> int:
        """By how many microseconds ledger time is early; below 0: late; 0: it goes on as it did."""
        if (last := self.last) is None:
            return 0
        off = last.jump_until(reading)
        is_new = reading.agreements > last.agreements
        # It is early, too, where others have agreed to a time that was late, and it is late no
        # more: what they wrote was written no earlier than when they agreed.
        if is_new and reading.agreed_at < last.at - AGREEING:
            is_late_no_more = replace(last, at=reading.agreed_at).jump_until(reading) > 0
            off = max(off, reading.at - reading.agreed_at) if is_late_no_more else off
        return off

    def _follow_jump(self) -> Reading | None:
        """Have ledger time go on as it did (mends, tells), or as others say. None: left to them."""
        # The lock keeps off all who write an instant that is counted, but for passes. Those write
        # by no wrong time, and one that is frozen would keep back everybody.
        with database.writing(self.using):
            database.set_idle_timeout(self.using, SILENT)
            ensure_rows(self.using)
            list(database.locked(tables.ledger_state(self.using).order_by("pk"), wait=True))
            reading, last = read(self.using), self.last
            off = self._us_early(reading)
            if not off or last is None:
                return reading
            is_new = self._is_new(off, last, reading)
            if is_new and self._is_new_again:
                return None
            by = self._to_set_back(off, last, reading, is_new=is_new)
            if by:
                jump, reading = Jump.between(last, reading, by), set_back(self.using, reading, by)
                mend(self.using, jump, reading)
            elif last.moved == reading.moved:
                # What is kept by instant may be ahead. Else it is marked: who is new by then waits
                # once more for each mark.
                reading = set_back(self.using, reading, 0)
            if by > 0 or not (by or is_new):
                reading = _agree(self.using, reading)
            if not by and not is_new:
                _mend_what_is_ahead(self.using, reading)
        if by:
            events.emit("clock_jumped", seconds=by / SECOND)
        with self._keeping:
            self._begin_anew(reading, is_new=is_new)
        return reading

    def _to_set_back(self, off: int, last: Reading, reading: Reading, *, is_new: bool) -> int:
        """By how much ledger time is to be set back; below 0: forward; 0: it is taken as it is."""
        if off > 0:
            # At once. Who is new may have come while it was late: that others have put it forward
            # since is no error.
            by = off - max(0, last.moved - reading.moved) if is_new else off
            return by if by > clocks.TOLERANCE else 0
        # Late: put forward by who is not new, where nobody has agreed since the clock was set back.
        # What others have written by it would be too early.
        was_agreed = last.at <= reading.agreed_at and reading.at < reading.agreed_at
        # of the same number where a copy of the database has lost one
        is_same = (reading.agreements, reading.agreed_at) == (last.agreements, last.agreed_at)
        is_agreed = not (is_same or was_agreed)
        return 0 if is_new or is_agreed else off

    def _begin_anew(self, reading: Reading, *, is_new: bool) -> None:
        """Go by this from now on; `is_new`: as a process that has just come."""
        self.last, self.steady_from, self.narrowed = reading, None, ClockEstimate()
        if is_new:
            self._be_new(reading)

    def _be_new(self, reading: Reading) -> None:
        self._must_settle = self.since is not None
        self.since, self._agreements_then = reading.after, reading.agreements

    def _keep(self, reading: Reading) -> Reading:
        """Make it the last reading, as narrow as those before allow. The watch may be new by it."""
        if self.last is not None and self.last.moved != reading.moved:
            self.narrowed = ClockEstimate()  # those before may be by a wrong time
        self._be_new_if_doubtful(reading)
        self.last = self.narrowed.add(reading)
        if self.since is None:
            self._be_new(reading)
        return self.last

    def _be_new_if_doubtful(self, reading: Reading) -> bool:
        """Be new from now on, and leave jumps to others, if drift may hide one by now, or the last
        reading, made while new, was in nobody's time: others have moved the ledger. Whether so.
        """
        last, since = self.last, self.since
        if last is None or since is None or self._is_new_again:
            return False
        is_old = reading.after - last.before > OLD and last.contradicts(reading)
        was_new = last.before - since <= SETTLED and last.moved != reading.moved
        if is_old or (was_new and not self._us_early(reading)):
            self._be_new(reading)
            return True
        return False


def check_for_jump(using: str, reading: Reading) -> None:
    """Raise Jumped where the clock has jumped until this reading (else kept), or this process is
    too new to know, or nobody has agreed; but not within another transaction. Whoever writes what
    counts asks this: what a new one wrote after a clock was set back would be early for ever.
    """
    found = watch(using)
    is_known = found.keep_and_credit(reading) is not None and not found.seconds_to_settle()
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
    """Watch anew, after the clock was set on purpose, as if this process began now, or long ago."""
    for using in list(_watches):
        _watches[using] = Watch(using)
        if not is_new:
            _watches[using].since = Mono(-math.inf)


@dataclass(frozen=True)
class Jump:
    """The clock jumped. Microseconds."""

    by: int  # how early ledger time was by it; below 0: late
    doubt: int  # by how much `by` may be too high
    gap: int  # from the last good reading until the one that showed the jump

    @classmethod
    def between(cls, last: Reading, reading: Reading, by: int) -> Jump:
        width = (reading.after - reading.before) + (last.after - last.before)
        gap = reading.after - last.before
        return cls(by, round(width * SECOND), round(gap * SECOND))


def mend(using: str, jump: Jump, reading: Reading) -> None:
    """Mend what was written by the wrong time; calls' deadlines, if it was late. With the rows of
    LedgerState locked; `reading` is in the right time. A few statements, however much is counted.

    Releases, ends and holds are right: who writes them asks `check_for_jump` first, or is a pass
    (`Watch.keep_and_credit`). Begins and signs of life are wrong where, less the jump, they lie
    between the last good reading and now. A right one that lies there gets no shorter lease.
    """
    now, off = from_us(reading.at), timedelta(microseconds=jump.doubt - jump.by)
    first = from_us(
        reading.at + (jump.by - jump.gap if jump.by < 0 else max(0, jump.by - jump.gap))
    )
    last = from_us(reading.at + jump.by + jump.doubt)

    def put_right(rows: Any, name: str, *others: str) -> None:
        # the instants of this name, where they are wrong, and others by as much
        then = When(**{f"{name}__lte": now - off}, then=F(name) + off)
        fixed = Case(then, default=Value(now), output_field=DateTimeField())
        wrong = rows.filter(**{f"{name}__gt": first, f"{name}__lte": last})
        _update_if_any(wrong, {name: fixed, **{other: F(other) + off for other in others}})

    put_right(tables.attempts(using).open(), "started_at", "lease_until")
    # Ledger time may be late by what readings erred: what ended just now would count for longer.
    late = now + timedelta(microseconds=jump.doubt + clocks.TOLERANCE)
    _update_if_any(_ended_after(using, now).filter(finished_at__lte=late), _as_ended_at(now))
    put_right(tables.dispensers(using), "seen_at")
    put_right(tables.opinions(using), "seen_at")
    put_right(tables.opinions(using), "lapsed_at")
    if jump.by < 0:
        _bring_deadlines_back(using, jump, reading)


def _mend_what_is_ahead(using: str, last: Reading) -> None:
    """Where ledger time stays late after the clock was set back: charges that end ahead end now;
    leases and holds that begin ahead begin now, as long as before. Each once, whoever else does so.
    Nothing is done after a jump since the `last` reading. In a transaction that a freeze ends.
    """
    seen = read(using)
    if last.jump_until(seen):
        return
    # Now is when each statement runs, and no earlier than what is read here: whoever is frozen in
    # between takes nothing for the future that has begun meanwhile. A charge that ends now leaves
    # no room: who was away finds that others have agreed to a time that is earlier by more than
    # that.
    now, ahead, least = LedgerNow(), LedgerNow() + AHEAD, Value(from_us(seen.at) + AHEAD)
    _update_if_any(_ended_after(using, ahead).filter(finished_at__gt=least), _as_ended_at(now))
    for rows, began, ends in (
        (tables.attempts(using).open(), "started_at", "lease_until"),
        (tables.holds(using), "began_at", "until"),
    ):
        changed = {ends: F(ends) - _ahead_by(began), began: now}  # MySQL goes by this order
        is_ahead = rows.filter(**{f"{began}__gt": ahead}).filter(**{f"{began}__gt": least})
        _update_if_any(is_ahead, changed)
    # A release stays when it was: one whose lease ends before it was seen to already.
    unbegun = tables.attempts(using).open().filter(started_at=None, released_at__gt=ahead)
    unbegun = unbegun.filter(released_at__gt=least)
    lasts = ExpressionWrapper(F("lease_until") - F("released_at"), DurationField())
    longer = unbegun.filter(GreaterThan(F("lease_until"), F("released_at")))
    longer = longer.filter(GreaterThan(_ahead_by("released_at"), lasts))
    _update_if_any(longer, {"lease_until": F("lease_until") - _ahead_by("released_at")})


def _update_if_any(rows: Any, changed: dict[str, Any]) -> None:
    # Mostly there is none, and reading waits for nobody: on its way to those that it changes,
    # MariaDB's UPDATE waits for all that others have locked.
    if rows.exists():
        rows.update(**changed)


def _ended_after(using: str, instant: Any) -> Any:
    """Attempts that ended after this, by the rules' index."""
    rules = list(tables.rule_states(using).values_list("pk", flat=True))
    return tables.attempts(using).filter(rule__in=rules, finished_at__gt=instant)


def _as_ended_at(now: Any) -> dict[str, Any]:
    return {
        "sent_at": Case(When(sent_at__gt=now, then=now), default=F("sent_at")),
        "finished_at": now,
    }


def _ahead_by(name: str) -> Any:
    return ExpressionWrapper(F(name) - LedgerNow(), DurationField())


def _bring_deadlines_back(using: str, jump: Jump, reading: Reading) -> None:
    """Bring backoffs and permits' deadlines back by the jump, so that no wait gets longer: of each
    the first RETRIES to come by the clock as it is. Appointments stay, and locked calls.
    """
    waiting, now = tables.calls(using).waiting(), from_us(reading.wall)
    retries = waiting.filter(status=states.ERROR, ready=False)
    for rows, name in ((retries, "due_at_dt"), (waiting.filter(method=PERMIT), "expires_at_dt")):
        first = rows.filter(**{f"{name}__gt": now}).order_by(name)
        seen = tables.calls(using).filter(pk__in=list(first.values_list("pk", flat=True)[:RETRIES]))
        free = list(database.locked(seen.order_by("pk")).values_list("pk", flat=True))
        sooner = F(name) + timedelta(microseconds=jump.by)
        rows.filter(pk__in=free).update(**{name: sooner})
