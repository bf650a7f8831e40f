"""The HTTP wire against real servers on loopback: how far a call got, what bounds it, and what
never leaves.

Servers are scripts on raw sockets, since most of what they do is wrong. Time is real where a socket
must wait for it, and short; where it need not pass, `journey.clock` is moved.
"""

from __future__ import annotations

import datetime
import gzip
import ipaddress
import json
import os
import random
import socket
import ssl
import struct
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import brotli
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from callqueue import clocks
from callqueue.execution.http import adapter, client, connection, deadline
from callqueue.execution.http.client import Answer, Dropped, Gate, Policy, Timeouts, close_idle
from tests.support.busy import BUSY, CHUNKED

LOOPBACK = Policy(allowed_networks=("127.0.0.0/8", "::1/128"))
FOLLOWING = replace(LOOPBACK, redirects=10)
PATIENT = Timeouts(connect=5, read=5, total=10)
SECRET = "s3cr3t"

# --- The other side


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

    def read_head(self) -> bytes:
        while b"\r\n\r\n" not in self._buffer:
            data = self.sock.recv(65536)
            if not data:
                raise ConnectionError
            self._buffer += data
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        return head

    def read(self) -> Seen:
        head = self.read_head()
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        length = int(headers.get("content-length", 0))
        while len(self._buffer) < length:
            data = self.sock.recv(65536)
            if not data:
                raise ConnectionError
            self._buffer += data
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
    seen: list[Seen] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    failures: list[BaseException] = field(default_factory=list)
    accepted: threading.Condition = field(default_factory=threading.Condition)

    def __enter__(self) -> Peer:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self.listener = socket.create_server((self.address, 0), family=family)
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
        return f"{scheme}://{host or (f'[{self.address}]' if ':' in self.address else self.address)}:{self.port}{path}"

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
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
    lines = {
        "Content-Length": str(len(body)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
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


def echo(seen: Seen) -> bytes:
    return answer_bytes(seen.body)


def call(url: str, method: str = "post", **more: Any) -> Answer:
    options = {name: more.pop(name) for name in ("policy", "timeouts", "gate") if name in more}
    return client.request(
        method, {"url": url, **more}, **{"policy": LOOPBACK, "timeouts": PATIENT, **options}
    )


def body_of(answer: Answer) -> bytes:
    assert answer.response is not None, answer.error
    return answer.response.content


def nothing_was_sent(answer: Answer) -> bool:
    return (answer.response, answer.sent, answer.sent_at) == (
        None,
        False,
        None,
    ) and answer.error != ""


@pytest.fixture(autouse=True)
def _no_connection_outlives_its_test() -> Iterator[None]:
    yield
    close_idle()


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr(deadline, "clock", moved)
    return moved


@dataclass
class Names:
    """A name server: each lookup takes the next answer, the last one for ever."""

    answers: list[list[str]]
    lookups: list[str] = field(default_factory=list)

    def __call__(self, host: Any, port: Any, *args: Any, **kwargs: Any) -> list[Any]:
        self.lookups.append(host)
        found = self.answers[min(len(self.lookups), len(self.answers)) - 1]
        return [
            (
                socket.AF_INET6 if ":" in text else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                (text, port),
            )
            for text in found
        ]


@pytest.fixture
def name_is(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Names]:
    real = socket.getaddrinfo

    def install(*answers: list[str]) -> Names:
        names = Names(list(answers))

        def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
            if str(host).endswith(".test"):
                return names(host, port, *args, **kwargs)
            return real(host, port, *args, **kwargs)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        return names

    return install


# --- A call that goes well


def test_a_call_comes_back_as_a_requests_response() -> None:
    with Peer(answering(answer_bytes(b'{"id": 7}', Content_Type="application/json"))) as peer:
        before = clocks.monotonic()
        answer = call(peer.url("/v1"), json={"a": 1})
        after = clocks.monotonic()
    response = answer.response
    assert type(response) is requests.Response
    assert (response.status_code, response.json(), response.text, response.reason) == (
        200,
        {"id": 7},
        '{"id": 7}',
        "OK",
    )
    assert response.url == peer.url("/v1")
    assert response.headers["content-type"] == "application/json"
    assert response.request.method == "POST"
    assert 0 < response.elapsed.total_seconds() < after - before
    assert answer.sent_at is not None
    assert before < answer.sent_at < after
    assert answer == Answer(response, answer.sent_at, sent=True)
    assert (peer.seen[0].method, peer.seen[0].target, peer.seen[0].body) == (
        "POST",
        "/v1",
        b'{"a": 1}',
    )


@pytest.mark.parametrize("method", ["get", "options", "head", "post", "put", "patch", "delete"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"params": {"q": "a b", "list": ["1", "2"], "none": None, "ü": "é"}},
        {"params": [["a", "1"], ["a", "2"]]},
        {"params": "raw=1&x"},
        {"json": {"name": "ü", "deep": [1, None, True]}},
        {"json": []},
        {"json": None},
        {"data": {"a": "1", "b": ["2", "3"]}},
        {"data": [["a", "1"], ["b", "ü"]]},
        {"data": "text ü"},
        {"data": ""},
        {"data": {}, "json": {"a": 1}},
        {
            "headers": {
                "X-One": "1",
                "user-agent": "own",
                "ACCEPT": "text/csv",
                "Content-Type": "text/x",
            },
            "data": "a",
        },
        {"headers": {"X-Latin": "é"}},
        {"cookies": {"a": "1", "b": "2"}},
        {"cookies": {"a": "1"}, "headers": {"Cookie": "z=1"}},
        {"auth": ["user", "pässword"]},
        {"auth": ["user", "p"], "headers": {"Authorization": "Bearer x"}},
    ],
)
def test_what_is_sent_is_what_requests_would_send(method: str, params: dict[str, Any]) -> None:
    with Peer(answering(answer_bytes(b"", "204 No Content"))) as peer:
        url = peer.url("/päth/%41?x=1#fragment")
        with requests.Session() as session:
            session.trust_env = False
            theirs = {**params, "auth": tuple(params["auth"])} if "auth" in params else params
            session.request(method, url, **theirs)
        assert call(url, method, **params).error == ""
    one, other = (
        [*sorted(seen.raw.partition(b"\r\n\r\n")[0].split(b"\r\n")), seen.body]
        for seen in peer.seen
    )
    assert other == one


def test_nothing_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password s3cr3t")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with Peer(answering(echo)) as peer:
        assert body_of(call(peer.url(), data="x")) == b"x"
    assert "authorization" not in peer.seen[0].headers


def test_no_cookie_is_kept_between_calls() -> None:
    with Peer(answering(answer_bytes(Set_Cookie="a=1; Path=/"))) as peer:
        first = call(peer.url())
        assert first.response is not None
        assert first.response.cookies["a"] == "1"
        call(peer.url())
    assert "cookie" not in peer.seen[1].headers


def test_ipv6_is_called_by_its_literal() -> None:
    with ExitStack() as stack:
        try:
            peer = stack.enter_context(Peer(answering(echo), address="::1"))
        except OSError:
            pytest.skip("no IPv6 here")
        assert body_of(call(peer.url(), data="x")) == b"x"
        assert peer.seen[0].headers["host"] == f"[::1]:{peer.port}"


def test_interim_answers_are_passed_over() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
    with Peer(answering(interim + answer_bytes(b"done"))) as peer:
        assert body_of(call(peer.url())) == b"done"
        assert body_of(call(peer.url())) == b"done"
        assert len(peer.lines) == 1


# --- Connections


def test_a_connection_is_used_again() -> None:
    with Peer(answering(echo)) as peer:
        for word in ("one", "two", "three"):
            assert body_of(call(peer.url(), data=word)) == word.encode()
        assert len(peer.lines) == 1


@pytest.mark.parametrize(
    "answer",
    [
        answer_bytes(b"", "204 No Content", Content_Length=""),
        answer_bytes(b"", "304 Not Modified", Content_Length="", Transfer_Encoding="chunked"),
        answer_bytes(b"", Content_Encoding="gzip"),
        answer_bytes(gzip.compress(b"x" * 10), Content_Encoding="gzip"),
        answer_bytes(b"2\r\nok\r\n0\r\n\r\n", Content_Length="", Transfer_Encoding="chunked"),
        answer_bytes(b"x" * 200_000),
        answer_bytes(b"", "302 Found", Location="/there"),
    ],
)
def test_a_connection_is_used_again_after_every_kind_of_whole_answer(answer: bytes) -> None:
    with Peer(answering(answer)) as peer:
        for _ in range(3):
            answered = call(peer.url())
            assert answered.response is not None
            assert answered.error == ""
        assert len(peer.lines) == 1


def test_the_answer_to_head_has_no_body_whatever_it_says() -> None:
    with Peer(answering(answer_bytes(b"", Content_Length="9999", Content_Encoding="gzip"))) as peer:
        for _ in range(2):
            answer = call(peer.url(), "head")
            assert (body_of(answer), answer.error) == (b"", "")
        assert len(peer.lines) == 1


@pytest.mark.parametrize(("idle", "connections"), [(1.4, 1), (1.6, 2)])
def test_a_connection_idle_for_too_long_is_not_used_again(
    clock: Clock, idle: float, connections: int
) -> None:
    with Peer(answering(echo)) as peer:
        call(peer.url())
        clock.ahead += idle
        assert call(peer.url()).error == ""
        assert len(peer.lines) == connections


def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    with Peer(once(answer_bytes())) as peer:
        for expected in (1, 2):
            assert body_of(call(peer.url())) == b"ok"
            assert peer.has_closed(expected)
            assert len(peer.lines) == expected


def test_a_connection_with_an_unasked_answer_in_it_is_not_used_again() -> None:
    wanted, sent = threading.Event(), threading.Event()

    def script(line: Line) -> None:
        line.read()
        line.send(answer_bytes(b"mine"))
        wanted.wait(5)
        line.send(answer_bytes(b"not asked for"))
        sent.set()
        line.has_ended()

    with Peer(script) as peer:
        call(peer.url())
        wanted.set()
        assert sent.wait(5)
        assert body_of(call(peer.url(), data="x")) == b"mine"
        assert len(peer.lines) == 2


def test_a_connection_checked_under_other_networks_is_not_used_again() -> None:
    with Peer(answering(echo)) as peer:
        call(peer.url(), policy=LOOPBACK)
        call(peer.url(), policy=Policy(allowed_networks=("127.0.0.1/32",)))
        assert len(peer.lines) == 2
        assert call(peer.url(), policy=Policy()).refused
        assert len(peer.lines) == 2


def test_each_thread_has_connections_of_its_own() -> None:
    with Peer(answering(echo)) as peer:
        call(peer.url())
        thread = threading.Thread(target=call, args=(peer.url(),))
        thread.start()
        thread.join()
        assert len(peer.lines) == 2
        assert peer.has_closed(2)  # with its thread
        assert not peer.line(1).is_over.is_set()


def test_idle_connections_are_few(clock: Clock) -> None:
    with ExitStack() as stack:
        peers = [
            stack.enter_context(Peer(answering(echo))) for _ in range(adapter.IDLE_CONNECTIONS + 2)
        ]
        for peer in peers:
            call(peer.url())
        assert peers[0].has_closed(1)
        call(peers[-1].url())
        call(peers[0].url())
        assert (len(peers[-1].lines), len(peers[0].lines)) == (1, 2)


def test_close_idle_closes_them() -> None:
    with Peer(answering(echo)) as peer:
        call(peer.url())
        close_idle()
        assert peer.has_closed(1)
        call(peer.url())
        assert len(peer.lines) == 2


# --- The gate


class Recording(Gate):
    def __init__(self, deed: Callable[[], None] = lambda: None) -> None:
        self.deed = deed
        self.waits: list[float] = []

    def wait(self) -> None:
        self.deed()
        self.waits.append(clocks.monotonic())


def test_the_gate_is_passed_when_connected_and_before_the_first_byte() -> None:
    passed = threading.Event()

    def script(line: Line) -> None:
        passed.wait(5)
        answering(echo)(line)

    def look() -> None:
        sock = peer.line(1).sock
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1, socket.MSG_PEEK)
        sock.setblocking(True)
        passed.set()

    with Peer(script) as peer:
        gate = Recording(look)
        answer = call(peer.url(), data="x", gate=gate)
        assert body_of(answer) == b"x"
    assert len(gate.waits) == 1
    assert gate.sent_at is not None
    assert gate.waits[0] <= gate.sent_at == answer.sent_at


