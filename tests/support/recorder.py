"""A vendor for tests: an HTTP/1.1 server in a process of its own that records every request and
misbehaves on demand.

In: requests, whose path chooses the behaviour (`Connection.behave`). Out: the record, as JSON lines
at `/_record`; instants are of the machine's monotonic clock, so they compare between processes. A
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
from dataclasses import dataclass
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
    """One request as the vendor saw it; two are None while it is unanswered."""

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
    """`with Recorder() as vendor: vendor.url("/ok")`. Dies with this process."""

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
        if self._process is not None:
            with self._process as process:
                process.kill()
            self._process = None

    def url(self, path: str = "/ok", **query: Any) -> str:
        return f"http://127.0.0.1:{self.port}{path}" + (f"?{urlencode(query)}" if query else "")

    def arrivals(self) -> list[Arrival]:
        """In order of arrival."""
        return [Arrival(**json.loads(line)) for line in self._ask("GET", "/_record").splitlines()]

    def count(self) -> int:
        return int(json.loads(self._ask("GET", "/_count"))["count"])

    def wait_for(self, count: int, timeout: float = 30.0) -> list[Arrival]:
        """All arrivals, once there are `count`; TimeoutError otherwise."""
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


# The server: when something arrived.

SO_TIMESTAMPNS = 35  # of Linux; the socket module does not name it
# seconds within which the two clocks must have been read for the one to be told from the other
SURE = 50e-6


class StampedSocket(socket.socket):
    """Knows when the kernel received what was read last (None where that does not say)."""

    arrived_at: float | None = None

    def recv(self, size: int, flags: int = 0) -> bytes:
        data, told, _flags, _address = self.recvmsg(size, socket.CMSG_SPACE(16), flags)
        kind = (socket.SOL_SOCKET, SO_TIMESTAMPNS)
        stamps = [value for *of_kind, value in told if tuple(of_kind) == kind]
        self.arrived_at = monotonic_at(*struct.unpack("qq", stamps[0][:16])) if stamps else None
        return data


def monotonic_at(seconds: int, nanoseconds: int) -> float:
    """What the monotonic clock showed at that time of day; at most `SURE` later."""
    stamp = seconds + nanoseconds / 1e9
    while True:
        before, now, after = time.time(), time.monotonic(), time.time()
        if after - before < SURE:
            return now - max(0.0, before - stamp)


# The server: what it remembers, and one connection.


class Entry:
    """One line of the record; the head is read only when somebody asks for that."""

    __slots__ = ("answered_at", "at", "body", "connection", "head", "status")

    def __init__(self, at: float, connection: int, head: bytes, body: bytes) -> None:
        self.at, self.connection, self.head = at, connection, head
        self.body = body[:KEPT_BODY_BYTES]
        self.status: int | None = None
        self.answered_at: float | None = None

    def line(self) -> str:
        first, *lines = self.head.decode("latin-1").split("\r\n")
        method, target, _version = first.split(" ", 2)
        pairs = [line.partition(":") for line in lines]
        document = {
            "at": self.at,
            "connection": self.connection,
            "method": method,
            "target": target,
            "headers": {name.lower(): value.strip() for name, _, value in pairs},
            "body": self.body.decode("utf-8", "replace"),
            "status": self.status,
            "answered_at": self.answered_at,
        }
        return json.dumps(document)


entries: list[Entry] = []
failures: Counter[str] = Counter()
held: list[Callable[[], None]] = []


class Connection(asyncio.Protocol):
    """Reads requests by hand, for speed: one at a time, the next after the answer."""

    opened = 0
    method = ""
    busy = False
    entry: Entry | None = None

    def __init__(self, stamped: StampedSocket) -> None:
        self.socket, self.buffer = stamped, bytearray()
        self.loop = asyncio.get_running_loop()
        Connection.opened += 1
        self.number = Connection.opened

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.read_requests()

    def read_requests(self) -> None:
        while not self.busy and not self.transport.is_closing():
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head, end = bytes(self.buffer[:end]), end + 4
            _, _, length = head.lower().partition(b"\r\ncontent-length:")
            whole = end + int(length.partition(b"\r\n")[0] or 0)
            if len(self.buffer) < whole:
                return
            body = bytes(self.buffer[end:whole])
            del self.buffer[:whole]
            self.busy = True
            self.receive(head, body)

    def receive(self, head: bytes, body: bytes) -> None:
        now = self.socket.arrived_at or time.monotonic()
        method, target, _ = head.decode("latin-1").split(" ", 2)
        self.method, self.entry = method, None
        path, _, rest = target.partition("?")
        query = dict(parse_qsl(rest))
        if path.startswith("/_"):
            self.control(path, query)
            return
        self.entry = Entry(now, self.number, head, body)
        entries.append(self.entry)
        self.behave(*path[1:].partition("/")[::2], query)

    def behave(self, name: str, rest: str, query: dict[str, str]) -> None:
        if name == "ok":  # 200 at once
            self.answer(200, {"ok": True})
        elif name == "status":  # /status/<code>: that status
            self.answer(int(rest), {"status": int(rest)})
        elif name == "fail":  # /fail/<n>/<id>: 500 n times, then 200
            times, _, one = rest.partition("/")
            failures[one] += 1
            self.answer(500 if failures[one] <= int(times) else 200, {"times": failures[one]})
        elif name == "hang":  # /hang?s=3600: nothing for that long, then the connection closes
            self.loop.call_later(float(query.get("s", "3600")), self.transport.close)
        elif name == "delay":  # /delay?s=0.2: 200 after that long
            self.loop.call_later(float(query.get("s", "0.2")), self.answer, 200, {"ok": True})
        elif name == "hold":  # /hold: no answer until POST /_release, then 200
            held.append(lambda: self.answer(200, {"ok": True, "held": True}))
        else:
            self.answer(404, {"error": "no such behaviour"})

    def control(self, path: str, query: dict[str, str]) -> None:
        """What the test asks of the server itself; not recorded."""
        if path == "/_record":
            self.answer(200, "\n".join(entry.line() for entry in entries).encode())
        elif path == "/_count":
            self.answer(200, {"count": len(entries)})
        elif path == "/_wait":
            until = self.loop.time() + float(query["timeout"])
            self.answer_once_there_are(int(query["count"]), until)
        elif path == "/_clear":
            entries.clear()
            failures.clear()
            self.answer(200, {})
        elif path == "/_release":
            released, held[:] = list(held), []
            for answer in released:
                answer()
            self.answer(200, {"released": len(released)})

    def answer_once_there_are(self, count: int, until: float) -> None:
        if len(entries) < count and self.loop.time() < until:
            self.loop.call_later(0.005, self.answer_once_there_are, count, until)
        else:
            self.answer(200, {"count": len(entries)})

    def answer(self, status: int, document: Any) -> None:
        """Unless the client has gone by now."""
        if self.transport.is_closing():
            return
        content = document if isinstance(document, bytes) else json.dumps(document).encode()
        reason = HTTPStatus(status).phrase if status in set(HTTPStatus) else "Unknown"
        head = (
            f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        self.transport.write(head.encode() + (b"" if self.method == "HEAD" else content))
        if self.entry is not None:
            self.entry.status, self.entry.answered_at = status, time.monotonic()
        self.busy = False
        if self.buffer:
            self.loop.call_soon(self.read_requests)


# The server: the process.


async def accept_for_ever(server: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        accepted, _address = await loop.sock_accept(server)
        stamped = StampedSocket(fileno=accepted.detach())
        stamped.setblocking(False)
        await loop.connect_accepted_socket(lambda stamped=stamped: Connection(stamped), stamped)


async def serve() -> None:
    """What is accepted is stamped, on Linux."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        server.setblocking(False)
        if sys.platform == "linux":
            server.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        accepting = loop.create_task(accept_for_ever(server))
        print(server.getsockname()[1], flush=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        loop.add_reader(sys.stdin.fileno(), ended.set)
        await ended.wait()
        accepting.cancel()


if __name__ == "__main__":
    asyncio.run(serve())
