"""The page of a rule: the proof of its limits, what it sent, its keys, what failed, how it drains."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow
from callqueue.models import CallAttempt, CallQueue, Total
from callqueue.operations import audit, peaks
from callqueue.operations.counting import Counter
from tests.db.admin.staff import DASHBOARD, ended, log_in, text_of

Rules = Callable[..., None]
Status = CallQueue.Status


def page(client: Client, name: str, **query: str) -> Any:
    return client.get(reverse("admin:callqueue_rule", args=[name]), query)


def answered(
    rule: str, count: int, seconds: float = 30, outcome: str = "succeeded", key: str = ""
) -> None:
    """So many attempts a tenth of a second apart, the last of them so many seconds ago."""
    for i in range(count):
        at = timezone.now() - timedelta(seconds=seconds + i / 10)
        call = CallQueue.objects.create(
            rule=rule, key=key, status=Status.DONE, last_attempt=1, call_data={},
            due_at_dt=at - timedelta(seconds=2),
        )  # fmt: skip
        CallAttempt.objects.create(
            call=call, number=1, rule=rule, key=key, released_at=at, started_at=at, sent_at=at,
            finished_at=at + timedelta(milliseconds=50), outcome=outcome,
        )  # fmt: skip


def count() -> None:
    counter = Counter("default")
    while counter.count():
        pass


def test_it_shows_what_an_audit_finds(rules: Rules, root: Client) -> None:
    rules(pay=Rule(limits=[SlidingWindow("20/s", name="account"), SlidingWindow("9/m", per="key")]))
    answered("pay", 17, key="a")
    answered("pay", 3, 1000, "throttled", key="b")
    count()
    shown = page(root, "pay")
    findings = audit.audit("default", since=timedelta(days=1), tell=False).findings
    for one, found in zip(shown.context["limits"], findings, strict=False):
        for use in one["uses"]:
            assert f"{found.highest} of {found.allowed}" in use["bar"]
            assert use["is_over"] == found.exceeded
    assert [use["value"] for use in shown.context["limits"][1]["uses"]] == ["a"] * 3
    assert [numbers for _, numbers, *_ in shown.context["sums"]] == [["20", "17", "0", "3"]] * 3
    (_, (_, day)) = shown.context["sent_tables"]
    assert [row[:3] for row in day] == [("a", "17", "85 %"), ("b", "3", "15 %")]


@pytest.mark.parametrize("shown", ["hour", "day", "week", "nonsense"])
def test_every_range_is_drawn_and_written(rules: Rules, root: Client, shown: str) -> None:
    rules(pay=Rule(limits=[SlidingWindow("20/s")]))
    answered("pay", 5)
    count()
    charts = page(root, "pay", range=shown).context["charts"]
    assert len(charts) == 4
    for chart in charts:
        assert chart["svg"].startswith("<svg")
        assert "<title>" in chart["svg"]
        assert chart["rows"]
    live = text_of(page(root, "pay", range=shown, live="1"))
    assert 'data-live="charts"' in live
    assert "<html" not in live


def test_a_limit_that_calls_in_flight_use_up_says_so(rules: Rules, root: Client) -> None:
    rules(llm=Rule(limits=[Concurrency(2)]))
    answered("llm", 3)
    count()
    CallQueue.objects.create(rule="llm", ready=True, call_data={})
    for number in (1, 2):
        CallAttempt.objects.create(call_id=number, number=1, rule="llm", released_at=timezone.now())
        (limit,) = page(root, "llm").context["limits"]
        assert bool(limit["note"]) == (number == 2)
    assert limit["note"].startswith("used up by 2 calls in flight, which take ")


def test_a_limit_that_is_not_followed_says_so(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its use is not nothing."""
    monkeypatch.setattr(peaks, "MOST", 2)
    rules(bulk=Rule(limits=[SlidingWindow("1000000/d")]))
    assert page(root, "bulk").context["limits"][0]["note"] == ""
    answered("bulk", 5, 900)
    count()
    (limit,) = page(root, "bulk").context["limits"]
    assert [use["bar"] for use in limit["uses"]] == ["–"] * 3
    assert "callqueue_audit counts them" in limit["note"]


