"""The page of a call, and what is done to calls: requeued, cancelled, deleted, and written down."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from callqueue import Rule, SlidingWindow
from callqueue.admin import call_actions
from callqueue.control import bulk
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt, CallQueue
from tests.db.admin.staff import (
    CHANGELIST,
    DASHBOARD,
    answer,
    ask,
    attempt,
    do,
    ended,
    log_in,
    page_of,
    text_of,
)
from tests.support.behaviour import release, send

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
        ({"response_body": "x" * 70_000, "response_size": 70_000}, "The first 65,536 of 70,000 characters are shown."),
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


def test_failed_calls_are_asked_about_requeued_and_each_is_logged(
    rules: Rules, root: Client
) -> None:
    rules(default=Rule(limits=[SlidingWindow("1/h")]))
    calls = [ended(Status.FAILED), ended(Status.CANCELLED), ended(Status.EXPIRED)]
    asked = ask(root, "requeue_calls", *calls)
    assert "Requeue 3 calls" in text_of(asked)
    assert re.search(r"default: done by [^<]*, in 2 hours", text_of(asked))
    assert set(CallQueue.objects.values_list("status", flat=True)) == {4, 5, 6}
    assert "3 calls requeued" in text_of(do(root, "requeue_calls", *calls))
    assert set(CallQueue.objects.values_list("status", flat=True)) == {Status.NEW}
    entries = LogEntry.objects.all()
    assert {entry.object_id for entry in entries} == {str(call.pk) for call in calls}
    assert {entry.change_message for entry in entries} >= {"Requeued. Status before: failed."}


def test_when_the_last_is_done_is_said_for_all_rules_together(rules: Rules, root: Client) -> None:
    """Two rules share a limit of one a second: ten calls of each take twenty seconds. A third has its own."""
    shared = SlidingWindow("1/s", name="account")
    quick = Rule(limits=[SlidingWindow("50/s")])
    rules(high=Rule(limits=[shared], priority=5), low=Rule(limits=[shared]), quick=quick)
    for rule in ("high", "low"):
        for _ in range(10):
            ended(Status.FAILED, rule=rule)
    ended(Status.FAILED, rule="quick")
    CallQueue.objects.filter(pk=ended(Status.FAILED).pk).update(rule="gone")
    said = ask(root, "requeue_calls", *CallQueue.objects.all()).context["ends"]
    assert len(said) == 2
    seconds = re.search(r"in (\d+) seconds", said[0])
    assert seconds and 18 <= int(seconds[1]) <= 23
    assert said[1].startswith("gone: its rule is not in")


@pytest.mark.parametrize("action", ["requeue_calls", "cancel_calls"])
def test_the_page_that_asks_names_filter_rule_and_reason(
    rules: Rules, root: Client, action: str
) -> None:
    rules(pay=Rule(), ship=Rule())
    status = {"requeue_calls": Status.FAILED, "cancel_calls": Status.ERROR}[action]
    for number in range(3):
        ended(status, rule="pay", error_message=f"HTTP 402: card 1000{number} declined")
    call = ended(status, rule="ship", error_message="HTTP 503 password=h1dd3n")
    shown = ask(root, action, *CallQueue.objects.all())
    assert shown.context["about"] == [
        ("pay", "HTTP 402: card … declined", "3"),
        ("ship", "HTTP 503 password=[redacted]", "1"),
    ]
    assert "All that the list shows" not in text_of(shown)
    assert "Why they failed" not in text_of(ask(root, "cancel_calls", send("pay")))
    data = {"action": action, "_selected_action": [call.pk], "select_across": "1"}
    query = f"?rule__exact=pay&status__exact={status.value}"
    shown = root.post(reverse(CHANGELIST) + query, data)
    assert f"All that the list shows: rule = pay, status = {status.label}" in re.sub(
        "<[^>]+>", "", text_of(shown)
    )


def test_what_may_have_been_made_already_is_asked_about_once(rules: Rules, root: Client) -> None:
    for status in (Status.UNKNOWN, Status.DONE):
        call = ended(status)
        asked = ask(root, "requeue_calls", call)
        assert "twice" in text_of(asked) or "second time" in text_of(asked)
        call.refresh_from_db()
        assert call.status == status
        assert "1 call requeued" in text_of(answer(root, asked))
        call.refresh_from_db()
        assert call.status == Status.NEW


def test_of_a_mixture_only_the_safe_ones_may_be_requeued(rules: Rules, root: Client) -> None:
    failed, unknown, done = ended(Status.FAILED), ended(Status.UNKNOWN), ended(Status.DONE)
    text = text_of(ask(root, "requeue_calls", failed, unknown, done))
    assert "Only those that failed" in text
    do(root, "requeue_calls", failed, unknown, done, confirm="safe")
    assert dict(CallQueue.objects.values_list("pk", "status")) == {
        failed.pk: Status.NEW,
        unknown.pk: Status.UNKNOWN,
        done.pk: Status.DONE,
    }


def test_waiting_calls_are_cancelled_and_begun_ones_are_left(rules: Rules, root: Client) -> None:
    begun, released = send(), send()
    release()
    CallAttempt.objects.filter(call=begun).update(started_at=ledger_time.now("default"))
    waiting = send()
    assert "Cancel 3 calls" in text_of(ask(root, "cancel_calls", waiting, released, begun))
    assert not CallQueue.objects.cancelled().exists()
    text = text_of(do(root, "cancel_calls", waiting, released, begun))
    assert "2 calls cancelled" in text
    assert "1 call was left as it is" in text
    assert CallQueue.objects.get(pk=begun.pk).status == Status.DISPATCHED
    assert CallQueue.objects.cancelled().count() == 2
    assert LogEntry.objects.count() == 2


FAILED_ONES = {"action": "requeue_calls", "select_across": "1", "index": "0"}


def test_all_that_match_are_done_and_counted_exactly(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that were there when it was asked; each is named in the log."""
    monkeypatch.setattr(bulk, "BATCH", 4)
    calls = [ended(Status.FAILED) for _ in range(14)]
    kept = ended(Status.CANCELLED)
    data = {**FAILED_ONES, "_selected_action": [calls[0].pk]}
    page = root.post(f"{reverse(CHANGELIST)}?status__exact=4", data)
    assert "Requeue 14 calls" in text_of(page)
    later = ended(Status.FAILED)  # nobody was asked about this one
    for said in ("14 calls requeued", "0 calls requeued"):  # sent twice, nothing is done twice
        assert said in text_of(answer(root, page))
    assert dict(CallQueue.objects.exclude(status=Status.NEW).values_list("pk", "status")) == {
        kept.pk: Status.CANCELLED,
        later.pk: Status.FAILED,
    }
    assert LogEntry.objects.count() == 14


