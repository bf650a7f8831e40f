"""The list of calls: what it shows, finds and counts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from django.test import Client
from django.urls import reverse

from callqueue import Rule
from callqueue.admin import lists
from callqueue.admin.calls import CallQueueAdmin
from callqueue.models import CallQueue
from tests.db.admin.staff import CHANGELIST, ended, page_of, text_of
from tests.support.behaviour import send

Rules = Callable[..., None]
Status = CallQueue.Status


def test_the_list_shows_each_call_with_its_status_and_last_error(
    rules: Rules, root: Client
) -> None:
    rules(pay=Rule())
    why = "HTTP 500 from vendor.example"
    call = ended(Status.FAILED, rule="pay", key="tenant-7", error_message=why)
    text = text_of(root.get(reverse(CHANGELIST)))
    for shown in (page_of(call), "cq-failed", "tenant-7", "vendor.example", "post", why):
        assert shown in text


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
    calls = {
        "failed": ended(Status.FAILED, rule="pay", key="tenant-1", path="/v1/charges?a=tenant"),
        "new": send("pay", path="/v1/charges/7"),
        "other": send("ship", unique_key="order-1"),
    }
    for query, found in FOUND:
        text = text_of(root.get(f"{reverse(CHANGELIST)}?{query.format(**calls)}"))
        assert {name for name, call in calls.items() if page_of(call) in text} == found, query


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
