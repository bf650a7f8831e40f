"""The dashboard: whether all is well, and where every rule stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from callqueue import Concurrency, Rule, SlidingWindow
from callqueue.history import sums
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt, CallQueue, DispenserState, Hold, Sum, Summed
from tests.db.admin.staff import CHANGELIST, DASHBOARD, log_in, text_of

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


def states(row: dict[str, Any]) -> list[str]:
    return [str(state) for state, _ in row["states"]]


def sentences(client: Client) -> list[tuple[str, str]]:
    """What the page says, in its order."""
    told = client.get(reverse(DASHBOARD)).context
    return [(one.kind, one.text) for one, _ in [*told["troubles"], *told["said"]]]


def came_to(rule: str, seconds: int = 60, **counts: Any) -> None:
    """So much in the stretches that were over so many seconds ago."""
    at = int(ledger_time.now("default").timestamp()) - seconds
    for width in (sums.MINUTE_S, sums.QUARTER_S):
        Sum.objects.create(rule=rule, width=width, start=at // width * width, **counts)


def summed(seconds: float = 2) -> None:
    """Everything is added up, up to so many seconds ago."""
    until = int((ledger_time.now("default").timestamp() - seconds) * 1_000_000)
    Summed.objects.update_or_create(pk=1, defaults={"until": until})


def wait(rule: str, count: int = 1, seconds: float = 0) -> None:
    """So many calls that have been due for so long."""
    due = timezone.now() - timedelta(seconds=seconds)
    CallQueue.objects.bulk_create(
        [CallQueue(rule=rule, ready=True, due_at_dt=due, call_data={}) for _ in range(count)]
    )


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
    rules(
        idle=Rule(), held=Rule(), failing=Rule(), stuck=Rule(limits=[SlidingWindow("5/s")]),
        full=Rule(limits=[SlidingWindow("2/h")]), lots=Rule(limits=[SlidingWindow("5/s")]),
    )  # fmt: skip
    Hold.objects.create(rule="held", source="breaker", reason="5 of 5 failed")
    wait("held")
    wait("stuck", 2, seconds=30)
    wait("full", 3, seconds=30)
    wait("lots", 4, seconds=30)
    in_flight("full", 2, started_at=ledger_time.now("default"))
    in_flight("lots", 1, started_at=ledger_time.now("default"))
    came_to("failing", sent=10, done=1, failed=9)
    summed()
    found = rows(root)
    assert {name: states(row) for name, row in found.items() if name != "default"} == {
        "held": ["held"], "failing": ["failing"], "stuck": ["nothing is sent"],
        "full": ["at its limit"], "lots": ["draining"], "idle": ["ok"],
    }  # fmt: skip
    assert [name for name in found if name != "default"] == [
        "held", "failing", "stuck", "full", "lots", "idle",
    ]  # fmt: skip
    assert found["full"]["waiting"] == "3"
    ((name, bar, changed),) = found["full"]["limits"]
    assert (name, changed) == ("2/h", "")
    assert "2 of 2" in bar
    assert 'class="x"' not in bar, "a limit that is used whole is not drawn as a breach"
    assert '<path class="w" d="M0 0H60v8' in bar, "nothing of it is answered yet"


def test_more_than_a_limit_allows_is_told_apart(rules: Rules, root: Client) -> None:
    rules(pay=Rule(limits=[Concurrency(5)]))
    in_flight("pay", 7, started_at=ledger_time.now("default"))
    ((_, bar, _),) = rows(root)["pay"]["limits"]
    assert '<path class="x" d="M0 0H60v8' in bar
    assert "7 of 5" in bar


def test_it_does_not_say_that_nothing_failed_where_nobody_has_looked(
    rules: Rules, root: Client, dispenser: DispenserState
) -> None:
    nothing = "Nothing failed and nothing was throttled in the last hour."
    assert nothing not in [text for _, text in sentences(root)]
    summed()
    assert ("well", nothing) in sentences(root)
    summed(seconds=600)
    said = sentences(root)
    assert nothing not in [text for _, text in said]
    assert any(kind == "odd" and "is counted up to" in text for kind, text in said)


def test_the_table_is_sorted_by_numbers(rules: Rules, root: Client) -> None:
    rules(a=Rule(), b=Rule(), c=Rule())
    for rule, count in (("a", 1), ("b", 3), ("c", 2)):
        wait(rule, count, seconds=60 * count)
        came_to(rule, sent=10 * count, failed=count)
    for column in ("waiting", "oldest", "failed"):
        assert [name for name in rows(root, o=column) if name != "default"] == ["a", "c", "b"]
        page = text_of(root.get(reverse(DASHBOARD), {"o": f"-{column}"}))
        assert page.count("aria-sort") == 1
        assert 'aria-sort="descending"' in page
        assert list(rows(root, o=f"-{column}"))[:3] == ["b", "c", "a"]
    assert len(rows(root, o="nonsense")) == 4


def test_what_is_fetched_again_is_the_page_itself(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    response = root.get(reverse(DASHBOARD))
    assert "no-store" in response["Cache-Control"]
    text = text_of(response)
    assert 'href="rule/?name=pay"' in text
    assert {'data-live="health"', 'data-live="rules"'} <= set(re.findall(r'data-live="\w+"', text))
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
