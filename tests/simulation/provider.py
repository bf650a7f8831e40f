"""The simulated provider, and the sockets that lead to it: what it counted and when is the record
that the judge goes by.

In: bytes of requests. Out: bytes of answers, late, wrong, or none. It counts a request at an
instant between its last byte and its answer. Every instant is true time, in microseconds.
"""

from __future__ import annotations

import fcntl
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.doors import Doors
from tests.simulation.scheduler import MICRO, Process
from tests.simulation.simulated import Waiters
from tests.simulation.simulated import module as simulated_module

HTML = {"Content-Type": "text/html; charset=undefined"}
JSON = {"Content-Type": "application/json"}


@dataclass
class Request:
    """A request that a worker sent, and what became of it."""

    token: str  # names the call
    process: Process
    sent_at: int
    counted_at: int | None = None  # None: it never arrived
    status: int | None = None  # None: no answer
    left_at: int | None = None  # when the answer left
    told_at: int | None = None  # when the answer arrived
    given_up_at: int | None = None  # when the worker hung up without one
    attempt: int | None = None
    used: int | None = None  # of tokens, where the answer says it
    died_at: int | None = None  # its process
    wants_rest: float = 0.0  # seconds for which the answer asked for a rest
    confirmed_at: int | None = None  # when the other side's kernel had all of it

    @property
    def over_at(self) -> float:
        """When the provider had nothing more to do with it."""
        ends = [at for at in (self.left_at, self.given_up_at) if at is not None]
        if not ends and self.died_at is not None:
            return self.died_at  # its socket was closed, and no answer was under way
        return min(ends) if ends else float("inf")


@dataclass
class Mood:
    """How the provider is: each of its answers with how often it gives it."""

    answers: list[tuple[str, float]]
    latency: tuple[float, float] = (0.005, 0.2)


CALM = Mood([("ok", 1.0)], latency=(0.01, 0.06))
MOODS = (
    Mood([("ok", 0.9), ("error", 0.1)]),
    Mood([("ok", 0.9), ("slow", 0.1)], latency=(0.003, 0.05)),
    Mood([("ok", 1.0)], latency=(0.15, 0.9)),
    Mood(
        [("ok", 0.6), ("error", 0.1), ("busy", 0.1), ("away", 0.04), ("missing", 0.04),
         ("silence", 0.06), ("reset", 0.03), ("odd", 0.03)]
    ),
    Mood([("ok", 0.6), ("busy", 0.2), ("busy2", 0.15), ("busy0", 0.05)], latency=(0.1, 0.4)),
    Mood([("ok", 0.5), ("told", 0.3), ("busy", 0.1), ("odd", 0.1)]),
    Mood([("ok", 0.7), ("silence", 0.3)]),
    Mood([("ok", 0.1), ("error", 0.9)], latency=(0.003, 0.05)),
)  # fmt: skip


class Provider:
    """Counts requests, and answers them as its mood is."""

    def __init__(self, doors: Doors, mood: Mood) -> None:
        self.doors, self.mood = doors, mood
        self.requests: list[Request] = []
        self.is_refusing = False
        self.doomed: set[str] = set()  # calls that it always fails to make
        self.transit_of: Callable[[str], float] = lambda token: 0.0
        self.on_count: Callable[[Request], None] = lambda request: None

    @property
    def scheduler(self) -> Any:
        return self.doors.scheduler

    def accept(self, sock: Socket, token: str) -> None:
        """The last byte of a request was sent."""
        draw = self.scheduler.stream("provider")
        request = Request(token, self.scheduler.current.process, self.scheduler.now)
        sock.request = request
        self.requests.append(request)
        most = self.transit_of(token)
        transit = draw.choice([draw.uniform(0, most), 0.01 * most, 0.99 * most])
        request.confirmed_at = self.scheduler.now + round(draw.uniform(0, transit) * MICRO)
        self.scheduler.later(transit, lambda: self._count(sock, request))

    def _count(self, sock: Socket, request: Request) -> None:
        if request.given_up_at is not None:
            return  # the connection was reset before it arrived
        draw = self.scheduler.stream("provider")
        request.counted_at = self.scheduler.now
        self.on_count(request)
        kinds, weights = zip(*self.mood.answers, strict=True)
        kind = draw.choices(kinds, weights)[0]
        if request.token in self.doomed:
            kind = "error"
        low, high = self.mood.latency
        latency = draw.uniform(low, high) * (1 if kind != "slow" else 20)
        self.scheduler.tell(f"counts {request.token}, and answers {kind}", "provider")
        self.scheduler.later(latency, lambda: self._answer(sock, request, kind))

    def _answer(self, sock: Socket, request: Request, kind: str) -> None:
        draw = self.scheduler.stream("provider")
        request.left_at = self.scheduler.now
        if kind == "silence":
            return  # the answer is lost
        if kind == "reset":
            self.scheduler.later(0.001, sock.break_off)
            return
        status, headers, body = ANSWERS[kind]
        if request.used is not None and kind in ("ok", "slow", "told"):
            body = b'{"tokens": %d}' % request.used
        request.status = status
        request.wants_rest = float(headers.get("Retry-After", 0))
        back = draw.uniform(0.0005, 0.01)
        self.scheduler.later(back, lambda: sock.arrive(request, _bytes(status, headers, body)))


