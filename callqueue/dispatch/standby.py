"""Beat's dispenser task beside a dispenser of its own process: the task leaves the work to it, and
takes over when that falls silent or ends.
"""

from __future__ import annotations

import time

from callqueue import conf
from callqueue.dispatch.chores import HEARTBEAT
from callqueue.dispatch.dispenser import Dispenser
from callqueue.limits.opinions import digest_of, opinion_of
from callqueue.look import alive
from callqueue.maintenance import recovery

_told: dict[str, float] = {}  # by database: when (monotonic) this process said that beat runs


def has_steady_dispenser(using: str) -> bool:
    """Whether a process that is alive dispenses all rules, by the limits of these settings."""
    digest = digest_of(opinion_of(conf.current().book))
    return any(one.kind == "steady" and one.digest == digest for one in alive.alive(using))


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
