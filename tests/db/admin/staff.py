"""Staff in the admin: logging in, pages, actions, and calls as they might be."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt, CallQueue
from tests.support.behaviour import send

Rules = Callable[..., None]
Status = CallQueue.Status

CHANGELIST = "admin:callqueue_callqueue_changelist"

DASHBOARD = "admin:callqueue_dashboard"


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


def text_of(response: Any) -> str:
    return str(response.content.decode())


def wait(rule: str, count: int = 1, seconds: float = 0) -> None:
    """So many calls that have been due for so long."""
    due = timezone.now() - timedelta(seconds=seconds)
    CallQueue.objects.bulk_create(
        [CallQueue(rule=rule, due_at_dt=due, call_data={}) for _ in range(count)]
    )
    CallQueue.objects.waiting().filter(rule=rule).update(ready=True)


def ended(status: int, **fields: Any) -> CallQueue:
    """A call in a final state, as if it had been made."""
    call = send(**{name: fields.pop(name) for name in ("rule", "path", "key") if name in fields})
    CallQueue.objects.filter(pk=call.pk).update(
        status=status, ready=False, finished_at_dt=timezone.now(), **fields
    )
    return CallQueue.objects.get(pk=call.pk)


def page_of(call: CallQueue) -> str:
    return reverse("admin:callqueue_callqueue_change", args=[call.pk])


def ask(client: Client, action: str, *calls: CallQueue, **more: Any) -> Any:
    """Choose an action: the page that asks."""
    data = {"action": action, "_selected_action": [call.pk for call in calls], **more}
    return client.post(reverse(CHANGELIST), data, follow=True)


def do(client: Client, action: str, *calls: CallQueue, **more: Any) -> Any:
    """Choose an action and confirm it."""
    return ask(client, action, *calls, **{"confirm": "all", **more})


def answer(client: Client, asked: Any, **more: str) -> Any:
    """Send the form of a page that asks by its first button; `more` is filled in."""
    text = text_of(asked).partition('<div id="content-main"')[2]
    fields: dict[str, Any] = {}
    for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', text):
        fields.setdefault(name, []).append(value)
    fields |= dict(re.findall(r'<button type="submit" name="(\w+)" value="(\w+)"', text)[:1])
    to = re.search(r'<form method="post" action="([^"]+)"', text)
    assert to and "until" in fields, "there is no form"
    return client.post(html.unescape(to[1]), {**fields, **more}, follow=True)


def attempt(call: CallQueue, number: int = 1, **fields: Any) -> CallAttempt:
    now = ledger_time.now("default")
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


def edit(client: Client, call: CallQueue, change: Callable[[Any], Any], **more: Any) -> Any:
    """Take the text that the form shows, change it, send it back."""
    path = reverse("admin:callqueue_callqueue_edit", args=[call.pk])
    shown = client.get(path).context["text"]
    data = json.loads(shown)
    return client.post(path, {"call_data": json.dumps(change(data) or data), **more}, follow=True)


def act(client: Client, **fields: str) -> str:
    return text_of(client.post(reverse(DASHBOARD), fields, follow=True))
