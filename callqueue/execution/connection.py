"""One request on its way: what it may do and when it must have ended, the addresses of its host,
and the connection to one of them.

In this order: compose, resolve, connect, pass the gate, send, await the answer. What was checked is
what is connected to; nothing is sent before the gate has been passed; nothing of a request is
delivered once it was given up. Texts of errors repeat no header, body or query.
"""

from __future__ import annotations

import errno
import io
import math
import re
import socket
import ssl
import struct
import sys
import time
from contextlib import suppress
from email.parser import Parser
from functools import partial
from http.client import (
    HTTPException,
    HTTPMessage,
    HTTPResponse,
    LineTooLong,
    UnknownProtocol,
)
from typing import Any, NamedTuple, cast

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse
from urllib3.util.wait import wait_for_read

from callqueue import aside, clocks
from callqueue.clocks import Mono
from callqueue.execution.starvation import why_starved
from callqueue.security.addresses import Place, address_refusal, literal_address

try:  # what asks how many bytes the other side has not confirmed: Linux, tcp(7), SIOCOUTQ
    import fcntl
    import termios

    _UNCONFIRMED = termios.TIOCOUTQ if sys.platform == "linux" else None
except ImportError:  # Windows
    _UNCONFIRMED = None

clock = clocks.monotonic
MOST_TURNS = 32_768  # reads and chunks that an answer may come in, besides one for each KiB of it
# bytes off the network that are no body: heads, chunks' sizes, trailers, what unfolds to nothing
WASTE = 512 * 1024
_SPELL = 64  # turns after which other threads get theirs
_REST = 0.001  # seconds that they get
# What is judged in a worker is judged by the settings that it was started with.
HERE = "(in this worker's settings)"
# servers close idle connections; one that closes while a POST goes out leaves its fate unknown
IDLE_SECONDS = 1.5
MOST_INTERIM = 20  # interim answers (100, 102, 103) before the one that counts
_PIECE = 65536
_LONGEST_LINE, _MOST_HEADERS = 65536, 100  # bytes and lines, as http.client has it
# No two parts of it match the same: else a line of blanks would take as long as their square.
_PLAIN_HEADER = re.compile(r"([!-9;-~]+):([^\r\n]*)\r?\n")
_UNNOTICED = 0.001  # seconds in a gate that need no second look at the connection
_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux
# SO_LINGER: what is not delivered when a socket is closed, by whatever ends this process too, never
# will be; or is, as usual
_NOTHING_LATER, _AS_USUAL = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
_LAST_DATA = struct.Struct("52xI")  # of TCP_INFO
# what a kernel says that looks like Linux and does not know SIOCOUTQ
_UNKNOWN = {errno.ENOTTY, errno.ENOSYS, errno.EOPNOTSUPP}


class Dropped(Exception):
    """The gate refuses, or this process lacks what a request takes: nothing was sent."""


class Starved(Dropped):
    """This process lacks what a request takes: no fault of the call's, nor of the other side's."""


class Failed(Exception):
    """There will be no answer; the text says why."""


class Refused(Failed):
    """By policy, or because no request can be made of this: another time will not be better."""


class Flooded(Failed):
    """The server keeps this process busy with what is no answer; the text says with what."""


class Policy(NamedTuple):
    """What may be called (`allowed_networks`: CIDR ranges), whom to trust, how much to read."""

    allowed_hosts: tuple[str, ...] = ("*",)
    allowed_networks: tuple[str, ...] = ()
    verify: bool | str = True
    max_response_bytes: int = 1048576


class Timeouts(NamedTuple):
    """Seconds: for one connection, between two bytes, and from the name to the last byte."""

    connect: float = 3.05
    read: float = 27
    total: float = 60


class Gate:
    """What a request passes just before its first byte. This gate is always open."""

    # just after the last byte so far, or just before the first; None: none can have gone out
    sent_at: Mono | None = None
    # monotonic: when the request must have ended, whatever its timeouts say
    ends_at: float = math.inf
    is_passed = False  # something was sent, or is about to be
    is_whole = False  # the last byte has left
    arrived_at: Mono | None = None  # when the other side had all of it, as far as that is known
    is_late = False  # it had not at the last look
    # when the last bytes of an answer came that were read, or its end; None: none have come
    answered_at: Mono | None = None
    is_told = False  # the ledger knows when it was sent

    def latest_arrival(self, sent: Mono, answered: Mono) -> Mono:
        """The latest instant at which what left at `sent` can have arrived, as far as was seen."""
        if self.arrived_at is not None:
            return max(sent, self.arrived_at)
        return answered if self.is_late else sent

    def has_arrived(self) -> bool:
        """Whether the other side has all that was sent. A connection puts in what can tell."""
        return True

    def wait(self) -> None:
        """Return when the first byte may go, or raise Dropped. Called connected and composed, and
        again where the server hung up meanwhile. Time in it counts against no timeout.
        """


