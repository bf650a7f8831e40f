"""Connections to checked addresses: resolve, refuse, connect, pass the gate, send, and read within
the deadline.

A composed request enters; the head of an answer leaves, its body still to be read, or Failed with
the reason. The address that was checked is the one that is connected to. Never sends before the
gate has been passed.
"""

from __future__ import annotations

import socket
import ssl
import sys
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any, cast

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse
from urllib3.util.wait import wait_for_read, wait_for_socket, wait_for_write

from callqueue.execution.http import delivery
from callqueue.execution.http.deadline import Deadline, now
from callqueue.execution.http.errors import (
    Failed,
    Flooded,
    reason_of,
    refuse_to_compose,
    starved,
)
from callqueue.execution.http.resolver import Place, allowed_places
from callqueue.execution.http.response import BoundedReader, Head
from callqueue.execution.http.target import Target

# servers close idle connections; one that closes while a POST goes out leaves its fate unknown
IDLE_SECONDS = 1.5
_PIECE = 65536
_UNNOTICED = 0.001  # seconds in a gate that need no second look at the connection


class Connection(HTTPConnection):
    """A connection to a checked address that keeps to its request's deadline and passes its gate.

    In this order: compose (no network), depart (connect, gate, send), arrive (the head of the
    answer).
    """

    deadline: Deadline
    allowed_networks: tuple[str, ...] = ()
    is_secure = False
    idle_since = 0.0
    _is_reused = False
    _is_complete = False  # the whole request went out
    _has_peeked = False
    _sent_bytes = 0
    _outgoing: list[bytes]

    def compose(self, method: str, url: str, body: Any, headers: Mapping[str, str]) -> None:
        self._outgoing, self._sent_bytes, self._is_complete, self._has_peeked = [], 0, False, False
        try:
            self.request(method, url, body, headers, preload_content=False)
        except (HTTPException, ValueError, TypeError) as error:
            refuse_to_compose(error)
        if self._response_options is not None:  # urllib3 logs this URL where headers are malformed
            self._response_options = self._response_options._replace(
                request_url=url.partition("?")[0]
            )

    def send(self, data: Any) -> None:
        """What http.client composed. It goes out in one piece, once the gate has been passed."""
        self._outgoing.append(data)

    def depart(self) -> None:
        """Connect where needed, pass the gate, send. Failed where there is nothing to hope for."""
        for _ in range(3):
            if self.sock is None:
                self._open()
            self._hurry()
            waited = self.deadline.pass_gate()
            if waited < _UNNOTICED or not self._has_gone_stale():
                self._transmit()
                return
            self._hang_up()
        raise Failed(f"{self._name} closes connections before anything is sent")

    def _hurry(self) -> None:
        try:
            self.deadline.left(0)
        except TimeoutError as error:
            raise Failed(f"nothing was sent to {self._name}: {error}") from None

    def _has_gone_stale(self) -> bool:
        return (self._is_reused and now() - self.idle_since > IDLE_SECONDS) or self.is_stale()

    def _hang_up(self) -> None:
        """Close the socket; what was composed stays."""
        if self.sock is not None:
            self.sock.close()
        self.sock = None

    def _open(self) -> None:
        deadline = self.deadline
        self._is_reused = False
        try:
            self.timeout = deadline.left(deadline.timeouts.connect)
            self.connect()
        except TimeoutError:
            late = deadline.why_late("connect", deadline.timeouts.connect)
            raise Failed(f"connecting to {self._name} took longer than {late}") from None
        except (OSError, HTTPError) as error:
            if want := starved(error):
                raise want from None
            raise Failed(
                f"no {'TLS ' * self.is_secure}connection to {self._name}: {reason_of(error)}"
            ) from None

    def _new_conn(self) -> socket.socket:
        """Connect to one of the very addresses that were checked, each in turn."""
        places = allowed_places(self._dns_host, self.port, self.allowed_networks, self.deadline)
        error: OSError = OSError("the name has no addresses")
        for place in places:
            try:
                return self._connected(place)
            except OSError as failure:
                error = failure
        raise error

    def _connected(self, place: Place) -> socket.socket:
        bound = self.deadline.timeouts.connect
        sock = socket.socket(place.family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(self.deadline.left(bound))
            sock.connect(place.where)
            sock.settimeout(self.deadline.left(bound))  # for the TLS handshake
        except BaseException:
            sock.close()
            raise
        sys.audit("http.client.connect", self, self.host, self.port)
        return sock

    def _transmit(self) -> None:
        """Send what was composed. An answer that is there counts for more than a broken send."""
        gate, outgoing = self.deadline.gate, self._outgoing
        before, gate.is_whole = gate.sent_at, False
        # Ahead of the send: what strikes from outside, such as a task's time limit, must not find
        # it unmarked.
        gate.sent_at = now()
        try:
            delivery.bound(self.sock, self.deadline.left(self.deadline.timeouts.total))
            self.sock.settimeout(0)
            for data in [b"".join(outgoing)] if sum(map(len, outgoing)) <= _PIECE else outgoing:
                self._push(memoryview(data))
            self._is_complete = True
            gate.has_arrived, gate.is_whole = self._has_arrived, True  # type: ignore[method-assign]
        except OSError as error:
            # TLS may have sent a part of what it did not take
            if not self._sent_bytes and not self.is_secure:
                gate.sent_at = before
                if want := starved(error):
                    raise want from None
            if not self._sent_bytes or (
                isinstance(error, TimeoutError) and not wait_for_read(self.sock, 0)
            ):
                raise Failed(f"sending to {self._name} failed: {self._why_slow(error)}") from None
        finally:
            self._outgoing = []

    def _has_arrived(self) -> bool:
        return delivery.is_done(self.sock)

    def _push(self, data: memoryview) -> None:
        gate, position = self.deadline.gate, 0
        while position < len(data):
            try:
                count = self.sock.send(data[position : position + _PIECE])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError) as wanted:
                self._wait_for_room(wanted)
                continue
            gate.sent_at = now()
            self._sent_bytes += count
            position += count
            if position < len(data):
                self.deadline.left(0)

    def _wait_for_room(self, wanted: Exception) -> None:
        """Until the socket takes more. TimeoutError if it does not, OSError on an early answer."""
        bound = self.deadline.left(self.deadline.timeouts.read)
        if isinstance(wanted, ssl.SSLWantReadError):
            is_ready = wait_for_read(self.sock, bound)
        elif self.is_secure or self._has_peeked:
            is_ready = wait_for_write(self.sock, bound)
        else:
            is_ready = wait_for_socket(self.sock, read=True, write=True, timeout=bound)
            if is_ready and not wait_for_write(self.sock, 0):
                self._peek()
        if not is_ready:
            raise TimeoutError("the server reads too slowly")

    def _peek(self) -> None:
        """An error that arrives while we send ends the sending: RFC 9112 section 9.5."""
        self._has_peeked = True
        head = self.sock.recv(12, socket.MSG_PEEK)
        if not head or head[9:10] in (b"4", b"5"):
            raise ConnectionAbortedError("answered before the request was whole")

    def _why_slow(self, error: OSError) -> str:
        if isinstance(error, TimeoutError):
            return f"not done within {self.deadline.why_late('read', self.deadline.timeouts.read)}"
        return reason_of(error)

    def arrive(self) -> BaseHTTPResponse:
        """The head of the answer; its body is still to be read. Failed where there is none."""
        try:
            return self.getresponse()
        except TimeoutError:
            late = self.deadline.why_late("read", self.deadline.timeouts.read)
            raise Failed(f"no answer from {self._name} within {late}") from None
        except ConnectionError:  # http.client.RemoteDisconnected is one
            raise Failed(f"{self._name} closed the connection without an answer") from None
        except OSError as error:
            raise Failed(f"no answer from {self._name}: {reason_of(error)}") from None
        except Flooded as flood:
            raise Failed(f"no answer from {self._name}: {flood}") from None
        except (HTTPException, HTTPError, ValueError) as error:
            raise Failed(
                f"the answer of {self._name} is not HTTP ({type(error).__name__})"
            ) from None

    def response_class(  # type: ignore[override]
        self, sock: socket.socket, *_: Any, method: str | None = None, **__: Any
    ) -> HTTPResponse:
        """What http.client makes of the socket, read no longer than the deadline allows."""
        head = Head(cast(socket.socket, BoundedReader(sock, self.deadline)), method=method)
        head.deadline = self.deadline
        return head

    @property
    def _name(self) -> str:
        return str(Target("", self.host, self.port))

    def is_stale(self) -> bool:
        """Whether anything waits in an idle connection: its end, or an answer nobody asked for."""
        sock = self.sock
        return sock is None or wait_for_read(sock, 0)

    def abandon(self) -> None:
        """Close, and take back what the kernel has not delivered yet."""
        if self.sock is not None:
            delivery.take_back(self.sock)
        self.close()

    def is_reusable(self) -> bool:
        return self.sock is not None and self._is_complete

    def rest(self) -> None:
        """Keep nothing of the call."""
        del self.deadline
        self.idle_since = now()
        self._is_reused = True


class SecureConnection(Connection, HTTPSConnection):
    """A connection over TLS. The name, not the address, is what the certificate must be for."""

    is_secure = True

    def is_stale(self) -> bool:
        """Whether anything but session tickets waits in an idle connection. Those may arrive at any
        time, are read here and leave nothing.
        """
        sock = cast(ssl.SSLSocket | None, self.sock)
        if sock is None or sock.pending():
            return True
        if not wait_for_read(sock, 0):
            return False
        sock.settimeout(0)
        try:
            sock.recv(1)
        except ssl.SSLWantReadError:
            return False
        except OSError:
            return True
        return True
