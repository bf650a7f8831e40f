"""What failed, and what now? Counts are the same at every door, and what the page says is done."""

from __future__ import annotations

import re
from typing import Any

from callqueue import Retry, Rule
from callqueue.models import CallQueue
from callqueue.testing import run_callqueue, travel
from tests.db.admin.staff import answer, text_of
from tests.operator.asking import Ask, Rules, dispenser, number, plain, tables
from tests.support.behaviour import Vendor, run

Status = CallQueue.Status
NO_RETRY = Retry(max_attempts=1)


def send_to(path: str, count: int, method: str = "get") -> None:
    CallQueue.objects.send_many(
        [{"method": method, "params": {"url": f"http://vendor.example{path}"}}] * count, rule="r"
    )


def groups(ask: Ask) -> dict[str, int]:
    """What the rule's page lists as failed: a status, and how many calls."""
    (listed,) = [
        table
        for table in tables(ask.page("rule", name="r"))
        if "Answer and reason" in " ".join(table[0])
    ]
    rows = [row for row in listed[1:] if len(row) > 2]
    return {(re.findall(r"\d{3}", row[1]) or [row[1]])[0]: number(row[2]) for row in rows}


def requeue_group(ask: Ask) -> Any:
    """Press "Requeue all" of the first group, as the page has it."""
    page = ask.page("rule", name="r")
    form = re.search(r'(?s)<form method="post" action="([^"]*rule__exact[^"]*)">(.*?)</form>', page)
    assert form
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', form[2]))
    return ask.client.post(form[1], fields, follow=True)


def test_what_is_being_retried_is_seen_to_fail(rules: Rules, remote: Vendor, ask: Ask) -> None:
    rules(r=Rule(retry=Retry(base=600)))
    remote.answers["/a"] = (503, {}, b"")
    send_to("/a", 4)
    run()
    assert ask.status("r")["waiting"] == 4
    assert groups(ask) == {"503": 4}


def test_what_the_page_said_is_what_is_requeued(rules: Rules, remote: Vendor, ask: Ask) -> None:
    """Calls that failed alike are one line of it. Not what failed alike since, nor what failed
    otherwise; these are counted until somebody decides.
    """
    rules(r=Rule(retry=NO_RETRY))
    remote.answers.update({"/a": (402, {}, b""), "/b": (422, {}, b"")})
    send_to("/a", 3), send_to("/b", 1), send_to("/fine", 1)
    run()
    assert groups(ask) == {"402": 3, "422": 1}
    listed = ask.page("callqueue_changelist", rule__exact="r", status__exact=Status.FAILED)
    assert plain(listed).count("402 Payment Required") == 3
    asked = requeue_group(ask)
    assert re.search(r"\b3 calls", plain(text_of(asked)))
    send_to("/a", 2)
    run()
    assert ask.metrics("callqueue_failed_calls", "r") == 6
    assert "3 calls requeued" in plain(text_of(answer(ask.client, asked)))
    assert ask.metrics("callqueue_failed_calls", "r") == CallQueue.objects.failed().count() == 2 + 1
    assert ask.status("r")["waiting"] == CallQueue.objects.new().count() == 3


def test_failures_of_the_hour_are_the_same_at_every_door(
    transactional_db: None, rules: Rules, remote: Vendor
) -> None:
    """The sentence that counts them leads to them."""
    rules(r=Rule(retry=NO_RETRY))
    ask = Ask()
    remote.answers.update({"/a": (402, {}, b""), "/429": (429, {}, b"")})
    send_to("/a", 6), send_to("/fine", 4)
    with travel() as clock:
        run_callqueue()
        send_to("/429", 1)
        run_callqueue(until_idle=False)
        clock.forward(5)
        run_callqueue(until_idle=False)
        dispenser(rules=["nothing"])
        found = ask.row("r")
        assert (found["Failed 1 h"], found["429s 1 h"]) == ("6", "1")
        assert "failing" in found["State"]
        page = ask.page("dashboard")
        assert "1 rule is failing (r)" in plain(page)
        assert "6 attempts failed and 1 were throttled in the last hour" in plain(page)
        (row,) = [row for row in ask.rule_tables("r") if row[0] == "Last hour"]
        assert row[1:] == ["11", "4", "6", "1"]
        for outcome, count in (("failed", 6), ("succeeded", 4), ("throttled", 1)):
            assert ask.metrics("callqueue_attempts_total", outcome, "r") == count
        link = re.search(r'<a href="([^"]+)">[^<]*attempts failed', page)
        assert link
        listed = ask.client.get(link[1].replace("&amp;", "&"), follow=True)
        rows = [row for table in tables(listed.content.decode()) for row in table]
        assert len([row for row in rows if "402" in row]) == 6


def test_calls_whose_outcome_is_unknown_wait_for_a_decision_at_every_door(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    def lost() -> None:
        raise ConnectionResetError("the answer never came")

    rules(r=Rule(on_lost="unknown"))
    remote.answers["/a"] = lost
    send_to("/a", 2, method="post")
    run()
    assert ask.metrics("callqueue_unknown_calls", "r") == sum(groups(ask).values()) == 2
