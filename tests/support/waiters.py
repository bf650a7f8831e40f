"""Permits that wait, step by step."""

from __future__ import annotations

from typing import Any

from callqueue.models import CallQueue
from callqueue.permits.asking import Options
from callqueue.permits.waiting import Waiter


def waiting() -> Any:
    """The rows of permits that wait."""
    return CallQueue.objects.waiting().filter(method="permit")


def waiter(**options: Any) -> Waiter:
    """One of rule "r" that has made no step yet."""
    return Waiter(Options("r", **options).wanted())


def pass_now(one: Waiter) -> Any:
    """What comes of a pass that it makes now, whoever goes before it."""
    one.ahead, one.passed_at = 0, -1e9
    return one.step()
