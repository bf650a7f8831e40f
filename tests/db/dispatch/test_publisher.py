"""What a message carries, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from callqueue import Rule, broker, tasks
from callqueue.dispatch import publisher
from callqueue.dispatch.dispenser import Dispenser
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
