"""The testing kit: run the queue in this process, answer for the APIs, say what time it is, and see
what was sent.

`run_callqueue` releases and makes calls without a broker, inside a test's transaction too.
`fake_transport` answers in place of the network, `travel` shifts the clock, `assert_call_sent` and
`calls_sent` look at what the code under test sent, and at the permits that it took.
Async tests await `arun_callqueue`, and the others through `sync_to_async`. Where there is pytest,
this package is a plugin of it (see callqueue.testing.plugin).

pytest imports the package when it starts, before Django's settings are known. So its modules import
Django, Celery, requests and what needs them inside their functions.
"""

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

if find_spec("pytest"):
    # pytest finds fixtures by their names in the module that it was told of, which is this one.
    from callqueue.testing.plugin import callqueue_clock as callqueue_clock
    from callqueue.testing.plugin import callqueue_sent as callqueue_sent
    from callqueue.testing.plugin import callqueue_transport as callqueue_transport

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
