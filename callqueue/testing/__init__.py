"""The testing kit: run the queue here, answer for the APIs, say what time it is, see what was sent.

`run_callqueue` releases and makes calls without a broker, inside a test's transaction too.
`fake_transport` answers in place of the network, `travel` shifts the clock, `assert_call_sent` and
`calls_sent` look at what was sent. Async tests await `arun_callqueue`. Where there is pytest, this
package is a plugin of it.

pytest imports it before Django's settings are known: so its modules import Django, Celery, requests
and what needs them inside their functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from callqueue.testing.clock import Clock, travel
from callqueue.testing.run import CallbackFailed, arun_callqueue, run_callqueue
from callqueue.testing.sent import Sent, assert_call_sent, calls_sent
from callqueue.testing.transport import (
    FakeTransport,
    Request,
    UnexpectedRequest,
    answer,
    fake_transport,
)

__all__ = [
    "CallbackFailed",
    "Clock",
    "FakeTransport",
    "Request",
    "Sent",
    "UnexpectedRequest",
    "answer",
    "arun_callqueue",
    "assert_call_sent",
    "calls_sent",
    "fake_transport",
    "run_callqueue",
    "travel",
]

if find_spec("pytest"):
    import pytest

    # pytest finds fixtures by their names in the module that its entry point names: this one.
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
