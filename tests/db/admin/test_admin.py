"""The admin as staff use it: what they see, what they may do, what is written down, and what never
gets out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.core.cache import cache
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow, TokenBucket
from callqueue.admin import actions, call_actions, call_page, changelist
from callqueue.ledger import clock_jumps
from callqueue.models import CallAttempt, CallQueue, Hold, RuleState
from callqueue.security.secrets import Secret
from tests.support.behaviour import release, send

Rules = Callable[..., None]
Status = CallQueue.Status
CHANGELIST = "admin:callqueue_callqueue_changelist"
DASHBOARD = "admin:callqueue_dashboard"
XSS = "<script>alert('x')</script>\"'><img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    cache.clear()


def log_in(*permissions: str, is_superuser: bool = False) -> Client:
    """A client of someone with these permissions of the app."""
    user = User.objects.create_user(
        f"user{User.objects.count()}", password="x", is_staff=True, is_superuser=is_superuser
    )
    for name in permissions:
        user.user_permissions.add(
            Permission.objects.get(content_type__app_label="callqueue", codename=name)
        )
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def root(db: None) -> Client:
    return log_in(is_superuser=True)


def text_of(response: Any) -> str:
    return str(response.content.decode())


def ended(status: int, **fields: Any) -> CallQueue:
    """A call in a final state, as if it had been made."""
    call = send(**{name: fields.pop(name) for name in ("rule", "path", "key") if name in fields})
    CallQueue.objects.filter(pk=call.pk).update(
        status=status, ready=False, finished_at_dt=timezone.now(), **fields
    )
    return CallQueue.objects.get(pk=call.pk)


def page_of(call: CallQueue) -> str:
    return reverse("admin:callqueue_callqueue_change", args=[call.pk])


def do(client: Client, action: str, *calls: CallQueue, **more: Any) -> Any:
    data = {"action": action, "_selected_action": [call.pk for call in calls], **more}
    return client.post(reverse(CHANGELIST), data, follow=True)


# --- the list


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
        ("q=tenant", set()),
    ],
)
def test_filters_and_search_find_exactly_what_they_name(
    rules: Rules, root: Client, query: str, found: set[str]
) -> None:
    rules(pay=Rule(), ship=Rule())
    calls = {
        "failed": ended(Status.FAILED, rule="pay", key="tenant-1"),
        "new": send("pay"),
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


def test_a_filter_without_an_index_looks_through_the_newest_calls_and_says_so(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changelist, "WINDOW", 3)
    monkeypatch.setattr(changelist.database, "estimated_rows", lambda using, table: 1_000_000)
    rules(pay=Rule())
    calls = [send("pay") for _ in range(6)]
    for place, call in enumerate(calls):
        CallQueue.objects.filter(pk=call.pk).update(
            created_dt=calls[0].created_dt + timedelta(milliseconds=10 * place)
        )
    text = text_of(root.get(f"{reverse(CHANGELIST)}?rule__exact=pay"))
    assert [page_of(call) in text for call in calls] == [False] * 3 + [True] * 3
    assert "Among the newest 3 calls" in text
    year = timezone.localtime(calls[0].created_dt).year
    text = text_of(root.get(f"{reverse(CHANGELIST)}?rule__exact=pay&created_dt__year={year}"))
    assert [page_of(call) in text for call in calls] == [False] * 3 + [True] * 3


def test_large_tables_are_estimated_and_large_filters_counted_no_further_than_needed(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changelist, "COUNTED", 2)
    monkeypatch.setattr(changelist.database, "estimated_rows", lambda using, table: 1_234_567)
    for _ in range(4):
        send()
    assert "about 1,234,567 calls" in text_of(root.get(reverse(CHANGELIST)))
    assert "2+ calls" in text_of(root.get(f"{reverse(CHANGELIST)}?status__exact=0"))


# --- one call


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


def attempt(call: CallQueue, number: int = 1, **fields: Any) -> CallAttempt:
    now = timezone.now()
    given = {
        "outcome": "failed",
        "response_status": 500,
        "response_headers": {"X-Served-By": "w1"},
        **fields,
    }
    times = {"released_at": now, "started_at": now, "sent_at": now, "finished_at": now}
    return CallAttempt.objects.create(
        call=call, number=number, rule=call.rule, key=call.key, **times, **given
    )


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
    assert root.get(reverse("admin:callqueue_callqueue_add")).status_code == 403
    assert root.post(page_of(call), {"status": 3}).status_code == 403


# --- requeue and cancel


def test_failed_calls_are_requeued_at_once_and_each_is_logged(rules: Rules, root: Client) -> None:
    calls = [ended(Status.FAILED), ended(Status.CANCELLED), ended(Status.EXPIRED)]
    assert "3 calls requeued" in text_of(do(root, "requeue_calls", *calls))
    assert set(CallQueue.objects.values_list("status", flat=True)) == {Status.NEW}
    entries = LogEntry.objects.all()
    assert {entry.object_id for entry in entries} == {str(call.pk) for call in calls}
    assert {entry.change_message for entry in entries} >= {"Requeued; it was failed."}


@pytest.mark.parametrize("status", [Status.UNKNOWN, Status.DONE])
def test_what_may_have_been_made_already_is_asked_about_once(
    rules: Rules, root: Client, status: int
) -> None:
    call = ended(status)
    asked = do(root, "requeue_calls", call)
    assert "twice" in text_of(asked) or "second time" in text_of(asked)
    call.refresh_from_db()
    assert call.status == status
    fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', text_of(asked)))
    assert "1 call requeued" in text_of(root.post(reverse(CHANGELIST), fields, follow=True))
    call.refresh_from_db()
    assert call.status == Status.NEW


def test_of_a_mixture_only_the_safe_ones_may_be_requeued(rules: Rules, root: Client) -> None:
    failed, unknown, done = ended(Status.FAILED), ended(Status.UNKNOWN), ended(Status.DONE)
    text = text_of(do(root, "requeue_calls", failed, unknown, done))
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
    text = text_of(do(root, "cancel_calls", waiting, released, begun))
    assert "2 calls cancelled" in text
    assert "1 call was left as it is" in text
    assert CallQueue.objects.get(pk=begun.pk).status == Status.DISPATCHED
    assert CallQueue.objects.cancelled().count() == 2
    assert LogEntry.objects.count() == 2


def test_all_that_match_are_done_in_batches(
    rules: Rules, root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "BATCH", 4)
    monkeypatch.setattr(actions, "LOGGED", 8)
    calls = [ended(Status.FAILED) for _ in range(14)]
    kept = ended(Status.CANCELLED)
    data = {
        "action": "requeue_calls",
        "_selected_action": [calls[0].pk],
        "select_across": "1",
        "index": "0",
    }
    response = root.post(f"{reverse(CHANGELIST)}?status__exact=4", data, follow=True)
    assert "14 calls requeued" in text_of(response)
    assert CallQueue.objects.get(pk=kept.pk).status == Status.CANCELLED
    assert LogEntry.objects.exclude(object_id=None).count() == 8
    assert "4 calls" in LogEntry.objects.filter(object_id=None).earliest("pk").object_repr


def test_one_call_is_requeued_and_cancelled_from_its_page(rules: Rules, root: Client) -> None:
    call = ended(Status.FAILED)
    text = text_of(
        root.post(reverse("admin:callqueue_callqueue_requeue", args=[call.pk]), follow=True)
    )
    assert "Requeued; it was failed" in text
    text = text_of(
        root.post(reverse("admin:callqueue_callqueue_cancel", args=[call.pk]), follow=True)
    )
    assert "Cancelled; it was new" in text
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


# --- who may


def test_staff_who_may_view_see_everything_and_can_do_nothing(rules: Rules) -> None:
    viewer = log_in("view_callqueue")
    failed, waiting = ended(Status.FAILED), send()
    for path in (reverse(CHANGELIST), page_of(failed), reverse(DASHBOARD)):
        response = viewer.get(path)
        assert response.status_code == 200
        main = text_of(response).partition('id="content-main"')[2]
        assert not re.search(r'<form[^>]*method="post"[^>]*action="[^"]*callqueue', main)
        assert 'name="action"' not in main
    do(viewer, "requeue_calls", failed)
    do(viewer, "cancel_calls", waiting)
    do(viewer, "delete_selected", waiting, post="yes")
    for name, call in (("requeue", failed), ("cancel", waiting), ("edit", failed)):
        assert (
            viewer.post(reverse(f"admin:callqueue_callqueue_{name}", args=[call.pk])).status_code
            == 403
        )
    assert viewer.post(reverse(DASHBOARD), {"do": "pause", "rule": "default"}).status_code == 403
    assert (
        viewer.post(
            reverse("admin:callqueue_callqueue_delete", args=[failed.pk]), {"post": "yes"}
        ).status_code
        == 403
    )
    assert dict(CallQueue.objects.values_list("pk", "status")) == {
        failed.pk: Status.FAILED,
        waiting.pk: Status.NEW,
    }
    assert not Hold.objects.exists()
    assert not LogEntry.objects.exists()


def test_each_permission_allows_its_own_act_and_no_other(rules: Rules) -> None:
    requeuer, canceller = (
        log_in("view_callqueue", "requeue_call"),
        log_in("view_callqueue", "cancel_call"),
    )
    editor = log_in("view_callqueue", "edit_call")
    failed, waiting = ended(Status.FAILED), send()
    editing = reverse("admin:callqueue_callqueue_edit", args=[failed.pk])
    for client in (requeuer, canceller):
        assert client.get(editing).status_code == 403
        assert client.post(editing, {"call_data": json.dumps(failed.call_data)}).status_code == 403
        assert editing not in text_of(client.get(page_of(failed)))
    assert editing in text_of(editor.get(page_of(failed)))
    do(editor, "requeue_calls", failed)
    do(editor, "cancel_calls", waiting)
    do(canceller, "requeue_calls", failed)
    do(requeuer, "cancel_calls", waiting)
    assert CallQueue.objects.get(pk=failed.pk).status == Status.FAILED
    assert CallQueue.objects.get(pk=waiting.pk).status == Status.NEW
    do(requeuer, "requeue_calls", failed)
    do(canceller, "cancel_calls", waiting)
    assert CallQueue.objects.get(pk=failed.pk).status == Status.NEW
    assert CallQueue.objects.get(pk=waiting.pk).status == Status.CANCELLED
    again = ended(Status.FAILED)
    edit(editor, again, lambda data: None)
    assert CallQueue.objects.get(pk=again.pk).status == Status.NEW


def test_why_something_is_held_and_which_keys_are_is_told_to_those_who_may_see_holds(
    rules: Rules,
) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100/h", per="key")]))
    call, other = send("pay", key="tenant-1"), send("pay")
    Hold.objects.create(rule="pay", reason="why-of-rule")
    Hold.objects.create(rule="pay", per="key", value="tenant-1", reason="why-of-key")
    Hold.objects.create(
        rule="pay",
        per="key",
        value="tenant-gone",
        reason="why-gone",
        until=timezone.now() + timedelta(hours=1),
    )
    root = log_in("view_callqueue", "view_rulestate", "view_hold", "control_rule")
    act(root, do="pause", rule="pay", key="tenant-2", reason="why-of-form")
    forecasts = [
        reverse("admin:callqueue_callqueue_forecast", args=[pk]) for pk in (call.pk, other.pk)
    ]
    pages = [
        page_of(call),
        page_of(other),
        *forecasts,
        reverse(DASHBOARD),
        reverse("admin:callqueue_dashboard_live"),
    ]
    history = reverse("admin:callqueue_rulestate_history", args=["pay"])
    RuleState.objects.get_or_create(rule="pay")
    told = "".join(text_of(root.get(page)) for page in [*pages, history])
    for hidden in (
        "why-of-rule",
        "why-of-key",
        "why-gone",
        "why-of-form",
        "tenant-gone",
        "tenant-2",
    ):
        assert hidden in told
    viewer = log_in("view_callqueue", "view_rulestate", "control_rule")
    told = "".join(text_of(viewer.get(page)) for page in pages)
    assert "until it is resumed" in told, "that a rule is held is no secret"
    assert "why-" not in told
    assert "tenant-gone" not in told
    assert "tenant-2" not in told
    assert viewer.get(history).status_code == 403


def test_staff_without_permissions_see_nothing(rules: Rules) -> None:
    call = send()
    nobody = log_in()
    for path in (
        reverse(CHANGELIST),
        page_of(call),
        reverse(DASHBOARD),
        reverse("admin:callqueue_dashboard_live"),
    ):
        assert nobody.get(path).status_code == 403
    assert Client().get(reverse(DASHBOARD)).status_code == 302


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


# --- edit and requeue


def edit(client: Client, call: CallQueue, change: Callable[[Any], Any], **more: Any) -> Any:
    """Take the text that the form shows, change it, send it back."""
    path = reverse("admin:callqueue_callqueue_edit", args=[call.pk])
    shown = client.get(path).context["text"]
    data = json.loads(shown)
    return client.post(path, {"call_data": json.dumps(change(data) or data), **more}, follow=True)


def secretive() -> CallQueue:
    call = CallQueue.objects.send(
        {
            "method": "post",
            "params": {
                "url": "https://vendor.example/v1?token=t0psecret",
                "headers": {
                    "Authorization": "Bearer abcdefgh",
                    "X-Key": Secret("KEY"),
                    "X-Plain": "1",
                },
                "json": {"items": [{"password": "p4ss", "n": 1}]},
            },
        },
        rule="pay",
    )
    CallQueue.objects.filter(pk=call.pk).update(status=Status.FAILED, finished_at_dt=timezone.now())
    return CallQueue.objects.get(pk=call.pk)


@pytest.fixture
def with_secret(rules: Rules) -> None:
    rules({"SECRETS": {"KEY": "v4lue", "OTHER": "0ther"}}, pay=Rule())


def test_an_edited_call_keeps_what_was_not_shown(with_secret: None, root: Client) -> None:
    call = secretive()

    def change(data: Any) -> None:
        data["params"]["headers"]["X-Plain"] = "2"
        data["params"]["json"]["items"][0]["n"] = 5

    assert "edited and requeued" in text_of(edit(root, call, change))
    fresh = CallQueue.objects.get(pk=call.pk)
    assert fresh.status == Status.NEW
    expected = deepcopy(call.call_data)
    expected["params"]["headers"]["X-Plain"] = "2"
    expected["params"]["json"]["items"][0]["n"] = 5
    assert fresh.call_data == expected
    assert fresh.idempotency_key != call.idempotency_key
    changed = "params.headers.X-Plain, params.json.items[0].n"
    assert (
        LogEntry.objects.get().change_message
        == f"Edited and requeued; it was failed. Changed: {changed}."
    )


def test_an_unchanged_call_keeps_its_idempotency_key(with_secret: None, root: Client) -> None:
    call = secretive()
    edit(root, call, lambda data: None)
    fresh = CallQueue.objects.get(pk=call.pk)
    assert (fresh.status, fresh.call_data, fresh.idempotency_key) == (
        Status.NEW,
        call.call_data,
        call.idempotency_key,
    )


def test_an_edit_names_no_secret_whatever_is_typed(with_secret: None, root: Client) -> None:
    call = secretive()

    def change(data: Any) -> None:
        data["params"]["json"] = {"note": {"$secret": "OTHER"}, "same": {"$secret": "KEY"}}

    edit(root, call, change)
    params = CallQueue.objects.get(pk=call.pk).call_data["params"]
    assert params["json"] == {"note": {"$secret": "OTHER"}, "same": {"$secret": "KEY"}}
    assert params["headers"]["X-Key"] == Secret("KEY")


def _to_another_host(data: Any) -> None:
    data["params"]["url"] = "https://evil.example/v1"


def _to_another_port(data: Any) -> None:
    data["params"]["url"] = "https://vendor.example:8443/v1"


def _another_secret(data: Any) -> None:
    data["params"]["headers"]["X-Other"] = "[secret OTHER]"


def _moved_redaction(data: Any) -> None:
    data["params"]["headers"]["X-Copy"] = "Bearer [redacted]"


def _mail(data: Any) -> Any:
    return {"method": "send_email", "params": {"to": "a@evil.example", "message": "x"}}


def _bad_header(data: Any) -> None:
    data["params"]["headers"]["X-Plain"] = "a\r\nb"


def _bad_method(data: Any) -> None:
    data["method"] = "pots"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_to_another_host, "another kind of call"),
        (_to_another_port, "another kind of call"),
        (_another_secret, "OTHER"),
        (_moved_redaction, "[redacted]"),
        (_mail, "another kind of call"),
        (_bad_header, "line break"),
        (_bad_method, "another kind of call"),
        (lambda data: [1], "call_data"),
    ],
)
def test_an_edit_is_refused_where_it_would_leak_or_send_would_refuse(
    with_secret: None, root: Client, change: Callable[[Any], Any], why: str
) -> None:
    call = secretive()
    response = edit(root, call, change)
    assert response.status_code == 400
    assert why in text_of(response)
    fresh = CallQueue.objects.get(pk=call.pk)
    assert (fresh.status, fresh.call_data) == (Status.FAILED, call.call_data)
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 5000,
        '"x"',
        '{"a":' * 300 + "1" + "}" * 300,
        '{"method": ["get"], "params": {}}',
    ],
)
def test_what_is_not_a_request_is_refused_with_the_text_kept(
    with_secret: None, root: Client, text: str
) -> None:
    call = secretive()
    response = root.post(
        reverse("admin:callqueue_callqueue_edit", args=[call.pk]), {"call_data": text}
    )
    assert response.status_code == 400
    assert response.context["text"] == text


# What says where a call goes or what it runs stays, whether or not anything in it is hidden.
OPEN_CALLS: dict[str, dict[str, Any]] = {
    "get": {"url": "https://vendor.example/v1", "params": {"page": 1}},
    "send_email": {
        "to": ["a@shop.example"],
        "subject": "Paid",
        "message": "Thanks",
        "from_email": "shop@shop.example",
    },
    "celery_task": {
        "name": "shop.tasks.ship",
        "args": [1],
        "kwargs": {"fast": True},
        "options": {"task_id": "t-1"},
    },
    "django_task": {
        "path": "shop.tasks.ship",
        "args": [1],
        "kwargs": {},
        "queue_name": "default",
        "backend": "default",
    },
}


def stored(method: str, params: Any) -> CallQueue:
    """A call that has failed, as any code may have written it."""
    data = {"method": method, "params": params}
    return CallQueue.objects.create(
        call_data=data, method=method, status=Status.FAILED, finished_at_dt=timezone.now()
    )


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda data: data["params"].__setitem__(name, value)


@pytest.mark.parametrize(
    ("method", "change"),
    [
        (
            "get",
            lambda data: {
                "method": "celery_task",
                "params": {"name": "accounts.make_superuser", "args": [1]},
            },
        ),
        (
            "get",
            lambda data: {
                "method": "send_email",
                "params": {"to": ["x@y.example"], "message": "m"},
            },
        ),
        ("get", lambda data: {"method": "delete", "params": data["params"]}),
        ("get", put("url", "https://evil.example/v1")),
        ("get", put("url", "http://vendor.example/v1")),
        ("get", put("url", "https://vendor.example:8443/v1")),
        ("get", put("url", "https://vendor.example.evil.example/v1")),
        ("get", put("url", "https://vendor.example\\@evil.example/v1")),
        ("get", put("url", "https://vendor.example[/v1")),
        ("get", put("url", "https://[vendor.example/v1")),
        ("get", put("url", {"$secret": "KEY"})),
        ("send_email", put("to", ["x@y.example"])),
        ("send_email", put("to", "a@shop.example")),
        ("send_email", put("from_email", "ceo@bank.example")),
        ("send_email", put("bcc", ["x@y.example"])),
        ("send_email", put("cc", ["x@y.example"])),
        ("send_email", put("reply_to", ["x@y.example"])),
        ("celery_task", put("name", "accounts.make_superuser")),
        ("celery_task", put("options", {"link": [{"task": "accounts.make_superuser"}]})),
        (
            "celery_task",
            lambda data: {
                "method": "django_task",
                "params": {**data["params"], "path": "os.system"},
            },
        ),
        ("django_task", put("path", "os.system")),
        ("django_task", put("backend", "other")),
        ("django_task", put("queue_name", "other")),
    ],
)
def test_an_edit_never_makes_another_kind_of_call(
    rules: Rules, root: Client, method: str, change: Callable[[Any], Any]
) -> None:
    rules({"SECRETS": {"KEY": "v4lue"}}, default=Rule())
    call = stored(method, OPEN_CALLS[method])
    response = edit(root, call, change)
    assert response.status_code == 400
    assert "another kind of call" in text_of(response)
    fresh = CallQueue.objects.get(pk=call.pk)
    assert (fresh.status, fresh.call_data) == (Status.FAILED, call.call_data)
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize(
    ("method", "name", "value", "path"),
    [
        ("get", "url", "https://vendor.example/v2?page=2", "params.url"),
        ("get", "params", {"page": True}, "params.params.page"),
        ("get", "json", {"a": 1}, "params.json"),
        ("send_email", "message", "Many thanks", "params.message"),
        ("celery_task", "args", [2], "params.args[0]"),
        ("celery_task", "kwargs", {"fast": 1}, "params.kwargs.fast"),
        ("django_task", "args", [2, 3], "params.args"),
    ],
)
def test_the_rest_of_a_call_may_be_edited_and_the_log_names_its_path(
    rules: Rules, root: Client, method: str, name: str, value: Any, path: str
) -> None:
    rules(default=Rule())
    call = stored(method, OPEN_CALLS[method])
    edit(root, call, put(name, value))
    fresh = CallQueue.objects.get(pk=call.pk)
    assert fresh.status == Status.NEW
    assert json.dumps(fresh.call_data["params"][name]) == json.dumps(value), "1 is not True"
    assert fresh.idempotency_key != call.idempotency_key
    assert (
        LogEntry.objects.get().change_message
        == f"Edited and requeued; it was failed. Changed: {path}."
    )


PAIRS = [
    ["user", "bob"],
    ["password", "hunter2-real"],
    ["tag", "a"],
    ["tag", "b"],
    ["token", "t0k-1"],
    ["token", "t0k-2"],
]


@pytest.mark.parametrize("place", ["data", "params"])
@pytest.mark.parametrize(
    "change",
    [
        lambda pairs: [["comment" if name == "password" else name, value] for name, value in pairs],
        lambda pairs: [[value, name] for name, value in pairs],
        lambda pairs: [["user", "[redacted]"], ["password", "bob"], *pairs[2:]],
        lambda pairs: [pairs[0], *pairs[2:], ["tag", "[redacted]"]],
        lambda pairs: pairs[:5],  # one token fewer: which of the two it is, nobody can say
        lambda pairs: [*pairs, ["token", "[redacted]"]],
        lambda pairs: dict(pairs),
        lambda pairs: {**{name: "x" for name, _ in pairs}, "comment": "[redacted]"},
        lambda pairs: [["user", ["[redacted]"]], *pairs[1:]],
    ],
)
def test_no_renaming_and_no_other_order_of_pairs_shows_what_was_hidden(
    rules: Rules, root: Client, place: str, change: Callable[[Any], Any]
) -> None:
    rules(default=Rule())
    call = stored("post", {"url": "https://vendor.example/", place: PAIRS})
    response = edit(root, call, lambda data: put(place, change(data["params"][place]))(data))
    assert response.status_code == 400
    assert "[redacted]" in text_of(response)
    assert CallQueue.objects.get(pk=call.pk).call_data == call.call_data
    for hidden in ("hunter2-real", "t0k-1", "t0k-2"):
        assert hidden not in text_of(response) + text_of(root.get(page_of(call)))


def test_pairs_in_another_order_keep_their_own_values(rules: Rules, root: Client) -> None:
    rules(default=Rule())
    call = stored("post", {"url": "https://vendor.example/", "data": PAIRS})

    def change(data: Any) -> None:
        pairs = data["params"]["data"]
        data["params"]["data"] = [pairs[4], pairs[1], ["user", "eve"], pairs[5], ["new", "1"]]

    assert "edited and requeued" in text_of(edit(root, call, change))
    expected = [
        ["token", "t0k-1"],
        ["password", "hunter2-real"],
        ["user", "eve"],
        ["token", "t0k-2"],
        ["new", "1"],
    ]
    assert CallQueue.objects.get(pk=call.pk).call_data["params"]["data"] == expected


def test_items_of_a_list_keep_what_was_hidden_in_them_wherever_they_are_put(
    rules: Rules, root: Client
) -> None:
    rules(default=Rule())
    items = [{"user": name, "password": f"of-{name}"} for name in ("ann", "bob", "eve")]
    call = stored("post", {"url": "https://vendor.example/", "json": items})
    edit(root, call, lambda data: data["params"]["json"].reverse())
    assert CallQueue.objects.get(pk=call.pk).call_data["params"]["json"] == items[::-1]
    CallQueue.objects.filter(pk=call.pk).update(status=Status.FAILED)
    edit(root, call, lambda data: data["params"]["json"].__delitem__(0))
    assert CallQueue.objects.get(pk=call.pk).call_data["params"]["json"] == items[1::-1]
    CallQueue.objects.filter(pk=call.pk).update(status=Status.FAILED)
    refused = edit(
        root,
        call,
        lambda data: data["params"].__setitem__(
            "json", [{"user": "zoe", "password": "[redacted]"}]
        ),
    )
    assert refused.status_code == 400, "whose password that is, nobody can say"


def test_what_only_a_handler_understands_is_not_edited_where_something_is_hidden(
    rules: Rules, root: Client
) -> None:
    rules({"HANDLERS": {"sms": f"{__name__}.page_of"}}, default=Rule())
    call = stored("sms", {"to": "+49", "token": "t0k-1"})
    refused = edit(root, call, put("to", "+1"))
    assert refused.status_code == 400
    assert "only its handler knows" in text_of(refused)
    edit(root, stored("sms", {"to": "+49"}), put("to", "+1"))
    assert CallQueue.objects.new().get().call_data["params"] == {"to": "+1"}


def test_the_log_of_an_edit_is_short_and_holds_no_value(rules: Rules, root: Client) -> None:
    rules(default=Rule())
    body = {f"name{i}\n\x1b[2J": f"v4lue-{i}" for i in range(30)} | {"n" * 500: "v4lue"}
    call = stored("post", {"url": "https://vendor.example/", "json": body})
    edit(root, call, lambda data: put("json", dict.fromkeys(body, "0ther"))(data))
    said = LogEntry.objects.get().change_message
    assert said.isprintable()
    assert len(said) < 3000
    assert "v4lue" not in said
    assert "0ther" not in said


def test_a_begun_call_cannot_be_edited(with_secret: None, root: Client) -> None:
    call = secretive()
    CallQueue.objects.filter(pk=call.pk).update(status=Status.DISPATCHED)
    path = reverse("admin:callqueue_callqueue_edit", args=[call.pk])
    assert "cannot be edited" in text_of(root.get(path, follow=True))


# --- the dashboard


def test_the_dashboard_shows_where_every_rule_stands(rules: Rules, root: Client) -> None:
    rules(
        pay=Rule(queues="egress", limits=[SlidingWindow("10/h", name="account"), Concurrency(4)]),
        chat=Rule(limits=[SlidingWindow("2/h", per="key")]),
        daily=Rule(limits=[FixedWindow("100/d")]),
    )
    for _ in range(3):
        send("pay")
    for key in ("a", "a", "a", "a", "b"):
        send("chat", key=key)
    release()
    response = root.get(reverse(DASHBOARD))
    text = text_of(response)
    rows = {row.rule.name: row for row in response.context["rows"]}
    assert (rows["pay"].rule.waiting, rows["pay"].rule.in_flight) == (0, 3)
    assert [(limit.name, limit.used, limit.free) for limit, *_ in rows["pay"].limits] == [
        ("account", 3, 7),
        ("Concurrency 4", 3, 1),
    ]
    assert rows["chat"].rule.waiting == 2
    assert [(key.key, key.waiting, key.in_flight) for key, *_ in rows["chat"].keys] == [("a", 2, 2)]
    assert [(limit.used, limit.free) for limit, *_ in rows["chat"].limits] == [(2, 0)]
    for shown in ("<svg", "egress", "account", 'aria-label="Calls per minute', "percent used"):
        assert shown in text
    assert "<script>" not in text.partition('id="content-main"')[2]
    assert " style=" not in text.partition('id="content-main"')[2]


def test_the_last_hour_is_counted_by_minute(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    for status, minutes in (
        (Status.DONE, 0),
        (Status.DONE, 5),
        (Status.FAILED, 5),
        (Status.UNKNOWN, 5),
        (Status.DONE, 90),
    ):
        call = ended(status, rule="pay")
        CallQueue.objects.filter(pk=call.pk).update(
            finished_at_dt=timezone.now() - timedelta(minutes=minutes)
        )
    for _ in range(2):  # the second time from the cache
        row = looked_at(root, "pay", lambda row: row.plot)
        assert (row.plot.total_done, row.plot.total_failed, row.plot.top) == (2, 2, 3)


def looked_at(client: Client, rule: str, plot_of: Callable[[Any], Any]) -> Any:
    """The rule's row once its plot is counted: a look counts no more than it has time for."""
    for _ in range(200):
        (row,) = (
            row for row in client.get(reverse(DASHBOARD)).context["rows"] if row.rule.name == rule
        )
        if "cq-bar-unknown" not in plot_of(row).drawn:
            return row
    raise AssertionError("200 looks did not count an hour")


