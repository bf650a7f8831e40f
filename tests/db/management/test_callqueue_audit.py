"""callqueue_audit: what it prints for people, and what is wrong use."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from callqueue import Rule, SlidingWindow, states
from callqueue.models import CallAttempt
from tests.db.commands import run

Rules = Callable[..., None]
NOON = timezone.now().replace(microsecond=0) - timedelta(hours=1)


def attempt(
    at: datetime,
    *,
    rule: str = "r",
    seconds: float = 0.2,
    outcome: str = states.SUCCEEDED,
    **columns: Any,
) -> CallAttempt:
    values = {
        "released_at": at,
        "started_at": at,
        "sent_at": at,
        "finished_at": at + timedelta(seconds=seconds),
        **columns,
    }
    return CallAttempt(call_id=1, number=1, rule=rule, outcome=outcome, **values)


def paced(count: int, every: float, **columns: Any) -> None:
    CallAttempt.objects.bulk_create(
        [attempt(NOON + timedelta(seconds=n * every), **columns) for n in range(count)]
    )


def test_people_get_a_table(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("20/s")]))
    paced(5, 0.1)
    ran = run("audit")
    assert "5 attempts since" in ran.out
    assert "SlidingWindow 20/s" in ran.out


def test_an_audit_since_nonsense_is_wrong_use(rules: Rules) -> None:
    rules(r=Rule())
    assert run("audit", "--since", "yesterday").code == 2
