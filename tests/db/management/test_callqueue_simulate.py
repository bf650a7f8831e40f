"""callqueue_simulate: what a backlog would take."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from callqueue import Concurrency, Rule, SlidingWindow, control
from tests.db.commands import run

Rules = Callable[..., None]


def test_a_simulation_says_what_draining_takes(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("20/s", name="vendor"), Concurrency(50)]))
    ran = run("simulate", "--rule", "r", "--calls", "200", "--json")
    assert ran.code == 0
    document = ran.document
    assert (document["rule"], document["calls"], document["binding_limit"]) == ("r", 200, "vendor")
    assert document["seconds"] == pytest.approx(9.65, abs=0.1)
    assert "the limit that binds is vendor" in run("simulate", "--rule", "r", "--calls", "200").out


def test_a_simulation_knows_changed_limits_keys_and_costs(rules: Rules) -> None:
    rules(
        r=Rule(
            limits=[
                SlidingWindow("20/s", name="vendor"),
                SlidingWindow("100/m", unit="tokens", per="key"),
            ]
        )
    )
    control.change_limit("default", "r", "vendor", "40/s")
    assert run("simulate", "--rule", "r", "--calls", "200", "--json").document["seconds"] < 5
    slow = run(
        "simulate", "--rule", "r", "--calls", "20", "--cost", "tokens=50", "--keys", "5", "--json"
    ).document
    assert slow["seconds"] == pytest.approx(60.05 + 0.2, abs=0.2)


def test_no_calls_take_no_time(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("20/s"), Concurrency(50)]))
    ran = run("simulate", "--rule", "r", "--calls", "0", "--json")
    assert ran.code == 0
    assert ran.document == {"rule": "r", "calls": 0, "seconds": 0.0, "binding_limit": None}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rule", "x", "--calls", "1"),
        ("--rule", "r", "--calls", "-1"),
        ("--rule", "r", "--calls", "1", "--latency", "-1"),
        ("--rule", "r", "--calls", "1", "--latency", "nan"),
        ("--rule", "r", "--calls", "1", "--keys", "0"),
        ("--rule", "r", "--calls", "1", "--cost", "21"),
        ("--rule", "r", "--calls", "1", "--cost", "many"),
        ("--rule", "r", "--calls", "1", "--cost", "tokens=1"),
    ],
)
def test_a_simulation_of_nonsense_is_wrong_use(rules: Rules, arguments: tuple[str, ...]) -> None:
    rules(r=Rule(limits=[SlidingWindow("20/s")]))
    assert run("simulate", *arguments).code == 2
