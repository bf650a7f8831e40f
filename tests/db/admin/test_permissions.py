"""Who may see and do what in the admin."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import timedelta

from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from callqueue import Rule, SlidingWindow
from callqueue.admin.rule_actions import rule_url
from callqueue.models import CallQueue, Hold
from tests.db.admin.staff import (
    CHANGELIST,
    DASHBOARD,
    act,
    do,
    edit,
    ended,
    log_in,
    page_of,
    text_of,
)
from tests.support.behaviour import send

Rules = Callable[..., None]
Status = CallQueue.Status


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
    root = log_in("view_callqueue", "view_hold", "control_rule")
    act(
        root,
        do="pause",
        rule="pay",
        key="tenant-2",
        reason="why-of-form",
        how="resumed",
        confirm="y",
    )
    pages = [
        page_of(call),
        page_of(other),
        reverse(DASHBOARD),
        rule_url("pay"),
    ]
    told = "".join(text_of(root.get(page)) for page in pages)
    for hidden in (
        "why-of-rule",
        "why-of-key",
        "why-gone",
        "why-of-form",
        "tenant-gone",
        "tenant-2",
    ):
        assert hidden in told
    viewer = log_in("view_callqueue", "control_rule")
    told = "".join(text_of(viewer.get(page)) for page in pages)
    assert "until it is resumed" in told, "that a rule is held is no secret"
    assert "why-" not in told
    assert "tenant-gone" not in told
    assert "tenant-2" not in told
    history = "What was done"
    assert history in text_of(root.get(rule_url("pay")))
    assert history not in text_of(viewer.get(rule_url("pay")))


def test_staff_without_permissions_see_nothing(rules: Rules) -> None:
    call = send()
    nobody = log_in()
    for path in (
        reverse(CHANGELIST),
        page_of(call),
        reverse(DASHBOARD),
        rule_url("default"),
    ):
        assert nobody.get(path).status_code == 403
    assert Client().get(reverse(DASHBOARD)).status_code == 302
