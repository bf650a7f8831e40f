"""Alerts: each signal and its log line, fired where the thing happens, once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.dispatch import Signal
from django.utils import timezone

from callqueue import Retry, Rule, events
from callqueue.dispatch.dispenser import Dispenser
from callqueue.execution import wire
from callqueue.models import CallQueue
from tests.support.behaviour import Vendor, run, send

Rules = Callable[..., None]


LOST = wire.Answer(None, None, error="read timeout", sent=True)


@pytest.mark.parametrize(
    ("signal", "answer", "facts"),
    [
        (events.rule_held, (429, {"Retry-After": "60"}, b""), {"per": "rule"}),
        (events.call_unknown, LOST, {"status": "unknown"}),
        (events.call_failed, 500, {"status": "failed", "reason": "500 Internal Server Error"}),
    ],
)
def test_what_went_wrong_is_told_once(
    rules: Rules, remote: Vendor, told: Any, signal: Signal, answer: Any, facts: dict[str, Any]
) -> None:
    rules(r=Rule(retry=Retry(max_attempts=1)))
    heard = told(signal)
    remote.answers["/"] = lambda: answer
    call = send("r")
    if signal is events.rule_held:
        send("r")  # is refused too
    run()
    (said,) = heard
    assert said.items() >= {"rule": "r", **facts}.items()
    assert said.get("call_id", call.pk) == call.pk


def test_each_call_that_is_done_has_a_line_of_its_own(
    rules: Rules, remote: Vendor, caplog: Any
) -> None:
    rules(r=Rule())
    calls = [send("r"), send("r")]
    with caplog.at_level("DEBUG", logger="callqueue"):
        run()
    lines = [record.getMessage() for record in caplog.records if record.event == "call_done"]
    assert sorted(lines) == [f"call_done call_id={call.pk} rule=r attempt=1" for call in calls]


def test_a_call_whose_rule_is_gone_is_a_dead_letter_too(rules: Rules, told: Any) -> None:
    rules(r=Rule())
    call = send("r")
    rules(other=Rule())
    CallQueue.objects.update(due_at_dt=timezone.now() - timedelta(minutes=5))
    heard = told(events.call_failed)
    Dispenser(publish=lambda *_: True).run_once()
    assert [facts["call_id"] for facts in heard] == [call.pk]