def test_the_stamp_is_that_of_the_last_byte() -> None:
    reading = threading.Event()
    times: list[float] = []

    def script(line: Line) -> None:
        line.read_head()
        reading.wait(5)
        times.append(clocks.monotonic())
        size = len(line._buffer)
        while size < 20_000_000:
            size += len(line.sock.recv(1 << 20))
        line.send(answer_bytes())

    with Peer(script) as peer:
        threading.Timer(0.1, reading.set).start()
        answer = call(peer.url(), data="x" * 20_000_000)
        assert body_of(answer) == b"ok"
        assert answer.sent_at is not None
        assert answer.sent_at > times[0]


def test_a_dropped_call_sends_nothing() -> None:
    ended: list[bool] = []

    def script(line: Line) -> None:
        ended.append(line.has_ended())

    def drop() -> None:
        raise Dropped("the lease has ended")

    with Peer(script) as peer:
        answer = call(peer.url(), gate=Recording(drop))
        assert peer.has_closed(1)
    assert answer == Answer(None, None, error="the lease has ended", dropped=True)
    assert ended == [True]


def test_what_else_the_gate_raises_is_raised_and_sends_nothing() -> None:
    ended: list[bool] = []

    def interrupt() -> None:
        raise RuntimeError("the worker is told to stop")

    with Peer(lambda line: ended.append(line.has_ended())) as peer:
        with pytest.raises(RuntimeError, match="told to stop"):
            call(peer.url(), gate=Recording(interrupt))
        assert peer.has_closed(1)
    assert ended == [True]


