"""Connections to checked addresses, and the pools that keep them for a moment.

A request enters by urllib3's pools; the head of an answer leaves, its body still to be read within
the trip's bounds, or Failed with the reason. In this order: compose, connect, pass the gate, send,
await the answer. The address that was checked is the one that is connected to; nothing is sent
before the gate has been passed; nothing of a request is delivered once it was given up.
"""

from __future__ import annotations

import errno
import io
import math
import os
import queue
import re
import socket
import ssl
import struct
import sys
import threading
from collections import deque
from contextlib import suppress
from email.parser import Parser
from functools import lru_cache
from http.client import (
    HTTPException,
    HTTPMessage,
    HTTPResponse,
    LineTooLong,
    UnknownProtocol,
)
from typing import Any, cast

from requests.utils import DEFAULT_CA_BUNDLE_PATH
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse
from urllib3.util.ssl_ import create_urllib3_context
from urllib3.util.wait import wait_for_read, wait_for_socket, wait_for_write

from callqueue.execution.starvation import starved
from callqueue.execution.trip import (
    Failed,
    Flooded,
    Policy,
    Refused,
    Starved,
    Trip,
    allowed_addresses,
    now,
    reason_of,
)
from callqueue.security.addresses import Place

try:  # what asks how many bytes the other side has not confirmed: Linux, tcp(7), SIOCOUTQ
    import fcntl
    import termios

    _UNCONFIRMED = termios.TIOCOUTQ if sys.platform == "linux" else None
except ImportError:  # Windows
    _UNCONFIRMED = None

# servers close idle connections; one that closes while a POST goes out leaves its fate unknown
IDLE_SECONDS = 1.5
MOST_INTERIM = 20  # interim answers (100, 102, 103) before the one that counts
MOST_POOLS = 64  # places to which connections are kept
_PIECE = 65536
_LONGEST_LINE, _MOST_HEADERS = 65536, 100  # bytes and lines, as http.client has it
# No two parts of it match the same: else a line of blanks would take as long as their square.
_PLAIN_HEADER = re.compile(r"([!-9;-~]+):([^\r\n]*)\r?\n")
_UNNOTICED = 0.001  # seconds in a gate that need no second look at the connection
_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux
# SO_LINGER: what is not delivered when a socket is closed, by whatever ends this process too, never
# will be; or is, as usual
_NOTHING_LATER, _AS_USUAL = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
# what a kernel says that looks like Linux and does not know SIOCOUTQ
_UNKNOWN = {errno.ENOTTY, errno.ENOSYS, errno.EOPNOTSUPP}


