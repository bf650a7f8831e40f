"""The admin as an attacker sees it. Addresses come from the resolver: a new view is attacked too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.apps import apps
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import get_resolver
from django.utils import timezone

from callqueue.models import CallAttempt, CallQueue, Hold, RuleState, SettingsState

RULE = "<path:name>"
OBJECT = "<path:object_id>"
# The page of a rule, which its query names, and the two of Django's that show its calls.
OTHERS = [
    "admin/callqueue/callqueue/dashboard/rule/?name=default",
    "admin/callqueue/",
    "admin/autocomplete/?app_label=callqueue&model_name=callattempt&field_name=call&term=",
]


@dataclass(frozen=True)
class Address:
    """An address of the app's admin; `model` is whose number stands in it, "" where there is none."""

    route: str
    model: str

    def of(self, pk: Any) -> str:
        return "/" + self.route.replace(OBJECT, str(pk)).replace(RULE, "default")


def addresses() -> list[Address]:
    """Every address that one of the app's admin classes answers, and OTHERS."""
    own = [route for route in _routes(get_resolver()) if route.startswith("admin/callqueue/")]
    found = [Address(route, route.split("/")[2] if OBJECT in route else "") for route in own]
    return [*found, *(Address(route, "") for route in OTHERS)]


def _routes(resolver: Any, before: str = "") -> Iterator[str]:
    for pattern in resolver.url_patterns:
        route = before + str(pattern.pattern)
        yield from _routes(pattern, route) if hasattr(pattern, "url_patterns") else [route]


def admins() -> list[admin.ModelAdmin]:  # type: ignore[type-arg]
    """The registered admin classes of the app."""
    return [
        made for model, made in admin.site._registry.items() if model._meta.app_label == "callqueue"
    ]


# --- who comes


def permissions() -> list[str]:
    """The codename of every permission of the app."""
    own = Permission.objects.filter(content_type__app_label="callqueue")
    return list(own.order_by("pk").values_list("codename", flat=True))


def someone(*codenames: str, **fields: Any) -> Client:
    """A client of a member of staff with these permissions of the app and no other."""
    user = User.objects.create_user(
        f"user{User.objects.count()}", password="x", **{"is_staff": True, **fields}
    )
    wanted = Permission.objects.filter(content_type__app_label="callqueue", codename__in=codenames)
    assert len(wanted) == len(set(codenames))
    user.user_permissions.set(wanted)
    client = Client()
    client.force_login(user)
    return client


def viewer() -> Client:
    """Someone who may see everything and do nothing."""
    return someone(*(f"view_{model._meta.model_name}" for model in apps.get_app_config("callqueue").get_models()
                     if "view" in model._meta.default_permissions))  # fmt: skip


# --- what is there, and what was done to it


@dataclass(frozen=True)
class Scene:
    """One row of everything: a call that failed, one that waits, an attempt, a hold."""

    failed: CallQueue
    waiting: CallQueue
    attempt: CallAttempt
    hold: Hold

    def pks(self, model: str) -> list[Any]:
        calls = [self.failed.pk, self.waiting.pk]
        one = {"callattempt": self.attempt.pk, "hold": self.hold.pk}
        return calls if model == "callqueue" else [one[model]] if model else [""]

    def paths(self, listed: list[Address]) -> list[str]:
        """The addresses with the numbers of what is there."""
        return [address.of(pk) for address in listed for pk in self.pks(address.model)]


def scene(text: str = "t", hidden: str = "h") -> Scene:
    """A scene whose every text is `text`, and whose telling places hold `hidden`."""
    common = {
        "rule": "default", "key": text, "method": "post", "host": "vendor.example", "queue": text,
        "call_data": {"method": "post", "params": telling(hidden, text)},
    }  # fmt: skip
    now = timezone.now()
    failed = CallQueue.objects.create(
        **common, status=CallQueue.Status.FAILED, finished_at_dt=now, error_message=_answer(hidden, text), unique_key=text,
        callback=text, cost={text: 1, "calls": 1},
    )  # fmt: skip
    waiting = CallQueue.objects.create(**common, ready=True, error_message=text)
    attempt = CallAttempt.objects.create(
        call=failed, number=1, rule="default", key=text, queue=text, released_at=now, sent_at=now, finished_at=now,
        outcome="failed", response_status=500, response_headers={"Set-Cookie": hidden, "X-Token": hidden, "X-Text": text},
        response_body=_answer(hidden, text), error_message=_answer(hidden, text), worker=text[:100],
    )  # fmt: skip
    until = now + timedelta(hours=1)
    hold = Hold.objects.create(rule="default", per="key", value=text, reason=text, until=until)
    held = {"reason": text, "until": until}
    Hold.objects.update_or_create(rule="default", per="rule", defaults=held)
    RuleState.objects.get_or_create(rule="default")
    user = User.objects.create_user(f"user{User.objects.count()}")
    LogEntry.objects.log_actions(user.pk, [failed, waiting], 2, text)
    return Scene(failed, waiting, attempt, hold)


def telling(hidden: str, text: str) -> dict[str, Any]:
    """Params with `hidden` wherever the admin hides a value, and `text` beside it."""
    return {
        "url": f"https://vendor.example/v1?token={hidden}&page=1",
        "headers": {"Authorization": f"Bearer {hidden}", "X-Api-Key": hidden, "X-Text": text},
        "cookies": {"anything": hidden},
        "auth": ["user", hidden],
        "params": [["key", hidden], ["text", text]],
        "json": {
            "password": hidden,
            "text": text,
            "inside": json.dumps({"pwd": hidden}),
            text: [text],
        },
    }


def _answer(hidden: str, text: str) -> str:
    return f'{text} Authorization: Bearer {hidden} {{"access_token": "{hidden}"}} https://u:{hidden}@vendor.example/?api_key={hidden}'


def state() -> dict[str, Any]:
    """All that an attack might change."""
    told = ("pk", "status", "call_data", "rule", "key", "idempotency_key")
    calls = CallQueue.objects.order_by("pk").values(*told)
    return {
        "calls": {row["pk"]: row for row in calls},
        "attempts": list(CallAttempt.objects.order_by("pk").values()),
        "holds": list(Hold.objects.order_by("pk").values()),
        "rates": list(SettingsState.objects.values_list("rates")),
        "log": LogEntry.objects.count(),
        "users": list(User.objects.order_by("pk").values_list("pk", "is_superuser", "is_staff")),
    }


def acts(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """What was done between two states, in the words of the permissions."""
    done = set()
    for pk, call in before["calls"].items():
        now = after["calls"].get(pk)
        if now is None:
            done.add("delete")
        elif now["call_data"] != call["call_data"]:
            done.add("edit")
        elif now["status"] != call["status"]:
            done.add("cancel" if now["status"] == CallQueue.Status.CANCELLED else "requeue")
        elif now != call:
            done.add("other")
    if (before["holds"], before["rates"]) != (after["holds"], after["rates"]):
        done.add("control")
    if (before["attempts"], before["users"]) != (after["attempts"], after["users"]):
        done.add("other")
    if after["log"] != before["log"] and not done:
        done.add("log")
    return done