ANSWERS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "ok": (200, JSON, b'{"ok": true}'),
    "slow": (200, JSON, b'{"ok": true}'),
    "told": (200, {**JSON, "RateLimit-Remaining": "0", "RateLimit-Reset": "1"}, b"{}"),
    "odd": (200, HTML, b"<p>\xff\xfe done"),
    "error": (500, JSON, b"{}"),
    "busy": (429, {"Retry-After": "1"}, b""),
    "busy0": (429, {}, b""),
    "busy2": (429, {"Retry-After": "2"}, b""),
    "away": (503, {}, b"maintenance"),
    "missing": (404, JSON, b"{}"),
}


def _bytes(status: int, headers: dict[str, str], body: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Socket:
    """A socket to the provider."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.request: Request | None = None
        self._waiters = Waiters(provider.doors)
        self._out, self._in = b"", b""
        self._timeout: float | None = None
        self._is_broken = self._is_closed = False

    def unconfirmed(self) -> int:
        """How many bytes the other side's kernel has not confirmed."""
        if self._out or self.request is None or self.request.confirmed_at is None:
            return len(self._out)
        return 0 if self.request.confirmed_at <= self.provider.scheduler.now else 1

    def setsockopt(self, *_: Any) -> None:
        """Nothing to set."""

    def getsockopt(self, *_: Any) -> bytes:
        """Of TCP_INFO: what came was read at once."""
        return bytes(56)

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def gettimeout(self) -> float | None:
        return self._timeout

    def fileno(self) -> int:
        return -1 if self._is_closed else 99

    def connect(self, where: Any) -> None:
        scheduler = self.provider.scheduler
        scheduler.sleep(scheduler.stream("provider").uniform(0.0002, 0.003))
        if self.provider.is_refusing:
            raise ConnectionRefusedError(111, "Connection refused")

    def send(self, data: Any) -> int:
        self.provider.scheduler.alive()
        if self._is_broken or self._is_closed:
            raise BrokenPipeError(32, "Broken pipe")
        self._out += bytes(data)
        head, found, body = self._out.partition(b"\r\n\r\n")
        length = [
            line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        ]
        if found and len(body) >= (int(length[0].split(b":")[1]) if length else 0):
            self._out = b""
            self.provider.accept(self, head.split(b" ")[1].decode().strip("/"))
        return len(data)

    sendall = send

    def is_readable(self) -> bool:
        return bool(self._in) or self._is_broken or self._is_closed

    def wait_readable(self, seconds: float | None) -> bool:
        return self._waiters.wait_until(self.is_readable, seconds)

    def recv(self, size: int, flags: int = 0) -> bytes:
        if not self.wait_readable(self._timeout):
            raise BlockingIOError if self._timeout == 0 else TimeoutError("timed out")
        if self._is_broken and not self._in:
            raise ConnectionResetError(104, "Connection reset by peer")
        data = self._in[:size]
        if not flags:
            self._in = self._in[size:]
        return data

    def recv_into(self, buffer: Any, size: int = 0) -> int:
        data = self.recv(size or len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def makefile(self, *_: Any, **__: Any) -> Any:
        return _File(self)

    def arrive(self, request: Request, data: bytes) -> None:
        """An answer."""
        if not self._is_closed:
            request.told_at = self.provider.scheduler.now
            self._in += data
            self._waiters.wake()

    def break_off(self) -> None:
        """The other side hangs up."""
        self._is_broken = True
        self._waiters.wake()

    def close(self) -> None:
        if not self._is_closed and self.request is not None and self.request.told_at is None:
            self.request.given_up_at = self.provider.scheduler.now
        self._is_closed = True
        self._waiters.wake()

    def shutdown(self, how: int) -> None:
        """As close."""


class _File:
    """The reading side of a socket."""

    def __init__(self, sock: Socket) -> None:
        self._sock = sock

    def readinto(self, buffer: Any) -> int:
        return self._sock.recv_into(buffer)

    def close(self) -> None:
        """The socket is closed by itself."""


@dataclass
class Wire:
    """What leads every socket of the product to the provider of the run."""

    doors: Doors
    provider: Provider = field(default=None)  # type: ignore[assignment]

    def install(self) -> None:
        def wait(sock: Any, *given: Any, read: bool = True, timeout: Any = None, **_: Any) -> bool:
            seconds = given[0] if given and not isinstance(given[0], bool) else timeout
            return sock.wait_readable(seconds)

        fake = simulated_module(
            "socket",
            socket,
            socket=lambda *_, **__: Socket(self.provider),
            gethostname=lambda: "host",
        )
        asked = simulated_module(
            "fcntl",
            fcntl,
            ioctl=lambda sock, *_: sock.unconfirmed().to_bytes(4, sys.byteorder),
        )
        waits = {
            "wait_for_read": wait,
            "wait_for_write": lambda *_, **__: True,
            "wait_for_socket": lambda *_, **__: True,
        }
        for module in self.doors.modules:
            for name, value in list(vars(module).items()):
                if value is socket:
                    setattr(module, name, fake)
                elif value is fcntl:
                    setattr(module, name, asked)
                elif name in waits:
                    setattr(module, name, waits[name])