def reason_of(error: Exception) -> str:
    """A network error in a few words, without the objects that urllib3 puts into its texts."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted, {error.verify_message}"
    said = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
    return str(said) or type(error).__name__


def monotonic() -> Mono:
    """Seconds, from a clock that never jumps; a test may put another in its place."""
    return clock()


class Trip:
    """The end of one request, its gate, and what its answer has cost so far."""

    def __init__(self, timeouts: Timeouts, gate: Gate, policy: Policy) -> None:
        self.timeouts, self.gate, self.policy = timeouts, gate, policy
        self.ends_at = min(monotonic() + timeouts.total, gate.ends_at)
        self.in_gate = 0.0  # seconds, so far
        self.kept = 0  # bytes of its body, decoded
        self._off_network = self._turns = 0

    def seconds_left(self, bound: float = math.inf) -> float:
        """Seconds that the next wait may take, `bound` at most. TimeoutError where none is left."""
        left = self.ends_at - monotonic()
        if left <= 0:
            raise TimeoutError(f"{self._last_bound()} is over")
        return left if left < bound else bound

    def pass_gate(self) -> float:
        """Wait in the gate; the seconds. The trip's end moves by them, but not past the gate's."""
        before = monotonic()
        self.gate.wait()
        waited = monotonic() - before
        self.in_gate += waited
        self.ends_at = min(self.ends_at + waited, self.gate.ends_at)
        return waited

    def why_late(self, name: str, bound: float) -> str:
        """In words: this timeout of a step, or what ended the whole trip before it."""
        return (
            self._last_bound()
            if self.ends_at <= monotonic()
            else f"the {name} timeout of {bound:g} s"
        )

    def _last_bound(self) -> str:
        if self.ends_at == self.gate.ends_at:
            return "the lease"
        return f"the total timeout of {self.timeouts.total:g} s"

    def note_read(self, count: int) -> None:
        """Count a read of so many bytes; rest after some. Flooded: too many, or hardly any body."""
        self._off_network += count
        self._turns += 1
        if self._off_network - self.kept > WASTE + self._off_network // 4:
            raise Flooded(f"{self._off_network // 1024} KiB came that are hardly any body")
        if self._turns > MOST_TURNS + self._off_network // 1024:
            raise Flooded(f"it came in more than {MOST_TURNS} pieces")
        if self._turns % _SPELL == 0:
            time.sleep(_REST)


class Connection(HTTPConnection):
    """A connection to a checked address that keeps to its request's time and passes its gate."""

    trip: Trip  # of the request that it carries
    is_secure = False
    is_whole = True  # the whole request went out
    is_resting = True  # nothing of a request is on its way
    _is_unsent = True  # no byte of it
    idle_since = math.inf  # monotonic; inf: since it was connected it has not been idle

    def request(
        self, method: str, url: str, body: Any = None, headers: Any = None, **more: Any
    ) -> None:
        """Compose, connect where need be, pass the gate, send. Raises Failed or Dropped."""
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
            if trip.ends_at <= monotonic():
                raise Failed(f"nothing was sent to {self._place}: {trip.why_late('', 0)} is over")
            if trip.pass_gate() < _UNNOTICED or self.is_connected:
                return self._transmit(trip)
            cast(socket.socket, self.sock).close()
            self.sock = None
        raise Failed(f"{self._place} closes connections before anything is sent")

    def putheader(self, header: Any, *values: Any) -> None:
        """As http.client's, of whose checks one is still needed: ValueError for a line break."""
        line = header.encode("ascii") + b": "
        for value in values:
            line += value if isinstance(value, bytes) else str(value).encode("latin-1")
        if b"\n" in line or b"\r" in line:
            raise ValueError("a header is more than a line")
        self._output(line)  # type: ignore[attr-defined]

    def send(self, data: Any) -> None:
        """Keep what http.client composed: it is sent once the gate has been passed."""
        self._outgoing.append(data)

    def connect(self) -> None:
        trip = self.trip
        try:
            super().connect()
            self.idle_since = math.inf
        except TimeoutError:
            late = trip.why_late("connect", trip.timeouts.connect)
            raise Failed(f"connecting to {self._place} took longer than {late}") from None
        except (OSError, HTTPError) as error:
            if want := why_starved(error):
                raise Starved(want) from None
            tls = "TLS " * self.is_secure
            raise Failed(f"no {tls}connection to {self._place}: {reason_of(error)}") from None

    def _new_conn(self) -> socket.socket:
        """A socket to the first address that accepts. Raises the last one's OSError, or Failed."""
        trip, error = self.trip, OSError("the name has no addresses")
        bound = trip.timeouts.connect
        for family, where in allowed_addresses(self._dns_host, self.port, trip):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOTHING_LATER)
                sock.settimeout(trip.seconds_left(bound))
                sock.connect(where)
                sock.settimeout(trip.seconds_left(bound))  # for the TLS handshake
                sys.audit("http.client.connect", self, self.host, self.port)
                return sock
            except BaseException as failure:
                sock.close()
                if not isinstance(failure, OSError):
                    raise
                error = failure
        raise error

    def _transmit(self, trip: Trip) -> None:
        """Send what was composed. Failed or Starved if none of it went out; Failed if time is up
        and there is nothing to read. After any other error there may be an answer: none is raised.
        """
        gate, sock, outgoing, self._outgoing = trip.gate, self.sock, self._outgoing, []
        before, gate.is_whole, self._is_unsent = gate.sent_at, False, True
        self.is_whole = self.is_resting = False
        # Ahead of the send: what strikes from outside, such as a task's time limit, must not find
        # it unmarked.
        gate.sent_at = monotonic()
        try:
            if _USER_TIMEOUT is not None:  # the kernel tries to deliver it for no longer than that
                sock.setsockopt(
                    socket.IPPROTO_TCP, _USER_TIMEOUT, max(1, round(trip.seconds_left() * 1e3))
                )
            for data in [b"".join(outgoing)] if sum(map(len, outgoing)) <= _PIECE else outgoing:
                self._send_in_pieces(trip, memoryview(data))
            self.is_whole, gate.has_arrived = True, self.has_arrived  # type: ignore[method-assign]
            gate.is_whole = True
        except OSError as error:
            # TLS may have sent a part of what it did not take
            if self._is_unsent and not self.is_secure:
                gate.sent_at = before
                if want := why_starved(error):
                    raise Starved(want) from None
            late = isinstance(error, TimeoutError)
            if self._is_unsent or (late and not wait_for_read(sock, 0)):
                why = f"not done within {self._why_read_late}" if late else reason_of(error)
                raise Failed(f"sending to {self._place} failed: {why}") from None

    def _send_in_pieces(self, trip: Trip, data: memoryview) -> None:
        while data:
            _set_timeout(self.sock, trip.seconds_left(trip.timeouts.read))
            count = self.sock.send(data[:_PIECE])
            trip.gate.sent_at, self._is_unsent = monotonic(), False
            data = data[count:]

    def has_arrived(self) -> bool:
        # Any thread may ask, so the socket may be closed by now: then it is False.
        if _UNCONFIRMED is None:  # this system cannot tell
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
            self.timeout = self.trip.seconds_left(self.trip.timeouts.read)  # which urllib3 sets
            return super().getresponse()
        except TimeoutError:
            raise Failed(f"no answer from {self._place} within {self._why_read_late}") from None
        except ConnectionError:  # http.client.RemoteDisconnected is one
            raise Failed(f"{self._place} closed the connection without an answer") from None
        except (Flooded, OSError) as error:
            raise Failed(f"no answer from {self._place}: {reason_of(error)}") from None
        except (HTTPException, HTTPError, ValueError) as error:
            what = type(error).__name__
            raise Failed(f"the answer of {self._place} is not HTTP ({what})") from None

    def response_class(self, sock: Any, **given: Any) -> HTTPResponse:  # type: ignore[override]
        head = _Head(cast(socket.socket, _Reader(sock, self.trip)), **given)
        head.connection, head.trip = self, self.trip
        return head

    def close(self) -> None:
        """Close; of a request that is on its way, what is not delivered yet never will be."""
        if self.is_resting and self.sock is not None:
            with suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AS_USUAL)
        super().close()

    @property
    def _place(self) -> str:
        return str(Place("", self.host, self.port))

    @property
    def _why_read_late(self) -> str:
        return self.trip.why_late("read", self.trip.timeouts.read)

    @property
    def is_connected(self) -> bool:
        """Whether it can be used: not idle for long, with nothing to read, its end included."""
        if self.sock is None or monotonic() - self.idle_since > IDLE_SECONDS:
            return False
        return not self._has_unread()

    def _has_unread(self) -> bool:
        return wait_for_read(self.sock, 0)


