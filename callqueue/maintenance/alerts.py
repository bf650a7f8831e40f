"""Alerts that nothing but time brings: backlogs that have grown older than their rule's
`backlog_alert`.

In: the waiting set. Out: the event `backlog_aged`, with its signal. The other alerts are told where
they happen.
"""

from __future__ import annotations

import time
from typing import Any

from callqueue import conf, database, events, tables
from callqueue.ledger import ready_calls

AGAIN = 600.0  # seconds after which a backlog that is still too old is told of again


class Backlogs:
    """What one dispenser has told of backlogs: once when one ages, and again if it stays so."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def tell(self, using: str) -> None:
        """Tell of backlogs that are too old. No statement without a `backlog_alert`."""
        for name, rule in conf.current().rules.items():
            if rule.backlog_alert is None:
                continue
            age = oldest_due(using, name)
            if age is None or age <= rule.backlog_alert:
                self._told.pop(name, None)
            elif time.monotonic() - self._told.get(name, -AGAIN) >= AGAIN:
                self._told[name] = time.monotonic()
                events.emit("backlog_aged", rule=name, oldest_due_s=round(age, 1))


def oldest_due(using: str, rule: str) -> float | None:
    """For how many seconds the oldest due call has waited, or None. One row per priority."""
    ready = tables.calls(using).waiting().filter(ready=True, rule=rule)
    found: list[Any] = []
    for priority in ready_calls.priorities(using, rule):
        found += (
            ready.filter(priority=priority)
            .order_by("due_at_dt")
            .values_list("due_at_dt", flat=True)[:1]
        )
    return max(0.0, (database.clock(using) - min(found)).total_seconds()) if found else None