def test_what_became_done_after_the_question_is_not_made_again(rules: Rules, root: Client) -> None:
    failed, done = ended(Status.FAILED), ended(Status.FAILED)
    asked = ask(root, "requeue_calls", failed, done)
    CallQueue.objects.filter(pk=done.pk).update(status=Status.DONE)
    assert "1 call requeued" in text_of(answer(root, asked))
    assert CallQueue.objects.get(pk=done.pk).status == Status.DONE


def test_of_more_than_a_request_has_time_for_some_are_left(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "BATCH", 2)
    monkeypatch.setattr(call_actions, "WORKS_S", -1.0)  # a batch a request
    calls = [ended(Status.FAILED) for _ in range(4)]
    asked = ask(root, "requeue_calls", *calls, select_across="1")
    first, second = (text_of(answer(root, asked)) for _ in range(2))
    assert "2 calls requeued" in first and "2 calls requeued" in second
    assert ("callqueue_requeue" in first, "callqueue_requeue" in second) == (True, False)
    assert CallQueue.objects.new().count() == LogEntry.objects.count() == 4


def test_one_call_is_requeued_and_cancelled_from_its_page_and_back(
    rules: Rules, root: Client
) -> None:
    call = ended(Status.FAILED)
    for action, word, status in (
        ("requeue_calls", "requeued", Status.NEW),
        ("cancel_calls", "cancelled", Status.CANCELLED),
    ):
        shown = text_of(root.get(page_of(call)))
        assert f'name="action" value="{action}"' in shown
        asked = ask(root, action, call, page=str(call.pk))
        assert f'<a href="{page_of(call)}" class="button cq-quiet">' in text_of(asked)
        done = answer(root, asked)
        assert done.redirect_chain == [(page_of(call), 302)]
        assert f"1 call {word}." in text_of(done)
        assert CallQueue.objects.get(pk=call.pk).status == status
    assert LogEntry.objects.count() == 2
    elsewhere = ask(root, "requeue_calls", call, page="//evil.example")
    assert "evil.example" not in re.findall(r'<a href="([^"]*)" class="button', text_of(elsewhere))


def test_one_call_is_deleted_its_attempts_stay_for_the_ledger_and_many_are_not(
    rules: Rules, root: Client
) -> None:
    call, other = ended(Status.DONE), ended(Status.DONE)
    attempt(call, outcome="succeeded")
    page = reverse("admin:callqueue_callqueue_delete", args=[call.pk])
    assert "Are you sure" in text_of(root.get(page))
    root.post(page, {"post": "yes"})
    assert "delete_selected" not in text_of(root.get(reverse(CHANGELIST)))
    do(root, "delete_selected", other, post="yes")
    assert list(CallQueue.objects.all()) == [other]
    assert CallAttempt.objects.count() == 1
    assert LogEntry.objects.count() == 1


def test_what_a_question_counts_is_one_statement_however_many_rules(
    rules: Rules, root: Client, django_assert_max_num_queries: Any
) -> None:
    names = [f"r{n}" for n in range(40)]
    rules(**{name: Rule(limits=[SlidingWindow("1/s")]) for name in names})
    for name in names:
        ended(Status.FAILED, rule=name)
    with django_assert_max_num_queries(40):
        shown = ask(root, "requeue_calls", *CallQueue.objects.all())
    assert len(shown.context["counts"]) == call_actions.LISTED
    assert "And 10 lines more" in text_of(shown)
