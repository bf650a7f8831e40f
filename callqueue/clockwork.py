"""Watches the database's clock with this process's monotonic one, and moves the ledger along when that clock jumps.

The ledger's instants are on the database's clock. If it is set forward, charges would seem older than they are; if it is set
back, they would stay for hours. So whoever sees a jump first shifts what the ledger still counts into the clock's new frame,
once, under a lock. Instants are microseconds, monotonic ones seconds; those go on while the machine is suspended.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db.models import F, Q

from callqueue import database, events, holds, ledger, states
from callqueue.database import from_us, to_us

TOLERANCE = 20_000  # microseconds that the two clocks may differ by between two readings, besides a thousandth of the time
FRESH = 20.0  # seconds for which a reading helps to narrow later ones
DRIFT = 1e-4  # how much one clock may run faster than the other, as a share: twice what NTP's slewing ever does
WAS = "was"  # in a rule's memo: what the clock showed before it jumped, so that what was due then still is
FRAME = ""  # the RuleState row that counts the jumps: no rule has this name


_BOOT_TIME = getattr(time, "CLOCK_BOOTTIME", None)


def monotonic() -> float:
    """Seconds that have passed, those of a suspended machine included where it can tell (Linux): leases go by them too.

    `time.monotonic` stands still meanwhile, so a worker that slept past its lease would send, and the database's clock would
    seem to have jumped.
    """
    return time.monotonic() if _BOOT_TIME is None else time.clock_gettime(_BOOT_TIME)


@dataclass(frozen=True)
class Reading:
    """The database's clock, read between two instants of this process's monotonic time."""

    at: int
    before: float
    after: float

    def jump_to(self, later: Reading) -> int:
        """By how much the clock moved more (or less) until `later` than time went by; 0 within the tolerance.

        Errs upwards, by no more than the readings took: what is moved along by it ages late, never early.
        """
        moved = later.at - self.at
        most = round((later.after - self.before) * 1_000_000)
        least = round((later.before - self.after) * 1_000_000)
        slack = TOLERANCE + most // 1000
        return moved - least if not least - slack <= moved <= most + slack else 0


class Narrowed:
    """Readings of the last seconds, taken together: each bounds how the two clocks stand to each other, all bound it closer."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque(maxlen=16)

    def add(self, reading: Reading) -> Reading:
        """The reading, its two instants moved towards each other as far as the others allow."""
        while self._readings and reading.after - self._readings[0].after > FRESH:
            self._readings.popleft()
        self._readings.append(reading)
        before, after = reading.before, reading.after
        for other in self._readings:
            passed = (reading.at - other.at) / 1_000_000
            drift = abs(passed) * DRIFT
            before, after = max(before, other.before + passed - drift), min(after, other.after + passed + drift)
        if before <= after:
            return Reading(reading.at, before, after)
        self._readings.clear()  # they contradict each other: one of the clocks was set
        self._readings.append(reading)
        return reading


class Watch:
    """This process's last reading of one database's clock, and how many jumps of it are known here."""

    def __init__(self, using: str) -> None:
        self.using, self.pid = using, os.getpid()
        self.last: Reading | None = None
        self.frame: int | None = None
        self.narrowed = Narrowed()
        self.steady_from: int | None = None
        self._suspicious = False
        self._lock = threading.Lock()

    def look(self) -> int:
        """Read the clock; where it has jumped since the last look, move the ledger along. Not inside a transaction."""
        with self._lock:
            if self.frame is None:
                self.frame = _frame(self.using)
            reading = read(self.using)
            jump = self.last.jump_to(reading) if self.last else 0
            if jump and self.last:
                self.frame = _follow(self.using, self.frame, self.last, reading, jump)
            self.last, self._suspicious = reading, False
            return jump

    def is_steady(self, reading: Reading) -> bool:
        """Whether the clock went on as it should until this reading; if not, look again before anything is counted."""
        if self.last is not None and self.last.jump_to(reading):
            self._suspicious = True
            return False
        self.last = reading
        return True

    def take(self, reading: Reading) -> int:
        """Follow one reading more; the instant, microseconds on the clock, from which it is known to have gone on steadily.

        An instant that was written down before that may be of another frame. Readings far apart prove little.
        """
        last, self.last = self.last, reading
        if self.steady_from is None or last is None or reading.after - last.before > FRESH or last.jump_to(reading):
            self.steady_from = reading.at
        return self.steady_from

    @property
    def wants_look(self) -> bool:
        """Whether a look is needed before a reading can be judged."""
        return self.last is None or self._suspicious