class SecureConnection(Connection, HTTPSConnection):
    """A connection over TLS. The name, not the address, is what the certificate must be for."""

    is_secure = True

    def _has_unread(self) -> bool:
        """Whether it has more to read than session tickets. Reads a byte, and such tickets."""
        sock = cast(ssl.SSLSocket, self.sock)
        if sock.pending():  # in a record that came with the last answer
            return True
        if not super()._has_unread():
            return False
        sock.settimeout(0)
        try:
            sock.recv(1)
        except ssl.SSLWantReadError:
            return False
        except OSError:
            return True
        return True


def _seconds_since_last_bytes(sock: socket.socket) -> float:
    """Seconds since bytes came last, by Linux's tcpi_last_data_recv; 0: it does not tell."""
    if sys.platform != "linux":
        return 0.0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA.size)
        return float(_LAST_DATA.unpack(info)[0] / 1000)
    except (OSError, struct.error):
        return 0.0


def _set_timeout(sock: socket.socket, seconds: float) -> None:
    """Set it if it is another: each call of the system lets other threads go first."""
    if sock.gettimeout() != seconds:
        sock.settimeout(seconds)


# --- The addresses that a name has


def allowed_addresses(host: str, port: int, trip: Trip) -> list[tuple[int, Any]]:
    """A host's families and socket addresses. Failed: it has none. Refused: one is not allowed."""
    address = literal_address(host)
    if address is None:
        found = _resolve(host, port, trip)
    else:
        found = socket.getaddrinfo(
            str(address), port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    places = list(dict.fromkeys((family, where) for family, _, _, _, where in found))
    for _, where in places:
        if why := address_refusal(str(where[0]), trip.policy.allowed_networks):
            name = f"the host {host} resolves: " if address is None else ""
            raise Refused(f"{name}{why} {HERE}")
    return places


def _resolve(host: str, port: int, trip: Trip) -> list[Any]:
    # getaddrinfo knows no timeout: it runs in a thread, which is left behind where it hangs. Those
    # of one name are bounded in number, and keep no other name from being tried.
    ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        return list(aside.within(trip.seconds_left(), f"lookup {host}", ask))
    except (aside.LeftBehind, TimeoutError) as error:
        late = f"took longer than {trip.why_late('total', trip.timeouts.total)}"
        late = f"is not tried: {error}" if isinstance(error, aside.TooMany) else late
        raise Failed(f"resolving the name {host} {late}") from None
    except Exception as error:
        if want := why_starved(error):
            raise Starved(want) from None
        raise Failed(f"the name {host} does not resolve: {reason_of(error)}") from None


# --- Answers


class _Reader(io.RawIOBase):
    """A socket's reading side. No read waits past the trip's end, so a slow drip ends with it."""

    def __init__(self, sock: socket.socket, trip: Trip) -> None:
        self._sock, self._trip = sock, trip
        # keeps the socket open for as long as the body is read
        self._raw = sock.makefile("rb", buffering=0)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """As io's; the gate is told when these bytes came."""
        gate = self._trip.gate
        gate.answered_at = None  # where nothing more comes, what came before was not the answer
        _set_timeout(self._sock, self._trip.seconds_left(self._trip.timeouts.read))
        count: int | None = self._raw.readinto(buffer)
        # of data the system tells when it came; of the connection's end it does not
        gate.answered_at = monotonic() - (_seconds_since_last_bytes(self._sock) if count else 0.0)
        self._trip.note_read(count or 0)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Head(HTTPResponse):
    """An answer. Interim ones (100, 102, 103) are passed over; Flooded after MOST_INTERIM."""

    connection: Connection
    trip: Trip
    _interim = 0

    def begin(self) -> None:
        """Read the head as http.client's does, but seldom by its parser of emails: that is slow.
        Where the whole request went out, the connection rests: to close it takes nothing back.
        """
        version, self.status, reason = self._read_status()
        if not version.startswith("HTTP/1.") and version != "HTTP/0.9":
            raise UnknownProtocol(version)
        self.version = 10 if version in ("HTTP/1.0", "HTTP/0.9") else 11
        self.code, self.reason = self.status, reason.strip()
        self.headers = self.msg = _read_headers(self.fp)
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
            _read_headers(self.fp)

    def read1(self, n: int = -1) -> bytes:
        self.trip.note_read(0)
        return super().read1(n)


def _read_headers(file: Any) -> HTTPMessage:
    """Read an answer's headers; what parses emails is asked only where one is no plain line."""
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
