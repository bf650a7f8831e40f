"""What is done to rules on the dashboard: pause, resume, changed limits; who may see why one is held."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import reverse

from callqueue import Rule, SlidingWindow
from callqueue.admin.rule_actions import rule_url
from callqueue.ledger import ledger_time
from callqueue.maintenance import recovery
from callqueue.models import Hold, SettingsState
from tests.db.admin.staff import DASHBOARD, act, log_in, page_of, text_of
from tests.support.behaviour import send

Rules = Callable[..., None]


NONSENSE: list[dict[str, str]] = [
    {"do": "pause", "rule": "nope"},
    {"do": "pause", "rule": "pay", "for": "soon"},
    {"do": "pause", "rule": "pay", "for": "soon", "confirm": "yes"},
    {"do": "pause", "rule": "pay", "for": "0m", "confirm": "yes"},
    {"do": "pause", "rule": "pay", "confirm": "yes"},
    {"do": "pause", "rule": "pay", "how": "for", "confirm": "yes"},
    {"do": "pause", "rule": "pay", "for": "10m", "key": "x" * 256, "confirm": "yes"},
    {"do": "pause", "rule": "pay", "for": "10m", "key": '{"a":' * 3000, "confirm": "yes"},
    {"do": "pause", "rule": "pay", "for": "10m", "key": '{"a":{"b":1}}', "confirm": "yes"},
    {"do": "resume", "rule": "nope"},
    {"do": "resume", "rule": "pay", "key": '{"a":' * 3000},
    {"do": "limit", "rule": "pay", "limit": "nope", "rate": "5/s"},
    {"do": "limit", "rule": "pay", "limit": "pay#0", "rate": "ten/s"},
    {"do": "limit", "rule": "pay", "limit": "pay#0", "rate": "ten/s", "confirm": "yes"},
    {"do": "limit", "rule": "nope", "limit": "pay#0", "rate": "5/s"},
    {"do": "explode", "rule": "pay"},
    {},
]


def test_what_makes_no_sense_changes_nothing_and_says_why(rules: Rules, root: Client) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100/h")]))
    for fields in NONSENSE:
        assert re.search("Nothing was (changed|done)", act(root, **fields)), fields
    assert not Hold.objects.exists()
    assert not SettingsState.objects.exclude(rates={}).exists()
    assert not LogEntry.objects.exists()


def test_what_was_typed_is_kept_after_a_bad_duration(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    typed = {"how": "for", "for": "ten", "key": 'k"1', "reason": "they <asked>"}
    shown = act(root, do="pause", rule="pay", **typed, confirm="yes")
    assert "is not a duration" in shown
    for name, value in {**typed, "key": "k&quot;1", "reason": "they &lt;asked&gt;"}.items():
        assert name == "how" or f'name="{name}"' in shown
        assert f'value="{value}"' in shown


def test_the_hold_after_a_restored_backup_is_ended_on_purpose(rules: Rules, root: Client) -> None:
    rules(pay=Rule(), default=Rule())
    page = rule_url("pay")
    act(root, do="pause", rule="pay", how="resumed", confirm="yes")
    assert 'name="restored"' not in text_of(root.get(page))
    recovery.hold_everything("default")
    assert 'name="restored"' in text_of(root.get(page))
    assert "1 hold ended. It is still held after a restored backup, until 2" in act(
        root, do="resume", rule="pay"
    )
    assert Hold.objects.get(rule="pay").source == "restored"
    assert "Resumed; 1 hold ended." in act(root, do="resume", rule="pay", restored="yes")
    assert not Hold.objects.filter(rule="pay").exists()


def test_why_something_is_held_and_which_keys_are_is_told_to_those_who_may_see_holds(
    rules: Rules,
) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100/h", per="key")]))
    call, other = send("pay", key="tenant-1"), send("pay")
    Hold.objects.create(rule="pay", reason="why-of-rule")
    Hold.objects.create(rule="pay", per="key", value="tenant-1", reason="why-of-key")
    soon = ledger_time.now("default") + timedelta(hours=1)
    Hold.objects.create(rule="pay", per="key", value="tenant-gone", reason="why-gone", until=soon)
    root = log_in("view_callqueue", "view_hold", "control_rule")
    pause = {"do": "pause", "rule": "pay", "how": "resumed", "confirm": "y"}
    act(root, **pause, key="tenant-2", reason="why-of-form")
    pages = [page_of(call), page_of(other), reverse(DASHBOARD), rule_url("pay")]
    told = "".join(text_of(root.get(page)) for page in pages)
    keys = {"tenant-gone", "tenant-2"}
    for hidden in {"why-of-rule", "why-of-key", "why-gone", "why-of-form", *keys}:
        assert hidden in told
    viewer = log_in("view_callqueue", "control_rule")
    told = "".join(text_of(viewer.get(page)) for page in pages)
    assert "until it is resumed" in told, "that a rule is held is no secret"
    assert not [hidden for hidden in {"why-", *keys} if hidden in told]
    history = "What was done"
    assert history in text_of(root.get(rule_url("pay")))
    assert history not in text_of(viewer.get(rule_url("pay")))
