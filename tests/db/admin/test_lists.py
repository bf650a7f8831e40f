"""The lists of calls, attempts and holds: what they show, find and count."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import Client
from django.urls import reverse

from callqueue import Rule
from callqueue.admin import lists
from callqueue.admin.calls import CallQueueAdmin
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt, CallQueue, Hold
from tests.db.admin.staff import CHANGELIST, attempt, ended, page_of, text_of
from tests.support.behaviour import send

Rules = Callable[..., None]
Status = CallQueue.Status
ATTEMPTS = "admin:callqueue_callattempt_changelist"
HOLDS = "admin:callqueue_hold_changelist"


FOUND: list[tuple[str, set[str]]] = [
    ("status__exact=4", {"failed"}),
    ("status__exact=0", {"new", "other"}),
    ("rule__exact=pay", {"failed", "new"}),
    ("rule__exact=pay&status__exact=4", {"failed"}),
    ("q=tenant-1", {"failed"}),
    ("q=order-1", {"other"}),
    ("q=tenant", {"failed"}),
    ("q=enant-1", set()),
    ("q=Tenant", set()),
    ("q=order", set()),
    ("q=order-1&status__exact=4", set()),
    ("q=tenant&status__exact=4&rule__exact=pay", {"failed"}),
    ("q=tena_t", set()),
    ("q=%25", set()),
    ("q=vendor.example/v1", set()),
    ("q={new.pk}", {"new"}),
    ("q={new.idempotency_key}", {"new"}),
    ("q={other.idempotency_key.hex}", {"other"}),
]


def test_filters_and_search_find_exactly_what_they_name(rules: Rules, root: Client) -> None:
    rules(pay=Rule(), ship=Rule())
    why = "HTTP 500 from vendor.example"
    path = "/v1/charges?a=tenant"
    calls = {
        "failed": ended(Status.FAILED, rule="pay", key="tenant-1", path=path, error_message=why),
        "new": send("pay", path="/v1/charges/7"),
        "other": send("ship", unique_key="order-1"),
    }
    for query, found in FOUND:
        text = text_of(root.get(f"{reverse(CHANGELIST)}?{query.format(**calls)}"))
        assert {name for name, call in calls.items() if page_of(call) in text} == found, query
    text = text_of(root.get(reverse(CHANGELIST)))
    for shown in ("cq-failed", "tenant-1", "vendor.example", "post", why):
        assert shown in text


@pytest.mark.parametrize("counted", [1000, 4])
@pytest.mark.parametrize(
    "query", ["", "?status__exact=4", "?q=k&status__exact=4", "?rule__exact=pay"]
)
def test_pages_follow_each_other_by_number(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch, counted: int, query: str
) -> None:
    """Of few calls that match, and of more than are counted, some of them far from the others."""
    monkeypatch.setattr(CallQueueAdmin, "list_per_page", 3)
    monkeypatch.setattr(lists, "COUNTED", counted)
    monkeypatch.setattr(lists, "NEAR", (2, 5))
    rules(pay=Rule(), ship=Rule())
    expected = []
    for number in range(16):
        if query and 6 <= number < 11:
            send("ship")
        else:
            expected.append(page_of(ended(Status.FAILED, rule="pay", key="k")))
    expected.reverse()
    pages, at = [], query or "?"
    while at:
        page = root.get(f"{reverse(CHANGELIST)}{at}")
        shown = re.findall(r'<a href="(/admin/callqueue/callqueue/\d+/change/)', text_of(page))
        pages.append([path.partition("?")[0] for path in shown])
        newest = page.context["cl"].newest
        assert newest == ("" if len(pages) == 1 else query or "?"), "the way back"
        at = page.context["cl"].older
    assert [page for shown in pages for page in shown] == expected
    assert {len(shown) for shown in pages[:-1]} == {3}


def test_a_filter_begins_at_the_first_page(rules: Rules, root: Client) -> None:
    calls = [send() for _ in range(3)]
    page = text_of(root.get(f"{reverse(CHANGELIST)}?before={calls[1].pk}"))
    assert page_of(calls[0]) in page
    assert page_of(calls[1]) not in page
    links = set(re.findall(r'href="(\?[^"]*)"', page))
    assert [link for link in links if "before" in link] == []
    assert 'name="before"' not in page, "nor does a search"


def test_what_matches_is_counted_no_further_than_needed(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "COUNTED", 2)
    for status in (Status.NEW, Status.NEW, Status.NEW, Status.FAILED):
        call = send()
        CallQueue.objects.filter(pk=call.pk).update(status=status, key="k")
    for query, said in (
        ("", "more than 2 calls"),
        ("?status__exact=0", "more than 2 calls"),
        ("?status__exact=4", "1 call"),
        ("?q=k", "more than 2 calls"),
    ):
        text = " ".join(text_of(root.get(f"{reverse(CHANGELIST)}{query}")).split())
        assert f"{said} </p>" in text, query


def listed(client: Client, query: str = "") -> list[int]:
    """The attempts on the first page, in its order."""
    text = text_of(client.get(f"{reverse(ATTEMPTS)}?{query}"))
    return [
        int(pk) for pk in re.findall(r'<a href="/admin/callqueue/callattempt/(\d+)/change', text)
    ]


def made(rule: str, minutes: float, **fields: Any) -> CallAttempt:
    """An attempt that ended so long ago; one that is open where it has no outcome."""
    one = attempt(send(rule, key=fields.pop("key", "")), **fields)
    at = ledger_time.now("default") - timedelta(minutes=minutes)
    ends = None if one.outcome == "" else at
    CallAttempt.objects.filter(pk=one.pk).update(released_at=at, finished_at=ends)
    return one


OUTCOMES = {
    "": {"open", "done", "created", "throttled", "declined", "lost", "forgiven", "failed"},
    "outcome__exact=open": {"open"},
    "outcome__exact=succeeded": {"done", "created", "forgiven"},
    "outcome__exact=throttled": {"throttled"},
    "outcome__exact=lost": {"lost"},
}
PLACES = {
    "": OUTCOMES[""],
    "rule__exact=pay": {"open", "done", "throttled", "declined"},
    "rule__exact=gone": set(),
    "q=acct_2": {"created", "throttled"},
    "ended=1h": {"done", "created", "throttled", "declined", "lost"},
    "ended=24h": {"done", "created", "throttled", "declined", "lost", "forgiven"},
    "rule__exact=ship&ended=24h": {"created", "lost", "forgiven"},
}


def test_attempts_are_found_in_any_combination_even_where_their_call_is_gone(
    rules: Rules, root: Client
) -> None:
    """The newest first."""
    rules(pay=Rule(), ship=Rule())
    attempts = {
        "open": made("pay", 0.1, outcome="", response_status=None),
        "done": made("pay", 1, outcome="succeeded", response_status=200),
        "created": made("ship", 2, outcome="succeeded", response_status=201, key="acct_2"),
        "throttled": made("pay", 3, outcome="throttled", response_status=429, key="acct_2"),
        "declined": made("pay", 4, outcome="gave up", response_status=402),
        "lost": made("ship", 5, outcome="lost", response_status=None),
        "forgiven": made("ship", 90, outcome="succeeded", response_status=402),
        "failed": made("ship", 60 * 30, outcome="failed", response_status=500),
    }
    newest = [one.pk for one in attempts.values()][::-1]
    for outcome, place in product(OUTCOMES, PLACES):
        query = "&".join(filter(None, (outcome, place)))
        wanted = {attempts[name].pk for name in OUTCOMES[outcome] & PLACES[place]}
        assert listed(root, query) == [pk for pk in newest if pk in wanted], query
    lost = attempts["lost"]
    assert listed(root, f"q={lost.call_id}") == [lost.pk], "a call is found by its number"
    lost.call.delete()
    assert lost.pk in listed(root)
    page = reverse("admin:callqueue_callattempt_change", args=[lost.pk])
    assert root.get(page).status_code == 200


def test_holds_in_force_come_first_with_their_times(rules: Rules, root: Client) -> None:
    now = ledger_time.now("default")
    for name, until in (("over", -60), ("soon", 60), ("later", 3600), ("open", None)):
        ends = None if until is None else now + timedelta(seconds=until)
        Hold.objects.create(rule="pay", per="key", value=name, reason="why", until=ends)
    text = text_of(root.get(reverse(HOLDS)))
    shown = re.findall(
        r'field-value">(\w+)</td><td class="field-state"><span class="[^"]*">([^<]*)</span>', text
    )
    in_force = [(name, "in force") for name in ("open", "later", "soon")]
    assert shown == [*in_force, ("over", "over")]
    shown_at = ledger_time.to_wall("default", now + timedelta(seconds=3600))
    for said in ("until it is resumed", "an operator", f"{shown_at:%Y-%m-%d %H:%M:%S} UTC"):
        assert said in text
    Hold.objects.create(rule="ship", reason="theirs", source=Hold.Source.PROVIDER)
    text = text_of(root.get(f"{reverse(HOLDS)}?rule__exact=ship"))
    assert ("theirs" in text, "why" in text) == (True, False)


def test_a_list_leaves_the_transaction_of_its_request_as_it_was(rules: Rules, root: Client) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("no other has the setting")
    rules(r=Rule())
    send("r")

    def setting() -> str:
        with connection.cursor() as cursor:
            cursor.execute("SHOW enable_seqscan")
            return str(cursor.fetchone()[0])

    with transaction.atomic():
        before = setting()
        assert root.get(reverse(CHANGELIST)).status_code == 200
        assert setting() == before == "on"