def test_the_last_hour_of_a_key_is_counted_by_attempts(rules: Rules, root: Client) -> None:
    """Whatever a call costs, it is one attempt; and another key's attempts are not counted."""
    rules(chat=Rule(limits=[SlidingWindow("100/h", per="key")]))
    for key, outcome, minutes in (
        ("a", "succeeded", 0),
        ("a", "failed", 5),
        ("a", "succeeded", 5),
        ("a", "succeeded", 90),
    ):
        answered(key, outcome, timedelta(minutes=minutes))
    answered("b", "failed", timedelta())
    for _ in range(2):
        send("chat", key="a")
    for _ in range(2):  # the second time from the cache
        row = looked_at(root, "chat", lambda row: row.keys[0][1])
        ((key, plot, ((limit, _, trace),)),) = row.keys
        assert (key.key, plot.total_done, plot.total_failed, plot.top) == ("a", 2, 1, 2)
        assert limit.used == 9
        assert trace.lines


def answered(key: str, outcome: str, ago: timedelta) -> None:
    ended_at = timezone.now() - ago
    CallAttempt.objects.create(
        call=ended(Status.DONE, rule="chat"), number=2, rule="chat", key=key, queue="celery", calls=3, cost=3, outcome=outcome,
        released_at=ended_at, started_at=ended_at, sent_at=ended_at, finished_at=ended_at,
    )  # fmt: skip


