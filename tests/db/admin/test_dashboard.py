"""The dashboard: whether all is well, and where every rule stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from callqueue import Rule, SlidingWindow
from callqueue.models import CallAttempt, CallQueue, DispenserState, Hold, Peak, Total
from callqueue.operations import history
from tests.db.admin.staff import CHANGELIST, DASHBOARD, text_of
from tests.support.behaviour import release, send

Rules = Callable[..., None]
LIVE = "admin:callqueue_dashboard_live"


@pytest.fixture
def dispenser(db: None) -> DispenserState:
    now = timezone.now()
    return DispenserState.objects.create(name="egress-1", started_at=now, seen_at=now)


def rows(client: Client, **query: str) -> dict[str, dict[str, Any]]:
    response = client.get(reverse(DASHBOARD), query)
    return {row["name"]: row for row in response.context["rows"]}


def sentences(client: Client) -> list[tuple[str, str]]:
    return [(one.kind, one.text) for one in client.get(reverse(DASHBOARD)).context["said"]]


def totals(rule: str, seconds: int = 60, **counts: Any) -> None:
    """So much in the stretches that were over so many seconds ago."""
    at = int(timezone.now().timestamp()) - seconds
    for width in history.KEPT:
        Total.objects.create(rule=rule, width=width, start=at // width * width, **counts)


def counted_now() -> None:
    from callqueue.models import Counted

    now = int(timezone.now().timestamp() * 1_000_000)
    Counted.objects.update_or_create(pk=1, defaults={"until": now, "peaks_until": now})


def test_a_rule_is_a_row_the_worst_first(
    rules: Rules, root: Client, dispenser: DispenserState
) -> None:
    rules(idle=Rule(), held=Rule(), failing=Rule(), full=Rule(limits=[SlidingWindow("5/s")]))
    Hold.objects.create(rule="held", source="breaker", reason="5 of 5 failed")
    for rule in ("held", "full", "full"):
        send(rule)
    totals("failing", sent=10, failed=9)
    counted_now()
    now = timezone.now()
    CallAttempt.objects.create(
        call_id=1, number=1, rule="full", released_at=now, finished_at=now, outcome="succeeded"
    )
    Peak.objects.create(
        budget="full#0", width=history.QUARTER, highest=5, allowed=5,
        start=int(timezone.now().timestamp()) // 900 * 900,
    )  # fmt: skip
    CallQueue.objects.update(ready=True)
    found = rows(root)
    assert list(found)[:3] == ["held", "failing", "full"]
    assert [str(found[name]["state"]) for name in ("held", "failing", "full", "idle")] == [
        "held", "failing", "at its limit", "idle",
    ]  # fmt: skip
    assert found["full"]["waiting"] == "2"
    assert "5 of 5" in found["full"]["use"]
    assert 'class="x"' not in found["full"]["use"], "full speed is not drawn as a breach"


def test_more_than_a_limit_allows_is_told_apart(rules: Rules, root: Client) -> None:
    rules(pay=Rule(limits=[SlidingWindow("5/s")]))
    start = int(timezone.now().timestamp()) // 900 * 900
    Peak.objects.create(budget="pay#0", width=900, highest=7, allowed=5, start=start)
    assert 'class="x"' in rows(root)["pay"]["use"]


def test_without_a_dispenser_nothing_is_promised(
    rules: Rules, root: Client, dispenser: DispenserState
) -> None:
    rules(pay=Rule(limits=[SlidingWindow("60/m")]))
    for _ in range(120):
        send("pay")
    CallQueue.objects.update(ready=True)
    assert re.search(r"\d\d:\d\d", rows(root)["pay"]["done"])
    DispenserState.objects.update(seen_at=timezone.now() - timedelta(minutes=11))
    row = rows(root)["pay"]
    assert (row["done"], str(row["state"])) == ("–", "no dispenser")
    said = sentences(root)
    assert said[0][0] == "bad"
    assert said[0][1].startswith("No dispenser runs: the last one was seen 11 minutes ago, at ")
    assert not any("done by" in text for _, text in said)


def test_the_health_line_says_what_is_held_failed_and_throttled(
    rules: Rules, root: Client, dispenser: DispenserState
) -> None:
    rules(pay=Rule(), read=Rule())
    Hold.objects.create(rule="pay", source="breaker", reason="5 of 5 failed")
    for _ in range(3):
        send("pay")
    totals("read", sent=600, done=508, failed=12, throttled=80)
    counted_now()
    said = [text for _, text in sentences(root)]
    assert "1 rule held (pay by its breaker, 3 waiting)." in said
    assert "12 attempts failed and 80 were throttled in the last hour." in said
    assert any(text.startswith("1 dispenser, seen ") for text in said)
    read = rows(root)["read"]
    assert (read["throttled"], read["throttled_day"], read["failed"]) == ("80", "80", "12")


def test_workers_that_never_come_are_missed(
    rules: Rules, root: Client, dispenser: DispenserState
) -> None:
    rules(pay=Rule(limits=[SlidingWindow("5/m")]))
    send("pay")
    release()
    CallAttempt.objects.update(released_at=timezone.now() - timedelta(minutes=1))
    assert str(rows(root)["pay"]["state"]) == "no workers"
    assert ("bad", "1 rule has no workers (pay).") in sentences(root)


def test_the_table_is_sorted_by_any_column(rules: Rules, root: Client) -> None:
    rules(a=Rule(), b=Rule(), c=Rule())
    for rule, count in (("a", 1), ("b", 3), ("c", 2)):
        for _ in range(count):
            send(rule)
    CallQueue.objects.update(ready=True)
    assert [name for name in rows(root, o="waiting") if name != "default"] == ["a", "c", "b"]
    assert list(rows(root, o="-rule"))[-1] == "a"
    assert 'aria-sort="descending"' in text_of(root.get(reverse(DASHBOARD), {"o": "-waiting"}))
    for column in root.get(reverse(DASHBOARD)).context["columns"]:
        assert len(rows(root, o=f"-{column[0].name}")) == 4
    assert len(rows(root, o="nonsense")) == 4


def test_250_rules_take_a_dozen_statements_and_a_page_of_150_kb(
    rules: Rules, root: Client, dispenser: DispenserState
) -> None:
    names = [f"provider-number-{i}" for i in range(250)]
    shared = SlidingWindow("1000/h", name="all")
    rules(**{n: Rule(limits=[SlidingWindow("10/s"), shared]) for n in names})
    CallQueue.objects.bulk_create(
        [
            CallQueue(rule=name, key=f"k{i}", ready=True, call_data={})
            for i, name in enumerate(names * 2)
        ]
    )
    now = int(timezone.now().timestamp())
    Total.objects.bulk_create(
        [
            Total(
                rule=name, width=width, start=(now - 60) // width * width, sent=60_000, done=50_000,
                failed=5_000, throttled=4_000, waits={"40": 50_000}, answers={"50": 50_000},
            )
            for name in names
            for width in history.KEPT
        ]
    )  # fmt: skip
    Peak.objects.bulk_create(
        [
            Peak(budget=f"{name}#0", width=900, start=now // 900 * 900, highest=10, allowed=10)
            for name in names
        ]
    )
    counted_now()
    root.get(reverse(LIVE))  # settings are read
    with CaptureQueriesContext(
        connection,
    ) as asked:
        live = root.get(reverse(LIVE))
    of_board = [one["sql"] for one in asked if "django_session" not in one["sql"]]
    of_board = [sql for sql in of_board if "auth_user" not in sql and "SAVEPOINT" not in sql]
    assert len(of_board) <= 12, "\n".join(sql[:150] for sql in of_board)
    page = root.get(reverse(DASHBOARD))
    assert len(page.content) < 150_000
    assert text_of(live).count("<tr>") == 252


def test_the_live_part_holds_every_rule_and_no_page(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    text = text_of(root.get(reverse(LIVE)))
    assert reverse("admin:callqueue_rule", args=["pay"]) in text
    assert {'data-live="health"', 'data-live="rules"'} <= set(re.findall(r'data-live="\w+"', text))
    assert "<html" not in text
    for page in (text, text_of(root.get(reverse(DASHBOARD))).partition('id="content-main"')[2]):
        assert "<script>" not in page
        assert " style=" not in page


def test_the_dashboard_is_linked_from_the_list_and_the_index(rules: Rules, root: Client) -> None:
    for path in (reverse(CHANGELIST), reverse("admin:app_list", args=["callqueue"])):
        assert reverse(DASHBOARD) in text_of(root.get(path))
