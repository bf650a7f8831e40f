"""Watches the database's clock with this process's monotonic one, and moves the ledger along when
that clock jumps.

The ledger's instants are on the database's clock. If it is set forward, charges would seem older
than they are; if it is set back, they would stay for hours. So whoever sees a jump first moves what
the ledger still counts, with all rules' rows locked, and writes down by how much. Nothing is ever
moved to before its own time. Instants are microseconds, monotonic ones seconds.

After a jump forward, the answered attempts of each rule are moved later, some at a time, however
many there are: it is written down which (MOVING), and until all are moved, nothing is released that
they count for. Other rules go on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from django.db.models import Case, DateTimeField, F, Q, QuerySet, Value, When
from django.db.models.functions import Coalesce

from callqueue import clocks, database, events, states, tables
from callqueue.clocks import ClockEstimate, Reading
from callqueue.database import from_us, to_us
from callqueue.ledger import ready_calls, settings
from callqueue.ledger.rule_rows import FRAME, MOVING, OF_NO_RULE, SILENT
from callqueue.ledger.tallies import counted_for, longest_window
from callqueue.limits.kinds import SECOND

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
            reading, suspicious = self._follow(last) if jump and last else (reading, False)
            self._suspicious = suspicious
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
            database.end_if_silent(self.using, SILENT)
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
                count = shift(self.using, jump, rules)
                stored.filter(rule=FRAME).update(passes=F("passes") + 1, served=F("served") + by)
        if by:
            events.emit("clock_jumped", seconds=by / 1_000_000, attempts=count)
        return replace(reading, moved=reading.moved + (by or 0)), by is None

    def _unfollowed(self, last: Reading, reading: Reading) -> int | None:
        """By how much the ledger is to be moved; None where it is too early to tell.

        Whoever is new may have come after a jump that others deal with only now. If they do, it
        takes over what they say, unless the clock has jumped before its eyes since; if nobody has
        after a while, there are no others. Who is not new takes over only that the ledger is ahead,
        which is safe, where others have moved it and the clock did not go back before its eyes: so
        no two move it to and fro. Whatever of that they take back is no jump either.
        """
        by, since = last.jump_to(reading), self.since or 0.0
        if not by or last.moved == reading.moved:
            return None if by and reading.before - since <= SETTLED else by
        seen = last.jump_to(replace(reading, moved=last.moved))
        is_new = last.before - since <= SETTLED and reading.before - since <= 2 * SETTLED
        if is_new and not seen:
            return 0
        if by > 0:
            rest = by - self._ahead
            self._ahead = max(0, -rest)
            return rest if rest > clocks.TOLERANCE else 0
        if seen < 0:
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


# in a rule's memo: what the clock showed before it jumped, so that what was due then still is
WAS = "was"
AT_ONCE = 1000  # answered attempts that one transaction moves


@dataclass(frozen=True)
class Jump:
    """What the clock shows now, and by how much it jumped: perhaps less, by `doubt`, and within the
    last `gap`. Microseconds.
    """

    now: int
    by: int
    doubt: int
    gap: int


@dataclass(frozen=True)
class _Move:
    """Attempts of a rule that are still to be moved: those that ended after `since`, and by `until`
    at the latest. `by` and `now`: of the jump. Microseconds.
    """

    since: int
    until: int
    by: int
    now: int


def shift(using: str, jump: Jump, rules: Collection[Any]) -> int:
    """Move what the ledger still counts by the jump; the count of attempts. To be called with all
    rules' rows locked. After a jump forward, `move_on` has to move what was answered.

    Nothing is moved to before its own time in the new frame, whichever frame it was written in:
    forward, an instant is moved by as much as the clock, though not past its "now"; back, only what
    lies in the future is moved, and not past "now" either. So it may be moved twice, or by somebody
    who does not know all: then it counts for longer, up to a window from "now".
    """
    forget(using, rules, jump)
    _shift_holds(using, jump)
    _shift_retries(using, jump)
    _shift_summed(using, jump)
    _shift_signs(using, jump)
    # Those that are under way first: one that is answered meanwhile is then among the answered.
    count = _shift_open(using, jump)
    if jump.by > 0:
        _note_answered(using, jump, [rule.pk for rule in rules])
        return count
    return count + _shift_answered(using, jump)


def forget(using: str, rules: Iterable[Any], jump: Jump) -> None:
    """Forget memos and tallies: all is counted anew, and keys that wait are woken. What was due
    before still is.
    """
    was = jump.now - jump.by
    memos = [{"pk": rule.pk, "memo": {WAS: max(rule.memo.get(WAS, 0), was)}} for rule in rules]
    database.update_each(tables.RuleState, using, memos)
    if jump.by > 0:  # back, what a rule was charged with counts for longer rather than for less
        settings.shift(using, jump.by)
    else:
        ready_calls.set_back(using, jump.now)


def lag(using: str) -> int:
    """By how much the attempts at most lag behind that are still to be moved; 0: there are none."""
    found = tables.rule_states(using).filter(rule=MOVING).values_list("memo", flat=True).first()
    return max((sum(move["by"] for move in moves) for moves in (found or {}).values()), default=0)


def move_on(using: str, rules: Collection[str] | None = None) -> bool:
    """Move AT_ONCE answered attempts more, of these rules or of all; whether none is left of them.
    In a transaction. Where somebody else does so, it is left to him.

    The newest first: what was moved is then later than all that still is to be.
    """
    row = database.locked(tables.rule_states(using).filter(rule=MOVING)).first()
    if row is None:
        return False
    moves: dict[str, list[dict[str, int]]] = dict(row.memo)
    wanted, left = sorted(moves if rules is None else moves.keys() & set(rules)), AT_ONCE
    for rule in wanted:
        while moves[rule] and left:
            count, rest = _move_some(using, rule, _Move(**moves[rule][0]), left)
            moves[rule] = [*([] if rest is None else [asdict(rest)]), *moves[rule][1:]]
            left -= count
        if not moves[rule]:
            del moves[rule]
    tables.rule_states(using).filter(rule=MOVING).update(memo=moves)
    return moves.keys().isdisjoint(wanted)


def _move_some(using: str, rule: str, move: _Move, most: int) -> tuple[int, _Move | None]:
    """Move the newest of them, at most so many; how many those were, and what is left, if
    anything.
    """
    begin, end = from_us(move.since), from_us(move.until)
    rows = tables.attempts(using).filter(rule=rule, finished_at__gt=begin, finished_at__lte=end)
    newest = rows.order_by("-finished_at").values_list("pk", "finished_at")
    found: list[tuple[int, Any]] = list(newest[:most])
    _move_rows(
        tables.attempts(using).filter(pk__in=[pk for pk, _ in found]),
        Jump(move.now, move.by, 0, 0),
    )
    # Others may have ended at the same instant as the last of these. Those are past it by now.
    is_left = len(found) == most
    return len(found), replace(move, until=to_us(found[-1][1])) if is_left else None


def _note_answered(using: str, jump: Jump, rules: Iterable[str]) -> None:
    """Write down that what some limit may still count is to be moved: of each rule as far back as
    its own limits count. Whoever writes when an attempt ended, or was sent, has a reading that is
    `held`: it is past by now.
    """
    book = settings.book_in_force(using)
    windows, longest = counted_for(book), longest_window(book)
    row = tables.rule_states(using).get(rule=MOVING)
    for rule in rules:
        since = jump.now - jump.by - windows.get(rule, longest)
        move = _Move(since, jump.now - 1, jump.by, jump.now)
        row.memo.setdefault(rule, []).append(asdict(move))
    row.save(using=using)


def _shift_open(using: str, jump: Jump) -> int:
    """Attempts under way. What their own clock said when they were released, or begun, tells the
    frame they were written in.
    """
    by, begun = timedelta(microseconds=jump.by), Coalesce("started_at", "released_at")
    rows = tables.attempts(using).open()
    of_old = _of_old_frame(rows.annotate(begun=begun), "begun", jump)
    count = of_old.update(lease_until=F("lease_until") + by, started_at=F("started_at") + by)
    # No later than it was: what is remembered of a bucket ends before the first attempt that is
    # still open was released.
    released = {
        "released_at": F("released_at") + by - timedelta(microseconds=jump.doubt),
        "send_at": F("send_at") + by,
    }
    _of_old_frame(rows, "released_at", jump).update(**released)
    # All of them: one that is being told of now is waited for.
    rows.update(sent_at=_moved("sent_at", jump))
    return int(count)


def _shift_answered(using: str, jump: Jump) -> int:
    """After a jump back: what is in the future now. And what is still to be moved by a jump forward
    is moved no further than to now.
    """
    row = tables.rule_states(using).get(rule=MOVING)
    for moves in row.memo.values():
        for move in moves:
            move["now"] = min(move["now"], jump.now)
            move["until"] = min(move["until"], jump.now - 1)
    row.save(using=using)
    return _move_rows(tables.attempts(using).filter(finished_at__gt=from_us(jump.now)), jump)


def _move_rows(rows: QuerySet[Any], jump: Jump) -> int:
    names = ("released_at", "started_at", "sent_at", "finished_at")
    return int(rows.update(**{name: _moved(name, jump) for name in names}))


def _moved(name: str, jump: Jump) -> Case:
    """The instant, moved by the jump but not past now: what is past stays so, what is in the future
    does not come before now.
    """
    now, by = from_us(jump.now), timedelta(microseconds=jump.by)
    if jump.by > 0:
        cases = [
            When(**{f"{name}__lte": now - by}, then=F(name) + by),
            When(**{f"{name}__lte": now}, then=Value(now)),
        ]
    else:
        cases = [
            When(**{f"{name}__gte": now - by}, then=F(name) + by),
            When(**{f"{name}__gt": now}, then=Value(now)),
        ]
    return Case(*cases, default=F(name), output_field=DateTimeField())


def _shift_holds(using: str, jump: Jump) -> None:
    """Holds that end by themselves, those that were laid before the jump; none is made shorter."""
    by = timedelta(microseconds=jump.by)
    rows = tables.holds(using).filter(until__isnull=False)
    _of_old_frame(rows, "began_at", jump).update(until=F("until") + by, began_at=F("began_at") + by)


def _shift_retries(using: str, jump: Jump) -> None:
    """Calls that wait for their backoff go on waiting as long as they had to, or less. Scheduled
    ones keep their instants.
    """
    retries = tables.calls(using).filter(status=states.ERROR, ready=False)
    of_old = (
        Q(due_at_dt__lt=from_us(jump.now - jump.gap))
        if jump.by > 0
        else Q(due_at_dt__gt=from_us(jump.now - jump.by - jump.gap))
    )
    retries.filter(of_old).update(due_at_dt=F("due_at_dt") + timedelta(microseconds=jump.by))


def _shift_signs(using: str, jump: Jump) -> None:
    """Dispensers are as silent as they were: or what only one of them holds would not be in force
    for whoever has not heard it yet.
    """
    if jump.by > 0:
        tables.dispensers(using).update(seen_at=_moved("seen_at", jump))


def _shift_summed(using: str, jump: Jump) -> None:
    """How far sums are added up, as the attempts that were are moved. Nothing up to now is counted
    once more to settle it: what was moved there is in the sums of where it was. So what a clock
    that was set back found not added yet, of its last seconds, never is.
    """
    for row in database.locked(tables.summed(using).filter(until__gt=0), wait=True):
        if jump.by > 0:
            row.until = min(row.until + jump.by, jump.now)
        elif row.until > jump.now:
            row.until = max(row.until + jump.by, jump.now + 1)
        row.settled = max(row.settled, jump.now // SECOND + 1)
        row.save(using=using)


def _of_old_frame(rows: QuerySet[Any], name: str, jump: Jump) -> QuerySet[Any]:
    """Those whose instant, which was read off the clock at that moment, was surely read before the
    jump, or just after it.
    """
    if jump.by > 0:
        return rows.filter(**{f"{name}__lte": from_us(jump.now - jump.by + jump.doubt)})
    return rows.filter(**{f"{name}__gt": from_us(jump.now)})
