"""callqueue: calls to rate-limited APIs, queued in the database, released as fast as limits allow.

Names that need the app registry are loaded when first used, so settings.py can import this.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from callqueue.limits.kinds import Concurrency, FixedWindow, SlidingWindow, TokenBucket
from callqueue.limits.rules import Breaker, Discard, Retry, Route, Rule
from callqueue.outcome import GiveUp, HoldUntil, RetryLater, Succeeded
from callqueue.security.secrets import Secret, SecretFor

if TYPE_CHECKING:
    from callqueue.events import (
        call_failed,
        call_finished,
        call_unknown,
        limit_exceeded,
        rule_held,
    )
    from callqueue.forecast import Forecast
    from callqueue.handlers import handler
    from callqueue.integrations.queued_task import QueuedTask
    from callqueue.maintenance.periodic import beat_schedule
    from callqueue.permits.httpx_transport import AsyncPermitTransport, PermitTransport
    from callqueue.permits.permit import apermit, permit, permitted
    from callqueue.permits.transport import PermitAdapter

_LAZY = {
    "AsyncPermitTransport": "callqueue.permits.httpx_transport",
    "Forecast": "callqueue.forecast",
    "PermitAdapter": "callqueue.permits.transport",
    "PermitTransport": "callqueue.permits.httpx_transport",
    "QueuedTask": "callqueue.integrations.queued_task",
    "NotNow": "callqueue.exceptions",
    "apermit": "callqueue.permits.permit",
    "beat_schedule": "callqueue.maintenance.periodic",
    "call_failed": "callqueue.events",
    "call_finished": "callqueue.events",
    "call_unknown": "callqueue.events",
    "handler": "callqueue.handlers",
    "limit_exceeded": "callqueue.events",
    "permit": "callqueue.permits.permit",
    "permitted": "callqueue.permits.permit",
    "rule_held": "callqueue.events",
}

__all__ = [
    "AsyncPermitTransport",
    "Breaker",
    "Concurrency",
    "Discard",
    "FixedWindow",
    "Forecast",
    "GiveUp",
    "HoldUntil",
    "NotNow",
    "PermitAdapter",
    "PermitTransport",
    "QueuedTask",
    "Retry",
    "RetryLater",
    "Route",
    "Rule",
    "Secret",
    "SecretFor",
    "SlidingWindow",
    "Succeeded",
    "TokenBucket",
    "apermit",
    "beat_schedule",
    "call_failed",
    "call_finished",
    "call_unknown",
    "handler",
    "limit_exceeded",
    "permit",
    "permitted",
    "rule_held",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'callqueue' has no attribute {name!r}")
