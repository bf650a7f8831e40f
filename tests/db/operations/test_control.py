"""Pausing and resuming rules and keys."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from callqueue import Rule, SlidingWindow, database
from callqueue.models import Hold
from tests.db.commands import run
from tests.support.behaviour import release, send

Rules = Callable[..., None]


@pytest.fixture(autouse=True)
def two_rules(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("100/s", per="key")]), other=Rule())


def test_a_paused_rule_releases_nothing_until_it_is_resumed() -> None:
    call = send("r")
    assert run("pause", "r", "--reason", "they asked us to").out == "paused r until it is resumed\n"
    hold = Hold.objects.get()
    assert (hold.rule, hold.per, hold.until, hold.reason) == ("r", "rule", None, "they asked us to")
    assert release() == []
    assert run("resume", "r").out == "resumed r: 1 hold ended\n"
    assert release() == [call]


def test_a_pause_ends_by_itself() -> None:
    assert run("pause", "r", "--for", "10m").out == "paused r for 10m\n"
    left = Hold.objects.get().until - database.clock("default")
    assert timedelta(minutes=9) < left <= timedelta(minutes=10)


def test_one_key_is_paused_and_the_others_go_on() -> None:
    held, free = send("r", key="a"), send("r", key="b")
    assert run("pause", "r", "--key", "a").out == "paused r, key a until it is resumed\n"
    assert release() == [free]
    assert run("resume", "r", "--key", "b").out == "r, key b was not held\n"
    assert run("resume", "r", "--key", "a").code == 0
    assert release() == [held]


def test_resuming_a_rule_ends_the_holds_on_its_keys_too() -> None:
    call = send("r", key="a")
    run("pause", "r", "--key", "a")
    run("resume", "r")
    assert release() == [call]
