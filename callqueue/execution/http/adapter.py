"""The adapter of a thread's requests session, and the connections that it keeps for a moment.

A target, a policy and a deadline enter; requests asks the adapter to send, and gets a response
whose body is still to be read. Never keeps a cookie, never retries, and never gives a connection to
a call that would not have been let through to it.
"""

from __future__ import annotations

import os
import ssl
import threading
import weakref
from functools import lru_cache
from typing import Any, NamedTuple

import requests
from requests.adapters import HTTPAdapter
from requests.utils import DEFAULT_CA_BUNDLE_PATH
from urllib3.response import BaseHTTPResponse
from urllib3.util.ssl_ import create_urllib3_context

from callqueue.execution.http.connection import IDLE_SECONDS, Connection, SecureConnection
from callqueue.execution.http.deadline import Deadline, now
from callqueue.execution.http.errors import Failed, starved
from callqueue.execution.http.policy import Policy
from callqueue.execution.http.target import Target

IDLE_CONNECTIONS = 16
_thread = threading.local()


def this_thread() -> tuple[requests.Session, Adapter]:
    """The session and the adapter of this thread. A test may have put in another adapter."""
    try:
        return _thread.session, _thread.adapter
    except AttributeError:
        session, adapter = requests.Session(), Adapter()
        session.trust_env = False
        session.mount("http://", adapter)
        session.mount("https://", adapter)
        weakref.finalize(adapter, _close_all, adapter.idle)  # the thread has ended
        _thread.session, _thread.adapter = session, adapter
        return session, adapter


def close_idle() -> None:
    """Close the connections that this thread keeps."""
    adapter = getattr(_thread, "adapter", None)
    if adapter is not None:
        _close_all(adapter.idle)


class _Place(NamedTuple):
    """What a connection was let through to, and as whom it trusts the other side."""

    target: Target
    verify: bool | str
    allowed_networks: tuple[str, ...]


class Adapter(HTTPAdapter):
    """A requests adapter that sends by our connections, and keeps them for a moment.

    A connection is kept for calls to the same place under the same verify and allowed networks, so
    whoever reuses it would have been let through to its address too.
    """

    deadline: Deadline
    connection: Connection | None = None
    _place: _Place

    def __init__(self) -> None:
        super().__init__(max_retries=0)
        self.idle: dict[_Place, Connection] = {}

    def enter(self, target: Target, policy: Policy, deadline: Deadline) -> None:
        """What is sent next goes there, under this policy, and has this deadline."""
        self.deadline = deadline
        self._place = _Place(target, policy.verify, policy.allowed_networks)

    def get_connection_with_tls_context(self, *_: Any, **__: Any) -> Any:
        return self

    def cert_verify(self, *_: Any, **__: Any) -> None:
        """The connection's own context verifies."""

    def request_url(self, request: requests.PreparedRequest, proxies: Any) -> str:
        return request.path_url

    def urlopen(
        self, method: str, url: str, body: Any = None, headers: Any = None, **_: Any
    ) -> BaseHTTPResponse:
        """What requests asks of a pool: send, and come back with the head of the answer."""
        connection = self.connection = self._take()
        connection.deadline = self.deadline
        connection.compose(method, url, body, headers)
        connection.depart()
        return connection.arrive()

    def _take(self) -> Connection:
        at = now()
        for place, kept in list(self.idle.items()):
            if at - kept.idle_since > IDLE_SECONDS:
                self.idle.pop(place).close()
        connection = self.idle.pop(self._place, None)
        if connection is not None and not connection.is_stale():
            return connection
        if connection is not None:
            connection.close()
        return self._new()

    def _new(self) -> Connection:
        target, verify, networks = self._place
        connection = (
            SecureConnection(target.host, target.port, ssl_context=_context(verify))
            if target.scheme == "https"
            else Connection(target.host, target.port)
        )
        connection.allowed_networks = networks
        return connection

    def keep(self, response: requests.Response) -> None:
        """Keep the connection for the next call, where nothing of this one is left in it."""
        connection = self.connection
        if connection is None or not connection.is_reusable() or not response.raw.isclosed():
            return
        self.connection = None
        connection.rest()
        self.idle[self._place] = connection
        if len(self.idle) > IDLE_CONNECTIONS:
            self.idle.pop(next(iter(self.idle))).close()

    def leave(self) -> None:
        """Close what was not kept, so that nothing of it arrives any more, and forget the call."""
        del self.deadline
        if self.connection is not None:
            self.connection.abandon()
            self.connection = None

    def close(self) -> None:
        _close_all(self.idle)
        super().close()


def _close_all(idle: dict[_Place, Connection]) -> None:
    while idle:
        idle.popitem()[1].close()


@lru_cache(maxsize=64)
def _context(verify: bool | str) -> ssl.SSLContext:
    """One per set of trusted certificates: reading them takes longer than a call."""
    context = create_urllib3_context()
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    where = DEFAULT_CA_BUNDLE_PATH if verify is True else verify
    try:
        context.load_verify_locations(**{"capath" if os.path.isdir(where) else "cafile": where})
    except OSError as error:
        if want := starved(error):
            raise want from None
        raise Failed(
            f"the certificates to trust cannot be read from {where}: {error.strerror or error}"
        ) from None
    return context


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=close_idle)  # the parent's connections are the parent's
