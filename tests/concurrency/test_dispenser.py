"""A dispenser rests beside rows that somebody has locked, and minds the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from callqueue import Rule
from callqueue.dispatch import chores
from callqueue.dispatch.dispenser import Dispenser
from callqueue.dispatch.next_look import REVIEW
from callqueue.ledger import ready_calls
from callqueue.models import CallQueue
from tests.support.behaviour import send
from tests.support.locking import fresh, held_by_a_host, waiting_for_nobody

Rules = Callable[..., None]
PAST = timedelta(seconds=60)


pytestmark = pytest.mark.usefixtures("row_locks")


def test_a_dispenser_rests_beside_a_due_call_that_is_locked_and_minds_the_others(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    locked = send("r", not_before=timezone.now() + timedelta(hours=1))
    CallQueue.objects.update(due_at_dt=timezone.now() - PAST)
    running = Dispenser()
    running.run_once(maintain=False)
    with held_by_a_host(locked.pk), waiting_for_nobody():
        assert running.chores.maintain() == chores.ROUND
        send("r", not_before=timezone.now() + timedelta(seconds=0.3))
        assert 0 < running.chores.maintain() < chores.ROUND
    monkeypatch.setattr(ready_calls, "PROMOTED", 1)
    assert running.chores.maintain() == 0, "a full promotion is followed by the next at once"
    assert fresh(locked).ready


def test_a_dispenser_looks_ever_less_often_for_a_ready_call_that_is_locked(rules: Rules) -> None:
    rules(r=Rule(), other=Rule())
    locked = send("r")
    made: list[Any] = []
    running = Dispenser(publish=lambda using, messages: bool(made.extend(messages)) or True)
    running._follow_settings()
    group = running.groups[("r",)]
    with held_by_a_host(locked.pk), waiting_for_nobody():
        for _ in range(8):
            group.look_at = running._poll_at = 0.0
            running.tick()
        assert group.look_at > time.monotonic() + REVIEW / 2
        assert not made
        running._on_notify({"r"})
        assert not group.rests, "what a sender says is heard at once"
        send("other")
        running._poll_at = 0.0
        running.tick()
        assert len(made) == 1
    group.look_at = running._poll_at = 0.0
    running.tick()
    assert len(made) == 2
    assert group.next_look.streak.in_vain == 0
