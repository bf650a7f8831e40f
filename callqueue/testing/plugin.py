"""The testing kit's fixtures, which pytest finds by the entry point `callqueue.testing`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from callqueue.testing.clock import Clock, travel
from callqueue.testing.sent import Sent
from callqueue.testing.transport import FakeTransport, fake_transport


@pytest.fixture
def callqueue_sent(db: None) -> Sent:
    """The calls that the test has sent so far: a sequence, with `assert_call_sent`, `last`."""
    return Sent()


@pytest.fixture
def callqueue_transport() -> Iterator[FakeTransport]:
    """No call reaches the network; `add("https://api.example.com/*", {"ok": True})` answers."""
    with fake_transport() as transport:
        yield transport


@pytest.fixture
def callqueue_clock() -> Iterator[Clock]:
    """The queue's clock: `callqueue_clock.forward(hours=1)`. Put right after the test."""
    with travel() as clock:
        yield clock
