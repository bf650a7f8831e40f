"""The dashboard: where every rule stands."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.test import Client
from django.urls import reverse
from django.utils import timezone

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow
from callqueue.models import CallAttempt, CallQueue
from tests.db.admin.staff import CHANGELIST, DASHBOARD, ended, text_of
from tests.support.behaviour import release, send

Rules = Callable[..., None]
Status = CallQueue.Status


def test_the_dashboard_shows_where_every_rule_stands(rules: Rules, root: Client) -> None:
    rules(
        pay=Rule(queues="egress", limits=[SlidingWindow("10/h", name="account"), Concurrency(4)]),
        chat=Rule(limits=[SlidingWindow("2/h", per="key")]),
        daily=Rule(limits=[FixedWindow("100/d")]),
    )
    for _ in range(3):
        send("pay")
    for key in ("a", "a", "a", "a", "b"):
        send("chat", key=key)
    release()
    response = root.get(reverse(DASHBOARD))
    text = text_of(response)
    rows = {row.rule.name: row for row in response.context["rows"]}
    assert (rows["pay"].rule.waiting, rows["pay"].rule.in_flight) == (0, 3)
    assert [(limit.name, limit.used, limit.free) for limit, *_ in rows["pay"].limits] == [
        ("account", 3, 7),
        ("Concurrency 4", 3, 1),
    ]
    assert rows["chat"].rule.waiting == 2
    assert [(key.key, key.waiting, key.in_flight) for key, *_ in rows["chat"].keys] == [("a", 2, 2)]
    assert [(limit.used, limit.free) for limit, *_ in rows["chat"].limits] == [(2, 0)]
    for shown in ("<svg", "egress", "account", 'aria-label="Calls per minute', "percent used"):
        assert shown in text
    assert "<script>" not in text.partition('id="content-main"')[2]
    assert " style=" not in text.partition('id="content-main"')[2]


def test_the_last_hour_is_counted_by_minute(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    for status, minutes in (
        (Status.DONE, 0),
        (Status.DONE, 5),
        (Status.FAILED, 5),
        (Status.UNKNOWN, 5),
        (Status.DONE, 90),
    ):
        call = ended(status, rule="pay")
        CallQueue.objects.filter(pk=call.pk).update(
            finished_at_dt=timezone.now() - timedelta(minutes=minutes)
        )
    for _ in range(2):  # the second time from the cache
        row = looked_at(root, "pay", lambda row: row.plot)
        assert (row.plot.total_done, row.plot.total_failed, row.plot.top) == (2, 2, 3)


def looked_at(client: Client, rule: str, plot_of: Callable[[Any], Any]) -> Any:
    """The rule's row once its plot is counted: a look counts no more than it has time for."""
    for _ in range(200):
        (row,) = (
            row for row in client.get(reverse(DASHBOARD)).context["rows"] if row.rule.name == rule
        )
        if "cq-bar-unknown" not in plot_of(row).drawn:
            return row
    raise AssertionError("200 looks did not count an hour")


def test_the_last_hour_of_a_key_is_counted_by_attempts(rules: Rules, root: Client) -> None:
    """Whatever a call costs, it is one attempt; and another key's attempts are not counted."""
    rules(chat=Rule(limits=[SlidingWindow("100/h", per="key")]))
    for key, outcome, minutes in (
        ("a", "succeeded", 0),
        ("a", "failed", 5),
        ("a", "succeeded", 5),
        ("a", "succeeded", 90),
    ):
        answered(key, outcome, timedelta(minutes=minutes))
    answered("b", "failed", timedelta())
    for _ in range(2):
        send("chat", key="a")
    for _ in range(2):  # the second time from the cache
        row = looked_at(root, "chat", lambda row: row.keys[0][1])
        ((key, plot, ((limit, _, trace),)),) = row.keys
        assert (key.key, plot.total_done, plot.total_failed, plot.top) == ("a", 2, 1, 2)
        assert limit.used == 9
        assert trace.lines


def answered(key: str, outcome: str, ago: timedelta) -> None:
    ended_at = timezone.now() - ago
    CallAttempt.objects.create(
        call=ended(Status.DONE, rule="chat"), number=2, rule="chat", key=key, queue="celery", calls=3, cost=3, outcome=outcome,
        released_at=ended_at, started_at=ended_at, sent_at=ended_at, finished_at=ended_at,
    )  # fmt: skip


def test_the_live_part_holds_every_rule(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    text = text_of(root.get(reverse("admin:callqueue_dashboard_live")))
    assert 'data-live="rule-pay"' in text
    assert "<html" not in text


def test_the_dashboard_is_linked_from_the_list_and_the_index(rules: Rules, root: Client) -> None:
    for path in (reverse(CHANGELIST), reverse("admin:app_list", args=["callqueue"])):
        assert reverse(DASHBOARD) in text_of(root.get(path))
