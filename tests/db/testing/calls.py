"""Calls for the tests of the testing kit."""

from __future__ import annotations

from typing import Any

from callqueue.models import CallQueue

URL = "https://api.example.com"


def send(
    path: str = "/pay",
    method: str = "post",
    rule: str = "default",
    json: Any = None,
    **options: Any,
) -> CallQueue:
    params = {"url": URL + path} | ({} if json is None else {"json": json})
    call = CallQueue.objects.send({"method": method, "params": params}, rule=rule, **options)
    assert call is not None
    return call


def status_of(call: CallQueue) -> int:
    return CallQueue.objects.get(pk=call.pk).status
