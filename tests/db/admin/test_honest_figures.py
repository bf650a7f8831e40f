"""What the dashboard and a rule's page show is so now: nothing of an hour ago passes for the present,
nothing that was not counted for none, and no promise is made that something in the way breaks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import LazySettings
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from callqueue import FixedWindow, Rule, SlidingWindow
from callqueue.admin import changelist, charts, health
from callqueue.models import CallQueue, Counted, DispenserState, Hold, Peak, Total
from callqueue.operations import backlog, history
from callqueue.operations import board as boards
from tests.db.admin.staff import CHANGELIST, DASHBOARD, text_of

Rules = Callable[..., None]
MINUTES, QUARTERS = history.MINUTE, history.QUARTER


@pytest.fixture(autouse=True)
def dispenser(db: None) -> DispenserState:
    now = timezone.now()
    return DispenserState.objects.create(name="egress-1", started_at=now, seen_at=now)


def row(client: Client, rule: str) -> dict[str, Any]:
    return next(
        one for one in client.get(reverse(DASHBOARD)).context["rows"] if one["name"] == rule
    )


def said(client: Client) -> str:
    return " ".join(one.text for one in client.get(reverse(DASHBOARD)).context["said"])


def counted(seconds_ago: float) -> None:
    until = int((timezone.now().timestamp() - seconds_ago) * 1_000_000)
    Counted.objects.update_or_create(pk=1, defaults={"until": until, "peaks_until": until})


def total(rule: str, seconds_ago: float, **counts: Any) -> None:
    at = int(timezone.now().timestamp() - seconds_ago)
    for width in history.KEPT:
        Total.objects.create(rule=rule, width=width, start=at // width * width, **counts)


def wait(rule: str, *keys: str, ready: bool = True, **fields: Any) -> None:
    CallQueue.objects.bulk_create(
        [CallQueue(rule=rule, key=key, ready=ready, call_data={}, **fields) for key in keys]
    )


def test_what_was_sent_half_an_hour_ago_is_not_said_to_be_sent_now(
    rules: Rules, root: Client
) -> None:
    """Nobody counts any more: the last minute that was counted is no rate of now."""
    rules(pay=Rule())
    wait("pay", "")
    total("pay", 1860, sent=2400, done=1200, failed=1200, waits={"40": 2400})
    counted(1800)
    shown = row(root, "pay")
    assert (shown["rate"], shown["p95"], shown["done"]) == ("", "", "–")
    assert str(shown["state"]) == "nothing is sent"
    assert "Sending" not in said(root)
    assert "counted up to" in said(root)


def test_nothing_failed_is_said_only_of_what_was_counted(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    counted(1800)
    assert "Nothing failed" not in said(root)
    counted(5)
    assert "Nothing failed and nothing was throttled in the last hour" in said(root)


def test_a_limit_that_was_full_an_hour_ago_is_not_why_nothing_is_sent(
    rules: Rules, root: Client
) -> None:
    rules(pay=Rule(limits=[SlidingWindow("5/s")]))
    wait("pay", "")
    counted(3)
    start = (int(timezone.now().timestamp()) - 3000) // QUARTERS * QUARTERS
    Peak.objects.create(budget="pay#0", width=QUARTERS, start=start, highest=5, allowed=5)
    assert str(row(root, "pay")["state"]) == "nothing is sent"


def test_a_days_limit_that_is_used_up_is_why_nothing_is_sent(rules: Rules, root: Client) -> None:
    """Though nothing was sent for hours."""
    rules(maps=Rule(limits=[FixedWindow("100/d")]))
    wait("maps", "")
    counted(3)
    total("maps", 0, sent=100, done=100)
    assert str(row(root, "maps")["state"]) == "at its limit"


def test_what_is_due_later_is_counted_whoever_has_most_of_it(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "CAP", 5)
    rules(chat=Rule(), pay=Rule())
    soon, late = (timezone.now() + timedelta(hours=hours) for hours in (1, 9))
    wait("chat", *[""] * 9, ready=False, due_at_dt=soon)
    wait("pay", "", ready=True)
    wait("pay", *[""] * 3, ready=False, due_at_dt=late)
    assert row(root, "chat")["waiting"] == "9"
    assert row(root, "pay")["waiting"] == "4"
    figures = dict(root.get(reverse("admin:callqueue_rule", args=["pay"])).context["figures"])
    assert (figures["Waiting"], figures["Due later"]) == ("1", "3")


def test_no_time_is_given_while_a_key_with_calls_is_held_without_end(
    rules: Rules, root: Client
) -> None:
    rules(chat=Rule(limits=[SlidingWindow("1/s", per="key")]))
    wait("chat", "a", "b")
    assert row(root, "chat")["done"] not in ("", "–")
    hold = Hold.objects.create(rule="chat", per="key", value="c")
    assert row(root, "chat")["done"] not in ("", "–"), "no call of that key waits"
    hold.value = "b"
    hold.save()
    assert row(root, "chat")["done"] == "–"
    hold.until = timezone.now() + timedelta(hours=5)
    hold.save()
    (standing,) = (one for one in boards.read("default").rules if one.name == "chat")
    assert standing.drained_s == pytest.approx(5 * 3600, abs=60)


def test_a_part_of_keys_that_is_held_holds_the_calls_that_have_it(
    rules: Rules, root: Client
) -> None:
    rules(chat=Rule(limits=[SlidingWindow("1/s", per="workspace")]))
    key = json.dumps({"user": "7", "workspace": "w"}, separators=(",", ":"))
    wait("chat", key)
    Hold.objects.create(rule="chat", per="workspace", value="w", source="provider")
    assert row(root, "chat")["done"] == "–"


def test_a_rule_whose_queues_are_all_held_is_held(rules: Rules, root: Client) -> None:
    rules(pay=Rule(queues=("one", "two"), limits=[SlidingWindow("5/s")]))
    wait("pay", "")
    end = timezone.now() + timedelta(hours=2)
    Hold.objects.create(rule="pay", per="queue", value="one", source="provider", until=end)
    assert str(row(root, "pay")["state"]) != "held"
    Hold.objects.create(rule="pay", per="queue", value="two", source="provider", until=None)
    assert str(row(root, "pay")["state"]) == "held"
    (standing,) = (one for one in boards.read("default").rules if one.name == "pay")
    assert standing.drained_s == pytest.approx(2 * 3600, abs=60), "the first queue to be free"


def test_a_dispenser_of_beat_is_alive_between_its_runs(
    rules: Rules, root: Client, dispenser: DispenserState
) -> None:
    rules(pay=Rule())
    DispenserState.objects.update(kind="beat", seen_at=timezone.now() - timedelta(seconds=50))
    assert "No dispenser" not in said(root)
    DispenserState.objects.update(seen_at=timezone.now() - timedelta(minutes=11))
    assert "No dispenser runs" in said(root)


@pytest.mark.parametrize("unit", ["calls", "tokens"])
def test_a_dozen_statements_for_forty_rules_whatever_their_limits(
    rules: Rules, root: Client, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits and holds on parts of keys, another unit, long windows, and much that is due later."""
    monkeypatch.setattr(backlog, "CAP", 5)
    names = [f"p{i}" for i in range(40)]
    limits = [SlidingWindow("100/h", per="workspace", unit=unit), SlidingWindow("5000/h")]
    rules(**{name: Rule(limits=limits) for name in names})
    key = json.dumps({"user": "7", "workspace": "w"}, separators=(",", ":"))
    for name in names:
        wait(name, key, cost={"calls": 1, "tokens": 60})
        wait(name, key, ready=False, due_at_dt=timezone.now() + timedelta(hours=1))
        Hold.objects.create(rule=name, per="workspace", value="w", source="provider")
    counted(1)
    boards.read("default")
    with CaptureQueriesContext(connection) as asked:
        board = boards.read("default")
    assert len(asked) <= 12, "\n".join(one["sql"][:150] for one in asked)
    assert all(one.drain and one.drain.gates for one in board.rules if one.name != "default")


