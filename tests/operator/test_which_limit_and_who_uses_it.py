"""Which limit is it, and who uses it? What is used now is the same at every door."""

from __future__ import annotations

from typing import Any

import pytest

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow, TokenBucket
from callqueue.execution import executor
from callqueue.models import CallAttempt, RuleState
from callqueue.testing import travel
from tests.db import commands
from tests.operator.asking import Ask, Rules, dispenser, number, send
from tests.support.behaviour import Vendor, release, run

USED: dict[str, tuple[Any, dict[str, Any], int, int]] = {
    "sliding": (SlidingWindow("10/h"), {}, 3, 10),
    "long": (SlidingWindow("5000/d"), {}, 3, 5000),
    "calendar": (FixedWindow("90/d"), {}, 3, 90),
    "bucket": (TokenBucket("4/h", burst=8), {}, 3, 8),
    "in flight": (Concurrency(7), {}, 3, 7),
    "tokens": (SlidingWindow("9000/h", unit="tokens"), {"cost": {"tokens": 500}}, 1500, 9000),
    "per key": (SlidingWindow("6/h", per="key"), {"key": "k1"}, 3, 6),
    "per key, long": (SlidingWindow("4000/d", per="key"), {"key": "k1"}, 3, 4000),
    "per key, bucket": (TokenBucket("4/h", burst=6, per="key"), {"key": "k1"}, 3, 6),
    "per part": (SlidingWindow("6/h", per="channel"), {"key": {"channel": "C9"}}, 3, 6),
    "per queue": (SlidingWindow("5/h", per="queue"), {}, 3, 5),
}


@pytest.mark.parametrize("name", USED)
def test_every_door_says_how_much_is_used(
    rules: Rules, remote: Vendor, ask: Ask, name: str
) -> None:
    """Before it is answered, which is told apart, and after that; and so does the audit."""
    limit, options, used, allowed = USED[name]
    rules(r=Rule(limits=[limit]))
    send("r", 3, **options)
    assert len(release()) == 3
    found = ask.status("r")
    assert found["in_flight"] == ask.metrics("callqueue_in_flight_calls", "r") == 3
    (found,) = found["limits"]
    assert (found["used"], found["free"]) == (used, allowed - used)
    labels = limit.label, limit.per, "r"
    assert ask.metrics("callqueue_limit_used", *labels) == used
    assert ask.metrics("callqueue_limit_free", *labels) == allowed - used
    for said in (ask.row("r")["Limit"], ask.rule("r")):
        assert f"{used:,} of {allowed:,}" in said
    assert "In flight 3 (3 not begun" in ask.rule("r")
    if name == "in flight":
        return
    executor.execute("default", list(CallAttempt.objects.values_list("pk", flat=True)))
    judged = commands.run("audit", "--json").document["limits"]
    (judged,) = [one for one in judged if one["rule"] == "r"]
    assert (judged["highest"], judged["allowed"]) == (used, allowed)
    assert ask.status("r")["limits"][0]["used"] == pytest.approx(used, abs=1)


def test_the_limit_that_keeps_calls_back_is_shown_and_a_long_one_beside_it(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    """From four fifths on: of 20 a day 17 are gone, though 10 a minute is what binds now."""
    rules(r=Rule(limits=[SlidingWindow("100/s"), SlidingWindow("10/m"), FixedWindow("20/d")]))
    with travel() as clock:
        send("r", 7)
        run()
        clock.forward(90)
        send("r", 12)
        run()
        dispenser()
        shown = ask.row("r")["Limit"]
    assert "10/m 10 of 10" in shown
    assert "20/d 17 of 20" in shown
    assert "100/s" not in shown


def test_a_changed_limit_is_marked_and_never_said_to_be_used_beyond_what_it_allows(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    """Whatever was sent before it was lowered is not called a breach of it."""
    rules(r=Rule(limits=[SlidingWindow("10/h", name="vendor")]))
    send("r", 8)
    run()
    assert "*" not in ask.row("r")["Limit"]
    ask.post(do="limit", rule="r", limit="vendor", rate="2/h", confirm="yes")
    dispenser()
    row = ask.row("r")["Limit"]
    (found,) = ask.status("r")["limits"]
    assert (found["rate"], found["free"]) == ("2/h", 0)
    assert "*" in row and f"{found['used']} of 2" in row
    assert "changed from 10/h" in ask.rule("r")
    assert ask.metrics("callqueue_limit_capacity", "vendor", "rule", "r") == 2
    assert "is used up" in send("r")[0].forecast().reason


def test_who_shares_a_limit_is_named_and_each_has_its_own_traffic(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    account = SlidingWindow("100/h", name="account")
    rules(pay=Rule(limits=[account]), read=Rule(limits=[account]))
    send("pay", 2), send("read", 6)
    run()
    for rule in ("pay", "read"):
        assert ask.status(rule)["limits"][0]["used"] == 8
    assert "shared with read" in ask.rule("pay")
    rates = [ask.status(rule)["rate_per_s"] for rule in ("pay", "read")]
    assert rates == [pytest.approx(2 / 60, abs=0.01), pytest.approx(6 / 60, abs=0.01)]


def test_the_key_that_uses_most_and_those_that_wait_most_are_named(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    rules(chat=Rule(limits=[SlidingWindow("3/h", per="key")]))
    for key, count in (("loud", 40), ("quiet", 2)):
        send("chat", count, key=key)
    run()
    (limit,) = [row for row in ask.rule_tables("chat") if row[0].startswith("SlidingWindow")]
    assert "3 of 3" in limit[3]
    assert "loud" in limit[3]
    (loud,) = [row for row in ask.rule_tables("chat") if row[0].split(" ")[0] == "loud"]
    assert number(loud[1]) == 37
    assert "100 %" in loud[2]


def test_of_two_full_limits_the_one_that_the_pass_waited_for_is_named(
    rules: Rules, ask: Ask
) -> None:
    """Its row says which; and of what has room since, it says nothing."""
    rules(r=Rule(limits=[TokenBucket("3/h", burst=3), Concurrency(3)]))
    send("r", 9)
    release()
    dispenser()
    row = RuleState.objects.get(pk="r")
    assert row.memo["binding"] == {"r": "r#0"}
    assert "3/h 3 of 3" in ask.row("r")["Limit"]
    RuleState.objects.update(memo={**row.memo, "binding": {"r": "r#1"}})
    assert "Concurrency 3 3 of 3" in ask.row("r")["Limit"]
