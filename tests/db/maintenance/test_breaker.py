"""The circuit breaker holds a rule whose calls keep failing; what goes wrong is told once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.dispatch import Signal
from django.utils import timezone

from callqueue import Breaker, Retry, Rule, events, states
from callqueue.dispatch.dispenser import Dispenser
from callqueue.execution import executor, wire
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt, CallQueue, Hold
from callqueue.testing import travel
from tests.support.behaviour import Vendor, release, run, send

Rules = Callable[..., None]
NEVER = Retry(max_attempts=1)


def fail(remote: Vendor, count: int, status: int = 500) -> None:
    remote.answers["/"] = status
    for _ in range(count):
        send("r")
    run()


def in_force() -> list[Hold]:
    return list(Hold.objects.filter(source="breaker", until__gt=ledger_time.now("default")))


def test_so_many_failures_in_a_row_hold_the_rule_and_say_so(
    rules: Rules, remote: Vendor, told: Any
) -> None:
    rules(r=Rule(retry=NEVER, breaker=Breaker(failures=3, hold=30)))
    held = told(events.rule_held)
    fail(remote, 2)
    assert not in_force()
    fail(remote, 1)
    (hold,) = in_force()
    reason = "the circuit breaker: 3 attempts in a row failed within 60 s"
    assert (hold.rule, hold.reason) == ("r", reason)
    assert (hold.until - hold.began_at).total_seconds() == pytest.approx(30, abs=2)
    assert [facts["rule"] for facts in held] == ["r"]
    assert (held[0]["until"] - timezone.now()).total_seconds() == pytest.approx(30, abs=2)
    send("r")
    assert release() == []


def test_a_success_in_between_is_no_row_and_failures_long_ago_do_not_count(
    rules: Rules, remote: Vendor
) -> None:
    rules(r=Rule(retry=NEVER, breaker=Breaker(failures=3, within=60)))
    fail(remote, 2)
    fail(remote, 1, status=200)
    fail(remote, 2)
    assert not in_force()
    with travel(seconds=61):
        fail(remote, 2)
        assert not in_force()


def test_what_is_the_calls_own_fault_or_was_throttled_does_not_count(
    rules: Rules, remote: Vendor
) -> None:
    at_once = Retry(max_attempts=1, max_rate_limited=0, base=0.0)
    rules(r=Rule(retry=at_once, breaker=Breaker(failures=2)))
    fail(remote, 4, status=404)
    remote.answers["/slow"] = 429
    for _ in range(4):
        send("r", "/slow")
        run()
    assert not in_force()


def test_after_the_hold_all_may_go_and_a_success_begins_anew(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule(retry=NEVER, breaker=Breaker(failures=2, hold=30)))
    fail(remote, 2)
    with travel(seconds=31):
        fail(remote, 1, status=200)
        fail(remote, 1)
        assert not in_force()
        fail(remote, 1)
        (hold,) = in_force()
        assert (hold.until - hold.began_at).total_seconds() == pytest.approx(30, abs=1)


@pytest.mark.parametrize("status", [404, 500])
def test_the_first_failure_after_it_holds_the_rule_for_longer_up_to_a_bound(
    rules: Rules, remote: Vendor, status: int
) -> None:
    rules(r=Rule(retry=NEVER, breaker=Breaker(failures=2, hold=30, factor=3, longest=100)))
    fail(remote, 2)
    lengths, ahead = [], 0.0
    for _ in range(3):
        ahead += (lengths[-1] if lengths else 30) + 1
        with travel(ahead):
            fail(remote, 1, status=status)
            if status == 404:  # the call's own fault
                assert not in_force()
                continue
            (hold,) = in_force()
            lengths.append((hold.until - hold.began_at).total_seconds())
            assert hold.reason == "the circuit breaker: it failed again after it was held"
    assert lengths == pytest.approx([90, 100, 100] if status == 500 else [], abs=1)


def test_what_was_in_flight_before_the_hold_does_not_trip_it_after_that(
    rules: Rules, remote: Vendor
) -> None:
    rules(r=Rule(retry=NEVER, breaker=Breaker(failures=2, hold=10)))
    slow = send("r")
    assert release() == [slow]
    fail(remote, 2)
    with travel(seconds=11):
        executor.execute("default", [CallAttempt.objects.get(call=slow).pk])
        slow.refresh_from_db()
        assert slow.status == states.FAILED
        assert not in_force()


@pytest.mark.parametrize(
    ("kind", "options", "field"),
    [
        (Breaker, {"failures": 0}, "failures"),
        (Breaker, {"failures": None}, "failures"),
        (Breaker, {"failures": 10_001}, "failures"),
        (Breaker, {"within": -1}, "within"),
        (Breaker, {"within": 86401}, "within"),
        (Breaker, {"hold": 0}, "hold"),
        (Breaker, {"hold": 86401, "longest": 86400}, "hold"),
        (Breaker, {"factor": 0.5}, "factor"),
        (Breaker, {"factor": 101}, "factor"),
        (Breaker, {"longest": 86401}, "longest"),
        (Breaker, {"hold": 60, "longest": 30}, "longest"),
        (Rule, {"breaker": True}, "breaker"),
        (Rule, {"reconcile": "nodots"}, "reconcile"),
        (Rule, {"reconcile": 5}, "reconcile"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    kind: type, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ImproperlyConfigured, match=rf"{kind.__name__}\.{field}"):
        kind(**options)


# --- What else goes wrong is told of once, where it happens

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