@pytest.mark.parametrize(
    "name",
    ["../x", "..", ".", "a/../b", "a//b", "/a", "a/", "a\\b", "ü'\"<b>", "%2e%2e/x", "a?b#c"],
)
def test_a_rules_page_has_an_address_that_no_browser_changes(
    rules: Rules, root: Client, name: str
) -> None:
    """Segments of dots, also encoded, are taken out of an address before it is asked for."""
    from urllib.parse import unquote, urlsplit

    rules(**{name: Rule()})
    path = urlsplit(health.rule_url(name)).path
    segments = [unquote(part) for part in path.split("/")]
    assert "." not in segments
    assert ".." not in segments
    assert "\\" not in path
    shown = root.get(health.rule_url(name))
    assert shown.status_code == 200
    assert shown.context["rule"].name == name


def test_times_on_both_sides_of_a_change_of_the_clock_are_told_apart(
    settings: LazySettings,
) -> None:
    settings.TIME_ZONE = "Europe/Berlin"
    first = int(datetime(2026, 10, 25, 0, 30, tzinfo=UTC).timestamp())
    before, after = (charts.clock_of(first + hours * 3600, 3600) for hours in (0, 1))
    assert before != after


def test_a_large_number_in_a_form_is_no_error(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    wait("pay", *[""] * 3, status=CallQueue.Status.FAILED, ready=False)
    pks = list(CallQueue.objects.values_list("pk", flat=True))
    form = {"action": "requeue_calls", "_selected_action": pks, "confirm": "all"}
    answer = root.post(
        reverse(CHANGELIST), {**form, "total": "9" * 5000, "pace": "1/366d", "delay": "3660d"}
    )
    assert answer.status_code == 302
    assert not CallQueue.objects.failed().exists()


def test_what_would_be_due_after_the_end_of_time_is_refused(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any call is changed."""
    rules(pay=Rule())
    wait("pay", *[""] * 9000, status=CallQueue.Status.FAILED, ready=False)
    form = {"action": "requeue_calls", "_selected_action": [1], "select_across": "1"}
    answer = root.post(reverse(CHANGELIST), {**form, "confirm": "all", "pace": "1/366d"})
    assert answer.status_code == 200
    assert "more than ten years" in text_of(answer)
    assert CallQueue.objects.failed().count() == 9000


def test_a_rule_that_is_held_without_end_is_promised_no_end(rules: Rules, root: Client) -> None:
    rules(pay=Rule(limits=[SlidingWindow("5/s")]))
    wait("pay", "")
    hold = Hold.objects.create(rule="pay")
    page = reverse("admin:callqueue_rule", args=["pay"])
    ((_, _, said),) = root.get(page).context["drain_rows"]
    assert said == "No estimate: held until someone resumes it."
    hold.delete()
    DispenserState.objects.update(seen_at=timezone.now() - timedelta(minutes=11))
    ((_, _, said),) = root.get(page).context["drain_rows"]
    assert said == "in 0 seconds once a dispenser runs"
    limit = {"do": "limit", "rule": "pay", "limit": "pay#0", "rate": "1/s"}
    assert "No dispenser runs" in text_of(root.post(reverse(DASHBOARD), limit))


def test_a_held_key_keeps_its_own_calls_back_and_the_others_are_estimated(
    rules: Rules, root: Client
) -> None:
    rules(chat=Rule(limits=[SlidingWindow("1/s", per="key")]))
    wait("chat", *["a"] * 60, "b", "b")
    Hold.objects.create(rule="chat", per="key", value="b")
    page = root.get(reverse("admin:callqueue_rule", args=["chat"]))
    ((_, _, said),) = page.context["drain_rows"]
    assert re.fullmatch(
        r"2 calls are held until someone resumes them; the others take (59|6\d) seconds.", said
    )
    assert "<svg" in page.context["drain"], "what is known of the curve is drawn"


def test_rules_of_which_nothing_is_sent_are_in_the_health_line(rules: Rules, root: Client) -> None:
    rules(pay=Rule(), idle=Rule())
    wait("pay", "")
    assert "Nothing is sent of 1 rule, though calls are due (pay)." in said(root)


def test_as_many_as_are_counted_are_not_said_to_be_all(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changelist, "COUNTED", 3)
    rules(pay=Rule())
    wait("pay", *["a"] * 5)
    for query in ("", "?rule__exact=pay", "?q=a"):
        page = text_of(root.get(f"{reverse(CHANGELIST)}{query}"))
        assert "3 results" not in page, query
        if query:
            assert "3+ calls" in page, query
