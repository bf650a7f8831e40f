"""A vendor for tests: an HTTP/1.1 server in a process of its own that records every request and
misbehaves on demand.

In: requests, whose path chooses the behaviour (BEHAVIOURS). Out: the record, as JSON lines at
`/_record`; instants are of the machine's monotonic clock, so they compare between processes. A
request's is that at which its last byte reached the machine, as the kernel stamped it: on a busy
machine this process may come to read it much later. `python -m tests.support.recorder`
prints its port, and ends with its standard input. It never decides whether a test passes.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

KEPT_BODY_BYTES = 4096
ROOT = Path(__file__).resolve().parent.parent.parent

# What a test does with it.


@dataclass(frozen=True)
class Arrival:
    """One request as the vendor saw it. `answered_at` and `status` are None while it is
    unanswered.
    """

    at: float
    connection: int
    method: str
    target: str
    headers: dict[str, str]
    body: str
    status: int | None
    answered_at: float | None

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query))

    @property
    def idempotency_key(self) -> str | None:
        return self.headers.get("idempotency-key")


class Recorder:
    """The server, started and stopped: `with Recorder() as vendor: vendor.url("/ok")`. Dies with
    this process.
    """

    port = 0
    _process: subprocess.Popen[str] | None = None

    def start(self) -> Recorder:
        command = [sys.executable, "-m", "tests.support.recorder"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def stop(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def url(self, path: str = "/ok", **query: Any) -> str:
        return f"http://127.0.0.1:{self.port}{path}" + (f"?{urlencode(query)}" if query else "")

    def arrivals(self) -> list[Arrival]:
        """In order of arrival."""
        return [Arrival(**json.loads(line)) for line in self._ask("GET", "/_record").splitlines()]

    def count(self) -> int:
        return int(json.loads(self._ask("GET", "/_count"))["count"])

    def wait_for(self, count: int, timeout: float = 30.0) -> list[Arrival]:
        """All arrivals, once there are `count`; TimeoutError otherwise. Waits at the server,
        without polling.
        """
        asked = f"/_wait?{urlencode({'count': count, 'timeout': timeout})}"
        seen = int(json.loads(self._ask("GET", asked, timeout + 10))["count"])
        if seen < count:
            raise TimeoutError(f"{seen} of {count} requests arrived in {timeout} s")
        return self.arrivals()

    def clear(self) -> None:
        """Forget the record and the counts of failures."""
        self._ask("POST", "/_clear")

    def release(self) -> int:
        """Answer what `/hold` keeps. Returns how many."""
        return int(json.loads(self._ask("POST", "/_release"))["released"])

    def _ask(self, method: str, target: str, timeout: float = 30.0) -> str:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{target}", method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=timeout
        ) as response:
            return str(response.read().decode())

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(self, *raised: object) -> None:
        self.stop()


def highest_in_window(instants: Iterable[float], window: float) -> int:
    """The most instants that any half-open interval of length `window` holds."""
    ordered = sorted(instants)
    return max(
        (bisect.bisect_left(ordered, at + window) - index for index, at in enumerate(ordered)),
        default=0,
    )


def most_at_once(arrivals: Iterable[Arrival]) -> int:
    """The most requests that were under way at once."""
    listed = list(arrivals)
    moves = [(one.at, 1) for one in listed]
    moves += [(one.answered_at, -1) for one in listed if one.answered_at is not None]
    return max(accumulate(move for _, move in sorted(moves)), default=0)


def used_share(instants: Iterable[float], limit: int, window: float) -> float:
    """The share of `limit` per `window` that was used from the first instant to the last.

    The burst that fills the first window is free and not counted, so this is at most 1 where the
    limit was kept, and exactly 1 only where the last instant could not have been any sooner. 0
    where there is no time to speak of.
    """
    ordered = sorted(instants)
    span = ordered[-1] - ordered[0] if ordered else 0.0
    return max(len(ordered) - limit, 0) / (limit * span / window) if span > 0 else 0.0


# The server: what it remembers.


class Entry:
    """One line of the record; the head is kept as it came and read only when somebody asks for the
    record.
    """

    __slots__ = ("answered_at", "at", "body", "connection", "head", "status")

    def __init__(self, at: float, connection: int, head: bytes, body: bytes) -> None:
        self.at = at
        self.connection = connection
        self.head = head
        self.body = body[:KEPT_BODY_BYTES]
        self.status: int | None = None
        self.answered_at: float | None = None

    def line(self) -> str:
        method, target, headers = parse_head(self.head)
        document = {
            "at": self.at,
            "connection": self.connection,
            "method": method,
            "target": target,
            "headers": headers,
            "body": self.body.decode("utf-8", "replace"),
            "status": self.status,
            "answered_at": self.answered_at,
        }
        return json.dumps(document)


def parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    lines = head.decode("latin-1").split("\r\n")
    method, target, _version = lines[0].split(" ", 2)
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return method, target, headers


@dataclass
class Memory:
    """All that the server knows; one for the process."""

    entries: list[Entry] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    held: list[Callable[[], None]] = field(default_factory=list)
    waiting: list[tuple[int, asyncio.Future[None]]] = field(default_factory=list)

    def record(self, entry: Entry) -> None:
        self.entries.append(entry)
        for count, future in self.waiting:
            if len(self.entries) >= count and not future.done():
                future.set_result(None)

    def clear(self) -> None:
        self.entries.clear()
        self.failures.clear()

    def release(self) -> int:
        released, self.held = self.held, []
        for answer in released:
            answer()
        return len(released)


# The server: when something arrived.

SO_TIMESTAMPNS = 35  # of Linux; the socket module does not name it
# seconds within which the two clocks must have been read for the one to be told from the other
SURE = 50e-6


class StampedSocket(socket.socket):
    """A connection that knows when the kernel received what was read last (None where the kernel
    does not say).
    """

    arrived_at: float | None = None

    def recv(self, size: int, flags: int = 0) -> bytes:
        data, told, _flags, _address = self.recvmsg(size, socket.CMSG_SPACE(16), flags)
        stamps = [
            value
            for level, kind, value in told
            if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS)
        ]
        self.arrived_at = monotonic_at(*struct.unpack("qq", stamps[0][:16])) if stamps else None
        return data


def monotonic_at(seconds: int, nanoseconds: int) -> float:
    """What the monotonic clock showed at that time of day; at most `SURE` later."""
    stamp = seconds + nanoseconds / 1e9
    while True:
        before, now, after = time.time(), time.monotonic(), time.time()
        if after - before < SURE:
            return now - max(0.0, before - stamp)


async def accept_for_ever(server: socket.socket, memory: Memory) -> None:
    loop = asyncio.get_running_loop()
    while True:
        accepted, _address = await loop.sock_accept(server)
        stamped = StampedSocket(
            accepted.family, accepted.type, accepted.proto, fileno=accepted.detach()
        )
        stamped.setblocking(False)
        await loop.connect_accepted_socket(partial(Connection, memory, stamped), stamped)


# The server: one connection.


class Connection(asyncio.Protocol):
    """Reads requests by hand, since speed matters here: one at a time, the next after the
    answer.
    """

    opened = 0

    def __init__(self, memory: Memory, stamped: StampedSocket) -> None:
        self.memory, self.socket = memory, stamped
        self.buffer = bytearray()
        self.busy = False
        self.entry: Entry | None = None
        self.method = ""
        Connection.opened += 1
        self.number = Connection.opened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.read_requests()

    def read_requests(self) -> None:
        while not self.busy and not self.transport.is_closing():
            request = take_request(self.buffer)
            if request is None:
                return
            self.busy = True
            self.receive(*request)

    def receive(self, head: bytes, body: bytes) -> None:
        now = self.socket.arrived_at or time.monotonic()
        method, target = head.split(b" ", 2)[:2]
        self.method = method.decode("latin-1")
        path, _, query = target.decode("latin-1").partition("?")
        self.entry = None
        if path.startswith("/_"):
            control(self, path, dict(parse_qsl(query)))
            return
        self.entry = Entry(now, self.number, head, body)
        self.memory.record(self.entry)
        name, _, rest = path[1:].partition("/")
        behaviour = BEHAVIOURS.get(name, not_found)
        behaviour(self, rest, dict(parse_qsl(query)) if query else {})

    def answer(self, status: int, document: Any = None) -> None:
        content = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.transport.write(response_head(status, len(content)))
        if self.method != "HEAD":
            self.transport.write(content)
        if self.entry is not None:
            self.entry.status = status
            self.entry.answered_at = time.monotonic()
        self.busy = False
        if self.buffer:
            asyncio.get_running_loop().call_soon(self.read_requests)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something unless the client has gone by then."""
        asyncio.get_running_loop().call_later(
            seconds, lambda: None if self.transport.is_closing() else action()
        )