def test_time_spent_in_the_gate_counts_against_no_timeout(clock: Clock) -> None:
    def sleep() -> None:
        clock.ahead += 1000

    with Peer(answering(echo)) as peer:
        answer = call(peer.url(), data="x", gate=Recording(sleep))
    assert body_of(answer) == b"x"
    assert answer.response is not None
    assert answer.response.elapsed.total_seconds() < 5


class Watching(Gate):
    """Opens once the server has hung up, as many times as it does."""

    def __init__(self, peer: Peer, times: int) -> None:
        self.peer, self.times, self.waits = peer, times, 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits <= self.times:
            assert self.peer.has_closed(self.waits)
            time.sleep(0.002)  # a wait too short to notice is not looked at


def test_a_server_that_hangs_up_during_the_wait_is_connected_to_again() -> None:
    def script(line: Line) -> None:
        if line is not line.peer.line(1):
            answering(echo)(line)

    with Peer(script) as peer:
        gate = Watching(peer, times=1)
        assert body_of(call(peer.url(), data="x", gate=gate)) == b"x"
        assert (len(peer.seen), gate.waits) == (1, 2)


def test_a_server_that_always_hangs_up_during_the_wait_has_been_sent_nothing() -> None:
    with Peer(lambda line: None) as peer:
        answer = call(peer.url(), gate=Watching(peer, times=9))
    assert nothing_was_sent(answer)
    assert "before anything is sent" in answer.error


def test_a_kept_connection_grown_too_old_in_the_gate_is_not_used(clock: Clock) -> None:
    def wait_long() -> None:
        clock.ahead += 2

    with Peer(answering(echo)) as peer:
        call(peer.url())
        assert call(peer.url(), gate=Recording(wait_long)).error == ""
        assert len(peer.lines) == 2
        assert len(peer.seen) == 2


# --- Nothing sent


def test_a_name_that_does_not_resolve_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    answer = call("http://nowhere.test/?token=" + SECRET)
    assert nothing_was_sent(answer)
    assert not answer.refused
    assert answer.error == "the name nowhere.test does not resolve: Name or service not known"


def test_a_resolver_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(5) and [])
    before = time.monotonic()
    answer = call("http://slow.test/", timeouts=Timeouts(total=0.2))
    over.set()
    assert time.monotonic() - before < 1
    assert nothing_was_sent(answer)
    assert (
        "resolving the name slow.test took longer than the total timeout of 0.2 s" in answer.error
    )


def test_hanging_lookups_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    began: list[str] = []
    monkeypatch.setattr(connection, "_lookups", threading.BoundedSemaphore(2))
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *_, **__: began.append(host) or (over.wait(5) and [])
    )
    for _ in range(4):
        assert nothing_was_sent(call("http://slow.test/", timeouts=Timeouts(total=0.05)))
    over.set()
    assert len(began) == 2


def test_a_name_with_no_addresses_sends_nothing(name_is: Callable[..., Names]) -> None:
    name_is([])
    assert nothing_was_sent(call("http://empty.test/"))


def test_a_refused_connection_sends_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    answer = call(f"http://127.0.0.1:{port}/?token={SECRET}")
    assert nothing_was_sent(answer)
    assert answer.error == f"no connection to 127.0.0.1:{port}: Connection refused"


def test_a_connect_timeout_sends_nothing() -> None:
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        time.sleep(0.05)
        answer = call(
            f"http://127.0.0.1:{full.getsockname()[1]}/", timeouts=Timeouts(connect=0.2, total=5)
        )
    assert nothing_was_sent(answer)
    assert "the connect timeout of 0.2 s" in answer.error


def test_a_total_timeout_used_up_before_the_send_sends_nothing() -> None:
    with Peer(answering(echo)) as peer:
        call(peer.url())
        answer = call(peer.url(), timeouts=Timeouts(total=0))
    assert nothing_was_sent(answer)
    assert len(peer.seen) == 1


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"url": "no-scheme.test/x?token=" + SECRET}, "its URL has no scheme"),
        ({"url": "http:///x?token=" + SECRET}, "its URL is not valid"),
        ({"url": "http://[::1/?token=" + SECRET}, "its URL is not valid"),
        ({"url": "http://127.0.0.1:99999/"}, "not valid"),
        (
            {"url": "http://127.0.0.1/", "headers": {"X": SECRET + "\r\nY: 1"}},
            "one of its headers is not valid",
        ),
        ({"url": "http://127.0.0.1/", "headers": {"X": SECRET + "\u2603"}}, "cannot be made"),
        ({"url": "http://127.0.0.1/", "headers": {"X:Y": SECRET}}, "cannot be made"),
        ({"url": "http://127.0.0.1/", "headers": {"X": 1}}, "cannot be made"),
        ({"url": "http://127.0.0.1/", "json": {"x": float("nan")}}, "JSON"),
        ({"url": "http://127.0.0.1/", "auth": [SECRET]}, "cannot be made"),
        ({"url": "http://127.0.0.1/", "auth": [SECRET, "\u2603"]}, "cannot be made"),
        ({}, "cannot be made"),
    ],
)
def test_what_no_request_can_be_made_of_is_refused_without_repeating_it(
    params: dict[str, Any], why: str
) -> None:
    answer = client.request("get", params, policy=LOOPBACK, timeouts=PATIENT)
    assert nothing_was_sent(answer)
    assert answer.refused
    assert why in answer.error
    assert SECRET not in answer.error


# --- Policy


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/", "http://2130706433/", "http://0x7f.1/", "http://127.1/", "http://0177.0.0.1/",
     "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://[::1%25lo]/", "http://127.0.0.1./", "http://127。0。0。1/",
     "http://①②⑦.0.0.1/", "HTTP://127.0.0.1/", "http://169.254.169.254/latest", "http://[fd00:ec2::254]/",
     "http://100.64.0.1/", "http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/", "https://10.0.0.1/"],
)  # fmt: skip
def test_literal_addresses_that_are_not_public_are_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connected"))
    answer = call(url, policy=Policy())
    assert nothing_was_sent(answer)
    assert answer.refused
    assert (
        "ALLOWED_NETWORKS" in answer.error or not url.isascii()
    )  # which requests may refuse by itself


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1/",
        "file:///etc/passwd",
        "httpx://127.0.0.1/",
        "javascript:alert(1)",
        "data:text/plain,a",
    ],
)
def test_other_schemes_are_refused(url: str) -> None:
    answer = call(url)
    assert nothing_was_sent(answer)
    assert answer.refused


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    answer = call(f"http://me:{SECRET}@127.0.0.1/")
    assert answer.refused
    assert SECRET not in answer.error


def test_hosts_outside_of_the_allowed_ones_are_refused_without_a_lookup(
    name_is: Callable[..., Names],
) -> None:
    names = name_is(["127.0.0.1"])
    answer = call("http://evil.test/", policy=replace(LOOPBACK, allowed_hosts=("*.good.test",)))
    assert nothing_was_sent(answer)
    assert answer.refused
    assert answer.error == "the host evil.test is not in ALLOWED_HOSTS"
    assert names.lookups == []


