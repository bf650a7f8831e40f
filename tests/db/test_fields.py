"""Columns that are encrypted at rest, from send to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from callqueue import Rule
from callqueue.execution import executor
from callqueue.models import CallAttempt, CallQueue
from tests.support.behaviour import Vendor, release, send

Rules = Callable[..., None]
Status = CallQueue.Status


def fresh(call: CallQueue) -> CallQueue:
    return CallQueue.objects.get(pk=call.pk)


def test_encrypted_calls_are_made_and_unreadable_ones_fail_by_themselves(
    rules: Rules, remote: Vendor, settings: Any
) -> None:
    from cryptography.fernet import Fernet
    from django.db import connection

    key, other = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    rules({"ENCRYPTION_KEYS": [key]}, r=Rule())
    first, second = send("r", "/first-path"), send("r", "/second-path")
    remote.answers["/first-path"] = (200, {}, b"private answer")
    with connection.cursor() as cursor:
        cursor.execute("SELECT call_data FROM callqueue_callqueue")
        assert "first-path" not in str(cursor.fetchall())
    CallQueue.objects.filter(pk=second.pk).update(priority=-1)
    release()
    ids = list(CallAttempt.objects.order_by("pk").values_list("pk", flat=True))
    executor.execute("default", ids[:1])
    assert fresh(first).status == Status.DONE
    with connection.cursor() as cursor:
        cursor.execute("SELECT response_body FROM callqueue_callattempt")
        assert "private" not in str(cursor.fetchall())
    assert fresh(first).attempts.get().response_body == "private answer"
    rules({"ENCRYPTION_KEYS": [other]}, r=Rule())
    executor.execute("default", ids[1:])
    assert fresh(second).status == Status.FAILED
    assert "ENCRYPTION_KEYS" in fresh(second).error_message
