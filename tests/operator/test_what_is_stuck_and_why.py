"""What is stuck, and why? A hold, a quota, missing workers: all doors name the same cause."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from callqueue import FixedWindow, Rule, SlidingWindow
from callqueue.testing import travel
from tests.db import commands
from tests.operator.asking import Ask, Rules, dispenser, send, until, waiting
from tests.support.behaviour import Vendor, run

WHY = "too many complaints"


def test_a_paused_rule_is_held_at_every_door(rules: Rules, ask: Ask) -> None:
    rules(r=Rule())
    send("r", 3)
    commands.run("pause", "r", "--for", "20m", "--reason", WHY)
    dispenser()
    found = ask.status("r")
    assert (found["state"], found["hold"]["reason"]) == ("held", WHY)
    assert ask.metrics("callqueue_held", "r") == 1
    assert ask.row("r")["State"] == "held"
    assert "1 rule held (r by an operator, 3 waiting)" in ask.dashboard()
    (call, *_) = waiting("r")
    for said in (ask.status_text(), ask.rule("r"), call.forecast().reason, ask.call(call)):
        assert WHY in said
        assert re.search("[Hh]eld|until", said)


def test_a_rule_that_its_provider_throttles_says_so(rules: Rules, remote: Vendor, ask: Ask) -> None:
    rules(r=Rule())
    remote.answers["/"] = (429, {"Retry-After": "90"}, b"")
    send("r", 5)
    run()
    dispenser()
    assert "by the provider" in ask.dashboard()
    assert "429" in ask.status("r")["hold"]["reason"]
    assert "429" in ask.rule("r")
    (*_, last) = waiting("r")
    assert "429" in last.forecast().reason
    assert (last.forecast().release_at - timezone.now()).total_seconds() > 80  # type: ignore[operator]


def test_held_keys_are_not_the_whole_rule_and_many_are_counted(rules: Rules, ask: Ask) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/m", per="key")]))
    (theirs,), (ours,) = send("r", key="theirs"), send("r", key="ours")
    commands.run("pause", "r", "--key", "theirs", "--reason", WHY)
    dispenser(rules=["nothing"])
    found = ask.status("r")
    assert (found["hold"], found["keys_held"]) == (None, 1)
    assert ask.metrics("callqueue_held", "r") == 0
    assert "1 key held (r)" in ask.dashboard()
    assert "held" in theirs.forecast().reason
    assert ours.forecast().release_at is not None
    assert WHY in ask.rule("r")
    for n in range(39):
        commands.run("pause", "r", "--key", f"tenant-{n}", "--for", f"{n + 1}m")
    said = ask.rule("r")
    assert said.count("Held:") <= 5
    assert "35 more keys are held" in said
    assert "40 keys held" in ask.dashboard()
    assert ask.status("r")["keys_held"] == 40


def test_a_used_up_quota_is_the_reason_at_every_door(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    """By its name, with the instant at which it opens, though a short window is full, too."""
    rules(crm=Rule(limits=[SlidingWindow("20/10s"), FixedWindow("20/d", jitter=1)]))
    tomorrow = timezone.now() + timedelta(days=1)
    with travel(to=tomorrow.replace(hour=9, minute=0)) as clock:
        send("crm", 30)
        run()
        clock.forward(15)
        dispenser()
        now = timezone.now()
        midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
        found = ask.status("crm")
        assert found["state"] == "at_limit"
        quota = next(one for one in found["limits"] if one["rate"] == "20/d")
        assert (quota["used"], quota["free"]) == (20, 0)
        assert quota["opens_at"].startswith(f"{midnight:%Y-%m-%dT00:00}")
        assert ask.row("crm")["State"] == "at its limit"
        assert "20/d" in ask.row("crm")["Limit"]
        assert f"{midnight:%Y-%m-%d} 00:00" in ask.dashboard()
        assert f"{midnight:%Y-%m-%d} 00:00" in ask.rule("crm")
        last = waiting("crm")[-1]
        for said in (last.forecast().reason, ask.call(last)):
            assert "20/d is used up" in said
        left = until(ask.call(last).partition("should go at")[2], now)
        assert left == pytest.approx((midnight - now).total_seconds(), abs=90)


@pytest.mark.parametrize("waits_s", [0, 5])
def test_at_its_limit_is_a_rule_only_while_the_limit_keeps_calls_back(
    rules: Rules, remote: Vendor, ask: Ask, waits_s: int
) -> None:
    """What flows is calm: a call that waits for this moment's slot is no reason to say anything, as
    one that has waited for ten seconds is. Minutes later, its workers are what it waits for.
    """
    rules(r=Rule(limits=[SlidingWindow("2/s")]))
    with travel() as clock:
        for _ in range(20):
            send("r", 2)
            run()
            clock.forward(1.1)
        send("r", 4)
        run()
        clock.forward(waits_s)
        dispenser(rules=["nothing"])
        assert ask.status("r")["state"] == ask.row("r")["State"] == "ok"
        send("r", 160)
        for _ in range(12):
            clock.forward(1.1)
            run()
        dispenser(rules=["nothing"])
        assert ask.status("r")["state"] == "at_limit"
        assert ask.row("r")["State"] == "at its limit"
        clock.forward(60)
        dispenser(rules=["nothing"])
        assert ask.status("r")["state"] != "at_limit"
        assert "at its limit" not in ask.row("r")["State"]


def test_a_queue_that_other_rules_calls_are_taken_from_has_workers_at_every_door(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    """A call's own page asks for its rule alone."""
    rules(behind=Rule(limits=[SlidingWindow("1/h")]), quick=Rule())
    with travel() as clock:
        send("behind", 2)
        dispenser(rules=["behind"])
        clock.forward(20)
        send("quick", 3)
        assert run() == 3
        dispenser(rules=["nothing"])
        (last,) = waiting("behind")
        assert ask.status("behind")["state"] == "at_limit"
        assert last.forecast().release_at is not None
        for said in (last.forecast().reason, ask.call(last)):
            assert "1/h is used up" in said and "No worker" not in said