def test_a_name_is_refused_where_any_of_its_addresses_is(name_is: Callable[..., Names]) -> None:
    name_is(["127.0.0.1", "10.0.0.1"])
    with Peer(answering(echo)) as peer:
        answer = call(peer.url(host="mixed.test"))
        assert nothing_was_sent(answer)
        assert answer.refused
        assert "mixed.test" in answer.error
        assert "10.0.0.1 is private" in answer.error
        assert peer.lines == []


def test_the_address_that_was_checked_is_the_one_connected_to(
    name_is: Callable[..., Names],
) -> None:
    names = name_is(["127.0.0.1"], ["10.0.0.1"])
    with Peer(answering(echo)) as peer:
        assert body_of(call(peer.url(host="rebinding.test"), data="x")) == b"x"
        assert names.lookups == ["rebinding.test"]
        assert peer.seen[0].headers["host"] == f"rebinding.test:{peer.port}"
        close_idle()
        assert call(peer.url(host="rebinding.test")).refused
        assert len(peer.lines) == 1


def test_a_name_has_each_of_its_addresses_tried_in_turn(name_is: Callable[..., Names]) -> None:
    name_is(["127.0.0.2", "127.0.0.1"])
    with Peer(answering(echo)) as peer:
        assert body_of(call(peer.url(host="two.test"), data="x")) == b"x"


# --- Sent, and no answer


def is_lost(answer: Answer) -> bool:
    return (answer.response, answer.sent, answer.refused) == (
        None,
        True,
        False,
    ) and answer.sent_at is not None


def test_a_connection_closed_without_an_answer_is_a_sent_call() -> None:
    def script(line: Line) -> None:
        line.read()

    with Peer(script) as peer:
        answer = call(peer.url("/?token=" + SECRET))
    assert is_lost(answer)
    assert answer.error == f"127.0.0.1:{peer.port} closed the connection without an answer"


def test_a_reset_is_a_sent_call() -> None:
    def script(line: Line) -> None:
        line.read()
        line.reset()

    with Peer(script) as peer:
        assert is_lost(call(peer.url()))


def test_a_read_timeout_is_a_sent_call() -> None:
    def script(line: Line) -> None:
        line.read()
        line.peer.closing.wait(5)

    with Peer(script) as peer:
        answer = call(peer.url("/?token=" + SECRET), timeouts=Timeouts(read=0.1))
    assert is_lost(answer)
    assert answer.error == f"no answer from 127.0.0.1:{peer.port} within the read timeout of 0.1 s"


def test_what_is_given_up_is_taken_back_from_the_kernel() -> None:
    """A reset, not an orderly end: after an orderly one the kernel goes on to deliver what it still
    holds.
    """
    resets: list[BaseException] = []

    def script(line: Line) -> None:
        line.read()
        try:
            line.sock.recv(1)
        except ConnectionResetError as reset:
            resets.append(reset)

    with Peer(script) as peer:
        assert is_lost(call(peer.url(), timeouts=Timeouts(read=0.1)))
        assert peer.has_closed(1)
    assert len(resets) == 1


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_the_kernel_delivers_no_longer_than_the_call_may_take() -> None:
    with Peer(answering(answer_bytes())) as peer:
        for total in (7.0, 3.0):
            call(peer.url(), timeouts=Timeouts(total=total))
            (kept,) = client.this_thread()[1].idle.values()
            assert (
                0
                < kept.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                <= total * 1000
            )  # type: ignore[union-attr]
    assert len(peer.lines) == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n" + SECRET.encode(),
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 99999 OK\r\n\r\n",
        b"\r\n\r\n",
        b"\x00" * 100,
        b"HTTP/1.1 " + b"2" * 100_000,
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n"
        + b"".join(b"X-%d: 1\r\n" % number for number in range(1000))
        + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello",
    ],
)
def test_garbage_is_a_sent_call_without_an_answer(garbage: bytes) -> None:
    with Peer(once(garbage)) as peer:
        answer = call(peer.url())
    assert is_lost(answer) or garbage.endswith(b"hello")
    assert SECRET not in answer.error


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=300).map(lambda data: b"HTTP/1.1 200 OK\r\n" + data),
        st.binary(max_size=300).map(
            lambda data: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + data
        ),
        st.binary(max_size=300).map(
            lambda data: b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, br\r\n\r\n" + data
        ),
        st.binary(max_size=80).map(
            lambda data: b"HTTP/1.1 302 \xff\r\nLocation: " + data + b"\r\n\r\n"
        ),
        st.binary(max_size=80).map(
            lambda data: b"HTTP/1.1 200 OK\r\nContent-Type: " + data + b"\r\n\r\n"
        ),
        st.binary(max_size=80).map(
            lambda data: b"HTTP/1.1 200 OK\r\nSet-Cookie: " + data + b"\r\n\r\n"
        ),
    )
)
def test_no_answer_makes_it_raise(data: bytes) -> None:
    with Peer(once(data)) as peer:
        answer = call(peer.url(), policy=FOLLOWING, timeouts=Timeouts(total=2))
    assert answer.sent


# --- Slow on purpose

HURRIED = Timeouts(connect=5, read=5, total=0.3)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    before = time.monotonic()
    yield
    assert time.monotonic() - before < seconds


@pytest.mark.parametrize("how", list(BUSY))
def test_a_server_that_keeps_us_busy_costs_half_a_second_of_cpu_at_most(how: str) -> None:
    """This thread's own, so that it is no matter of what else runs; before, it was all of the total
    timeout.
    """
    head, piece, why = BUSY[how]
    with Peer(without_end(head, piece)) as peer:
        before = time.thread_time()
        answer = call(peer.url())
        spent = time.thread_time() - before
        assert peer.has_closed(1)
    assert why in answer.error
    assert answer.truncated == (answer.response is not None)
    assert not answer.broken
    assert spent < 0.5


def test_all_hops_together_may_keep_us_busy_no_longer_than_one() -> None:
    waste = b"1;" + b"y" * 60_000 + b"\r\nx\r\n"
    hop = (
        b"HTTP/1.1 307 Onward\r\nLocation: /\r\nTransfer-Encoding: chunked\r\n\r\n"
        + waste * 4
        + b"0\r\n\r\n"
    )
    with Peer(answering(hop)) as peer:
        answer = call(peer.url(), policy=FOLLOWING)
        assert "hardly any body" in answer.error
        assert len(peer.seen) == 4


@pytest.mark.parametrize("size", [40, 400])
def test_bodies_in_small_chunks_are_read_whole(size: int) -> None:
    """As streams of events are: some tens of bytes each."""
    count = 600_000 // size
    chunk = b"%x\r\n" % size + b"x" * size + b"\r\n"
    with Peer(answering(CHUNKED + b"\r\n" + chunk * count + b"0\r\n\r\n")) as peer:
        answer = call(peer.url())
    assert (len(body_of(answer)), answer.truncated, answer.broken) == (size * count, False, False)


def test_a_large_body_is_never_too_many_pieces() -> None:
    body = b"x" * (40 << 20)
    with Peer(answering(answer_bytes(body))) as peer:
        answer = call(peer.url(), policy=replace(LOOPBACK, max_response_bytes=64 << 20))
    assert (len(body_of(answer)), answer.truncated) == (len(body), False)


