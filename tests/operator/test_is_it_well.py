"""Is it well? All doors know the same dispensers and workers, and asking costs little."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from callqueue import Concurrency, Rule, SlidingWindow, TokenBucket
from callqueue.look import look
from callqueue.testing import run_callqueue, travel
from tests.db import commands
from tests.operator.asking import (
    Ask,
    Rules,
    SlowWorker,
    dispenser,
    every,
    number,
    send,
    tables,
    waiting,
)
from tests.support.behaviour import Vendor, release, run


def says_that_none_runs(ask: Ask, door: str) -> bool:
    """Whether this door says that no dispenser runs."""
    if door == "doctor":
        return not ask.doctor("dispenser")["ok"]
    if door == "status":
        return "No dispenser" in ask.status_text()
    if door == "dashboard":
        return "No dispenser" in ask.dashboard()
    if door == "state":
        return "no_dispenser" in (ask.status("r")["state"], *ask.row("r")["State"].split(", "))
    if door == "rule":
        return "No dispenser" in ask.rule("r")
    (call, *_) = waiting("r")
    reason = ask.call(call) if door == "call" else call.forecast().reason
    return "no dispenser" in reason


DOORS = ("doctor", "status", "dashboard", "state", "rule", "call", "forecast")


@pytest.mark.parametrize(
    ("history", "runs"),
    [("never", False), ("runs", True), ("ended", False), ("silent", False), ("silent 15 s", True)],
)
def test_every_door_knows_whether_a_dispenser_runs(
    rules: Rules, ask: Ask, history: str, runs: bool
) -> None:
    """One that fell silent is named, with its host and its process, since when, and with no word of
    what it sends.
    """
    rules(r=Rule(limits=[SlidingWindow("2/h")]))
    send("r", 5)
    with travel() as clock:
        if history != "never":
            running = dispenser()
            if history == "ended":
                running.leave()
        clock.forward({"silent": 30, "silent 15 s": 15}.get(history, 0))
        if history == "silent":
            board, status = ask.dashboard(), ask.status_text()
            for word in ("egress-1:21221", "30 seconds", "Nothing is sent until one runs"):
                assert word in board and word in status
            assert "Sending" not in board
        said = {door: says_that_none_runs(ask, door) for door in DOORS}
        assert said == dict.fromkeys(DOORS, not runs)


def test_a_cause_is_one_sentence_and_names_its_queues(rules: Rules, ask: Ask) -> None:
    """However many rules it concerns. Nobody takes their calls, and each of them says so."""
    rules(default=Rule(), **{f"r{n}": Rule(queues=f"egress-{n % 2}") for n in range(12)})
    with travel() as clock:
        calls = [send(rule)[0] for rule in ("default", *(f"r{n}" for n in range(12)))]
        assert len(release()) == 13
        clock.forward(15)
        dispenser()
        for said in (ask.dashboard(), ask.status_text()):
            assert said.count("Nobody takes calls") == 1
            assert "from the default queue, egress-0, egress-1 since" in said
            assert "13 calls" in said
        assert {ask.status(f"r{n}")["state"] for n in range(12)} == {"no_workers"}
        assert "egress-1" in ask.rule("r11")
        assert "the default queue" in ask.rule("default")
        calls[-1].refresh_from_db()
        for said in (calls[-1].forecast().reason, ask.call(calls[-1])):
            assert "dispatched to egress-1" in said
            assert "no worker has begun it" in said


@pytest.mark.parametrize(
    ("limits", "count", "turns"), [([SlidingWindow("10/s")], 200, 20), ([], 700, 10)]
)
def test_workers_that_are_slow_are_not_said_to_be_missing(
    rules: Rules, remote: Vendor, ask: Ask, limits: list[Any], count: int, turns: int
) -> None:
    """Calls wait for them for longer than ten seconds, and are begun all the while; or they are behind
    hundreds of calls that wait for a slot, the newest of which nobody has begun.
    """
    rules(r=Rule(limits=limits))
    send("r", count)
    worker = SlowWorker()
    with travel() as clock:
        for _ in every(clock, 2, turns):
            worker.make_one()
        if not limits:
            dispenser(rules=["nothing"])
        for said in (ask.dashboard(), ask.status_text(), ask.rule("r")):
            assert "Nobody takes calls" not in said
        if limits:
            assert ask.status("r")["state"] in ("draining", "at_limit")
            assert "no worker" not in waiting("r")[-1].forecast().reason
        else:
            assert ask.status("r")["in_flight"] > 500
            assert "1 process took calls" in ask.dashboard(), "however many messages it took"


def test_one_lost_message_does_not_make_a_rule_one_without_workers(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    rules(r=Rule(limits=[SlidingWindow("10/s")]))
    (lost,) = send("r")
    release()
    with travel() as clock:
        for _ in range(15):
            clock.forward(1)
            send("r")
            run()
        assert ask.status("r")["state"] == "ok"
        assert "Nobody takes calls" not in ask.dashboard()
        lost.refresh_from_db()
        assert "no worker has begun it" in lost.forecast().reason


def test_sums_that_are_behind_say_so(transactional_db: None, rules: Rules, remote: Vendor) -> None:
    """And not that nothing failed, where nobody has looked; once a dispenser has caught up with hours
    of silence, they do not.
    """
    rules(r=Rule())
    ask, nothing = Ask(), "Nothing failed and nothing was throttled in the last hour."
    assert nothing not in ask.dashboard()
    with travel() as clock:
        send("r", 3)
        run_callqueue()
        clock.forward(5)
        run_callqueue()
        clock.forward(minutes=40)
        said = ask.dashboard()
        assert "counted up to" in said and nothing not in said
        send("r", 4)
        run_callqueue()
        clock.forward(5)
        run_callqueue()
        said = ask.dashboard()
        assert "counted up to" not in said and nothing in said
        (today,) = [row for row in ask.rule_tables("r") if row[0] == "Last hour"]
        assert number(today[1]) == 7


def kinds(n: int) -> list[Any]:
    return [
        [SlidingWindow("100/s"), SlidingWindow("20000/d"), Concurrency(40)],
        [TokenBucket("5/s", burst=9), SlidingWindow("3/m", per="key")],
        [SlidingWindow("7/h", per="user"), SlidingWindow("4000/d", per="user")],
        [SlidingWindow("7/h", per="user"), SlidingWindow("900/h", unit="tokens")],
    ][n % 4]


MOST = {"dashboard": 17, "status": 15, "metrics": 19, "rule": 23}


def asked(ask: Ask, rules: Rules, count: int, keys: int, held: int) -> dict[str, int]:
    """How many SELECTs each door takes with so many rules, keys and held keys; and, as "stale", a look
    at rules that had no pass for so long that what their tallies say is to be counted anew.
    """
    rules(**{f"p{n}": Rule(limits=kinds(n)) for n in range(count)})
    for n in range(count):
        send(f"p{n}", 8, key={"user": "u1"}, cost={"calls": 1, "tokens": 5})
    for n in range(keys):
        send("p2", key={"user": f"u{n}"}, cost={"calls": 1, "tokens": 5})
    for n in range(held):
        commands.run("pause", "p1", "--key", f"k{n}", "--for", "10m")
        send("p1", key=f"k{n}")
    run()
    dispenser()
    doors = {
        "dashboard": lambda: ask.page("dashboard"),
        "status": lambda: ask.status("p0"),
        "metrics": lambda: ask.metrics("callqueue_up"),
        "rule": lambda: ask.page("rule", name="p0"),
    }
    found = {}
    with travel(minutes=2):  # so that short windows are counted anew, however long all this took
        for door, ask_there in doors.items():
            ask_there()
            with CaptureQueriesContext(connection) as captured:
                ask_there()
            found[door] = [
                one["sql"]
                for one in captured
                if one["sql"].startswith(("SELECT", "(SELECT", "WITH"))
            ]
    for door, statements in found.items():
        assert len(statements) <= MOST[door], "\n".join(sql[:150] for sql in statements)
    with travel(hours=30), CaptureQueriesContext(connection) as captured:
        assert look("default").rule("p0").limits[1].used == 0
    return {door: len(statements) for door, statements in found.items()} | {"stale": len(captured)}


def test_asking_takes_few_statements_whatever_there_is(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    """The dashboard's and the rule's page ask for the session and the user, too. So many rules that
    each SELECT for one of them no longer fits in one statement are asked for in two.
    """
    few = asked(ask, rules, 6, 3, 2)
    assert asked(ask, rules, 6, 60, 30) == few
    assert asked(ask, rules, 248, 3, 2) == {
        door: count + {"rule": 0, "stale": 2}.get(door, 1) for door, count in few.items()
    }
    page = ask.page("dashboard")
    assert (len(tables(page)[-1]), len(page) < 150_000) == (1 + 248 + 1, True)


def test_a_call_that_waits_for_no_reason_is_bad(rules: Rules, ask: Ask) -> None:
    """A dispenser serves other rules only. Its age is the same at every door."""
    rules(r=Rule(), other=Rule())
    with travel() as clock:
        send("r", 2, not_before=timezone.now() + timedelta(seconds=0.05))
        clock.forward(600)
        dispenser(rules=["other"])
        found = ask.status("r")
        assert (found["state"], found["drain_s"]) == ("stuck", None)
        assert "nothing is sent" in ask.row("r")["State"]
        assert "Nothing is sent of 1 rule" in ask.dashboard()
        assert found["oldest_due_s"] == pytest.approx(600, abs=5)
        assert ask.metrics("callqueue_oldest_due_seconds", "r") == pytest.approx(600, abs=5)
        assert "10 min" in ask.row("r")["Oldest"]
        assert "10 minutes" in ask.rule("r")
