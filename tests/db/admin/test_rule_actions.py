"""What is done to rules on the dashboard: pause, resume, changed limits."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from callqueue import Rule, SlidingWindow
from callqueue.models import Hold, RuleState
from tests.db.admin.staff import DASHBOARD, act, log_in, text_of
from tests.support.behaviour import send

Rules = Callable[..., None]
RULE = "admin:callqueue_rule"


def test_a_rule_is_paused_and_resumed(rules: Rules) -> None:
    rules(pay=Rule())
    operator = log_in("view_callqueue", "view_hold", "control_rule")
    assert "Paused until" in act(
        operator, do="pause", rule="pay", **{"for": "10m"}, reason="maintenance"
    )
    hold = Hold.objects.get()
    assert hold.reason == "maintenance"
    assert timedelta(minutes=9) < hold.until - timezone.now() <= timedelta(minutes=10)
    assert "maintenance" in text_of(operator.get(reverse(RULE, args=["pay"])))
    assert "1 hold ended" in act(operator, do="resume", rule="pay")
    assert not Hold.objects.exists()
    assert [entry.object_id for entry in LogEntry.objects.all()] == ["pay", "pay"]


def test_a_rule_is_held_until_an_instant_or_until_it_is_resumed(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    act(root, do="pause", rule="pay", until="2199-01-31T12:00")
    assert Hold.objects.get().until.year == 2199
    act(root, do="pause", rule="pay")
    assert Hold.objects.get().until is None


def test_one_key_is_paused(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    act(root, do="pause", rule="pay", key="tenant-1")
    hold = Hold.objects.get()
    assert (hold.per, hold.value) == ("key", "tenant-1")


def test_a_changed_limit_is_told_what_it_would_do_before_it_is_saved(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100/h")]), ship=Rule())
    for _ in range(250):
        send("pay")
    operator = log_in("view_callqueue", "control_rule")
    limit = {"do": "limit", "rule": "pay", "limit": "pay#0"}
    asked = operator.post(reverse(DASHBOARD), {**limit, "rate": "1000/h"})
    assert [list(one.values()) for one in asked.context["concerned"]] == [
        ["pay", "250", "2 hours", "0 seconds", False]
    ]
    assert not RuleState.objects.exclude(rates={}).exists()
    assert "changed to 1000/h" in act(operator, **limit, rate="1000/h", confirm="yes")
    (shown,) = operator.get(reverse(RULE, args=["pay"])).context["limits"]
    assert (shown["limit"].rate, shown["configured"]) == ("1000/h", "100/h")
    assert "changed from 100/h" in text_of(operator.get(reverse(RULE, args=["pay"])))
    act(operator, **limit, rate="", confirm="yes")
    (shown,) = operator.get(reverse(RULE, args=["pay"])).context["limits"]
    assert shown["limit"].rate == "100/h"
    assert LogEntry.objects.count() == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"do": "pause", "rule": "nope"},
        {"do": "pause", "rule": "pay", "for": "soon"},
        {"do": "pause", "rule": "pay", "for": "10m", "until": "2199-01-01T00:00"},
        {"do": "pause", "rule": "pay", "until": "yesterday"},
        {"do": "pause", "rule": "pay", "until": "2001-01-01T00:00"},
        {"do": "pause", "rule": "pay", "until": "2199-99-99T00:00"},
        {"do": "resume", "rule": "nope"},
        {"do": "limit", "rule": "pay", "limit": "nope", "rate": "5/s"},
        {"do": "limit", "rule": "pay", "limit": "pay#0", "rate": "ten/s"},
        {"do": "limit", "rule": "pay", "limit": "pay#0", "rate": "ten/s", "confirm": "yes"},
        {"do": "limit", "rule": "nope", "limit": "pay#0", "rate": "5/s"},
        {"do": "explode", "rule": "pay"},
        {},
    ],
)
def test_what_makes_no_sense_changes_nothing_and_says_why(
    rules: Rules, root: Client, fields: dict[str, str]
) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100/h")]))
    assert re.search("Nothing was (changed|done)", act(root, **fields))
    assert not Hold.objects.exists()
    assert not RuleState.objects.exclude(rates={}).exists()
    assert not LogEntry.objects.exists()