def test_text_that_barely_folds_is_read_whole() -> None:
    noise = random.Random(8).randbytes(900_000)
    with Peer(answering(answer_bytes(gzip.compress(noise), Content_Encoding="gzip"))) as peer:
        answer = call(peer.url())
    assert (body_of(answer) == noise, answer.truncated) == (True, False)


@pytest.mark.parametrize(
    ("claimed", "encoding"),
    [
        ("text/html; charset=Shift_JIS", "shift-jis"),
        ("text/html; charset=undefined", "utf-8"),
        ("text/html; charset=utf-7", "utf-8"),
        ("text/html; charset=" + "x" * 5000, "utf-8"),
        ("text/html", "latin-1"),
        ("image/png", None),
    ],
)
def test_a_hook_reads_text_by_no_name_of_the_servers(claimed: str, encoding: str | None) -> None:
    with Peer(answering(answer_bytes(b"ok", Content_Type=claimed))) as peer:
        answer = call(peer.url())
    assert answer.response is not None
    assert answer.response.encoding == encoding
    assert answer.response.text == "ok"


def test_a_redirect_to_a_host_of_any_length_is_kept_in_no_cache() -> None:
    client._target.cache_clear()
    for length in (20_000, 60_000):
        location = f"http://{'a' * length}.example/"
        with Peer(answering(answer_bytes(status="302 Found", Location=location))) as peer:
            answer = call(peer.url(), policy=FOLLOWING)
        assert answer.refused
        assert "a redirect" in answer.error
    assert client._target.cache_info().currsize == 2


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nX-One: "])
def test_a_head_that_drips_ends_with_the_total_timeout(head: bytes) -> None:
    def script(line: Line) -> None:
        line.read()
        line.send(head)
        line.drip(b"HTTP/1.1 200 OK and so on and on" * 100)

    with Peer(script) as peer, within(3):
        answer = call(peer.url(), timeouts=HURRIED)
    assert is_lost(answer)
    assert "the total timeout of 0.3 s" in answer.error


@pytest.mark.parametrize("status", ["100 Continue", "102 Processing", "103 Early Hints"])
def test_a_few_interim_answers_are_passed_over_and_more_are_no_answer(status: str) -> None:
    interim = f"HTTP/1.1 {status}\r\n\r\n".encode()
    with Peer(answering(interim * connection.MOST_INTERIM + answer_bytes(b"done"))) as peer:
        assert body_of(call(peer.url())) == b"done"
    with Peer(once(interim * (connection.MOST_INTERIM + 1) + answer_bytes(b"done"))) as peer:
        answer = call(peer.url())
    assert is_lost(answer)
    assert "more than 20 interim answers" in answer.error


@pytest.mark.parametrize(
    ("head", "drip"),
    [
        (answer_bytes(Content_Length="10000")[:-2], b"x" * 10000),
        (answer_bytes(Content_Length="", Connection="close")[:-2], b"x" * 10000),
        (answer_bytes(Content_Length="", Transfer_Encoding="chunked")[:-2], b"1\r\nx\r\n" * 1000),
        (
            answer_bytes(Content_Length="", Transfer_Encoding="chunked")[:-2] + b"1\r\nx\r\n0\r\n",
            b"X: y\r\n" * 1000,
        ),
    ],
)
def test_a_body_that_drips_ends_with_the_total_timeout_and_keeps_what_came(
    head: bytes, drip: bytes
) -> None:
    def script(line: Line) -> None:
        line.read()
        line.send(head)
        line.drip(drip)

    with Peer(script) as peer, within(3):
        answer = call(peer.url(), timeouts=HURRIED)
        assert answer.response is not None
        assert answer.response.status_code == 200
        assert answer.broken
        assert not answer.truncated
        assert body_of(answer).startswith(b"x")
        assert "the total timeout of 0.3 s" in answer.error
        assert len(peer.lines) == 1
        call(peer.url(), timeouts=HURRIED)
        assert len(peer.lines) == 2


def test_a_body_that_stalls_ends_with_the_read_timeout() -> None:
    def script(line: Line) -> None:
        line.read()
        line.send(answer_bytes(Content_Length="100"))
        line.peer.closing.wait(5)

    with Peer(script) as peer, within(3):
        answer = call(peer.url(), timeouts=Timeouts(read=0.1))
    assert answer.broken
    assert body_of(answer) == b"ok"
    assert "the read timeout of 0.1 s" in answer.error


def test_a_server_that_does_not_read_ends_with_the_total_timeout() -> None:
    with Peer(lambda line: line.peer.closing.wait(5) and None) as peer, within(4):
        answer = call(peer.url(), data="x" * 50_000_000, timeouts=HURRIED)
    assert is_lost(answer)
    assert "the total timeout of 0.3 s" in answer.error


def test_a_server_that_reads_one_byte_a_time_ends_with_the_total_timeout() -> None:
    def script(line: Line) -> None:
        while not line.peer.closing.wait(0.01) and line.sock.recv(1000):
            pass

    with Peer(script) as peer, within(4):
        answer = call(peer.url(), data="x" * 50_000_000, timeouts=HURRIED)
    assert is_lost(answer)


# --- Bodies


def limited(limit: int) -> Policy:
    return replace(LOOPBACK, max_response_bytes=limit)


@pytest.mark.parametrize("encoding", ["", "gzip", "deflate", "br", "gzip, gzip"])
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@pytest.mark.parametrize(
    ("limit", "is_truncated"), [(5000, True), (9999, True), (10000, False), (10001, False)]
)
def test_a_body_is_cut_at_the_limit_counted_as_decoded(
    encoding: str, framing: str, limit: int, is_truncated: bool
) -> None:
    body = random.Random(1).randbytes(500) * 20
    encoded = body
    for name in filter(None, encoding.split(", ")):
        encoded = {"gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress}[name](
            encoded
        )
    headers = {"Content_Encoding": encoding}
    if framing == "chunked":
        pieces = [encoded[at : at + 77] for at in range(0, len(encoded), 77)]
        encoded = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        headers |= {"Content_Length": "", "Transfer_Encoding": "chunked"}
    elif framing == "close":
        headers |= {"Content_Length": "", "Connection": "close"}
    script = once if framing == "close" else answering
    with Peer(script(answer_bytes(encoded, **headers))) as peer:
        answer = call(peer.url(), policy=limited(limit))
        assert body_of(answer) == body[:limit]
        assert (answer.truncated, answer.broken) == (is_truncated, False)
        assert ("cut at" in answer.error) is is_truncated
        call(peer.url(), policy=limited(limit))
        assert len(peer.lines) == (2 if is_truncated or framing == "close" else 1)


def test_a_body_without_end_is_bounded_in_memory_and_time() -> None:
    def script(line: Line) -> None:
        line.read()
        line.send(answer_bytes(b"", Content_Length="", Transfer_Encoding="chunked"))
        while True:
            line.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")

    with Peer(script) as peer:
        assert_bounded(peer)


