"""HTTP servers that are scripts on raw sockets, since most is wrong that they do; calls to them."""

from __future__ import annotations

import errno
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from callqueue import clocks
from callqueue.execution import wire
from callqueue.execution.wire import Answer, Gate, Policy, Timeouts

LOOPBACK = Policy(allowed_networks=("127.0.0.0/8", "::1/128"))
PATIENT = Timeouts(connect=5, read=5, total=10)
HURRIED = Timeouts(connect=5, read=5, total=1.0)
SECRET = "s3cr3t"


@dataclass
class Seen:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    raw: bytes


class Line:
    """One connection, as the server sees it."""

    def __init__(self, sock: socket.socket, peer: Peer) -> None:
        self.sock, self.peer, self._buffer = sock, peer, b""
        self.is_over = threading.Event()

    def _receive(self) -> None:
        data = self.sock.recv(65536)
        if not data:
            raise ConnectionError
        self._buffer += data

    def read_head(self) -> bytes:
        while b"\r\n\r\n" not in self._buffer:
            self._receive()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        return head

    def read(self) -> Seen:
        head = self.read_head()
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        pairs = [line.partition(":") for line in lines]
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        length = int(headers.get("content-length", 0))
        while len(self._buffer) < length:
            self._receive()
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        seen = Seen(method, target, headers, body, head + b"\r\n\r\n" + body)
        self.peer.seen.append(seen)
        return seen

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def drip(self, data: bytes, every: float = 0.03) -> None:
        """One byte at a time, until the other side has had enough."""
        for position in range(len(data)):
            self.send(data[position : position + 1])
            if self.peer.closing.wait(every):
                return

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def has_ended(self) -> bool:
        """Whether the client closes, having sent nothing more."""
        self.sock.settimeout(5)
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True


Script = Callable[[Line], None]


@dataclass
class Peer:
    """A server whose every connection follows a script."""

    script: Script
    context: ssl.SSLContext | None = None
    address: str = "127.0.0.1"
    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    failures: list[BaseException] = field(default_factory=list)
    accepted: threading.Condition = field(default_factory=threading.Condition)

    def __enter__(self) -> Peer:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self.listener = socket.create_server((self.address, self.port), family=family)
        self.port = self.listener.getsockname()[1]
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.threads[0].join(5)
        for line in self.lines:
            with suppress(OSError):
                line.sock.shutdown(socket.SHUT_RDWR)
            line.sock.close()
        for thread in self.threads:
            thread.join(5)
        assert not self.failures, self.failures

    def url(self, path: str = "/", host: str | None = None) -> str:
        scheme = "https" if self.context else "http"
        own = f"[{self.address}]" if ":" in self.address else self.address
        return f"{scheme}://{host or own}:{self.port}{path}"

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError as error:
                if error.errno != errno.EMFILE or self.closing.wait(0.01):
                    return
                continue  # the test's process may have no more descriptors for a moment
            line = Line(sock, self)
            thread = threading.Thread(target=self._serve, args=(line,), daemon=True)
            with self.accepted:
                self.lines.append(line)
                self.threads.append(thread)
                self.accepted.notify_all()
            thread.start()

    def line(self, number: int) -> Line:
        """The connection of that number, counted from 1, once there is one."""
        with self.accepted:
            assert self.accepted.wait_for(lambda: len(self.lines) >= number, 5)
            return self.lines[number - 1]

    def has_closed(self, number: int) -> bool:
        """Whether the script of that connection has come to its end."""
        return self.line(number).is_over.wait(5)

    def _serve(self, line: Line) -> None:
        try:
            if self.context is not None:
                line.sock = self.context.wrap_socket(line.sock, server_side=True)
            self.script(line)
        except (OSError, ssl.SSLError):
            pass
        except BaseException as failure:
            self.failures.append(failure)
        finally:
            line.sock.close()
            line.is_over.set()


