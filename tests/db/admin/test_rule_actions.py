"""What is done to rules on the dashboard: pause, resume, changed limits."""

from __future__ import annotations

import re
from collections.abc import Callable

from django.contrib.admin.models import LogEntry
from django.test import Client

from callqueue import Rule, SlidingWindow
from callqueue.admin.rule_actions import rule_url
from callqueue.maintenance import recovery
from callqueue.models import Hold, SettingsState
from tests.db.admin.staff import act, text_of

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
    typed = {
        "how": "for",
        "for": "ten",
        "key": 'k"1',
        "reason": "they <asked>",
    }
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
