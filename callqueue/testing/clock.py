"""The testing kit's clock: how much later than the database's clock this process believes it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from unittest import mock

active_clocks: list[Clock] = []  # of the `travel` blocks that we are in, the innermost last


class Clock:
    """The clock that the queue reads, in the hands of a test."""

    def forward(self, by: float | timedelta = 0.0, /, **parts: float) -> None:
        """Move it on by seconds, a timedelta or its arguments (`hours=1`); back where negative."""
        from callqueue.database import server_clock

        step = by if isinstance(by, timedelta) else timedelta(seconds=by)
        _set_ahead(server_clock.ahead + step + timedelta(**parts))

    def to(self, instant: datetime) -> None:
        self.forward(instant - self.now())

    def now(self, using: str = "default") -> datetime:
        """What it shows: the database's clock, and what it was moved by."""
        from callqueue import database

        return database.clock(using)


@contextmanager
def travel(
    by: float | timedelta = 0.0, /, *, to: datetime | None = None, **parts: float
) -> Iterator[Clock]:
    """Let the queue see a later time: `travel(hours=1)`, `travel(30.0)`, `travel(to=...)`. Time
    goes on from there. Shifts the database's clock as this process reads it, and
    `django.utils.timezone.now`. Nests, adding up.
    """
    from callqueue.database import server_clock

    clock, before = Clock(), server_clock.ahead
    active_clocks.append(clock)
    with _shift_now():
        try:
            clock.forward(by, **parts)
            if to is not None:
                clock.to(to)
            yield clock
        finally:
            active_clocks.remove(clock)
            _set_ahead(before)


@contextmanager
def _permits_travel() -> Iterator[None]:
    """A permit that waits moves the clock to when it need wait no more, instead of sleeping."""
    from callqueue.permits import permit, waiting

    def sleep(seconds: float) -> None:
        active_clocks[-1].forward(seconds)

    both, never = (math.inf, math.inf), math.inf
    with (
        mock.patch.object(permit, "sleep", sleep),
        mock.patch.multiple(waiting, REST=both, REVIEW=both, LONGEST=never, SIGN_EVERY=never),
    ):
        yield


def forget_readings() -> None:
    """Forget how the clock was read: it did not jump, but a test moved it, or begins just now."""
    from callqueue.ledger import ledger_time

    ledger_time.forget_readings(is_new=False)


def _set_ahead(ahead: timedelta) -> None:
    from callqueue.database import server_clock

    server_clock.ahead = ahead
    forget_readings()


@contextmanager
def _shift_now() -> Iterator[None]:
    """Have `timezone.now`, new rows' times and permits go by the clock that is ahead."""
    from django.utils import timezone

    from callqueue import database, tables
    from callqueue.database import server_clock

    if len(active_clocks) > 1:
        yield
        return
    real = timezone.now

    def now() -> datetime:
        return real() + server_clock.ahead

    # The table's defaults read the server's clock itself: insert this process's reading instead.
    columns = [
        tables.CallQueue._meta.get_field("created_dt"),
        tables.CallQueue._meta.get_field("due_at_dt"),
        tables.Hold._meta.get_field("began_at"),
    ]
    with mock.patch.object(timezone, "now", now), _permits_travel():
        for column in columns:
            column.__dict__["_get_default"] = database.ClockNow
        try:
            yield
        finally:
            for column in columns:
                column.__dict__.pop("_get_default", None)
