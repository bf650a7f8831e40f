"""Permits, by rule: how many calls are in flight that are not queued, what their callers call them,
and how many wait for their turn.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from django.db.models import Count

from callqueue import tables
from callqueue.database import ClockNow


@dataclass
class NotQueued:
    """The permits of a rule. `labels`: how many of those in flight have each."""

    in_flight: int = 0
    waiting: int = 0
    labels: Counter[str] = field(default_factory=Counter)


def by_rule(using: str) -> dict[str, NotQueued]:
    """The rules that have any. Two statements, over what is open or waits."""
    found: dict[str, NotQueued] = {}
    begun = tables.attempts(using).open().filter(call__isnull=True).order_by()
    counts = begun.values_list("rule", "label").annotate(count=Count("pk"))
    for rule, label, count in counts:
        permits = found.setdefault(rule, NotQueued())
        permits.in_flight += count
        permits.labels[label] += count
    waiting = tables.permit_requests(using).filter(
        attempt_id__isnull=True, alive_until__gt=ClockNow()
    )
    for rule, count in waiting.order_by().values_list("rule").annotate(count=Count("pk")):
        found.setdefault(rule, NotQueued()).waiting = count
    return found
