"""What failed, and what now? Counts are the same at every door, and what the page says is done."""

from __future__ import annotations

import re

from callqueue import Retry, Rule
from callqueue.models import CallQueue
from callqueue.testing import run_callqueue, travel
from tests.operator.asking import Ask, Rules, dispenser, number, plain, tables
from tests.support.behaviour import Vendor, run

Status = CallQueue.Status
NO_RETRY = Retry(max_attempts=1)


def send_to(path: str, count: int, method: str = "get") -> None:
    CallQueue.objects.send_many(
        [{"method": method, "params": {"url": f"http://vendor.example{path}"}}] * count, rule="r"
    )


def groups(ask: Ask) -> dict[str, int]:
    """What the rule's page lists as failed: a text, and how many calls."""
    (listed,) = [
        table
        for table in tables(ask.page("rule", name="r"))
        if "Answer and reason" in " ".join(table[0])
    ]
    return {row[1]: number(row[2]) for row in listed[1:] if len(row) > 2}


def requeue_group(ask: Ask) -> str:
    """Press "Requeue all" of the first group, as the page has it."""
    page = ask.page("rule", name="r")
    form = re.search(r'(?s)<form method="post" action="([^"]*rule__exact[^"]*)">(.*?)</form>', page)
    assert form
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', form[2]))
    return str(ask.client.post(form[1], fields, follow=True).content.decode())


def test_calls_that_failed_alike_are_one_line(rules: Rules, remote: Vendor, ask: Ask) -> None:
    rules(r=Rule(retry=NO_RETRY))
    remote.answers.update({"/a": (402, {}, b""), "/b": (422, {}, b"")})
    send_to("/a", 5), send_to("/b", 2), send_to("/fine", 1)
    run()
    found = groups(ask)
    assert sorted(found.values()) == [2, 5]
    assert {re.findall(r"\d{3}", text)[0]: count for text, count in found.items()} == {
        "402": 5,
        "422": 2,
    }


def test_what_is_being_retried_is_seen_to_fail(rules: Rules, remote: Vendor, ask: Ask) -> None:
    rules(r=Rule(retry=Retry(base=600)))
    remote.answers["/a"] = (503, {}, b"")
    send_to("/a", 4)
    run()
    assert ask.status("r")["waiting"] == 4
    assert {re.findall(r"\d{3}", text)[0]: n for text, n in groups(ask).items()} == {"503": 4}


def test_what_the_page_said_is_what_is_requeued(rules: Rules, remote: Vendor, ask: Ask) -> None:
    """Not what failed alike since, nor what failed otherwise."""
    rules(r=Rule(retry=NO_RETRY))
    remote.answers.update({"/a": (402, {}, b""), "/b": (422, {}, b"")})
    send_to("/a", 3), send_to("/b", 1)
    run()
    asked = requeue_group(ask)
    assert re.search(r"\b3 calls", plain(asked))
    send_to("/a", 2)
    run()
    assert "3 calls requeued" in plain(ask.confirm(asked))
    assert CallQueue.objects.new().count() == 3
    assert CallQueue.objects.failed().count() == 2 + 1


def test_failures_of_the_hour_are_the_same_at_every_door(
    transactional_db: None, rules: Rules, remote: Vendor
) -> None:
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
        said = ask.dashboard()
        assert "1 rule is failing (r)" in said
        assert "6 attempts failed and 1 were throttled in the last hour" in said
        (row,) = [row for row in ask.rule_tables("r") if row[0] == "Last hour"]
        assert row[1:] == ["11", "4", "6", "1"]
        for outcome, count in (("failed", 6), ("succeeded", 4), ("throttled", 1)):
            assert ask.metrics("callqueue_attempts_total", outcome, "r") == count


def test_the_sentence_of_what_failed_leads_to_what_it_counts(
    transactional_db: None, rules: Rules, remote: Vendor
) -> None:
    rules(r=Rule(retry=NO_RETRY))
    ask = Ask()
    remote.answers["/a"] = (402, {}, b"")
    with travel() as clock:
        send_to("/a", 3)
        run_callqueue()
        clock.forward(5)
        run_callqueue()
        page = ask.page("dashboard")
        link = re.search(r'<a href="([^"]+)">[^<]*attempts failed', page)
        assert link
        listed = ask.client.get(link[1].replace("&amp;", "&"), follow=True)
        rows = [row for table in tables(listed.content.decode()) for row in table]
        assert len([row for row in rows if "402" in row]) == 3


def test_the_list_of_failed_calls_names_each_reason(rules: Rules, remote: Vendor, ask: Ask) -> None:
    rules(r=Rule(retry=NO_RETRY))
    remote.answers["/a"] = (402, {}, b"")
    send_to("/a", 2)
    run()
    said = plain(ask.page("callqueue_changelist", rule__exact="r", status__exact=Status.FAILED))
    assert said.count("402 Payment Required") == 2


def test_calls_whose_outcome_is_unknown_wait_for_a_decision_at_every_door(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    def lost() -> None:
        raise ConnectionResetError("the answer never came")

    rules(r=Rule(on_lost="unknown"))
    remote.answers["/a"] = lost
    send_to("/a", 2, method="post")
    run()
    assert ask.metrics("callqueue_unknown_calls", "r") == 2
    assert sum(groups(ask).values()) == 2
    asked = ask.choose("requeue_calls", list(CallQueue.objects.unknown()))
    assert "twice" in plain(asked)
    assert CallQueue.objects.unknown().count() == 2


def test_a_call_says_what_it_was_answered_and_what_may_be_done(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    rules(r=Rule(retry=NO_RETRY))
    remote.answers["/a"] = (402, {}, b'{"error": "card declined"}')
    send_to("/a", 1)
    run()
    said = ask.call(CallQueue.objects.get())
    assert "status 402" in said
    assert "card declined" in said
    assert "Requeue" in said


def test_failed_calls_are_counted_until_somebody_decides(
    rules: Rules, remote: Vendor, ask: Ask
) -> None:
    rules(r=Rule(retry=NO_RETRY))
    remote.answers["/a"] = (402, {}, b"")
    send_to("/a", 3)
    run()
    assert ask.metrics("callqueue_failed_calls", "r") == 3
    CallQueue.objects.failed().requeue()
    assert ask.metrics("callqueue_failed_calls", "r") == 0
    assert ask.status("r")["waiting"] == 3
