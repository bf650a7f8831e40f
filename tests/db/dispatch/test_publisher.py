"""What a message carries, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from callqueue import Rule, broker, tasks
from callqueue.dispatch import publisher
from callqueue.dispatch.dispenser import Dispenser
from callqueue.models import CallQueue
from tests.celery_app import app
from tests.support.behaviour import send

Rules = Callable[..., None]
SHORT = {"LEASE": {"RELEASE": 2, "GRACE": 30}}  # seconds


def test_a_message_lasts_as_long_as_its_release_by_the_brokers_own_clock(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`expires` would be compared with the clock of a worker, which may be ten minutes off: it
    would drop all or nothing.
    """
    rules(SHORT, r=Rule())
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(
        tasks.make_api_call, "apply_async", lambda *args, **options: sent.append(options)
    )
    assert broker.send(tasks.make_api_call, ([1],), queue="q", lasts=2.0) is None
    publisher.publish("default", [("q", [1])])
    assert [(options["expiration"], options.get("expires")) for options in sent] == [
        (2.0, None)
    ] * 2


def test_the_task_of_a_message_knows_whether_it_makes_the_call_itself(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no HTTP call is made in the task: its time limits may strike, and it may use the ORM."""
    rules(r=Rule())
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(broker, "send", lambda task, args, given, **_: sent.append(given))
    send("r")
    email = {"subject": "s", "message": "b", "to": ["a@example.com"]}
    CallQueue.objects.send({"method": "send_email", "params": email}, rule="r")
    Dispenser().run_once()
    assert sorted(sent, key=len) == [{}, {"here": True}]


def test_a_broker_that_refuses_is_named_with_its_address_and_what_it_said(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rules(r=Rule())
    send("r")
    celery = app
    monkeypatch.setitem(celery.conf.changes, "broker_url", "amqp://me:secret@127.0.0.1:1//")

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError("[Errno 111] Connection refused")

    monkeypatch.setattr(broker, "send", refuse)
    with caplog.at_level("ERROR", logger="callqueue"):
        Dispenser().run_once()
    (line,) = (r.getMessage() for r in caplog.records if r.getMessage().startswith("broker_away"))
    assert "Connection refused" in line
    assert "127.0.0.1:1" in line
    assert "secret" not in line
