"""Connections to checked addresses: resolve, refuse, connect, pass the gate, send, and read within
the deadline.

A composed request enters; the head of an answer leaves, its body still to be read, or Failed with
the reason. The address that was checked is the one that is connected to. Never sends before the
gate has been passed.
"""

from __future__ import annotations

import io
import os
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException, HTTPResponse, parse_headers
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, cast

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse
from urllib3.util.wait import wait_for_read, wait_for_socket, wait_for_write

from callqueue.execution.http.deadline import (
    Failed,
    Flooded,
    Journey,
    Refused,
    Target,
    now,
    refuse_to_compose,
)
from callqueue.security.addresses import literal_address, refusal

# servers close idle connections; one that closes while a POST goes out leaves its fate unknown
IDLE_SECONDS = 1.5
MOST_INTERIM = 20  # interim answers (100, 102, 103) before the one that counts
# names being resolved at once, in this process: a resolver that hangs must not eat all threads
LOOKUPS = 64
_PIECE = 65536
_UNNOTICED = 0.001  # seconds in a gate that need no second look at the connection
_NOTHING_LATER = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time at all
_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux


class Connection(HTTPConnection):
    """A connection to a checked address that keeps to a journey's deadline and passes its gate.

    In this order: compose (no network), depart (connect, gate, send), arrive (the head of the
    answer).
    """

    journey: Journey
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
        """http.client hands over what it composed. It goes out in one piece, once the gate has been
        passed.
        """
        self._outgoing.append(data)

    def depart(self) -> None:
        """Connect where needed, pass the gate, send. Failed where there is nothing to hope for."""
        for _ in range(3):
            if self.sock is None:
                self._open()
            self._hurry()
            waited = self.journey.pass_gate()
            if waited < _UNNOTICED or not self._has_gone_stale():
                self._transmit()
                return
            self._hang_up()
        raise Failed(f"{self._name} closes connections before anything is sent")

    def _hurry(self) -> None:
        try:
            self.journey.left(0)
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
        journey = self.journey
        self._is_reused = False
        try:
            self.timeout = journey.left(journey.timeouts.connect)
            self.connect()
        except TimeoutError:
            late = journey.why_late("connect", journey.timeouts.connect)
            raise Failed(f"connecting to {self._name} took longer than {late}") from None
        except (OSError, HTTPError) as error:
            raise Failed(
                f"no {'TLS ' * self.is_secure}connection to {self._name}: {_reason(error)}"
            ) from None

    def _new_conn(self) -> socket.socket:
        """Resolve, refuse, connect: to one of the very addresses that were checked."""
        journey = self.journey
        places = _resolve(self._dns_host, self.port, journey)
        for place in places:
            why = refusal(str(place.where[0]), journey.policy.allowed_networks)
            if why is not None:
                raise Refused(
                    why if place.is_literal else f"the host {self._dns_host} resolves: {why}"
                )
        error: OSError = OSError("the name has no addresses")
        for place in places:
            try:
                return self._connected(place)
            except OSError as failure:
                error = failure
        raise error

    def _connected(self, place: _Place) -> socket.socket:
        bound = self.journey.timeouts.connect
        sock = socket.socket(place.family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(self.journey.left(bound))
            sock.connect(place.where)
            sock.settimeout(self.journey.left(bound))  # for the TLS handshake
        except BaseException:
            sock.close()
            raise
        sys.audit("http.client.connect", self, self.host, self.port)
        return sock

    def _transmit(self) -> None:
        """Send what was composed. Where that breaks off, an answer that is there already counts for
        more.
        """
        journey, outgoing = self.journey, self._outgoing
        before = journey.gate.sent_at, journey.is_sent
        # Ahead of the send: what strikes from outside, such as a task's time limit, must not find
        # it unmarked.
        journey.gate.sent_at, journey.is_sent = now(), True
        try:
            self._bound_delivery()
            self.sock.settimeout(0)
            for data in [b"".join(outgoing)] if sum(map(len, outgoing)) <= _PIECE else outgoing:
                self._push(memoryview(data))
            self._is_complete = True
        except OSError as error:
            if (
                not self._sent_bytes and not self.is_secure
            ):  # TLS may have sent a part of what it did not take
                journey.gate.sent_at, journey.is_sent = before
            if not self._sent_bytes or (
                isinstance(error, TimeoutError) and not wait_for_read(self.sock, 0)
            ):
                raise Failed(f"sending to {self._name} failed: {self._why_slow(error)}") from None
        finally:
            self._outgoing = []

    def _bound_delivery(self) -> None:
        """Should this process die, the kernel is not to deliver the request after the attempt's
        lease, which is longer.
        """
        if _USER_TIMEOUT is not None:
            left = self.journey.left(self.journey.timeouts.total)
            self.sock.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, max(1, round(left * 1000)))

    def _push(self, data: memoryview) -> None:
        gate, position = self.journey.gate, 0
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
                self.journey.left(0)

    def _wait_for_room(self, wanted: Exception) -> None:
        """Until the socket takes more. TimeoutError where it does not; OSError where the server
        wants no more.
        """
        bound = self.journey.left(self.journey.timeouts.read)
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
            return f"not done within {self.journey.why_late('read', self.journey.timeouts.read)}"
        return _reason(error)

    def arrive(self) -> BaseHTTPResponse:
        """The head of the answer; its body is still to be read. Failed where there is none."""
        try:
            return self.getresponse()
        except TimeoutError:
            late = self.journey.why_late("read", self.journey.timeouts.read)
            raise Failed(f"no answer from {self._name} within {late}") from None
        except ConnectionError:  # http.client.RemoteDisconnected is one
            raise Failed(f"{self._name} closed the connection without an answer") from None
        except OSError as error:
            raise Failed(f"no answer from {self._name}: {_reason(error)}") from None
        except Flooded as flood:
            raise Failed(f"no answer from {self._name}: {flood}") from None
        except (HTTPException, HTTPError, ValueError) as error:
            raise Failed(
                f"the answer of {self._name} is not HTTP ({type(error).__name__})"
            ) from None

    def response_class(  # type: ignore[override]
        self, sock: socket.socket, *_: Any, method: str | None = None, **__: Any
    ) -> HTTPResponse:
        """What http.client makes of the socket, which it reads no longer than the journey lasts."""
        head = _Head(cast(socket.socket, _Bounded(sock, self.journey)), method=method)
        head.journey = self.journey
        return head

    @property
    def _name(self) -> str:
        return str(Target("", self.host, self.port))

    def is_stale(self) -> bool:
        """Nothing may be waiting in an idle connection: neither its end, nor an answer that nobody
        asked for.
        """
        sock = self.sock
        return sock is None or wait_for_read(sock, 0)

    def abandon(self) -> None:
        """Close, and take back what the kernel has not delivered yet.

        Else it would go on trying, and a request that was counted as lost would arrive after its
        place had gone to another.
        """
        if self.sock is not None:
            with suppress(OSError):  # closed already, where TLS came to nothing
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOTHING_LATER)
        self.close()

    def is_reusable(self) -> bool:
        return self.sock is not None and self._is_complete

    def rest(self) -> None:
        """Keep nothing of the call."""
        del self.journey
        self.idle_since = now()
        self._is_reused = True


