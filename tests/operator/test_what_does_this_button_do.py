"""What does this button do? It asks first, says what would come of it, and does just that."""

from __future__ import annotations

import re

import pytest
from django.contrib.admin.models import LogEntry

from callqueue import Rule, SlidingWindow
from callqueue.ledger import ledger_time
from callqueue.models import Hold
from callqueue.testing import travel
from tests.operator.asking import (
    Ask,
    Rules,
    dispenser,
    every,
    plain,
    send,
    tables,
    waiting,
)
from tests.support.behaviour import Vendor, run


def test_a_pause_asks_first_and_has_an_end_by_default(rules: Rules, ask: Ask) -> None:
    """Names are said as they are: none begins with a capital letter of ours."""
    rules(**{"stripe-account": Rule(limits=[SlidingWindow("1/s", name="a")])})
    send("stripe-account", 7)
    asked = ask.post(do="pause", rule="stripe-account")
    assert "7 calls wait" in plain(asked)
    assert 'value="30m"' in asked
    assert not Hold.objects.exists()
    confirmed = {"rule": "stripe-account", "confirm": "yes"}
    said = plain(ask.post(do="pause", how="for", **confirmed, **{"for": "30m"}))
    assert "Paused until" in said
    ends = Hold.objects.get().until
    assert ends is not None
    assert (ends - ledger_time.now("default")).total_seconds() == pytest.approx(1800, abs=10)
    assert LogEntry.objects.count() == 1
    for text in (said, plain(ask.post(do="limit", limit="a", rate="1/h", **confirmed))):
        assert "stripe-account" in text and "Stripe-account" not in text


def test_a_key_is_paused_beside_its_name(rules: Rules, ask: Ask) -> None:
    rules(chat=Rule(limits=[SlidingWindow("1/m", per="key")]))
    send("chat", 30, key="loud"), send("chat", 2, key="quiet")
    page = ask.page("rule", name="chat")
    form = re.search(r'(?s)<form[^>]*>((?:(?!</form>).)*name="key" value="loud".*?)</form>', page)
    assert form
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', form[1]))
    fields.pop("csrfmiddlewaretoken", None)
    asked = ask.post(**fields)
    assert "30 calls wait" in plain(asked)
    ask.post(**fields, how="for", **{"for": "10m"}, confirm="yes")
    assert [(one.per, one.value) for one in Hold.objects.all()] == [("key", "loud")]
    assert run() == 1, "of the other key alone"


def test_resuming_ends_what_holds(rules: Rules, ask: Ask) -> None:
    rules(r=Rule())
    send("r", 2)
    ask.post(do="pause", rule="r", how="resumed", confirm="yes")
    assert Hold.objects.get().until is None
    asked = plain(ask.post(do="resume", rule="r"))
    assert "Resume r?" in asked and "1 hold would end" in asked
    assert Hold.objects.exists()
    assert "1 hold ended" in plain(ask.post(do="resume", rule="r", confirm="yes"))
    dispenser(rules=["nothing"])
    assert ask.status("r")["state"] == "ok"
    assert waiting("r")[0].forecast().release_at is not None


def preview(ask: Ask, rule: str, limit: str, rate: str) -> tuple[str, dict[str, list[str]]]:
    """What is asked before a limit is changed: the text, and a row for each rule concerned."""
    asked = ask.post(do="limit", rule=rule, limit=limit, rate=rate)
    rows = {row[0]: row for table in tables(asked) for row in table[1:]}
    return plain(asked), rows


def test_a_changed_limit_does_what_was_said_before(rules: Rules, ask: Ask) -> None:
    """The page that asks says now what `status` says afterwards."""
    rules(r=Rule(limits=[SlidingWindow("60/m")]))
    send("r", 600)
    dispenser(rules=["nothing"])
    _, rows = preview(ask, "r", "r#0", "10/m")
    assert rows["r"][-2:] == ["9 minutes", "59 minutes"]
    assert ask.status("r")["drain_s"] == pytest.approx(540, abs=60), "nothing is changed yet"
    ask.post(do="limit", rule="r", limit="r#0", rate="10/m", confirm="yes")
    dispenser(rules=["nothing"])
    assert ask.status("r")["drain_s"] == pytest.approx(59 * 60, rel=0.03)


def test_a_change_that_starves_a_rule_says_so_before(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    """Nothing waits yet: it is what is sent now that would not pass any more."""
    account = SlidingWindow("100/10s", name="account")
    rules(pay=Rule(limits=[account], priority=9), read=Rule(limits=[account]))
    with travel() as clock:
        for _ in every(clock, 10.5, 7):
            send("pay", 20), send("read", 20)
            run()
        dispenser()
        said, rows = preview(ask, "pay", "account", "20/10s")
        assert set(rows) >= {"pay", "read"}
        assert re.search(r"(3\.\d|4) calls a second come in .* let 2 through", said)
        assert "backlog would grow" in said
        said, _ = preview(ask, "pay", "account", "300/10s")
        assert "would grow" not in said


def test_a_raised_limit_is_not_held_to_the_pace_of_the_old_one(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    rules(r=Rule(limits=[SlidingWindow("10/m")]))
    with travel() as clock:
        send("r", 220)
        for _ in every(clock, 61, 3):
            run()
        assert run() == 10
        dispenser(rules=["nothing"])
        _, rows = preview(ask, "r", "r#0", "100/m")
        now, then = rows["r"][-2:]
        assert now in ("18 minutes", "19 minutes")
        assert then.endswith(" seconds")
