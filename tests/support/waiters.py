"""Permits, those that are taken at once and those that wait, step by step."""

from __future__ import annotations

from typing import Any

import pytest

import callqueue
from callqueue import NotNow
from callqueue.models import CallQueue
from callqueue.permits.asking import Options
from callqueue.permits.granted import Permit
from callqueue.permits.waiting import Waiter


def taken(rule: str = "r", **options: Any) -> Permit:
    """A permit whose block has ended already."""
    with callqueue.permit(rule, **options) as permit:
        pass
    return permit


def refusal(why: str | None = None, *, wait: float = 0, **options: Any) -> NotNow:
    """How a permit of rule "r" is refused."""
    with pytest.raises(NotNow, match=why) as refused:
        taken(wait=wait, **options)
    return refused.value


def waiting_rows() -> Any:
    """The rows of permits that wait."""
    return CallQueue.objects.waiting().filter(method="permit")


def new_waiter(rule: str = "r", **options: Any) -> Waiter:
    """One that has made no step yet."""
    return Waiter(Options(rule, **options).as_wanted())


def pass_now(one: Waiter) -> Any:
    """What comes of a pass that it makes now, whoever goes before it."""
    one.ahead, one.passed_at = 0, -1e9
    return one.step()
