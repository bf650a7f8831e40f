"""The dashboard: whether all is well, and where every rule stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from callqueue import Concurrency, Rule, SlidingWindow
from callqueue.history import sums
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt, DispenserState, Hold, Sum, Summed
from tests.db.admin.staff import CHANGELIST, DASHBOARD, log_in, text_of, wait

Rules = Callable[..., None]


@pytest.fixture
def dispenser(db: None) -> DispenserState:
    now = ledger_time.now("default")
    return DispenserState.objects.create(
        name="egress-1:7", started_at=now, seen_at=now, digest="settings"
    )


def rows(client: Client, **query: str) -> dict[str, dict[str, Any]]:
    response = client.get(reverse(DASHBOARD), query)
    return {row["name"]: row for row in response.context["rows"]}


def came_to(rule: str, seconds: int = 60, **counts: Any) -> None:
    """So much in the stretches that were over so many seconds ago."""
    at = int(ledger_time.now("default").timestamp()) - seconds
    for width in (sums.MINUTE_S, sums.QUARTER_S):
        Sum.objects.create(rule=rule, width=width, start=at // width * width, **counts)


def in_flight(rule: str, count: int, seconds: float = 0, **fields: Any) -> None:
    """So many attempts, released so long ago."""
    at = ledger_time.now("default") - timedelta(seconds=seconds)
    CallAttempt.objects.bulk_create(
        [
            CallAttempt(call_id=i, number=1, rule=rule, released_at=at, **fields)
            for i in range(1, count + 1)
        ]
    )


def test_a_rule_is_a_row_the_worst_first(
    rules: Rules, root: Client, dispenser: DispenserState
) -> None:
    """And a limit that is used whole is not drawn as a breach, as one is of which there is more."""
    five = [SlidingWindow("5/s")]
    rules(
        idle=Rule(), held=Rule(), failing=Rule(), stuck=Rule(limits=five), lots=Rule(limits=five),
        full=Rule(limits=[SlidingWindow("2/h")]), over=Rule(limits=[Concurrency(5)]),
    )  # fmt: skip
    Hold.objects.create(rule="held", source="breaker", reason="5 of 5 failed")
    wait("held")
    wait("stuck", 2, seconds=30)
    wait("full", 3, seconds=30)
    wait("lots", 4, seconds=30)
    begun = ledger_time.now("default")
    for rule, count in (("full", 2), ("lots", 1), ("over", 7)):
        in_flight(rule, count, started_at=begun)
    came_to("failing", sent=10, done=1, failed=9)
    until = int((begun.timestamp() - 2) * 1_000_000)
    Summed.objects.update_or_create(pk=1, defaults={"until": until})
    found = rows(root)
    states = {name: [str(state) for state, _ in row["states"]] for name, row in found.items()}
    assert [(name, *states[name]) for name in found if name != "default"] == [
        ("held", "held"), ("failing", "failing"), ("stuck", "nothing is sent"),
        ("full", "at its limit"), ("lots", "draining"), ("idle", "ok"), ("over", "ok"),
    ]  # fmt: skip
    assert found["full"]["waiting"] == "3"
    ((name, bar, changed),) = found["full"]["limits"]
    assert (name, changed) == ("2/h", "")
    assert "2 of 2" in bar
    assert 'class="x"' not in bar
    assert '<path class="w" d="M0 0H60v8' in bar, "nothing of it is answered yet"
    ((_, bar, _),) = found["over"]["limits"]
    assert '<path class="x" d="M0 0H60v8' in bar
    assert "7 of 5" in bar


def test_what_is_fetched_again_is_the_page_itself(rules: Rules, root: Client) -> None:
    """That it goes on is seen in a browser: tests/browser."""
    rules(pay=Rule())
    response = root.get(reverse(DASHBOARD))
    assert "no-store" in response["Cache-Control"]
    text = text_of(response)
    for wanted in ('href="rule/?name=pay"', 'data-live="health"', 'data-live="rules"'):
        assert wanted in text
    main = text.partition('id="content-main"')[2]
    assert "<script>" not in main
    assert " style=" not in main


def test_the_dashboard_is_in_the_menu_for_whoever_may_view_calls(rules: Rules) -> None:
    """And on the admin's first page, and above the list of calls."""
    entry = reverse("admin:callqueue_rulestate_changelist")
    viewer = log_in("view_callqueue")
    for path in (reverse("admin:index"), reverse("admin:app_list", args=["callqueue"])):
        assert re.search(rf'<a href="{entry}"[^>]*>Dashboard</a>', text_of(viewer.get(path)))
    assert viewer.get(entry)["Location"] == reverse(DASHBOARD)
    assert reverse(DASHBOARD) in text_of(viewer.get(reverse(CHANGELIST)))
    assert entry not in text_of(log_in("view_callattempt").get(reverse("admin:index")))