def gigabyte_deflated() -> bytes:
    """A gigabyte of zeros as one deflate stream, from a block that repeats itself."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(b"\0" * (1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    return first * 64


BOMBS = {
    "gzip": lambda: b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + gigabyte_deflated(),
    "deflate": gigabyte_deflated,
    "br": lambda: brotli.compress(b"\0" * (1 << 27), quality=1),
    "gzip, gzip": lambda: gzip.compress(
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + gigabyte_deflated(), 6
    ),
}


@pytest.mark.parametrize("encoding", list(BOMBS))
def test_a_small_body_that_unfolds_into_a_huge_one_is_bounded_in_memory_and_time(
    encoding: str,
) -> None:
    with Peer(once(answer_bytes(BOMBS[encoding](), Content_Encoding=encoding))) as peer:
        assert_bounded(peer)


def assert_bounded(peer: Peer) -> None:
    tracemalloc.start()
    try:
        with within(10):
            answer = call(peer.url())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.truncated
    assert len(body_of(answer)) == LOOPBACK.max_response_bytes
    assert peak < 12_000_000


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (answer_bytes(b"half", Content_Length="8"), b"half"),
        (answer_bytes(b"4\r\nhalf\r\n", Content_Length="", Transfer_Encoding="chunked"), b"half"),
        (answer_bytes(b"8\r\nhalf", Content_Length="", Transfer_Encoding="chunked"), b"half"),
        (
            answer_bytes(b"4\r\nhalf\r\nzz\r\n", Content_Length="", Transfer_Encoding="chunked"),
            b"half",
        ),
    ],
)
def test_a_body_that_breaks_off_is_told_and_kept(data: bytes, whole: bytes) -> None:
    with Peer(once(data)) as peer:
        answer = call(peer.url())
    assert body_of(answer) == whole
    assert (answer.broken, answer.truncated, answer.sent) == (True, False, True)
    assert answer.error == "the body broke off"


def test_a_body_that_is_not_encoded_as_it_says_is_broken() -> None:
    with Peer(answering(answer_bytes(b"not gzip at all", Content_Encoding="gzip"))) as peer:
        answer = call(peer.url())
    assert answer.broken
    assert "Content-Encoding" in answer.error


@pytest.mark.parametrize("encoding", ["br", "gzip, br", "gzip,\tbr", "gzip,BR ", "br\t,gzip"])
def test_brotli_that_cannot_be_bounded_is_not_unfolded(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setitem(client._UNBOUNDED, "br", "cannot be bounded")
    with Peer(answering(answer_bytes(brotli.compress(b"ok"), Content_Encoding=encoding))) as peer:
        answer = call(peer.url())
    assert (body_of(answer), answer.broken) == (b"", True)


def test_an_encoding_nobody_knows_is_left_as_it_is() -> None:
    with Peer(answering(answer_bytes(b"as it is", Content_Encoding="zebra"))) as peer:
        assert body_of(call(peer.url())) == b"as it is"


# --- Answers ahead of time


def test_an_answer_before_the_request_is_whole_counts_though_the_server_closes() -> None:
    def script(line: Line) -> None:
        line.read_head()
        line.send(answer_bytes(b"too large", "413 Content Too Large", Connection="close"))

    with Peer(script) as peer:
        answer = call(peer.url(), data="x" * 20_000_000)
    assert answer.response is not None
    assert (answer.response.status_code, answer.response.text) == (413, "too large")
    assert answer.sent


def test_an_answer_before_the_request_is_whole_counts_though_the_server_stays() -> None:
    def script(line: Line) -> None:
        line.read_head()
        line.send(answer_bytes(b"too large", "413 Content Too Large"))
        line.peer.closing.wait(5)

    with Peer(script) as peer, within(2):
        answer = call(peer.url(), data="x" * 20_000_000)
        assert answer.response is not None
        assert answer.response.status_code == 413
        call(peer.url(), data="x" * 20_000_000)
        assert len(peer.lines) == 2


def test_a_server_that_answers_well_and_reads_on_gets_the_whole_request() -> None:
    sizes: list[int] = []

    def script(line: Line) -> None:
        line.read_head()
        line.send(answer_bytes(b"reading")[:-3])
        line.peer.closing.wait(0.05)
        size = len(line._buffer)
        while size < 20_000_000:
            size += len(line.sock.recv(1 << 20))
        sizes.append(size)
        line.send(b"ing")

    with Peer(script) as peer:
        assert body_of(call(peer.url(), data="x" * 20_000_000)) == b"reading"
    assert sizes == [20_000_000]


# --- Redirects


def redirecting(location: str, status: str = "302 Found") -> bytes:
    return answer_bytes(b"moved", status, Location=location)


def test_a_redirect_is_the_answer_unless_it_is_to_be_followed() -> None:
    with Peer(answering(redirecting("/there"))) as peer:
        answer = call(peer.url("/here"))
        assert answer.response is not None
        assert (answer.response.status_code, answer.error, answer.refused) == (302, "", False)
        assert len(peer.seen) == 1


def test_a_followed_redirect_ends_at_its_target_with_its_history() -> None:
    gate = Recording()
    with Peer(answering(redirecting("/two"), redirecting("three?x=1"), echo)) as peer:
        answer = call(peer.url("/one"), "get", policy=FOLLOWING, gate=gate)
        assert answer.response is not None
        assert answer.response.status_code == 200
        assert [past.status_code for past in answer.response.history] == [302, 302]
        assert [seen.target for seen in peer.seen] == ["/one", "/two", "/three?x=1"]
        assert len(peer.lines) == 1
    assert len(gate.waits) == 3
    assert gate.sent_at is not None
    assert gate.sent_at >= gate.waits[-1]


@pytest.mark.parametrize(
    ("method", "status", "then", "is_body_kept"),
    [
        ("post", 301, "GET", False),
        ("post", 302, "GET", False),
        ("post", 303, "GET", False),
        ("put", 303, "GET", False),
        ("delete", 302, "GET", False),
        ("head", 302, "HEAD", False),
        ("head", 303, "HEAD", False),
        ("put", 301, "PUT", True),
        ("post", 307, "POST", True),
        ("post", 308, "POST", True),
        ("patch", 307, "PATCH", True),
    ],
)
def test_methods_change_on_redirects_as_they_do_in_browsers(
    method: str, status: int, then: str, is_body_kept: bool
) -> None:
    moved = answer_bytes(b"", f"{status} Moved", Location="/there")
    with Peer(answering(moved, answer_bytes(b""))) as peer:
        call(
            peer.url(), method, policy=FOLLOWING, **({} if method == "head" else {"json": {"a": 1}})
        )
    onward = peer.seen[1]
    assert onward.method == then
    assert onward.body == (b'{"a": 1}' if is_body_kept else b"")
    assert ("content-type" in onward.headers) is is_body_kept


PRIVATE = {
    "Authorization": f"Bearer {SECRET}",
    "Cookie": f"session={SECRET}",
    "Proxy-Authorization": SECRET,
    "X-Api-Key": SECRET,
    "Api-Key": SECRET,
    "apikey": SECRET,
    "X-Auth-Token": SECRET,
    "X-Access-Token": SECRET,
    "X-Amz-Security-Token": SECRET,
    "Ocp-Apim-Subscription-Key": SECRET,
    "X-Hub-Signature-256": SECRET,
    "X-Vault-Token": SECRET,
    "X-Client-Secret": SECRET,
    "X-Custom": f"Bearer {SECRET}",
    "Idempotency-Key": SECRET,
}


@pytest.mark.parametrize("status", ["302 Found", "307 Temporary Redirect"])
def test_credentials_do_not_follow_to_another_port(status: str) -> None:
    with (
        Peer(answering(echo)) as other,
        Peer(answering(redirecting(other.url("/there"), status))) as peer,
    ):
        answer = call(
            peer.url(), policy=FOLLOWING, headers={**PRIVATE, "X-Trace": "kept"}, json={"a": 1}
        )
        assert answer.response is not None
        assert answer.response.status_code == 200
        assert peer.seen[0].headers["x-api-key"] == SECRET
        assert SECRET.encode() not in other.seen[0].raw
        assert other.seen[0].headers["x-trace"] == "kept"
        assert other.seen[0].headers["host"] == f"127.0.0.1:{other.port}"


def test_auth_and_cookies_do_not_follow_to_another_host(name_is: Callable[..., Names]) -> None:
    name_is(["127.0.0.1"])
    with Peer(
        answering(
            lambda seen: (
                redirecting(peer.url("/x", host="other.test")) if seen.target == "/" else echo(seen)
            )
        )
    ) as peer:
        call(peer.url(), policy=FOLLOWING, auth=["me", SECRET], cookies={"session": SECRET})
    assert "authorization" in peer.seen[0].headers
    assert "cookie" in peer.seen[0].headers
    assert not {"authorization", "cookie"} & peer.seen[1].headers.keys()


def test_credentials_do_not_come_back_with_the_redirect_that_returns() -> None:
    with (
        Peer(answering(lambda seen: redirecting(f"{first.url('/back')}"))) as other,
        Peer(
            answering(lambda seen: redirecting(other.url()) if seen.target == "/" else echo(seen))
        ) as first,
    ):
        call(first.url(), policy=FOLLOWING, headers=PRIVATE)
        assert first.seen[1].target == "/back"
        assert SECRET.encode() not in first.seen[1].raw


def test_credentials_stay_on_the_same_origin() -> None:
    with Peer(answering(redirecting("/there", "307 Temporary Redirect"), echo)) as peer:
        call(peer.url(), policy=FOLLOWING, headers=PRIVATE)
    assert {name: peer.seen[1].headers[name.lower()] for name in PRIVATE} == PRIVATE


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("http://a.test/", "http://a.test:80/x", True),
        ("https://a.test/", "https://a.test:443/x", True),
        ("http://a.test/", "https://a.test/", True),
        ("https://a.test/", "http://a.test/", False),
        ("http://a.test:8080/", "https://a.test:8443/", False),
        ("http://a.test/", "http://b.test/", False),
        ("http://a.test/", "http://sub.a.test/", False),
        ("http://a.test/", "http://a.test:81/", False),
    ],
)
def test_an_origin_is_scheme_host_and_port(one: str, other: str, is_same: bool) -> None:
    assert client._is_same_origin(one, other) is is_same


@pytest.mark.parametrize(
    "location",
    ["http://10.0.0.1/", "http://0xa.1/", "//169.254.169.254/latest/meta-data", "http://[::ffff:10.0.0.1]/", "file:///etc/passwd",
     "ftp://127.0.0.1/", "gopher://127.0.0.1:25/", "http://me:pass@127.0.0.1/", "http://private.test/",
     "http://127.0.0.1:99999/", "http://[::1/", "javascript:alert(1)"],
)  # fmt: skip
def test_a_redirect_to_where_nothing_may_go_is_refused_there(
    location: str, name_is: Callable[..., Names]
) -> None:
    name_is(["10.0.0.1"])
    with Peer(answering(redirecting(location))) as peer:
        answer = call(peer.url(), policy=FOLLOWING)
        assert (answer.refused, answer.sent) == (True, True)
        assert answer.error != ""
        assert len(peer.seen) == 1


def test_a_redirect_to_a_host_outside_of_the_allowed_ones_is_refused(
    name_is: Callable[..., Names],
) -> None:
    names = name_is(["127.0.0.1"])
    with Peer(answering(redirecting("http://evil.test/"))) as peer:
        answer = call(peer.url(), policy=replace(FOLLOWING, allowed_hosts=("127.0.0.1",)))
    assert answer.refused
    assert answer.error == "a redirect was not followed: the host evil.test is not in ALLOWED_HOSTS"
    assert answer.response is not None
    assert answer.response.status_code == 302
    assert names.lookups == []


def test_a_redirect_to_a_closed_host_is_not_followed() -> None:
    """Another rule's host: its limits would not see the request."""
    with Peer(answering(answer_bytes(status="302 Found", Location="http://localhost:9/"))) as peer:
        answer = call(
            peer.url(), policy=replace(FOLLOWING, closed_hosts=("api.example.com", "localhost"))
        )
    assert answer.refused
    assert (
        answer.error
        == "a redirect was not followed: the host localhost is another rule's, with limits of its own"
    )
    assert answer.redirects == 0


