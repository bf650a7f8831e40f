"""What a page that asks says of the time that requeued calls will take."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from callqueue import database
from callqueue.admin import health
from callqueue.models import CallQueue
from callqueue.operations import board as boards
from callqueue.operations import formatting

SAMPLED = 5000  # calls whose rules are looked at; the rest are taken to be like them


def in_words(calls: QuerySet[CallQueue], count: int) -> list[str]:
    """A sentence for each rule whose calls these `count` ones are, the longest first."""
    taken = Counter(calls.order_by().values_list("rule", flat=True)[:SAMPLED])
    times = max(1.0, count / taken.total()) if taken else 1.0
    board = boards.read(calls.db)
    seconds = {
        standing.name: boards.drained_with(board, standing, round(taken[standing.name] * times))
        for standing in board.rules
        if standing.name in taken
    }
    now = database.clock(calls.db)
    ordered = sorted(seconds.items(), key=lambda one: (one[1] is not None, -(one[1] or 0)))
    gone = _("%s: its rule is not in CALLQUEUE['RULES'] any more; they will fail.")
    return [
        *(one.text for one in health.dispenser_trouble(board)),
        *(_sentence(rule, taking, now) for rule, taking in ordered),
        *(gone % rule for rule in sorted(set(taken) - set(seconds))),
    ]


def _sentence(rule: str, seconds: float | None, now: datetime) -> str:
    if seconds is None:
        return (
            _("%s: no estimate; it is held until it is resumed, or nothing is known of its pace.")
            % rule
        )
    values = {
        "rule": rule,
        "time": formatting.duration(seconds),
        "instant": formatting.instant(now + timedelta(seconds=seconds)),
    }
    return _("%(rule)s: about %(time)s with all that waits already, until %(instant)s.") % values