class Connection(HTTPConnection):
    """A connection to a checked address that keeps to its request's time and passes its gate."""

    trip: Trip  # of the request that it carries
    is_secure = False
    is_whole = True  # the whole request went out
    is_resting = True  # nothing of a request is on its way
    _is_unsent = True
    idle_since = math.inf

    def request(
        self, method: str, url: str, body: Any = None, headers: Any = None, **more: Any
    ) -> None:
        """Compose, connect where needed, pass the gate, send."""
        trip = self.trip
        self._outgoing: list[bytes] = []
        sock: Any = self.sock
        self.sock = None  # of which urllib3 would set the timeout anew
        try:
            super().request(method, url, body, headers, **more)
        except (HTTPException, ValueError, TypeError) as error:
            raise Refused(f"the request cannot be made: {type(error).__name__}") from None
        finally:
            self.sock = sock
        if self._response_options is not None:  # urllib3 logs this URL where headers are malformed
            logged = url.partition("?")[0]
            self._response_options = self._response_options._replace(request_url=logged)
        for _ in range(3):
            if self.sock is None:
                self.connect()
            if trip.ends <= now():
                raise Failed(f"nothing was sent to {self._name}: {trip.why_late('', 0)} is over")
            if trip.pass_gate() < _UNNOTICED or self.is_connected:
                return self._transmit(trip)
            cast(socket.socket, self.sock).close()
            self.sock = None
        raise Failed(f"{self._name} closes connections before anything is sent")

    def putheader(self, header: Any, *values: Any) -> None:
        """As http.client, of what requests has looked at: all that is left to see is that nothing
        ends the line.
        """
        line = header.encode("ascii") + b": "
        for value in values:
            line += value if isinstance(value, bytes) else str(value).encode("latin-1")
        if b"\n" in line or b"\r" in line:
            raise ValueError("a header is more than a line")
        self._output(line)  # type: ignore[attr-defined]

    def send(self, data: Any) -> None:
        """What http.client composed. It goes once the gate has been passed."""
        self._outgoing.append(data)

    def connect(self) -> None:
        trip = self.trip
        try:
            super().connect()
            self.idle_since = math.inf
        except TimeoutError:
            late = trip.why_late("connect", trip.timeouts.connect)
            raise Failed(f"connecting to {self._name} took longer than {late}") from None
        except (OSError, HTTPError) as error:
            if want := starved(error):
                raise Starved(want) from None
            tls = "TLS " * self.is_secure
            raise Failed(f"no {tls}connection to {self._name}: {reason_of(error)}") from None

    def _new_conn(self) -> socket.socket:
        """Connect to one of the very addresses that were checked, each in turn."""
        trip, error = self.trip, OSError("the name has no addresses")
        bound = trip.timeouts.connect
        for family, where in allowed_addresses(self._dns_host, self.port, trip):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOTHING_LATER)
                sock.settimeout(trip.left(bound))
                sock.connect(where)
                sock.settimeout(trip.left(bound))  # for the TLS handshake
                sys.audit("http.client.connect", self, self.host, self.port)
                return sock
            except BaseException as failure:
                sock.close()
                if not isinstance(failure, OSError):
                    raise
                error = failure
        raise error

    def _transmit(self, trip: Trip) -> None:
        """Send what was composed. An answer that is there counts for more than a broken send."""
        gate, sock, outgoing, self._outgoing = trip.gate, self.sock, self._outgoing, []
        before, gate.is_whole, self._is_unsent = gate.sent_at, False, True
        self.is_whole = self.is_resting = False
        # Ahead of the send: what strikes from outside, such as a task's time limit, must not find
        # it unmarked.
        gate.sent_at = now()
        try:
            if _USER_TIMEOUT is not None:  # the kernel tries to deliver it for no longer than that
                sock.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, max(1, round(trip.left() * 1e3)))
            for data in [b"".join(outgoing)] if sum(map(len, outgoing)) <= _PIECE else outgoing:
                self._push(trip, memoryview(data))
            self.is_whole, gate.has_arrived = True, self.has_arrived  # type: ignore[method-assign]
            gate.is_whole = True
        except OSError as error:
            # TLS may have sent a part of what it did not take
            if self._is_unsent and not self.is_secure:
                gate.sent_at = before
                if want := starved(error):
                    raise Starved(want) from None
            late = isinstance(error, TimeoutError)
            if self._is_unsent or (late and not wait_for_read(sock, 0)):
                why = f"not done within {self._late}" if late else reason_of(error)
                raise Failed(f"sending to {self._name} failed: {why}") from None

    def _push(self, trip: Trip, data: memoryview) -> None:
        while data:
            bound = trip.left(trip.timeouts.read)
            if not (self._is_unsent or self.is_secure):
                self._watch(bound)
            _wait_at_most(self.sock, bound)
            count = self.sock.send(data[:_PIECE])
            trip.gate.sent_at, self._is_unsent = now(), False
            data = data[count:]

    def _watch(self, bound: float) -> None:
        """Until the socket takes more. An error that is answered meanwhile ends the sending: RFC
        9112 section 9.5.
        """
        if not wait_for_socket(self.sock, read=True, write=True, timeout=bound):
            raise TimeoutError("the server reads too slowly")
        if not wait_for_write(self.sock, 0):
            head = self.sock.recv(12, socket.MSG_PEEK)
            if not head or head[9:10] in (b"4", b"5"):
                raise ConnectionAbortedError("answered before the request was whole")

    def has_arrived(self) -> bool:
        """Whether the other side's kernel has confirmed every byte; True where this system cannot
        tell. Any thread may ask, so the socket may be closed by now: then it is False.
        """
        if _UNCONFIRMED is None:
            return True
        try:
            return not int.from_bytes(fcntl.ioctl(self.sock, _UNCONFIRMED, bytes(4)), sys.byteorder)
        except OSError as error:
            return error.errno in _UNKNOWN
        except (TypeError, ValueError):
            return False

    def getresponse(self) -> BaseHTTPResponse:  # type: ignore[override]
        """The head of the answer; its body is still to be read. Failed where there is none."""
        try:
            self.timeout = self.trip.left(self.trip.timeouts.read)  # which urllib3 sets
            return super().getresponse()
        except TimeoutError:
            raise Failed(f"no answer from {self._name} within {self._late}") from None
        except ConnectionError:  # http.client.RemoteDisconnected is one
            raise Failed(f"{self._name} closed the connection without an answer") from None
        except (Flooded, OSError) as error:
            raise Failed(f"no answer from {self._name}: {reason_of(error)}") from None
        except (HTTPException, HTTPError, ValueError) as error:
            what = type(error).__name__
            raise Failed(f"the answer of {self._name} is not HTTP ({what})") from None

    def response_class(self, sock: Any, **given: Any) -> HTTPResponse:  # type: ignore[override]
        head = _Head(cast(socket.socket, _Reader(sock, self.trip)), **given)
        head.connection, head.trip = self, self.trip
        return head

    def close(self) -> None:
        """What is on its way is taken back: what the kernel has not delivered never will be."""
        if self.is_resting and self.sock is not None:
            with suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AS_USUAL)
        super().close()

    @property
    def _name(self) -> str:
        return str(Place("", self.host, self.port))

    @property
    def _late(self) -> str:
        return self.trip.why_late("read", self.trip.timeouts.read)

    @property
    def is_connected(self) -> bool:
        """Whether it may be used: not idle for long, and nothing waits in it, neither its end nor
        an answer that nobody asked for.
        """
        if self.sock is None or now() - self.idle_since > IDLE_SECONDS:
            return False
        return not self._has_news()

    def _has_news(self) -> bool:
        return wait_for_read(self.sock, 0)