def test_ten_redirects_are_followed_and_no_more() -> None:
    def count(seen: Seen) -> bytes:
        number = int(seen.target[1:])
        return redirecting(f"/{number - 1}") if number else answer_bytes(b"there")

    with Peer(answering(count)) as peer:
        assert body_of(call(peer.url("/10"), policy=FOLLOWING)) == b"there"
        answer = call(peer.url("/11"), policy=FOLLOWING)
    assert answer.response is not None
    assert answer.response.status_code == 302
    assert "more than 10 redirects" in answer.error
    assert len(peer.seen) == 11 + 11


def test_the_total_timeout_spans_all_hops() -> None:
    def slowly(seen: Seen) -> bytes:
        time.sleep(0.12)
        return redirecting("/again")

    with Peer(answering(slowly)) as peer, within(3):
        answer = call(peer.url(), policy=FOLLOWING, timeouts=HURRIED)
    assert answer.response is None
    assert answer.sent
    assert "0.3 s" in answer.error


def test_a_call_dropped_at_a_later_hop_was_sent() -> None:
    class Closing(Gate):
        hops = 0

        def wait(self) -> None:
            self.hops += 1
            if self.hops == 2:
                raise Dropped("too late")

    with Peer(answering(redirecting("/there"))) as peer:
        answer = call(peer.url(), policy=FOLLOWING, gate=Closing())
    assert (answer.response, answer.dropped, answer.sent) == (None, True, True)
    assert answer.sent_at is not None


def test_a_redirect_without_a_location_is_the_answer() -> None:
    with Peer(answering(answer_bytes(b"", "302 Found"))) as peer:
        answer = call(peer.url(), policy=FOLLOWING)
    assert answer.response is not None
    assert (answer.response.status_code, answer.error) == (302, "")


# --- TLS


