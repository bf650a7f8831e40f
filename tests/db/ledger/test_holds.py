"""Holds keep calls back, each its own scope, whatever the limits say."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from callqueue import Rule, control
from callqueue.ledger import holds
from callqueue.models import Hold
from tests.support.behaviour import release, send

Rules = Callable[..., None]


def test_a_paused_rule_waits_and_others_go_on(rules: Rules) -> None:
    rules(a=Rule(), b=Rule())
    held, free = send("a"), send("b")
    control.pause("default", "a", reason="maintenance")
    assert release() == [free]
    assert control.resume("default", "a") == 1
    assert release() == [held]


def test_a_pause_leaves_the_providers_own_hold_as_it_is(rules: Rules) -> None:
    """An operator's own may get shorter by another."""
    rules(a=Rule())
    holds.lay("default", ["a"], "rule", "", timedelta(minutes=5), "Retry-After", source="provider")
    control.pause("default", "a", seconds=600)
    control.pause("default", "a", seconds=5)
    left = {hold.source: hold.until - hold.began_at for hold in Hold.objects.all()}
    assert left["provider"] == timedelta(minutes=5)
    assert left["operator"] < timedelta(seconds=30)


def test_a_paused_key_waits_and_others_go_on(rules: Rules) -> None:
    rules(a=Rule())
    send("a", key="T1")
    other = send("a", key="T2")
    control.pause("default", "a", key="T1")
    assert release() == [other]