class SecureConnection(Connection, HTTPSConnection):
    """A connection over TLS. The name, not the address, is what the certificate must be for."""

    is_secure = True

    def _has_news(self) -> bool:
        """Not if it is but session tickets. Those may come at any time, and are read here."""
        sock = cast(ssl.SSLSocket, self.sock)
        if sock.pending():  # in a record that came with the last answer
            return True
        if not super()._has_news():
            return False
        sock.settimeout(0)
        try:
            sock.recv(1)
        except ssl.SSLWantReadError:
            return False
        except OSError:
            return True
        return True


def _wait_at_most(sock: socket.socket, seconds: float) -> None:
    """Nothing is asked of the system where it is so already: other threads would get their turn."""
    if sock.gettimeout() != seconds:
        sock.settimeout(seconds)


# --- Answers


class _Reader(io.RawIOBase):
    """A socket's reading side. No read waits past the trip's end, so a slow drip ends with it."""

    def __init__(self, sock: socket.socket, trip: Trip) -> None:
        self._sock, self._trip = sock, trip
        # keeps the socket open for as long as the body is read
        self._raw = sock.makefile("rb", buffering=0)

    def makefile(self, mode: str) -> io.BufferedReader:
        """What http.client asks of a socket."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        _wait_at_most(self._sock, self._trip.left(self._trip.timeouts.read))
        count: int | None = self._raw.readinto(buffer)
        self._trip.took(count or 0)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Head(HTTPResponse):
    """An answer as http.client reads it, which passes over every interim one (100, 102, 103), not
    over 100 alone. Flooded after MOST_INTERIM of them.
    """

    connection: Connection
    trip: Trip
    _interim = 0

    def begin(self) -> None:
        """As http.client's, whose parser of emails takes longest of all that a request takes."""
        version, self.status, reason = self._read_status()
        if not version.startswith("HTTP/1.") and version != "HTTP/0.9":
            raise UnknownProtocol(version)
        self.version = 10 if version in ("HTTP/1.0", "HTTP/0.9") else 11
        self.code, self.reason = self.status, reason.strip()
        self.headers = self.msg = _headers_of(self.fp)
        coding, size = self.headers.get("transfer-encoding"), self.headers.get("content-length")
        has_body = self.status not in (101, 204, 304) and self._method != "HEAD"  # type: ignore[attr-defined]
        self.chunked = coding is not None and coding.lower() == "chunked" and has_body
        self.chunk_left, self.length = None, None if has_body else 0
        if has_body and size and not self.chunked:
            with suppress(ValueError):
                self.length = int(size) if int(size) >= 0 else None
        is_framed = self.chunked or self.length is not None
        self.will_close = not is_framed or self._check_close()  # type: ignore[attr-defined]
        self.connection.is_resting = self.connection.is_whole

    def _read_status(self) -> tuple[str, int, str]:
        while True:
            status: tuple[str, int, str] = super()._read_status()  # type: ignore[misc]
            if status[1] == 101 or status[1] >= 200:
                return status
            self._interim += 1
            if self._interim > MOST_INTERIM:
                raise Flooded(f"more than {MOST_INTERIM} interim answers came")
            _headers_of(self.fp)

    def read1(self, n: int = -1) -> bytes:
        self.trip.took(0)
        return super().read1(n)