def take_request(buffer: bytearray) -> tuple[bytes, bytes] | None:
    """The head and body of the first whole request, taken out of the buffer; None until it is
    whole.
    """
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = bytes(buffer[:end])
    length = content_length(head.lower())
    if len(buffer) < end + 4 + length:
        return None
    body = bytes(buffer[end + 4 : end + 4 + length])
    del buffer[: end + 4 + length]
    return head, body


def content_length(lowered: bytes) -> int:
    start = lowered.find(b"\r\ncontent-length:")
    if start < 0:
        return 0
    return int(lowered[start + 17 :].split(b"\r\n", 1)[0])


def response_head(status: int, length: int) -> bytes:
    reason = HTTPStatus(status).phrase if status in set(HTTPStatus) else "Unknown"
    return (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


# The server: the behaviours. Each gets the rest of the path and the query.

Query = dict[str, str]


def ok(connection: Connection, rest: str, query: Query) -> None:
    """/ok: 200 at once."""
    connection.answer(200, {"ok": True})


def status(connection: Connection, rest: str, query: Query) -> None:
    """/status/<code>: that status."""
    connection.answer(int(rest), {"status": int(rest)})


def fail(connection: Connection, rest: str, query: Query) -> None:
    """/fail/<n>/<id>: 500 n times, then 200."""
    times, _, name = rest.partition("/")
    failures = connection.memory.failures
    if failures[name] >= int(times):
        connection.answer(200, {"ok": True, "after": failures[name]})
        return
    failures[name] += 1
    connection.answer(500, {"failure": failures[name]})


def hang(connection: Connection, rest: str, query: Query) -> None:
    """/hang?s=3600: nothing for that long, then the connection closes."""
    connection.later(float(query.get("s", "3600")), connection.transport.close)


def delay(connection: Connection, rest: str, query: Query) -> None:
    """/delay?s=0.2: 200 after that long."""
    seconds = float(query.get("s", "0.2"))
    connection.later(seconds, lambda: connection.answer(200, {"ok": True, "after": seconds}))


def hold(connection: Connection, rest: str, query: Query) -> None:
    """/hold: no answer until POST /_release, then 200."""

    def answer() -> None:
        if not connection.transport.is_closing():
            connection.answer(200, {"ok": True, "held": True})

    connection.memory.held.append(answer)


def not_found(connection: Connection, rest: str, query: Query) -> None:
    connection.answer(404, {"error": "no such behaviour", "behaviours": sorted(BEHAVIOURS)})


BEHAVIOURS: dict[str, Callable[[Connection, str, Query], None]] = {
    one.__name__: one for one in (ok, status, fail, hang, delay, hold)
}


def control(connection: Connection, path: str, query: Query) -> None:
    """What the test asks of the server itself; not recorded."""
    memory = connection.memory
    if path == "/_record":
        connection.answer(200, "\n".join(entry.line() for entry in memory.entries).encode())
    elif path == "/_count":
        connection.answer(200, {"count": len(memory.entries)})
    elif path == "/_wait":
        asyncio.get_running_loop().create_task(
            wait(connection, int(query["count"]), float(query["timeout"]))
        )
    elif path == "/_clear" and connection.method == "POST":
        memory.clear()
        connection.answer(200, {})
    elif path == "/_release" and connection.method == "POST":
        connection.answer(200, {"released": memory.release()})
    else:
        connection.answer(404, {"error": "no such control"})


async def wait(connection: Connection, count: int, timeout: float) -> None:
    memory = connection.memory
    if len(memory.entries) < count:
        waiting = (count, asyncio.get_running_loop().create_future())
        memory.waiting.append(waiting)
        await asyncio.wait([waiting[1]], timeout=timeout)
        memory.waiting.remove(waiting)
    connection.answer(200, {"count": len(memory.entries)})


# The server: the process.


async def serve() -> None:
    memory = Memory()
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    server = listening()
    accepting = loop.create_task(accept_for_ever(server, memory))
    print(server.getsockname()[1], flush=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    loop.add_reader(
        sys.stdin.fileno(), lambda: None if sys.stdin.buffer.raw.read(1) else ended.set()
    )  # type: ignore[attr-defined]
    await ended.wait()
    accepting.cancel()
    server.close()


def listening() -> socket.socket:
    """The server's socket; what it accepts is stamped, on Linux."""
    server = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server.setblocking(False)
    if sys.platform == "linux":
        server.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    return server


if __name__ == "__main__":
    asyncio.run(serve())
