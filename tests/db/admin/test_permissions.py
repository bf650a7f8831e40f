"""Who may see and do what in the admin."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

from django.urls import reverse

from callqueue import Rule, SlidingWindow
from callqueue.admin.rule_actions import rule_url
from callqueue.ledger import ledger_time
from callqueue.models import CallQueue, Hold
from tests.db.admin.staff import CHANGELIST, DASHBOARD, act, ended, log_in, page_of, text_of
from tests.support.behaviour import send

Rules = Callable[..., None]
Status = CallQueue.Status


def test_staff_who_may_only_view_are_offered_nothing(rules: Rules) -> None:
    """That they can do nothing, whatever they send, is tried at every address in tests/attacks."""
    viewer, failed = log_in("view_callqueue"), ended(Status.FAILED)
    for path in (reverse(CHANGELIST), page_of(failed), reverse(DASHBOARD)):
        main = text_of(viewer.get(path)).partition('id="content-main"')[2]
        assert not re.search(r'<form[^>]*method="post"[^>]*action="[^"]*callqueue', main)
        assert 'name="action"' not in main
    editing = reverse("admin:callqueue_callqueue_edit", args=[failed.pk])
    for permission, is_offered in (("edit_call", True), ("requeue_call", False)):
        client = log_in("view_callqueue", permission)
        assert (editing in text_of(client.get(page_of(failed)))) == is_offered


def test_why_something_is_held_and_which_keys_are_is_told_to_those_who_may_see_holds(
    rules: Rules,
) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100/h", per="key")]))
    call, other = send("pay", key="tenant-1"), send("pay")
    Hold.objects.create(rule="pay", reason="why-of-rule")
    Hold.objects.create(rule="pay", per="key", value="tenant-1", reason="why-of-key")
    soon = ledger_time.now("default") + timedelta(hours=1)
    Hold.objects.create(rule="pay", per="key", value="tenant-gone", reason="why-gone", until=soon)
    root = log_in("view_callqueue", "view_hold", "control_rule")
    pause = {"do": "pause", "rule": "pay", "how": "resumed", "confirm": "y"}
    act(root, **pause, key="tenant-2", reason="why-of-form")
    pages = [page_of(call), page_of(other), reverse(DASHBOARD), rule_url("pay")]
    told = "".join(text_of(root.get(page)) for page in pages)
    keys = {"tenant-gone", "tenant-2"}
    for hidden in {"why-of-rule", "why-of-key", "why-gone", "why-of-form", *keys}:
        assert hidden in told
    viewer = log_in("view_callqueue", "control_rule")
    told = "".join(text_of(viewer.get(page)) for page in pages)
    assert "until it is resumed" in told, "that a rule is held is no secret"
    assert not [hidden for hidden in {"why-", *keys} if hidden in told]
    history = "What was done"
    assert history in text_of(root.get(rule_url("pay")))
    assert history not in text_of(viewer.get(rule_url("pay")))
