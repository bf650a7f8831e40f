"""The page of a call: what it shows, and what never gets out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client
from django.urls import reverse

from callqueue import Rule, SlidingWindow
from callqueue.admin import call_page
from callqueue.models import CallQueue, Hold
from callqueue.security.secrets import Secret
from tests.db.admin.staff import (
    CHANGELIST,
    DASHBOARD,
    attempt,
    ended,
    page_of,
    text_of,
)
from tests.support.behaviour import send

Rules = Callable[..., None]
Status = CallQueue.Status

XSS = "<script>alert('x')</script>\"'><img src=x onerror=alert(1)>"


def test_the_page_of_a_call_shows_the_request_and_every_attempt_with_its_response(
    rules: Rules, root: Client
) -> None:
    rules(pay=Rule())
    call = ended(Status.FAILED, rule="pay", error_message="HTTP 500")
    for number in (1, 2):
        attempt(call, number, response_status=500 + number, response_body=f"body of {number}")
    text = text_of(root.get(page_of(call)))
    for shown in (
        "http://vendor.example/",
        "Attempt 1",
        "Attempt 2",
        "status 501",
        "body of 2",
        "X-Served-By",
        "curl",
    ):
        assert shown in text


def test_secrets_are_never_in_a_page(rules: Rules, root: Client) -> None:
    rules({"SECRETS": {"KEY": "sk_live_of_the_settings"}}, pay=Rule())
    call = CallQueue.objects.send(
        {
            "method": "post",
            "params": {
                "url": "https://vendor.example/a?token=hidden-in-url",
                "headers": {"Authorization": "Bearer hidden-in-header", "X-Key": Secret("KEY")},
                "json": {"password": "hidden-in-body"},
            },
        },
        rule="pay",
    )
    attempt(
        call,
        response_headers={"Set-Cookie": "hidden-cookie"},
        response_body='{"access_token": "hidden-answer"}',
    )
    pages = [
        page_of(call),
        reverse("admin:callqueue_callqueue_edit", args=[call.pk]),
        reverse(CHANGELIST),
    ]
    pages += [reverse("admin:callqueue_callattempt_change", args=[call.attempts.get().pk])]
    for page in pages:
        response = root.get(page)
        assert response.status_code == 200
        assert "hidden-" not in text_of(response)
        assert "sk_live" not in text_of(response)
    assert "[secret KEY]" in text_of(root.get(pages[0]))
    assert "$KEY" in text_of(root.get(pages[0])), "curl takes it from the environment"


def test_nothing_from_a_call_or_a_provider_is_taken_as_html(rules: Rules, root: Client) -> None:
    rules({"ALLOWED_HOSTS": ["*"]}, pay=Rule(limits=[SlidingWindow("1/h", per="key")]))
    call = CallQueue.objects.send(
        {
            "method": "post",
            "params": {
                "url": "https://vendor.example/",
                "json": {"x": XSS},
                "headers": {"X": "</pre><script>"},
            },
        },
        rule="pay",
        key=XSS,
        unique_key=XSS,
    )
    CallQueue.objects.filter(pk=call.pk).update(error_message=XSS, host=XSS)
    attempt(call, response_headers={"X": XSS}, response_body=XSS, error_message=XSS, worker=XSS)
    Hold.objects.create(rule="pay", reason=XSS)
    Hold.objects.create(rule="pay", per="key", value=XSS, reason=XSS)
    edit = reverse("admin:callqueue_callqueue_edit", args=[call.pk])
    CallQueue.objects.filter(pk=call.pk).update(status=Status.ERROR)
    for page in (
        reverse(CHANGELIST),
        page_of(call),
        edit,
        reverse(DASHBOARD),
        reverse("admin:callqueue_hold_changelist"),
    ):
        text = text_of(root.get(page))
        assert "<script>alert" not in text
        assert "<img src=x" not in text
        assert "</pre><script>" not in text
    assert "&lt;script&gt;alert" in text_of(root.get(page_of(call)))
    text = text_of(
        root.post(edit, {"call_data": f'{{"method": "post", "params": {{"url": "{XSS[:20]}"}}}}'})
    )
    assert "<script>alert" not in text


def test_a_waiting_call_says_why_it_waits(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    call = send("pay")
    Hold.objects.create(rule="pay", reason="the provider is down")
    text = text_of(root.get(page_of(call)))
    assert "Why it waits" in text
    assert "the provider is down" in text


def test_the_reason_is_fetched_after_the_page_where_there_are_many_attempts(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_page.database, "estimated_rows", lambda using, table: 1_000_000)
    rules(pay=Rule())
    call = send("pay")
    Hold.objects.create(rule="pay", reason="the provider is down")
    later = reverse("admin:callqueue_callqueue_forecast", args=[call.pk])
    page = text_of(root.get(page_of(call)))
    assert later in page
    assert "the provider is down" not in page
    assert "the provider is down" in text_of(root.get(later))
    call.cancel()
    assert root.get(later).status_code == 302


def test_a_call_that_does_not_exist_leads_back_to_the_index(rules: Rules, root: Client) -> None:
    for name in ("change", "edit"):
        for pk in ("999999999", "x", "9" * 30):
            assert (
                root.get(reverse(f"admin:callqueue_callqueue_{name}", args=[pk])).status_code == 302
            )


def test_calls_are_neither_added_nor_changed_by_form(rules: Rules, root: Client) -> None:
    call = send()
    add = root.get(reverse("admin:callqueue_callqueue_add"), follow=True)
    assert "Nothing is added here" in add.content.decode()
    assert root.post(page_of(call), {"status": 3}).status_code == 403