class SecureConnection(Connection, HTTPSConnection):
    """The same over TLS. The name, not the address, is what the certificate must be for."""

    is_secure = True

    def is_stale(self) -> bool:
        """As above; session tickets may arrive at any time, are read here and leave nothing."""
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


class _Bounded(io.RawIOBase):
    """A socket's reading side. Each read waits no longer than the journey has left, so a slow drip
    ends with it.
    """

    def __init__(self, sock: socket.socket, journey: Journey) -> None:
        self._sock = sock
        self._journey = journey
        self._raw = sock.makefile(
            "rb", buffering=0
        )  # keeps the socket open for as long as the body is read

    def makefile(self, mode: str) -> io.BufferedReader:
        """What http.client asks of a socket."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._journey.left(self._journey.timeouts.read))
        count: int | None = self._raw.readinto(buffer)
        self._journey.took(count or 0)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Head(HTTPResponse):
    """An answer that passes over every interim one (100, 102, 103), not over 100 alone, and over so
    many only.
    """

    journey: Journey
    _interim = 0

    def _read_status(self) -> tuple[str, int, str]:
        while True:
            status: tuple[str, int, str] = super()._read_status()  # type: ignore[misc]
            if status[1] == 101 or status[1] >= 200:
                return status
            self._interim += 1
            if self._interim > MOST_INTERIM:
                raise Flooded(f"more than {MOST_INTERIM} interim answers came")
            if status[1] == 100:  # whose headers http.client passes over itself
                return status
            parse_headers(self.fp)

    def read1(self, n: int = -1) -> bytes:
        self.journey.turn()
        return super().read1(n)


def _reason(error: Exception) -> str:
    """Short, without the objects that urllib3 puts into its texts."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted, {error.verify_message}"
    return str(
        getattr(error, "strerror", None)
        or getattr(error, "reason", None)
        or error
        or type(error).__name__
    )


# --- Names


class _Place(NamedTuple):
    family: int
    where: Any  # a socket address
    is_literal: bool


_lookups = threading.BoundedSemaphore(LOOKUPS)


def _resolve(host: str, port: int, journey: Journey) -> list[_Place]:
    """Every address of a host, itself where it is one. Failed where there are none, or where it
    takes too long.
    """
    address = literal_address(host)
    if address is not None:
        found = socket.getaddrinfo(
            str(address), port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    else:
        found = _looked_up(host, port, journey)
    return list(
        dict.fromkeys(
            _Place(family, where, address is not None) for family, _, _, _, where in found
        )
    )


def _looked_up(host: str, port: int, journey: Journey) -> list[Any]:
    """getaddrinfo knows no timeout: it runs in a thread, which is left behind where it hangs."""
    outcome: SimpleQueue[Any] = SimpleQueue()
    bound = journey.timeouts.total
    try:
        if not _lookups.acquire(timeout=journey.left(bound)):
            raise Empty
        _start_lookup(host, port, outcome)
        found = outcome.get(timeout=journey.left(bound))
    except (Empty, TimeoutError):
        late = journey.why_late("total", bound)
        raise Failed(f"resolving the name {host} took longer than {late}") from None
    if isinstance(found, Exception):
        raise Failed(f"the name {host} does not resolve: {_reason(found)}")
    return list(found)


def _start_lookup(host: str, port: int, outcome: SimpleQueue[Any]) -> None:
    try:
        threading.Thread(
            target=_look_up, args=(host, port, outcome, _lookups), daemon=True, name="lookup"
        ).start()
    except RuntimeError as error:  # no more threads
        _lookups.release()
        outcome.put(error)


def _look_up(
    host: str, port: int, outcome: SimpleQueue[Any], slots: threading.BoundedSemaphore
) -> None:
    try:
        outcome.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except Exception as error:
        outcome.put(error)
    finally:
        slots.release()


def _start_afresh() -> None:
    """In a forked child: the parent's lookups are the parent's."""
    global _lookups
    _lookups = threading.BoundedSemaphore(LOOKUPS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
