"""What a message carries, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from callqueue import Rule, broker, tasks
from callqueue.dispatch import publisher

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
    assert publisher.publish("default", [("q", [1])])
    assert [(options["expiration"], options.get("expires")) for options in sent] == [
        (2.0, None)
    ] * 2
