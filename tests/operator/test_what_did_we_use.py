"""What did we use? Of today, of yesterday and of the quota; and counters that only grow."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from callqueue import FixedWindow, Rule, SlidingWindow
from callqueue.testing import run_callqueue, travel
from tests.db import commands
from tests.operator.asking import Ask, Rules, dispenser, number, send
from tests.support.behaviour import Vendor

pytestmark = pytest.mark.django_db(transaction=True)


def at(hour: int, minute: int = 0) -> datetime:
    """Tomorrow, at this time of day, UTC."""
    tomorrow = timezone.now() + timedelta(days=1)
    return tomorrow.replace(hour=hour, minute=minute, second=0, microsecond=0)


def make(ask: Ask, clock: Any, rule: str, count: int) -> None:
    """So many calls, made and counted: what was missed of hours is counted in several turns."""
    send(rule, count)
    run_callqueue()
    clock.forward(5)
    while "counted up to" in ask.dashboard():
        run_callqueue()
    run_callqueue()
    run_callqueue()


def sums(ask: Ask, rule: str) -> dict[str, int]:
    """What the rule's page says was sent."""
    wanted = ("Today", "Yesterday", "Last hour", "Last 24 hours")
    return {row[0]: number(row[1]) for row in ask.rule_tables(rule) if row[0] in wanted}


def test_days_are_those_of_the_limits_own_zone(rules: Rules, remote: Vendor, ask: Ask) -> None:
    """Two hours past midnight in UTC it is still yesterday in Los Angeles."""
    rules(r=Rule(limits=[FixedWindow("100/d", timezone="America/Los_Angeles")]))
    with travel(to=at(22)) as clock:
        make(ask, clock, "r", 3)
        clock.forward(hours=4)
        make(ask, clock, "r", 2)
        found = sums(ask, "r")
        assert (found["Today"], found["Yesterday"]) == (5, 0)
        assert "America/Los_Angeles" in ask.rule("r")
        assert "5 of 100" in ask.rule("r")


def test_a_days_quota_is_what_was_sent_today_at_every_door(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    """A rule that sent nothing says zero, and not that nobody knows."""
    rules(r=Rule(limits=[FixedWindow("10/d", name="quota")]), idle=Rule())
    with travel(to=at(22)) as clock:
        make(ask, clock, "r", 3)
        clock.forward(hours=1)
        make(ask, clock, "r", 4)
        clock.forward(hours=3)
        make(ask, clock, "r", 9)
        dispenser()
        assert sums(ask, "r") == {"Today": 9, "Yesterday": 7, "Last hour": 9, "Last 24 hours": 16}
        assert ask.status("r")["limits"][0]["used"] == 9
        assert ask.metrics("callqueue_limit_used", "quota", "rule", "r") == 9
        for said in (ask.row("r")["Limit"], ask.rule("r")):
            assert "9 of 10" in said
        assert set(sums(ask, "idle").values()) == {0}
        assert "Counted up to" in ask.rule("idle")
        assert ask.metrics("callqueue_attempts_total", "succeeded", "idle") == 0


def test_counters_only_grow_over_hours_restarts_and_silence(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    """Nothing is lost at the turn of an hour, nor by a dispenser that was away meanwhile."""
    rules(r=Rule())
    made, seen = 0, []
    with travel(to=at(10, 55)) as clock:
        for minutes, count in ((4, 3), (4, 2), (90, 5), (60, 1), (1, 4)):
            make(ask, clock, "r", count)
            made += count
            seen.append(ask.metrics("callqueue_attempts_total", "succeeded", "r"))
            assert seen[-1] == made
            clock.forward(minutes=minutes)
        assert ask.metrics("callqueue_attempts_total", "succeeded", "r") == made


def test_the_highest_use_is_proved_by_the_audit_and_shown_by_the_page(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    rules(r=Rule(limits=[SlidingWindow("8/m")]))
    with travel() as clock:
        make(ask, clock, "r", 5)
        clock.forward(minutes=5)
        make(ask, clock, "r", 2)
        (found,) = [
            one
            for one in commands.run("audit", "--since", "1h", "--json").document["limits"]
            if one["rule"] == "r"
        ]
        assert (found["highest"], found["exceeded"]) == (5, False)
        assert 0 < found["used_share"] < 1
        assert "5 of 8" in ask.page("rule", name="r", audit="1").replace("\n", " ")
