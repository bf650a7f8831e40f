"""The page of a call: what it shows, and what never gets out."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.test import Client
from django.urls import reverse
from django.utils import timezone

from callqueue import Rule
from callqueue.ledger import ledger_time
from callqueue.models import CallQueue
from tests.db.admin.staff import (
    CHANGELIST,
    DASHBOARD,
    attempt,
    ended,
    log_in,
    page_of,
    text_of,
)
from tests.support.behaviour import send

Rules = Callable[..., None]
Status = CallQueue.Status


def test_the_command_is_that_of_the_request_whatever_the_column_beside_it_says(
    rules: Rules, root: Client
) -> None:
    rules(pay=Rule())
    call = send("pay")
    request = {"method": "PUT", "params": {"url": "http://vendor.example/"}}
    for column in ("", "celery_task"):
        CallQueue.objects.filter(pk=call.pk).update(method=column, call_data=request)
        assert "--request PUT" in root.get(page_of(call)).context["curl"]
    task = {"method": "celery_task", "params": {"name": "shop.ship", "url": "http://x.example/"}}
    CallQueue.objects.filter(pk=call.pk).update(method="post", call_data=task)
    assert not root.get(page_of(call)).context["curl"]


def test_the_page_shows_the_request_and_what_happened_in_order(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    call = ended(Status.FAILED, rule="pay", error_message="HTTP 500")
    now = timezone.now()
    CallQueue.objects.filter(pk=call.pk).update(
        created_dt=now - timedelta(seconds=90), finished_at_dt=now + timedelta(seconds=1)
    )
    for number in (1, 2):
        fields = {"response_status": 500 + number, "response_body": f"body of {number}"}
        attempt(call, number, queue="egress-1", worker="w1", **fields)
    ledger = ledger_time.now("default")
    begun = ledger - timedelta(seconds=60)
    ends = ledger - timedelta(seconds=59)
    call.attempts.filter(number=1).update(
        released_at=begun, started_at=begun, sent_at=begun, finished_at=ends
    )
    page = root.get(page_of(call))
    for shown in ("http://vendor.example/", "status 501", "body of 2", "X-Served-By", "curl"):
        assert shown in text_of(page)
    events = page.context["events"]
    assert [event.what for event in events] == ["created", "Attempt 1", "Attempt 2", "failed"]
    assert [event.after for event in events[:2]] == ["", "+30 s"]
    steps = events[1].attempt.steps
    words = ["released to egress-1", "begun by w1", "sent", "answered"]
    assert [what for what, _ in steps] == words
    assert steps[-1][1] == "+1.0 s"


def test_the_page_leads_to_the_rule_and_to_the_calls_of_its_key(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    call = send("pay", key="tenant-1")
    text = text_of(root.get(page_of(call)))
    assert f'href="{reverse("admin:callqueue_rule")}?name=pay"' in text
    same = f"{reverse(CHANGELIST)}?rule__exact=pay&amp;q=tenant-1"
    assert f'href="{same}"' in text
    assert str(call.pk) in text_of(root.get(same.replace("&amp;", "&")))
    CallQueue.objects.filter(pk=call.pk).update(rule="gone")
    assert "?name=gone" not in text_of(root.get(page_of(call)))


def test_buttons_are_those_of_the_state_and_of_what_the_person_may_do(rules: Rules) -> None:
    """What merely waits is neither edited nor deleted by one. That nobody can do more, whatever they
    send, is tried at every address in tests/attacks.
    """

    def buttons(client: Client, call: CallQueue) -> set[str]:
        shown = text_of(client.get(page_of(call)))
        pages = {
            name: reverse(f"admin:callqueue_callqueue_{name}", args=[call.pk])
            for name in ("edit", "delete")
        }
        acts = {name: f'value="{name}_calls"' for name in ("requeue", "cancel")}
        return {name for name, mark in {**pages, **acts}.items() if mark in shown}

    failed, root = ended(Status.FAILED), log_in(is_superuser=True)
    assert buttons(root, send()) == {"cancel"}
    assert buttons(root, failed) == {"requeue", "edit", "delete"}
    assert buttons(root, ended(Status.DONE)) == {"requeue", "delete"}
    assert "edit" in buttons(log_in("view_callqueue", "edit_call"), failed)
    assert "edit" not in buttons(log_in("view_callqueue", "requeue_call"), failed)
    viewer = log_in("view_callqueue")
    for path in (reverse(CHANGELIST), page_of(failed), reverse(DASHBOARD)):
        main = text_of(viewer.get(path)).partition('id="content-main"')[2]
        assert not re.search(r'<form[^>]*method="post"[^>]*action="[^"]*callqueue', main)
        assert 'name="action"' not in main


def test_the_page_says_what_is_not_shown_of_an_answer(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    call = ended(Status.DONE, rule="pay")
    kinds = [
        ({"response_body": "cut", "response_size": 70_000}, "3 of 70,000 bytes are kept."),
        ({"response_body": "[secret]", "response_size": 20, "response_form": "scrubbed"}, "A secret of the call was taken out."),
        ({"response_body": "iVBORw0K//8=", "response_size": 8, "response_form": "base64"}, "8 bytes that are no text."),
    ]  # fmt: skip
    for number, (columns, _) in enumerate(kinds, 1):
        attempt(call, number, **columns)
    text = text_of(root.get(page_of(call)))
    for number, (_, note) in enumerate(kinds, 1):
        assert note in text
        own = call.attempts.get(number=number).pk
        page = text_of(root.get(reverse("admin:callqueue_callattempt_change", args=[own])))
        assert note in page
    assert "iVBORw0K" not in text


def test_the_page_reads_the_newest_bodies_only(
    rules: Rules, root: Client, django_assert_max_num_queries: Any
) -> None:
    """A hundred attempts may have 64 kB each."""
    rules(pay=Rule())
    call = ended(Status.FAILED, rule="pay", error_message="HTTP 500")
    for number in range(1, 15):
        attempt(call, number, response_body=f"body of {number}.", response_size=10)
    with django_assert_max_num_queries(30):
        text = text_of(root.get(page_of(call)))
    shown = [number for number in range(1, 15) if f"body of {number}." in text]
    assert shown == list(range(5, 15))
    assert text.count("The body is on the attempt") == 4
