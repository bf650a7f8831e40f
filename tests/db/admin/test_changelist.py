"""The list of calls: what it shows, finds and counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from callqueue import Rule
from callqueue.admin import changelist
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
    call = ended(
        Status.FAILED, rule="pay", key="tenant-7", error_message="HTTP 500 from vendor.example"
    )
    text = text_of(root.get(reverse(CHANGELIST)))
    assert page_of(call) in text
    for shown in (
        "cq-failed",
        "tenant-7",
        "vendor.example",
        "post",
        "HTTP 500 from vendor.example",
    ):
        assert shown in text


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("status__exact=4", {"failed"}),
        ("status__exact=0", {"new", "other"}),
        ("rule__exact=pay", {"failed", "new"}),
        ("rule__exact=pay&status__exact=4", {"failed"}),
        ("method__exact=get", set()),
        ("q=tenant-1", {"failed"}),
        ("q=order-1", {"other"}),
        ("q=tenant", {"failed"}),
        ("q=enant-1", set()),
        ("q=Tenant", set()),
        ("q=order", set()),
        ("q=order-1&status__exact=4", set()),
        ("q=tenant&status__exact=4&rule__exact=pay&method__exact=post", {"failed"}),
        ("q=vendor.example", {"failed", "new", "other"}),
        ("q=VENDOR.example&status__exact=4", {"failed"}),
        ("q=example", {"failed", "new", "other"}),
        ("q=ndor.example", set()),
        ("q=/v1/charges", {"failed", "new"}),
        ("q=/v1/charges/7", {"new"}),
        ("q=/v1/CHARGES", set()),
        ("q=vendor.example/v1/charges/7", {"new"}),
        ("q=http://vendor.example/v1/charges%3Ftoken=x", {"failed", "new"}),
        ("q=other.example/v1", set()),
        ("q=/v1/ch_rges", set()),
        ("q=/v1/ch%25", set()),
        ("q=%25", set()),
        ("created_dt__gte=2000-01-01+00:00:00%2B00:00&rule__exact=pay&o=8", {"failed", "new"}),
        ("created_dt__lt=2000-01-01+00:00:00%2B00:00&rule__exact=pay", set()),
        ("o=8", {"failed", "new", "other"}),
        ("o=-8", {"failed", "new", "other"}),
    ],
)
def test_filters_and_search_find_exactly_what_they_name(
    rules: Rules, root: Client, query: str, found: set[str]
) -> None:
    rules(pay=Rule(), ship=Rule())
    calls = {
        "failed": ended(Status.FAILED, rule="pay", key="tenant-1", path="/v1/charges?a=tenant"),
        "new": send("pay", path="/v1/charges/7"),
        "other": send("ship", unique_key="order-1"),
    }
    text = text_of(root.get(f"{reverse(CHANGELIST)}?{query}"))
    assert {name for name, call in calls.items() if page_of(call) in text} == found


def test_search_finds_a_call_by_its_number(rules: Rules, root: Client) -> None:
    first, second = send(), send()
    text = text_of(root.get(f"{reverse(CHANGELIST)}?q={first.pk}"))
    assert page_of(first) in text
    assert page_of(second) not in text


def test_dates_are_offered_between_the_first_call_and_the_last(rules: Rules, root: Client) -> None:
    old, new = send(), send()
    CallQueue.objects.filter(pk=old.pk).update(created_dt=timezone.now() - timedelta(days=800))
    assert "created_dt__year=" in text_of(root.get(reverse(CHANGELIST)))
    year = timezone.localtime(new.created_dt).year
    text = text_of(root.get(f"{reverse(CHANGELIST)}?created_dt__year={year}"))
    assert page_of(new) in text
    assert page_of(old) not in text
    now = timezone.localtime(new.created_dt)
    day = f"created_dt__year={now.year}&created_dt__month={now.month}&created_dt__day={now.day}"
    assert page_of(new) in text_of(root.get(f"{reverse(CHANGELIST)}?{day}"))


@pytest.mark.parametrize(
    "query",
    [
        "created_dt__year=x",
        "created_dt__year=2026&created_dt__month=77",
        "status__exact=x",
        "p=99",
        "q=%00",
    ],
)
def test_nonsense_in_the_address_is_no_error(rules: Rules, root: Client, query: str) -> None:
    send()
    assert root.get(f"{reverse(CHANGELIST)}?{query}", follow=True).status_code == 200


@pytest.mark.parametrize("number", ["-1", "0", "2", "1001", "9" * 20])
def test_a_list_of_one_page_is_shown_whole_whatever_page_is_asked_for(
    rules: Rules, root: Client, number: str
) -> None:
    rules(pay=Rule())
    calls = [send("pay"), send("pay")]
    answer = root.get(f"{reverse(CHANGELIST)}?rule__exact=pay&p={number}", follow=True)
    assert answer.status_code == 200
    assert all(page_of(call) in text_of(answer) for call in calls)


def test_a_word_that_many_keys_and_many_hosts_have_is_searched(rules: Rules, root: Client) -> None:
    """By itself each would have few enough places to look at, and each place is said once."""
    CallQueue.objects.bulk_create(
        CallQueue(
            rule="default",
            method="get",
            call_data={},
            key=f"t{n}",
            host=f"t{n}.example" if n < 210 else "",
            path="/",
        )
        for n in range(320)
    )
    for word, count in (("t", 320), ("t1", 111)):
        with CaptureQueriesContext(connection) as asked:
            text = text_of(root.get(f"{reverse(CHANGELIST)}?q={word}"))
        assert f"{count} calls" in text
        assert max(len(one["sql"]) for one in asked) < 1_000_000


def test_search_finds_a_call_by_its_idempotency_key(rules: Rules, root: Client) -> None:
    first, second = send(), send()
    for form in (str(first.idempotency_key), first.idempotency_key.hex):
        text = text_of(root.get(f"{reverse(CHANGELIST)}?q={form}"))
        assert page_of(first) in text
        assert page_of(second) not in text


def test_pages_follow_each_other_whatever_they_are_merged_from(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CallQueueAdmin, "list_per_page", 3)
    rules(pay=Rule(), ship=Rule())
    calls = [ended(Status.FAILED, rule=("pay", "ship")[n % 2], key="k") for n in range(8)]
    send("pay", key="k")
    newest_first = [page_of(call) for call in reversed(calls)]
    for query in ("status__exact=4", "q=k&status__exact=4", "method__exact=post&status__exact=4"):
        found: list[str] = []
        for number in (1, 2, 3):
            text = text_of(root.get(f"{reverse(CHANGELIST)}?{query}&p={number}"))
            found += re.findall(r'<a href="(/admin/callqueue/callqueue/\d+/change/)', text)
            assert "8 calls" in text
        assert [path.partition("?")[0] for path in found] == newest_first, query


def test_large_tables_are_estimated_and_large_filters_counted_no_further_than_needed(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changelist, "COUNTED", 2)
    monkeypatch.setattr(changelist.database, "estimated_rows", lambda using, table: 1_234_567)
    for _ in range(4):
        send()
    assert "about 1,234,567 calls" in text_of(root.get(reverse(CHANGELIST)))
    assert "2+ calls" in text_of(root.get(f"{reverse(CHANGELIST)}?status__exact=0"))