def test_the_live_part_holds_every_rule(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    text = text_of(root.get(reverse("admin:callqueue_dashboard_live")))
    assert 'data-live="rule-pay"' in text
    assert "<html" not in text


def test_the_dashboard_is_linked_from_the_list_and_the_index(rules: Rules, root: Client) -> None:
    for path in (reverse(CHANGELIST), reverse("admin:app_list", args=["callqueue"])):
        assert reverse(DASHBOARD) in text_of(root.get(path))


def act(client: Client, **fields: str) -> str:
    return text_of(client.post(reverse(DASHBOARD), fields, follow=True))


def test_a_rule_is_paused_and_resumed(rules: Rules) -> None:
    rules(pay=Rule())
    operator = log_in("view_callqueue", "view_hold", "control_rule")
    assert "Paused until" in act(
        operator, do="pause", rule="pay", **{"for": "10m"}, reason="maintenance"
    )
    hold = Hold.objects.get()
    assert hold.reason == "maintenance"
    assert timedelta(minutes=9) < hold.until - timezone.now() <= timedelta(minutes=10)
    assert "maintenance" in text_of(operator.get(reverse(DASHBOARD)))
    assert "1 hold ended" in act(operator, do="resume", rule="pay")
    assert not Hold.objects.exists()
    assert [entry.object_id for entry in LogEntry.objects.all()] == ["pay", "pay"]


def test_a_rule_is_held_until_an_instant_or_until_it_is_resumed(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    act(root, do="pause", rule="pay", until="2199-01-31T12:00")
    assert Hold.objects.get().until.year == 2199
    act(root, do="pause", rule="pay")
    assert Hold.objects.get().until is None


def test_one_key_is_paused(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    act(root, do="pause", rule="pay", key="tenant-1")
    hold = Hold.objects.get()
    assert (hold.per, hold.value) == ("key", "tenant-1")


def test_a_changed_limit_is_told_what_it_would_do_before_it_is_saved(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100/h")]), ship=Rule())
    for _ in range(250):
        send("pay")
    operator = log_in("view_callqueue", "control_rule")
    limit = {"do": "limit", "rule": "pay", "limit": "pay#0"}
    asked = operator.post(reverse(DASHBOARD), {**limit, "rate": "1000/h"})
    assert (asked.context["drain_before"], asked.context["drain_after"]) == ("2 hours", "0 seconds")
    assert not RuleState.objects.exclude(rates={}).exists()
    assert "changed to 1000/h" in act(operator, **limit, rate="1000/h", confirm="yes")
    (row, *_) = operator.get(reverse(DASHBOARD)).context["rows"]
    assert (row.rule.limits[0].rate, row.rule.limits[0].configured) == ("1000/h", "100/h")
    assert "changed from 100/h" in text_of(operator.get(reverse(DASHBOARD)))
    act(operator, **limit, rate="", confirm="yes")
    (row, *_) = operator.get(reverse(DASHBOARD)).context["rows"]
    assert row.rule.limits[0].rate == "100/h"
    assert LogEntry.objects.count() == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"do": "pause", "rule": "nope"},
        {"do": "pause", "rule": "pay", "for": "soon"},
        {"do": "pause", "rule": "pay", "for": "10m", "until": "2199-01-01T00:00"},
        {"do": "pause", "rule": "pay", "until": "yesterday"},
        {"do": "pause", "rule": "pay", "until": "2001-01-01T00:00"},
        {"do": "pause", "rule": "pay", "until": "2199-99-99T00:00"},
        {"do": "resume", "rule": "nope"},
        {"do": "limit", "rule": "pay", "limit": "nope", "rate": "5/s"},
        {"do": "limit", "rule": "pay", "limit": "pay#0", "rate": "ten/s"},
        {"do": "limit", "rule": "pay", "limit": "pay#0", "rate": "ten/s", "confirm": "yes"},
        {"do": "limit", "rule": "nope", "limit": "pay#0", "rate": "5/s"},
        {"do": "explode", "rule": "pay"},
        {},
    ],
)
def test_what_makes_no_sense_changes_nothing_and_says_why(
    rules: Rules, root: Client, fields: dict[str, str]
) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100/h")]))
    assert re.search("Nothing was (changed|done)", act(root, **fields))
    assert not Hold.objects.exists()
    assert not RuleState.objects.exclude(rates={}).exists()
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("rule=pay&calls=250&latency=0.2&keys=1", "2 hours"),
        ("rule=pay&calls=50&latency=0.2&keys=1", "none"),
        ("rule=pay", "Work it out"),
        ("rule=pay&calls=0&latency=0.2&keys=1", "greater than or equal to 1"),
        ("rule=nope&calls=5&latency=0.2&keys=1", "not one of the available choices"),
        ("rule=pay&calls=x&latency=nan&keys=", "errorlist"),
        ("rule=pay&calls=100000&latency=0.2&keys=1", "less than or equal to 20000"),
        ("rule=many&calls=5001&latency=0.2&keys=1", "At most 5000 are followed here"),
        ("rule=many&calls=5000&latency=0.2&keys=20000", "Take"),
    ],
)
def test_what_if(rules: Rules, asked: str, said: str) -> None:
    four = [
        FixedWindow("1/s"),
        SlidingWindow("5/m", per="key"),
        TokenBucket("3/s", burst=2, per="key"),
        Concurrency(2),
    ]
    rules(pay=Rule(limits=[SlidingWindow("100/h")]), many=Rule(limits=four))
    response = log_in("view_callqueue").get(f"{reverse('admin:callqueue_simulate')}?{asked}")
    assert response.status_code == 200
    assert said in text_of(response)
    assert log_in().get(reverse("admin:callqueue_simulate")).status_code == 403


# --- the rest


def test_the_row_of_the_clocks_jumps_is_no_rule(rules: Rules, root: Client) -> None:
    RuleState.objects.get_or_create(rule=clock_jumps.FRAME)
    response = root.get(reverse("admin:callqueue_rulestate_changelist"))
    assert response.status_code == 200
    assert clock_jumps.FRAME not in {state.rule for state in response.context["cl"].result_list}


def test_holds_rules_and_attempts_can_only_be_looked_at(rules: Rules, root: Client) -> None:
    call = send()
    release()
    hold = Hold.objects.create(rule="pay", reason="because")
    pages = [("hold", hold.pk), ("rulestate", "default"), ("callattempt", call.attempts.get().pk)]
    for model, pk in pages:
        assert root.get(reverse(f"admin:callqueue_{model}_changelist")).status_code == 200
        page = reverse(f"admin:callqueue_{model}_change", args=[pk])
        assert root.get(page).status_code == 200
        assert root.post(page, {}).status_code == 403
        assert root.get(reverse(f"admin:callqueue_{model}_add")).status_code == 403
        assert (
            root.post(
                reverse(f"admin:callqueue_{model}_delete", args=[pk]), {"post": "yes"}
            ).status_code
            == 403
        )
