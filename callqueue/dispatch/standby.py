"""Beat's dispenser task beside a dispenser of its own process: the task leaves the work to it, and
takes over when that falls silent or ends.
"""

from __future__ import annotations

import time
from datetime import timedelta

from callqueue import conf, database, tables
from callqueue.dispatch.chores import HEARTBEAT
from callqueue.dispatch.dispenser import Dispenser
from callqueue.ledger.agreement import SILENCE
from callqueue.limits.opinions import digest_of, opinion_of
from callqueue.maintenance import recovery

_told: dict[str, float] = {}  # by database: when (monotonic) this process said that beat runs


def has_steady_dispenser(using: str) -> bool:
    """Whether a process dispenses all rules, has the limits of these settings, and gave a sign of
    life within SILENCE seconds. One statement.
    """
    digest = digest_of(opinion_of(conf.current().book))
    since = database.clock(using) - timedelta(seconds=SILENCE)
    steady = tables.dispensers(using).filter(kind="steady", digest=digest)
    return bool(steady.filter(seen_at__gt=since).exists())


def stand_by(using: str, dispenser: Dispenser) -> None:
    """Release nothing. Every few seconds say that beat runs, for the doctor; and take back what
    this task's own dispenser, which may have run before, holds of the limits.
    """
    if dispenser.membership.book is not None:
        dispenser.leave()
    now = time.monotonic()
    if now - _told.get(using, -HEARTBEAT) >= HEARTBEAT:
        _told[using] = now
        recovery.beat(using, dispenser.name, "beat")
