"""callqueue_status: where every rule stands, for machines and for people."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from callqueue import Rule, SlidingWindow
from callqueue.management.commands import callqueue_status
from callqueue.models import CallQueue
from tests.db.commands import run
from tests.support.behaviour import release, send

Rules = Callable[..., None]


@pytest.fixture(autouse=True)
def a_backlog(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/h", name="vendor")]), idle=Rule())
    for _ in range(5):
        send("r")
    release()


def test_json_has_the_figures_of_every_rule() -> None:
    ran = run("status", "--json")
    assert ran.code == 0
    rules = ran.document["rules"]
    assert set(rules) == {"r", "idle", "default"}
    keys = {"waiting", "in_flight", "oldest_due_s", "drain_s", "rate_per_s", "hold", "limits"}
    assert all(keys <= set(rule) for rule in rules.values())
    busy = rules["r"]
    assert (busy["waiting"], busy["in_flight"], busy["hold"]) == (3, 2, None)
    assert busy["limits"] == [
        {"name": "vendor", "per": "rule", "rate": "2/h", "used": 2, "free": 0}
    ]


def test_json_has_the_hold() -> None:
    run("pause", "r", "--for", "1h", "--reason", "they asked")
    hold = run("status", "--json").document["rules"]["r"]["hold"]
    assert hold["reason"] == "they asked"
    assert hold["until"]


def test_people_get_a_table_with_times_as_people_say_them() -> None:
    ran = run("status")
    lines = ran.out.splitlines()
    assert lines[0].split() == [
        "rule",
        "waiting",
        "in",
        "flight",
        "a",
        "second",
        "oldest",
        "due",
        "drained",
        "held",
    ]
    line = next(line for line in lines if line.startswith("r "))
    assert line.split()[:3] == ["r", "3", "2"]
    assert "just now" in line
    assert "    vendor 2/h: 2 used, 0 free" in lines


def test_watching_goes_on_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[float] = []

    def sleep(seconds: float) -> None:
        turns.append(seconds)
        if len(turns) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(callqueue_status.time, "sleep", sleep)
    ran = run("status", "--watch")
    assert ran.code == 0
    assert ran.out.count("    vendor 2/h: 2 used, 0 free") == 3


def test_why_one_call_waits() -> None:
    call = CallQueue.objects.new().order_by("-pk").first()
    assert call is not None
    ran = run("status", "--call", str(call.pk))
    assert ran.out.startswith(f"call {call.pk}, number 3 in its rule: ")
    assert run("status", "--call", str(call.pk), "--json").document["position"] == 3
    assert run("status", "--call", "99999999").code == 2


def test_json_cannot_be_watched() -> None:
    assert run("status", "--json", "--watch").code == 2
