"""Async code, and projects with several databases: calls go where they should."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, router

from callqueue import Rule
from callqueue.exceptions import InvalidCall
from callqueue.models import CallQueue
from callqueue.security.secrets import Secret
from callqueue.testing import assert_call_sent, calls_sent, fake_transport, run_callqueue

Rules = Callable[..., None]
URL = "https://api.example.com/"
CALL = {"method": "post", "params": {"url": URL}}


def in_a_loop(work: Any) -> Any:
    """What an async server does, its thread's connections closed afterwards."""

    async def all_of_it() -> Any:
        try:
            return await work
        finally:
            await sync_to_async(connections.close_all)()

    return asyncio.run(all_of_it())


@pytest.mark.django_db(transaction=True)
def test_asend_queues_as_send_does(rules: Rules) -> None:
    rules(default=Rule(), other=Rule())
    own = {"rule": "other", "key": "k", "priority": 3, "unique_key": "u"}
    call = in_a_loop(CallQueue.objects.asend(CALL, **own))
    found = CallQueue.objects.get()
    assert found == call
    assert {name: getattr(found, name) for name in own} == own
    with pytest.raises(InvalidCall):
        in_a_loop(CallQueue.objects.asend({"method": "post", "params": {}}))
    items = [CALL, {"call_data": CALL, "key": "own"}, CALL]
    calls = in_a_loop(CallQueue.objects.asend_many(items, batch_size=1, key="k"))
    assert [call.key for call in calls] == ["k", "own", "k"]
    assert CallQueue.objects.count() == 4


class Router:
    """Another database for the app's rows."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "calls" if model._meta.app_label == "callqueue" else None

    db_for_write = db_for_read


BOTH = pytest.mark.django_db(databases=["default", "calls"])


@BOTH
def test_using_names_the_database(db_alias: str, settings: Any) -> None:
    settings.CALLQUEUE = {"RULES": {"default": Rule()}}
    call = CallQueue.objects.db_manager("calls").send(CALL)
    assert call._state.db == "calls"
    assert not CallQueue.objects.using("default").exists()
    assert_call_sent(using="calls", count=1)
    with fake_transport({URL: 204}) as transport:
        assert run_callqueue() == 0
        assert run_callqueue(using="calls") == 1
    assert len(transport.requests) == 1
    assert CallQueue.objects.using("calls").get().status == CallQueue.Status.DONE


@BOTH
def test_a_router_chooses_the_database(
    db_alias: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.CALLQUEUE = {"RULES": {"default": Rule()}}
    monkeypatch.setattr(router, "routers", [Router()])
    with calls_sent() as sent, fake_transport({URL: 204}):
        one = CallQueue.objects.send(CALL, unique_key="u")
        assert CallQueue.objects.send(CALL, unique_key="u") == one
        many = CallQueue.objects.send_many([CALL, CALL])
        assert [call._state.db for call in (one, *many)] == ["calls"] * 3
        assert not CallQueue.objects.using("default").exists()
        assert CallQueue.objects.under_threshold()
        assert many[0].forecast().position is not None
        many[1].cancel()
        assert run_callqueue(using="calls") == 2
    assert [call.get_status_display() for call in sent] == ["done", "done", "cancelled"]
    many[1].requeue()
    assert CallQueue.objects.new().get() == many[1]
    keyed = [CallQueue.objects.send(CALL, unique_key=key) for key in "ab"]
    assert CallQueue.objects.filter(unique_key__in="ab").cancel() == 2
    CallQueue.objects.send(CALL, unique_key="a")
    pks = [call.pk for call in keyed]
    assert CallQueue.objects.filter(pk__in=pks).requeue() == 1, "another carries the key of one"
    assert list(one.attempts.values_list("outcome", flat=True)) == ["succeeded"]


def test_what_a_router_changes_is_not_sent(rules: Any) -> None:
    """It is given a copy: what is stored was checked."""

    def meddling(data: Any) -> None:
        data["method"] = "\0"
        data["params"]["json"]["deep"].append("\0" * 9)
        data["params"]["headers"].clear()
        data["params"].update(url="http://10.0.0.1/", proxies={})

    params = {"url": "http://v.example/", "json": {"deep": [1]}, "headers": {"X-A": Secret("K")}}
    call_data = {"method": "post", "params": params}
    rules(more={"ROUTER": meddling, "SECRETS": {"K": "a"}})
    call = CallQueue.objects.send(call_data)
    assert call is not None
    assert CallQueue.objects.get(pk=call.pk).call_data == call_data