@dataclass
class Certificate:
    path: Path
    server: ssl.SSLContext
    names: list[str | None] = field(default_factory=list)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Self-signed, for api.test and 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "api.test")])
    now = datetime.datetime.now(datetime.UTC)
    alternatives = [x509.DNSName("api.test"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    private = path.with_name("key.pem")
    path.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, private)
    made = Certificate(path, context)
    context.sni_callback = lambda sock, server_name, own: made.names.append(server_name)
    return made


@pytest.fixture
def secure(certificate: Certificate) -> Iterator[Peer]:
    certificate.names.clear()
    with Peer(answering(echo), context=certificate.server) as peer:
        yield peer


def trusting(certificate: Certificate) -> Policy:
    return replace(LOOPBACK, verify=str(certificate.path))


def test_a_self_signed_certificate_is_refused_before_anything_is_sent(secure: Peer) -> None:
    answer = call(secure.url("/?token=" + SECRET), data=SECRET)
    assert nothing_was_sent(answer)
    assert not answer.refused
    assert (
        answer.error
        == f"no TLS connection to 127.0.0.1:{secure.port}: certificate not accepted, self-signed certificate"
    )
    assert secure.seen == []


def test_environment_certificates_are_not_trusted(
    secure: Peer, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, str(certificate.path))
    assert nothing_was_sent(call(secure.url()))


def test_a_certificate_that_is_trusted_by_path_is_accepted(
    secure: Peer, certificate: Certificate
) -> None:
    for word in ("one", "two", "three"):
        assert body_of(call(secure.url(), data=word, policy=trusting(certificate))) == word.encode()
    assert len(secure.lines) == 1


def test_without_verify_any_certificate_is_accepted_and_its_connection_is_not_shared(
    secure: Peer, certificate: Certificate
) -> None:
    assert body_of(call(secure.url(), data="x", policy=replace(LOOPBACK, verify=False))) == b"x"
    assert nothing_was_sent(call(secure.url(), data="x"))
    assert body_of(call(secure.url(), data="x", policy=trusting(certificate))) == b"x"
    assert len(secure.lines) == 3


def test_the_name_is_what_the_certificate_must_be_for(
    secure: Peer, certificate: Certificate, name_is: Callable[..., Names]
) -> None:
    name_is(["127.0.0.1"])
    assert (
        body_of(call(secure.url(host="api.test"), data="x", policy=trusting(certificate))) == b"x"
    )
    assert certificate.names[-1] == "api.test"
    assert secure.seen[0].headers["host"] == f"api.test:{secure.port}"
    answer = call(secure.url(host="other.test"), policy=trusting(certificate))
    assert nothing_was_sent(answer)
    assert "not valid for 'other.test'" in answer.error


def test_certificates_that_cannot_be_read_send_nothing(secure: Peer, tmp_path: Path) -> None:
    answer = call(secure.url(), policy=replace(LOOPBACK, verify=str(tmp_path / "missing.pem")))
    assert nothing_was_sent(answer)
    assert "missing.pem" in answer.error


def test_a_server_that_does_not_speak_tls_is_sent_nothing() -> None:
    with Peer(lambda line: line.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as peer:
        assert nothing_was_sent(call(peer.url().replace("http:", "https:")))


def test_a_handshake_that_hangs_ends_with_the_connect_timeout() -> None:
    with Peer(lambda line: line.peer.closing.wait(5) and None) as peer, within(3):
        answer = call(peer.url().replace("http:", "https:"), timeouts=Timeouts(connect=0.2))
    assert nothing_was_sent(answer)
    assert "the connect timeout of 0.2 s" in answer.error


def test_slow_tls_servers_are_bounded_too(certificate: Certificate) -> None:
    def script(line: Line) -> None:
        line.read()
        line.drip(answer_bytes(b"x" * 10000))

    with Peer(script, context=certificate.server) as peer, within(3):
        assert is_lost(call(peer.url(), policy=trusting(certificate), timeouts=HURRIED))
    with (
        Peer(lambda line: line.peer.closing.wait(5) and None, context=certificate.server) as peer,
        within(4),
    ):
        answer = call(
            peer.url(), data="x" * 30_000_000, policy=trusting(certificate), timeouts=HURRIED
        )
        assert is_lost(answer)


def test_large_requests_and_answers_pass_through_tls(
    secure: Peer, certificate: Certificate
) -> None:
    data = "x" * 3_000_000
    policy = replace(trusting(certificate), max_response_bytes=5_000_000)
    assert body_of(call(secure.url(), data=data, policy=policy)) == data.encode()


def test_an_early_answer_over_tls_counts(certificate: Certificate) -> None:
    def script(line: Line) -> None:
        line.read_head()
        line.send(answer_bytes(b"too large", "413 Content Too Large"))
        line.peer.closing.wait(5)

    with Peer(script, context=certificate.server) as peer:
        answer = call(
            peer.url(),
            data="x" * 20_000_000,
            policy=trusting(certificate),
            timeouts=Timeouts(read=0.2, total=5),
        )
    assert answer.response is not None
    assert answer.response.status_code == 413


def test_a_tls_connection_closed_by_the_server_is_not_used_again(certificate: Certificate) -> None:
    with Peer(once(answer_bytes()), context=certificate.server) as peer:
        for expected in (1, 2):
            assert body_of(call(peer.url(), policy=trusting(certificate))) == b"ok"
            assert peer.has_closed(expected)
            assert len(peer.lines) == expected


def test_session_tickets_in_the_gate_are_no_reason_to_connect_again(
    secure: Peer, certificate: Certificate
) -> None:
    gate = Recording(lambda: time.sleep(0.05))
    assert body_of(call(secure.url(), data="x", policy=trusting(certificate), gate=gate)) == b"x"
    assert (len(gate.waits), len(secure.lines)) == (1, 1)


# --- Around it


def test_a_user_may_put_another_adapter_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(self: Any, request: requests.PreparedRequest, **_: Any) -> requests.Response:
        made_up = requests.Response()
        made_up.status_code, made_up._content, made_up.request = 202, b"made up", request
        made_up.url = request.url or ""
        return made_up

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    answer = call("http://api.example.com/", json={"a": 1})
    assert answer.response is not None
    assert (answer.response.status_code, answer.response.text) == (202, "made up")


def test_errors_of_another_adapter_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(self: Any, request: requests.PreparedRequest, **_: Any) -> requests.Response:
        raise requests.ConnectTimeout("?token=" + SECRET)

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    answer = call("http://api.example.com/")
    assert nothing_was_sent(answer)
    assert answer.error == "ConnectTimeout"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_use_its_parents_connections() -> None:
    with Peer(answering(echo)) as peer:
        call(peer.url())
        child = os.fork()
        if not child:
            os._exit(0 if body_of(call(peer.url(), data="child")) == b"child" else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(peer.lines) == 2
        assert body_of(call(peer.url(), data="parent")) == b"parent"
        assert len(peer.lines) == 2


def test_nothing_of_a_call_is_kept_once_it_is_over() -> None:
    with Peer(answering(echo)) as peer:
        call(peer.url(), headers={"X-Api-Key": SECRET}, json={"a": SECRET})
        (kept,) = adapter._thread.door.idle.values()
        assert SECRET not in json.dumps(vars(kept), default=str)
        assert not hasattr(kept, "journey")