def answer_bytes(body: bytes = b"ok", status: str = "200 OK", **headers: str) -> bytes:
    lines = {"Content-Length": str(len(body))}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value != "")
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode("latin-1") + body


def answering(*answers: bytes | Callable[[Seen], bytes]) -> Script:
    """Answer each request of a connection in turn, the last answer for ever."""

    def script(line: Line) -> None:
        turn = 0
        while True:
            seen = line.read()
            answer = answers[min(turn, len(answers) - 1)]
            turn += 1
            line.send(answer(seen) if callable(answer) else answer)

    return script


def once(data: bytes) -> Script:
    """Answer one request, then close."""

    def script(line: Line) -> None:
        line.read()
        line.send(data)

    return script


class Listener:
    """A server that counts whoever connects, keeps what it hears, and answers `answer` once."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ) -> None:
        self.answer, self.heard = answer, list[bytes]()
        self.peer = Peer(self._script, address=host, port=port)
        self.peer.__enter__()
        self.port = self.peer.port

    def _script(self, line: Line) -> None:
        self.heard.append(line.sock.recv(65536))
        line.send(self.answer)

    @property
    def connections(self) -> int:
        return len(self.peer.lines)

    def close(self) -> None:
        self.peer.__exit__()


def echo(seen: Seen) -> bytes:
    return answer_bytes(seen.body)


def call(url: str, method: str = "post", **more: Any) -> Answer:
    own = {name: more.pop(name) for name in ("policy", "timeouts", "gate") if name in more}
    options = {"policy": LOOPBACK, "timeouts": PATIENT, **own}
    return wire.request(method, {"url": url, **more}, **options)


def body_of(answer: Answer) -> bytes:
    assert answer.response is not None, answer.error
    return answer.response.content


def nothing_was_sent(answer: Answer) -> bool:
    found = (answer.response, answer.sent, answer.sent_at)
    return found == (None, False, None) and answer.error != ""


def without_end(head: bytes, piece: bytes) -> Script:
    """A head, and then the same again and again."""

    def script(line: Line) -> None:
        line.read()
        line.send(head)
        while True:
            line.send(piece)

    return script


@dataclass
class Clock:
    ahead: float = 0.0

    def __call__(self) -> float:
        return clocks.monotonic() + self.ahead


@dataclass
class Names:
    """A name server: each lookup takes the next answer, the last one for ever."""

    answers: list[list[str]]
    lookups: list[str] = field(default_factory=list)

    def __call__(self, host: Any, port: Any, *args: Any, **kwargs: Any) -> list[Any]:
        self.lookups.append(host)
        found = self.answers[min(len(self.lookups), len(self.answers)) - 1]
        families = [socket.AF_INET6 if ":" in text else socket.AF_INET for text in found]
        return [
            (family, socket.SOCK_STREAM, 6, "", (text, port))
            for family, text in zip(families, found, strict=True)
        ]


def kept_connections() -> list[Any]:
    """Those of this process that are idle."""
    return [one for pool in wire._pools.values() for one in pool.pool]


class Recording(Gate):
    def __init__(self, deed: Callable[[], None] = lambda: None) -> None:
        self.deed = deed
        self.waits: list[float] = []

    def wait(self) -> None:
        self.deed()
        self.waits.append(clocks.monotonic())


def is_lost(answer: Answer) -> bool:
    found = (answer.response, answer.sent, answer.refused)
    return found == (None, True, False) and answer.sent_at is not None


@contextmanager
def within(seconds: float) -> Iterator[None]:
    before = time.monotonic()
    yield
    assert time.monotonic() - before < seconds


def limited(limit: int) -> Policy:
    return LOOPBACK._replace(max_response_bytes=limit)


def redirecting(location: str, status: str = "302 Found") -> bytes:
    return answer_bytes(b"moved", status, Location=location)


@dataclass
class Certificate:
    path: Path
    server: ssl.SSLContext
    names: list[str | None] = field(default_factory=list)
