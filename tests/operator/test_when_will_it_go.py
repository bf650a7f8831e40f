"""When will it go? Every door gives the same answer, and the queue then keeps it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from callqueue import FixedWindow, Rule, SlidingWindow, TokenBucket
from callqueue.testing import travel
from tests.db import commands
from tests.operator.asking import (
    DOORS,
    Ask,
    Rules,
    SlowWorker,
    dispenser,
    every,
    run_all,
    send,
    waiting,
)
from tests.support.behaviour import Vendor, release, run

# Few calls a minute: what counts is how long they take.
BACKLOGS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "sliding": ({"limits": [SlidingWindow("3/m")]}, 30, {}),
    "bucket": ({"limits": [TokenBucket("3/m", burst=2)]}, 30, {}),
    "calendar": ({"limits": [FixedWindow("10/10m")]}, 25, {}),
    "two limits": ({"limits": [SlidingWindow("2/s"), SlidingWindow("4/m")]}, 40, {}),
    "tokens": (
        {"limits": [SlidingWindow("50/m"), SlidingWindow("300/m", unit="tokens")]},
        20,
        {"cost": {"tokens": 100}},
    ),
    "per part of a key": (
        {"limits": [SlidingWindow("2/m", per="channel")]},
        20,
        {"key": {"channel": "C9", "workspace": "T1"}},
    ),
    "per queue": (
        {"limits": [SlidingWindow("2/m", per="queue")], "queues": ["one", "two"]},
        40,
        {},
    ),
}


def at_every_door(ask: Ask, rule: str) -> dict[str, float | None]:
    """What all doors say now."""
    now = timezone.now()
    return {door: ask.seconds(door, rule, now) for door in DOORS}


def assert_doors_agree(ask: Ask, rule: str, seconds: float, rel: float = 0.1) -> None:
    """All doors say so, clock times of pages to the minute."""
    said = at_every_door(ask, rule)
    for door, found in said.items():
        assert found == pytest.approx(seconds, rel=rel, abs=70), (door, said)


@pytest.mark.parametrize("name", BACKLOGS)
def test_every_door_says_the_same_and_so_it_comes(
    rules: Rules, remote: Vendor, ask: Ask, name: str
) -> None:
    fields, count, options = BACKLOGS[name]
    rules(r=Rule(**fields))
    with travel():
        send("r", **options)
        run()
        send("r", count, **options)
        run()
        dispenser(rules=["nothing"])  # it would keep what no worker takes
        middle, began = waiting("r")[count // 2], timezone.now()
        at = middle.forecast().release_at
        said = at_every_door(ask, "r")
        took = run_all("r")
    assert took > 120
    middle.refresh_from_db()
    assert at is not None and middle.dispatched_at_dt is not None
    assert at - began == pytest.approx(middle.dispatched_at_dt - began, rel=0.1)
    for door, found in said.items():
        assert found == pytest.approx(took, rel=0.1, abs=70), (door, said, took)


@pytest.mark.parametrize(
    ("limits", "cost", "hours"),
    [
        ([SlidingWindow("2/10s"), SlidingWindow("4/4h")], 0, 4),
        ([SlidingWindow("100/s"), SlidingWindow("2000000/5h", unit="tokens")], 500_000, 5),
    ],
    ids=["calls", "tokens"],
)
def test_a_used_up_quota_is_waited_for_at_every_door(
    rules: Rules, remote: Vendor, ask: Ask, limits: list[Any], cost: int, hours: int
) -> None:
    """Though the short window beside it has room, and the sums know nothing of today."""
    rules(r=Rule(limits=limits))
    options = {"cost": {"tokens": cost}} if cost else {}
    send("r", 4, **options)
    with travel() as clock:
        for _ in range(3):
            run()
            clock.forward(11)
        send("r", 3, **options)
        run()
        dispenser()
        assert_doors_agree(ask, "r", hours * 3600)


def test_calls_of_a_shared_limit_are_waited_for_at_every_door(rules: Rules, ask: Ask) -> None:
    account = SlidingWindow("10/m", name="account")
    rules(low=Rule(limits=[account]), high=Rule(limits=[account], priority=9))
    dispenser(rules=["nothing"])
    send("high", 90)
    calls = send("low", 20)
    assert_doors_agree(ask, "low", 10 * 60)
    for said in (calls[0].forecast().reason, ask.call(calls[0])):
        assert "90 calls go before it" in said
        assert "account" in said
    assert "shared with high" in ask.rule("low")


@pytest.mark.parametrize("is_full", [False, True])
def test_nobody_promises_more_than_the_workers_do(
    rules: Rules, remote: Vendor, ask: Ask, is_full: bool
) -> None:
    """The limit would let ten a second go; one in two seconds is made. Whether what is out uses the
    limit up at this moment makes no difference.
    """
    rules(r=Rule(limits=[SlidingWindow("10/s")]))
    with travel() as clock:
        send("r", 600)
        worker = SlowWorker()
        for _ in every(clock, 2, 40):
            worker.make_one()
        dispenser(**({} if is_full else {"rules": ["nothing"]}))
        assert_doors_agree(ask, "r", 2 * len(waiting("r")), rel=0.15)


@pytest.mark.parametrize("why", ["no dispenser", "paused", "no workers"])
def test_where_nothing_goes_no_door_names_a_time(rules: Rules, ask: Ask, why: str) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/m")], queues="egress"))
    with travel() as clock:
        send("r", 20)
        if why == "no workers":
            assert len(release()) == 5
        dispenser(rules=["nothing"])
        if why == "paused":
            commands.run("pause", "r")
        clock.forward(25)
        if why != "no dispenser":
            dispenser(rules=["nothing"])
        assert at_every_door(ask, "r") == dict.fromkeys(DOORS)


def test_a_hold_is_waited_for_and_then_the_limits(rules: Rules, ask: Ask) -> None:
    rules(r=Rule(limits=[SlidingWindow("10/m")]))
    dispenser()
    send("r", 100)
    commands.run("pause", "r", "--for", "20m")
    assert_doors_agree(ask, "r", 29 * 60, rel=0.05)


def test_calls_that_are_due_later_are_told_apart_from_the_backlog(rules: Rules, ask: Ask) -> None:
    rules(r=Rule(limits=[SlidingWindow("10/m")]))
    dispenser(rules=["nothing"])
    send("r", 20)
    due = timezone.now() + timedelta(hours=3)
    (later,) = send("r", not_before=due)
    assert "20 + 1" in ask.row("r")["Waiting"]
    assert later.forecast().release_at == due
    assert f"{due:%Y-%m-%d %H:%M}" in ask.call(later)
    drained = ask.status("r")["drain_s"]
    assert drained < 120
    assert ask.metrics("callqueue_drain_seconds", "r") == pytest.approx(drained, abs=2)


def test_one_key_that_floods_keeps_no_other_back(rules: Rules, ask: Ask) -> None:
    rules(chat=Rule(limits=[SlidingWindow("1/s", per="key")]))
    dispenser(rules=["nothing"])
    flood = send("chat", 400, key="C0007")
    (quiet,) = send("chat", key="C0001")
    now = timezone.now()
    for call, seconds in ((quiet, 0), (flood[-1], 420)):
        at = call.forecast().release_at
        assert at is not None
        assert (at - now).total_seconds() == pytest.approx(seconds, rel=0.1, abs=5)
        assert f"{at:%H:%M}" in ask.call(call)


def test_a_backlog_that_grows_is_said_to_grow(rules: Rules, remote: Vendor, ask: Ask) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/10s")]))
    with travel() as clock:
        for _ in every(clock, 10.5, 8):
            send("r", 6)
            run()
        dispenser()
        found = ask.status("r")
        assert found["incoming_per_s"] == pytest.approx(0.6, rel=0.2)
        assert found["rate_per_s"] == pytest.approx(0.2, rel=0.2)
        assert "↑" in ask.row("r")["Waiting"]
        for text in (ask.dashboard(), ask.rule("r"), ask.status_text()):
            assert "grows" in text


def test_the_simulation_and_the_look_are_one_answer(rules: Rules, ask: Ask) -> None:
    rules(r=Rule(limits=[SlidingWindow("6/m"), TokenBucket("2/s", burst=9)]))
    simulated = commands.run("simulate", "--rule", "r", "--calls", "120", "--json").document
    send("r", 120)
    dispenser(rules=["nothing"])
    assert simulated["seconds"] == pytest.approx(ask.status("r")["drain_s"], rel=0.05, abs=2)
    assert "6/m" in simulated["binding_limit"]
