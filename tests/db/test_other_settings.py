"""What a process does with what other processes' settings know better, as in a deployment."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from callqueue import Retry, Rule, SlidingWindow, database
from callqueue.ledger import ledger_time, ready_calls
from callqueue.maintenance import recovery
from callqueue.models import CallAttempt, CallQueue, Hold
from tests.support.behaviour import Vendor, make_together, release, run, send
from tests.support.dispensers import Process
from tests.support.locking import fresh, status_of

Rules = Callable[..., None]
Status = CallQueue.Status
WIDE = SlidingWindow("10000/s")
OLD = {"default": Rule(limits=[WIDE])}
NEW = {**OLD, "new": Rule(limits=[WIDE], retry=Retry(max_attempts=3, base=0.0, jitter=False))}


@pytest.fixture
def newer(rules: Rules) -> Process:
    """A dispenser of a newer release, whose settings have one rule more than this process's."""
    rules(**OLD)
    process = Process("newer", **NEW)
    process.joins()
    return process


def fell_silent(rule: str = "default", method: str = "post") -> CallQueue:
    """A call that a worker has begun and will never answer."""
    call = send(rule, method=method)
    assert call in release()
    long_ago = ledger_time.now("default") - timedelta(seconds=60)
    CallAttempt.objects.filter(call=call).update(
        started_at=long_ago, lease_until=long_ago, worker="gone:1:x"
    )
    return call


def new_ones_fell_silent(rules: Rules, method: str = "post") -> CallQueue:
    """The same of the new rule, at a new worker; here the settings are old again."""
    rules(**NEW)
    call = fell_silent("new", method)
    rules(**OLD)
    release()  # it states its opinion
    return call


# --- what fell silent


@pytest.mark.parametrize(("method", "then"), [("get", Status.ERROR), ("post", Status.UNKNOWN)])
def test_what_fell_silent_is_left_to_those_who_know_its_rule(
    rules: Rules, newer: Process, method: str, then: Status
) -> None:
    call, own = new_ones_fell_silent(rules, method), fell_silent()
    recovery.recover("default")
    assert status_of(own) == Status.UNKNOWN
    assert status_of(call) == Status.DISPATCHED
    assert call.attempts.get().finished_at is None, "charged until somebody ends it"
    rules(**NEW)
    recovery.recover("default")
    assert status_of(call) == then


def test_what_others_are_to_end_keeps_nothing_else_from_being_ended(
    rules: Rules, newer: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "MOST", 2)
    for _ in range(3):
        new_ones_fell_silent(rules)
    own = fell_silent()
    recovery.recover("default")
    assert status_of(own) == Status.UNKNOWN


@pytest.mark.parametrize(("method", "then"), [("get", Status.FAILED), ("post", Status.UNKNOWN)])
def test_what_fell_silent_and_has_nobodys_rule_any_more_may_have_been_made(
    rules: Rules, newer: Process, method: str, then: Status
) -> None:
    call = new_ones_fell_silent(rules, method)
    newer.leave()
    recovery.recover("default")
    assert status_of(call) == then
    assert "the rule 'new' is gone" in fresh(call).error_message


# --- what a worker cannot make


def test_a_worker_that_does_not_know_a_rule_leaves_its_calls_to_others(
    rules: Rules, newer: Process, remote: Vendor
) -> None:
    rules(**NEW)
    call = send("new")
    assert release() == [call]
    rules(**OLD)
    release()
    make_together([call.attempts.get().pk])
    assert status_of(call) == Status.NEW
    assert call.attempts.get().outcome == "voided"
    assert not fresh(call).ready and fresh(call).due_at_dt > database.clock("default") + timedelta(
        seconds=5
    )
    assert remote.requests == []

    newer.leave()
    CallQueue.objects.filter(pk=call.pk).update(due_at_dt=database.clock("default"))
    ready_calls.promote_due("default")
    rules(**NEW)
    assert release() == [call]
    rules(**OLD)
    release()
    make_together([call.attempts.get(finished_at=None).pk])
    assert status_of(call) == Status.FAILED, "nobody has it any more"


# --- what an answer holds


def test_a_refusal_holds_all_rules_that_share_the_limit_in_force(
    rules: Rules, remote: Vendor
) -> None:
    account = SlidingWindow("1000/s", name="account")
    rules(a=Rule(limits=[WIDE]), b=Rule(limits=[WIDE]))
    Process("newer", a=Rule(limits=[account]), b=Rule(limits=[account])).joins()
    remote.answers["/busy"] = (429, {"Retry-After": "60"}, b"")
    send("a", path="/busy")
    assert run() == 1
    assert set(Hold.objects.values_list("rule", flat=True)) == {"a", "b"}


# --- what a limit would never admit


@pytest.mark.parametrize("own", ["100/h", "300/h"])
def test_a_call_that_a_limit_of_another_release_would_admit_waits_for_it(
    rules: Rules, own: str
) -> None:
    """The last dispenser with the smaller limit fails no call that the larger admits."""
    smaller, larger = (
        Rule(limits=[SlidingWindow(rate, unit="tokens")]) for rate in ("100/h", "300/h")
    )
    rules(r=larger)
    call, too_much = send("r", cost={"tokens": 200}), send("r", cost={"tokens": 300}, priority=9)
    CallQueue.objects.filter(pk=too_much.pk).update(cost={"calls": 1, "tokens": 301})
    rules(r=smaller if own == "100/h" else larger)
    other = Process("other", r=larger if own == "100/h" else smaller)
    other.joins()
    assert release() == []
    assert status_of(call) == Status.NEW
    assert status_of(too_much) == Status.FAILED, "no limit of anybody's would admit it"
    other.leave()
    rules(r=larger)
    assert release() == [call]
