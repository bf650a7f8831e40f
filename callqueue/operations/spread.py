"""Requeued calls that do not come due all at once: from when on, and how far from each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils.translation import gettext as _

from callqueue import database, states, tables, transitions
from callqueue.limits.durations import LONGEST, WrongDuration, parse_duration
from callqueue.limits.kinds.fields import parse_rate

MICROSECOND = timedelta(microseconds=1)
SLOWEST = 60_000_000  # microseconds: at a quicker pace no list of calls takes ten years


@dataclass(frozen=True)
class Spread:
    """The first call is due at `begin`, and each `interval_us` after the one before."""

    begin: datetime
    interval_us: int = 0

    def put_off(self, using: str, pks: Sequence[int], place: int) -> None:
        """Those of these calls that were just requeued come due in their turn: the first of them at
        this place. In the transaction that requeued them, lest any goes before.
        """
        fresh = tables.calls(using).filter(pk__in=pks, status=states.NEW).order_by("pk")
        dues = {
            pk: self.begin + timedelta(microseconds=(place + number) * self.interval_us)
            for number, pk in enumerate(fresh.values_list("pk", flat=True))
        }
        transitions.postpone(using, dues)


def spread_of(pace: str, delay: str, calls: Any) -> Spread | None:
    """What is asked for, as operators type it ("10/s", "10m"); None: all at once.
    ImproperlyConfigured or WrongDuration says what cannot be read, or that the last of these calls
    would be due too late.
    """
    if not pace and not delay:
        return None
    begin = database.clock(calls.db) + (parse_duration(delay) if delay else timedelta())
    if not pace:
        return Spread(begin)
    count, period = parse_rate(pace, _("Pace"))
    interval = max(1, period // count)
    if interval > SLOWEST and calls.count() * interval > LONGEST / MICROSECOND:
        why = _("At %r the last call would be due in more than ten years.")
        raise WrongDuration(why % pace)
    return Spread(begin, interval)
