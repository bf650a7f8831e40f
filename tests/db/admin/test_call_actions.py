"""Requeueing, cancelling and deleting calls in the admin, and what is written down."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from callqueue import database
from callqueue.admin import actions, call_actions
from callqueue.models import CallAttempt, CallQueue, Hold
from tests.db.admin.staff import (
    CHANGELIST,
    DASHBOARD,
    answer,
    ask,
    attempt,
    do,
    ended,
    text_of,
)
from tests.support.behaviour import release, send

Rules = Callable[..., None]
Status = CallQueue.Status


def test_failed_calls_are_asked_about_requeued_and_each_is_logged(
    rules: Rules, root: Client
) -> None:
    calls = [ended(Status.FAILED), ended(Status.CANCELLED), ended(Status.EXPIRED)]
    asked = ask(root, "requeue_calls", *calls)
    assert "Requeue 3 calls" in text_of(asked)
    assert "default: about" in text_of(asked)
    assert set(CallQueue.objects.values_list("status", flat=True)) == {4, 5, 6}
    assert "3 calls requeued" in text_of(do(root, "requeue_calls", *calls))
    assert set(CallQueue.objects.values_list("status", flat=True)) == {Status.NEW}
    entries = LogEntry.objects.all()
    assert {entry.object_id for entry in entries} == {str(call.pk) for call in calls}
    assert {entry.change_message for entry in entries} >= {"Requeued. Status before: failed."}


@pytest.mark.parametrize("status", [Status.UNKNOWN, Status.DONE])
def test_what_may_have_been_made_already_is_asked_about_once(
    rules: Rules, root: Client, status: int
) -> None:
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
    CallAttempt.objects.filter(call=begun).update(started_at=timezone.now())
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


def test_all_that_match_are_done_in_steps_and_counted_exactly(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "BATCH", 4)
    monkeypatch.setattr(actions, "LOGGED", 8)
    monkeypatch.setattr(actions, "STEP", -1.0)  # a batch a request
    calls = [ended(Status.FAILED) for _ in range(14)]
    kept = ended(Status.CANCELLED)
    query = "?status__exact=4"
    data = {**FAILED_ONES, "_selected_action": [calls[0].pk]}
    page = root.post(f"{reverse(CHANGELIST)}{query}", data)
    assert "Requeue 14 calls" in text_of(page)
    page = answer(root, page, query)
    assert "4 calls requeued so far" in text_of(page)
    later = ended(Status.FAILED)  # nobody was asked about this one
    steps = 1
    while "so far" in text_of(page):
        page, steps = answer(root, page, query), steps + 1
        assert steps < 9
    assert "14 calls requeued" in text_of(page)
    assert dict(CallQueue.objects.exclude(status=Status.NEW).values_list("pk", "status")) == {
        kept.pk: Status.CANCELLED,
        later.pk: Status.FAILED,
    }
    assert LogEntry.objects.exclude(object_id=None).count() == 8
    assert "4 calls" in LogEntry.objects.filter(object_id=None).earliest("pk").object_repr


def test_a_step_that_is_sent_twice_does_nothing_twice(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "BATCH", 2)
    monkeypatch.setattr(actions, "STEP", -1.0)
    calls = [ended(Status.FAILED) for _ in range(5)]
    first = answer(root, ask(root, "requeue_calls", *calls, select_across="1"))
    answer(root, first)
    answer(root, first)
    page = answer(root, first)
    assert "5 calls requeued" in text_of(page)
    assert "left as" not in text_of(page)
    assert LogEntry.objects.count() == 5
    assert "5 calls requeued" in text_of(answer(root, first))
    assert LogEntry.objects.count() == 5


def test_requeued_calls_come_due_at_the_pace_that_was_asked_for(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "BATCH", 2)
    calls = [ended(Status.FAILED) for _ in range(5)]
    begin = database.clock("default")
    assert "5 calls requeued" in text_of(do(root, "requeue_calls", *calls, pace="30/m", delay="1h"))
    dues = list(CallQueue.objects.order_by("pk").values_list("due_at_dt", flat=True))
    gaps = {later - sooner for sooner, later in pairwise(dues)}
    assert gaps == {timedelta(seconds=2)}
    assert timedelta(hours=1) <= dues[0] - begin < timedelta(hours=1, minutes=5)
    assert release() == []
    CallQueue.objects.filter(pk=calls[0].pk).update(due_at_dt=begin)
    assert release() == [calls[0]]


@pytest.mark.parametrize("wrong", [{"pace": "fast"}, {"delay": "soon"}, {"pace": "0/s"}])
def test_a_pace_that_cannot_be_read_is_asked_for_once_more(
    rules: Rules, root: Client, wrong: dict[str, str]
) -> None:
    call = ended(Status.FAILED)
    text = text_of(do(root, "requeue_calls", call, **wrong))
    assert 'role="alert"' in text
    assert f'value="{next(iter(wrong.values()))}"' in text
    call.refresh_from_db()
    assert call.status == Status.FAILED


def test_one_call_is_requeued_and_cancelled_from_its_page(rules: Rules, root: Client) -> None:
    call = ended(Status.FAILED)
    text = text_of(
        root.post(reverse("admin:callqueue_callqueue_requeue", args=[call.pk]), follow=True)
    )
    assert "Requeued. Status before: failed" in text
    cancel = reverse("admin:callqueue_callqueue_cancel", args=[call.pk])
    assert "A cancelled call is not made" in text_of(root.post(cancel))
    assert CallQueue.objects.get(pk=call.pk).status == Status.NEW
    text = text_of(root.post(cancel, {"confirm": "yes"}, follow=True))
    assert "Cancelled. Status before: new" in text
    assert CallQueue.objects.get(pk=call.pk).status == Status.CANCELLED
    assert LogEntry.objects.count() == 2


def test_one_call_that_may_have_been_made_needs_to_be_told_so(rules: Rules, root: Client) -> None:
    call = ended(Status.UNKNOWN)
    requeue = reverse("admin:callqueue_callqueue_requeue", args=[call.pk])
    assert "may have been made already" in text_of(root.post(requeue, follow=True))
    assert CallQueue.objects.get(pk=call.pk).status == Status.UNKNOWN
    root.post(requeue, {"again": "on"})
    assert CallQueue.objects.get(pk=call.pk).status == Status.NEW


def test_nothing_is_done_by_get_or_without_the_token(rules: Rules, root: Client) -> None:
    failed, waiting = ended(Status.FAILED), send()
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.get())
    paths = {
        reverse("admin:callqueue_callqueue_requeue", args=[failed.pk]): {},
        reverse("admin:callqueue_callqueue_cancel", args=[waiting.pk]): {},
        reverse("admin:callqueue_callqueue_edit", args=[failed.pk]): {
            "call_data": json.dumps(failed.call_data)
        },
        reverse(CHANGELIST): {"action": "requeue_calls", "_selected_action": [failed.pk]},
        reverse(DASHBOARD): {"do": "pause", "rule": "default"},
    }
    for path, data in paths.items():
        root.get(path, data)
        assert strict.post(path, data).status_code == 403
    assert set(CallQueue.objects.values_list("status", flat=True)) == {Status.FAILED, Status.NEW}
    assert not Hold.objects.exists()
    assert not LogEntry.objects.exists()


def test_a_superuser_deletes_calls_and_their_attempts_stay_for_the_ledger(
    rules: Rules, root: Client
) -> None:
    call = ended(Status.DONE)
    attempt(call, outcome="succeeded")
    assert "Are you sure" in text_of(do(root, "delete_selected", call))
    do(root, "delete_selected", call, post="yes")
    assert not CallQueue.objects.exists()
    assert CallAttempt.objects.count() == 1
    assert LogEntry.objects.count() == 1


def test_more_calls_than_fit_on_a_page_are_not_deleted_by_form(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_actions, "DELETED", 2)
    sent = [send() for _ in range(3)]
    assert "callqueue_cleanup" in text_of(do(root, "delete_selected", *sent))
    assert "Are you sure" in text_of(do(root, "delete_selected", *sent[:2]))
    assert CallQueue.objects.count() == 3