def read(using: str) -> Reading:
    """A reading of the database's clock."""
    before = monotonic()
    at = to_us(database.clock(using))
    return Reading(at, before, monotonic())


def brought(using: str, shown: Any, before: float) -> Reading:
    """The reading that a statement made after `before` brought along (`database.clock_sql`); a new one if it brought none."""
    after = monotonic()
    return read(using) if shown is None else Reading(database.instant_us(shown), before, after)


_watches: dict[str, Watch] = {}


def watch(using: str) -> Watch:
    """This process's watch over a database; a forked child has one of its own."""
    found = _watches.get(using)
    if found is None or found.pid != os.getpid():
        found = _watches[using] = Watch(using)
    return found


def _follow(using: str, frame: int, last: Reading, reading: Reading, jump: int) -> int:
    """Shift the ledger, unless another process that saw the same jump has done so; the frame that is now in force."""
    from callqueue.models import RuleState

    with database.writing(using):
        rows = RuleState.objects.using(using).filter(rule=FRAME)
        row = database.locked(rows, wait=True).first()
        now_in_force = row.passes if row else 0
        if now_in_force != frame:
            return int(now_in_force)
        shifted = shift(using, last, reading, jump)
        if row is None:
            RuleState.objects.using(using).create(rule=FRAME, passes=1)
        else:
            rows.update(passes=F("passes") + 1)
    events.tell("clock_jumped", seconds=jump / 1_000_000, attempts=shifted)
    return frame + 1


def shift(using: str, last: Reading, reading: Reading, jump: int) -> int:
    """Move what the ledger still counts by `jump`: all instants that are surely of the clock's old frame.

    What may be of either frame stays: after a jump back it then counts longer than need be, never shorter.
    """
    from callqueue.models import CallAttempt, Hold, RuleState

    by = timedelta(microseconds=jump)
    gap = round((reading.after - last.before) * 1_000_000)
    old_now = last.at + gap
    attempts = CallAttempt.objects.using(using)
    oldest = from_us(old_now - ledger.longest_window(holds.book_in_force(using)))
    answered = attempts.filter(finished_at__gt=oldest)
    count = answered.filter(_of_old_frame("finished_at", old_now, reading.at - gap, reading.at, jump)).update(
        released_at=F("released_at") + by, sent_at=F("sent_at") + by, finished_at=F("finished_at") + by
    )
    released = attempts.open().filter(_of_old_frame("released_at", old_now, reading.at - gap, reading.at, jump))
    count += released.update(released_at=F("released_at") + by, send_at=F("send_at") + by, lease_until=F("lease_until") + by)
    Hold.objects.using(using).filter(until__isnull=False, until__gt=oldest).update(until=F("until") + by)
    _shift_retries(using, by, old_now - gap, reading.at - gap)
    for state in RuleState.objects.using(using).exclude(rule=FRAME):
        memo: dict[str, Any] = {k: v for k, v in state.memo.items() if k not in ("levels", "free")}
        memo[WAS] = max(memo.get(WAS, 0), old_now)
        RuleState.objects.using(using).filter(pk=state.pk).update(memo=memo)
    return int(count)


def _shift_retries(using: str, by: timedelta, old_from: int, new_from: int) -> None:
    """Calls that wait for their backoff go on waiting as long as they had to. Scheduled ones keep their instants.

    What may be of either frame is tried again early, never later than it should be.
    """
    from callqueue.models import CallQueue

    retries = CallQueue.objects.using(using).filter(status=states.ERROR, ready=False)
    surely_old = {"due_at_dt__lt": from_us(new_from)} if by > timedelta(0) else {"due_at_dt__gt": from_us(old_from)}
    retries.filter(**surely_old).update(due_at_dt=F("due_at_dt") + by)


def _of_old_frame(name: str, old_now: int, new_from: int, new_now: int, jump: int) -> Q:
    if jump > 0:
        return Q(**{f"{name}__lte": from_us(old_now)})
    return Q(**{f"{name}__gt": from_us(new_now)}) | Q(**{f"{name}__lt": from_us(new_from)})


def _frame(using: str) -> int:
    from callqueue.models import RuleState

    return RuleState.objects.using(using).filter(rule=FRAME).values_list("passes", flat=True).first() or 0