def _headers_of(file: Any) -> HTTPMessage:
    """The headers of an answer. Only where one is no plain line, what parses emails is asked."""
    message, lines = HTTPMessage(), list[str]()
    while True:
        line = file.readline(_LONGEST_LINE + 1)
        if len(line) > _LONGEST_LINE:
            raise LineTooLong("header line")
        lines.append(line.decode("latin-1"))
        if len(lines) > _MOST_HEADERS:
            raise HTTPException(f"got more than {_MOST_HEADERS} headers")
        if line in (b"\r\n", b"\n", b""):
            break
    for text in lines[:-1]:
        plain = _PLAIN_HEADER.fullmatch(text)
        if plain is None:
            return Parser(_class=HTTPMessage).parsestr("".join(lines))
        message.set_raw(plain[1], plain[2].lstrip(" \t"))
    return message


# --- Pools


class _Idle(deque[Connection]):
    """Idle connections, the one that was used last at the end. Any thread may put and get."""

    def __init__(self, maxsize: int = 0) -> None:
        super().__init__()

    def put(self, connection: Connection | None, block: bool = False) -> None:
        if connection is not None and connection.sock is not None:
            self.append(connection)

    def get(self, block: bool = False, timeout: float | None = None) -> Connection:
        try:
            return self.pop()
        except IndexError:
            raise queue.Empty from None

    def close_older(self, at: float) -> None:
        """Close those that are idle since before that."""
        with suppress(IndexError):
            while self[0].idle_since < at:
                self.popleft().close()


class _Pool(HTTPConnectionPool):
    """Connections to one place under one policy: who reuses one would have been let through to its
    address too.
    """

    ConnectionCls = Connection
    QueueCls = _Idle  # type: ignore[assignment]

    def urlopen(  # type: ignore[override]
        self, method: str, url: str, body: Any = None, headers: Any = None, **_: Any
    ) -> BaseHTTPResponse:
        """What requests asks of a pool: send, and come back with the head of the answer."""
        connection: Any = self._get_conn()  # a live one, or a new one
        connection.trip = here.trip
        try:
            connection.request(method, url, body, headers, preload_content=False)
            response: Any = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        response._connection, response._pool = connection, self  # which release it at its end
        return cast(BaseHTTPResponse, response)

    def _put_conn(self, conn: Any) -> None:
        if conn.is_whole:
            # It is answered, so it has arrived; and what this connection knows is the next one's.
            del conn.trip.gate.has_arrived
        else:
            conn.close()
        del conn.trip
        conn.idle_since = now()
        super()._put_conn(conn)


class _SecurePool(_Pool, HTTPSConnectionPool):
    ConnectionCls = SecureConnection


here = threading.local()  # `trip`: of this thread's request
_pools: dict[tuple[Place, bool | str, tuple[str, ...]], _Pool] = {}


def pool_of(place: Place, policy: Policy) -> _Pool:
    """The pool of calls to this place under this policy."""
    key = (place, policy.verify, policy.allowed_networks)
    pool = _pools.get(key)
    if pool is None:
        pool = _pools.setdefault(key, _new_pool(place, policy.verify))
        with suppress(KeyError, RuntimeError):  # another thread does so
            while len(_pools) > MOST_POOLS:
                del _pools[next(iter(_pools))]
    return pool


def close_idle(seconds: float = IDLE_SECONDS) -> None:
    """Close this process's connections that have been idle for so long: no call takes them any
    more, and each is a descriptor.
    """
    for pool in list(_pools.values()):
        cast(_Idle, pool.pool).close_older(now() - seconds)


def _new_pool(place: Place, verify: bool | str) -> _Pool:
    if place.scheme == "https":
        return _SecurePool(place.host, place.port, maxsize=0, ssl_context=_context(verify))
    return _Pool(place.host, place.port, maxsize=0)


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
            raise Starved(want) from None
        why = error.strerror or error
        raise Failed(f"the certificates to trust cannot be read from {where}: {why}") from None
    return context


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # the parent's connections are the parent's
