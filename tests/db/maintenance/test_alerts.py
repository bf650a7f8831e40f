"""Alerts: each signal and its log line, fired where the thing happens, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@pytest.fixture
def told() -> Iterator[Callable[[Signal], list[dict[str, Any]]]]:
    """`told(signal)`: a list of what it was sent with from now on."""
    listening = []

    def listen_to(signal: Signal) -> list[dict[str, Any]]:
        heard: list[dict[str, Any]] = []

        def listen(sender: Any, signal: Signal, **facts: Any) -> None:
            heard.append(facts)

        signal.connect(listen)
        listening.append((signal, listen))
        return heard

    yield listen_to
    for signal, listen in listening:
        signal.disconnect(listen)


def test_a_hold_that_the_provider_asked_for_is_told_once(
    rules: Rules, remote: Vendor, told: Any
) -> None:
    rules(r=Rule())
    heard = told(events.rule_held)
    remote.answers["/"] = (429, {"Retry-After": "60"}, b"")
    send("r"), send("r")
    run()
    assert [(facts["rule"], facts["per"]) for facts in heard] == [("r", "rule")]


def test_an_unknown_outcome_is_told(rules: Rules, remote: Vendor, told: Any) -> None:
    rules(r=Rule())
    heard = told(events.call_unknown)
    remote.answers["/"] = lambda: wire.Answer(None, None, error="read timeout", sent=True)
    call = send("r")
    run()
    assert [(facts["call_id"], facts["rule"], facts["status"]) for facts in heard] == [
        (call.pk, "r", "unknown")
    ]


def test_a_dead_letter_is_told_with_its_reason(rules: Rules, remote: Vendor, told: Any) -> None:
    rules(r=Rule(retry=Retry(max_attempts=1)))
    heard = told(events.call_failed)
    remote.answers["/"] = 500
    call = send("r")
    run()
    assert heard == [
        {"call_id": call.pk, "status": "failed", "rule": "r", "reason": "500 Internal Server Error"}
    ]


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