def test_a_name_may_be_anything(rules: Rules, root: Client) -> None:
    name = "a/b & <c>?x=1"
    rules(**{name: Rule()})
    shown = page(root, name)
    assert shown.status_code == 200
    assert "<c>" not in text_of(shown)
    assert page(root, "nope").status_code == 404


def test_keys_are_counted_exactly(rules: Rules, root: Client) -> None:
    rules(chat=Rule(limits=[SlidingWindow("1/s", per="key")]))
    CallQueue.objects.bulk_create(
        [
            CallQueue(rule="chat", key=key, ready=True, call_data={})
            for key in ["hog"] * 30 + ["b"] * 3 + [f"k{i}" for i in range(27)]
        ]
    )
    shown = page(root, "chat")
    assert shown.context["keys_waiting"][:2] == [
        ("hog", "30", "50 %", False),
        ("b", "3", "5 %", False),
    ]
    assert shown.context["keys_count"] == "29"
    assert "in 30 seconds" in shown.context["drain_rows"][0][2]


def test_what_failed_alike_is_one_line_and_is_requeued(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    for number in range(4):
        ended(Status.FAILED, rule="pay", error_message=f"HTTP 402: card 1000{number} declined")
    ended(Status.UNKNOWN, rule="pay", error_message="no answer within 27 s")
    groups = page(root, "pay").context["groups"]
    assert [(g["status"], g["text"], g["count"]) for g in groups] == [
        ("failed", "HTTP 402: card … declined", "4"),
        ("unknown", "no answer within 27 s", "1"),
    ]
    asked = {"do": "requeue", "rule": "pay", "group": groups[0]["name"]}
    assert "These are 4 calls" in text_of(root.post(reverse(DASHBOARD), asked))
    assert CallQueue.objects.failed().count() == 4
    done = root.post(reverse(DASHBOARD), {**asked, "confirm": "yes"}, follow=True)
    assert "4 calls requeued" in text_of(done)
    assert not CallQueue.objects.failed().exists()
    again = root.post(reverse(DASHBOARD), {**asked, "confirm": "yes"}, follow=True)
    assert "Nothing was changed" in text_of(again)


def test_requeueing_needs_its_permission_and_no_other(rules: Rules) -> None:
    rules(pay=Rule())
    ended(Status.FAILED, rule="pay", error_message="no")
    controls = log_in("view_callqueue", "control_rule")
    (group,) = page(controls, "pay").context["groups"]
    assert "Requeue all" not in text_of(page(controls, "pay"))
    asked = {"do": "requeue", "rule": "pay", "group": group["name"], "confirm": "yes"}
    assert controls.post(reverse(DASHBOARD), asked).status_code == 403
    requeues = log_in("view_callqueue", "requeue_call")
    assert requeues.post(reverse(DASHBOARD), {"do": "pause", "rule": "pay"}).status_code == 403
    assert requeues.post(reverse(DASHBOARD), asked, follow=True).status_code == 200
    assert not CallQueue.objects.failed().exists()


def test_what_if_is_drawn_from_the_real_backlog(rules: Rules, root: Client) -> None:
    rules(pay=Rule(limits=[SlidingWindow("1/s")]))
    CallQueue.objects.bulk_create(
        [CallQueue(rule="pay", ready=True, call_data={}) for _ in range(600)]
    )
    asked = page(root, "pay", limit="pay#0", rate="2/s", held="10m").context["drain_rows"]
    assert "in 10 minutes" in asked[0][2]
    assert "in 15 minutes" in asked[1][2]
    for wrong in ({"rate": "many", "limit": "pay#0"}, {"held": "soon"}):
        assert page(root, "pay", **wrong).context["drain_wrong"]


def test_what_a_long_window_holds_is_waited_for(rules: Rules, root: Client) -> None:
    """A day's limit that is used up lets nothing go before midnight; one that is free, all."""
    rules(maps=Rule(limits=[FixedWindow("100/d")]))
    CallQueue.objects.bulk_create(
        [CallQueue(rule="maps", ready=True, call_data={}) for _ in range(40)]
    )
    assert "in 0 seconds" in page(root, "maps").context["drain_rows"][0][2]
    start = int(timezone.now().timestamp()) // 900 * 900
    Total.objects.create(rule="maps", width=900, start=start, sent=100)
    assert "in 0 seconds" not in page(root, "maps").context["drain_rows"][0][2]
