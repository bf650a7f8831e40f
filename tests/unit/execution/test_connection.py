"""How far a call got, whoever answers it; and which connections are kept, for how long, for whom."""

from __future__ import annotations

import errno
import gzip
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callqueue import aside, clocks
from callqueue.execution import connection, wire
from callqueue.execution.connection import Connection, Trip
from callqueue.execution.wire import Answer, Dropped, Gate, Policy, Timeouts, close_idle_connections
from tests.support.length import examples
from tests.support.peer import (
    HURRIED,
    LOOPBACK,
    SECRET,
    Certificate,
    Clock,
    Line,
    Names,
    Peer,
    Recording,
    answer_bytes,
    answering,
    body_of,
    call,
    echo,
    is_lost,
    kept_connections,
    nothing_was_sent,
    once,
    within,
)
from tests.support.starving import few_threads, no_descriptors
from tests.support.verdicts import on_a_quiet_machine, wait_until


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
    close_idle_connections(0)
    assert gate.waits[0] <= gate.sent_at == answer.sent_at
    # whatever becomes of its connection
    assert gate.is_whole and gate.has_arrived()


def test_the_stamp_is_that_of_the_last_byte() -> None:
    reading = threading.Event()
    times: list[float] = []

    def script(line: Line) -> None:
        line.read_head()
        reading.wait(5)
        times.append(clocks.monotonic())
        read_all(line)
        line.send(answer_bytes())

    with Peer(script) as peer:
        threading.Timer(0.1, reading.set).start()
        answer = call(peer.url(), data=LARGE)
        assert body_of(answer) == b"ok"
        assert answer.sent_at > times[0]


LARGE = "x" * 20_000_000


def read_all(line: Line) -> int:
    """The bytes of a large body, once all are there."""
    size = len(line._buffer)
    while size < len(LARGE):
        size += len(line.sock.recv(1 << 20))
    return size


NAMES = ("A", "Content-Length", "Transfer-Encoding", "Connection", "Keep-Alive", "Proxy-Connection",
         "To", "", "X Y", " Z", "\xe9")  # fmt: skip
VALUES = ("", "0", "5", "-3", " 12 ", "1_0", "x", "chunked", "Chunked", "gzip, chunked", "close", "keep-alive",
          "a\rb", "a:b", "\xff")  # fmt: skip
LINES = st.tuples(
    st.sampled_from(NAMES), st.sampled_from([":", ": ", " :", ":\t ", ""]), st.sampled_from(VALUES),
    st.sampled_from(["\r\n", "\r\n", "\n", "\r\n "]),
).map("".join)  # fmt: skip


@given(
    start=st.sampled_from([f"HTTP/{version} {status}\r\n" for version in ("1.1", "1.0", "0.9", "1.7", "2.0")
                           for status in ("200 OK", "204", "304  No", "101 S", "404 Not  found")]),
    lines=st.lists(LINES, max_size=5), end=st.sampled_from(["\r\n", "\n", ""]), method=st.sampled_from(["GET", "HEAD"]),
)  # fmt: skip
@settings(max_examples=examples(100, 300))
def test_the_head_of_an_answer_is_read_as_http_client_reads_it(
    start: str, lines: list[str], end: str, method: str
) -> None:
    data = "".join([start, *lines, end]).encode("latin-1") + b"body"
    assert head_of(ours(), data, method) == head_of(HTTPResponse, data, method)


def test_a_header_line_takes_as_long_as_it_is() -> None:
    """Whatever reads it keeps every other thread waiting: no server may choose for how long."""
    line, began = b"A:" + b" \t" * 10_000 + b"\rb\r\n", time.process_time()
    head_of(ours(), b"HTTP/1.1 200 OK\r\n" + line + b"\r\n", "GET")
    assert time.process_time() - began < 1


def ours() -> Any:
    one = Connection("localhost", 80)
    one.trip = Trip(Timeouts(), Gate(), Policy())
    return one.response_class


def head_of(reader: Any, data: bytes, method: str) -> Any:
    """What is read of an answer's head, and what is left for the body; or what is raised."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        there.close()
        head = reader(here, method=method)
        try:
            head.begin()
        except HTTPException as error:
            return type(error)
        is_chunked = bool(head.chunked) and head.length != 0
        framing = (is_chunked, head.length, bool(head.will_close))
        left = head.fp.read() if head.fp else None
        return head.version, head.status, head.reason, head.msg.items(), framing, left


@pytest.mark.parametrize("raised", [Dropped("the lease has ended"), SystemExit("told to stop")])
def test_what_the_gate_refuses_is_not_sent(raised: BaseException) -> None:
    """Dropped says so of the call; whatever else it raises is raised."""
    ended: list[bool] = []
    refusing = Recording(Mock(side_effect=raised))
    with Peer(lambda line: ended.append(line.has_ended())) as peer:
        if isinstance(raised, Dropped):
            dropped = Answer(None, None, error="the lease has ended", dropped=True)
            assert call(peer.url(), gate=refusing) == dropped
        else:
            with pytest.raises(SystemExit, match="told to stop"):
                call(peer.url(), gate=refusing)
        assert peer.has_closed(1)
    assert ended == [True]


@pytest.mark.parametrize("ends_in", [-1.0, 1.2])
def test_no_request_outlives_the_lease_of_its_gate(ends_in: float) -> None:
    """Nor by what it waited in there; one whose lease is over does not even connect."""
    gate = Recording(lambda: time.sleep(0.9))
    gate.ends_at = clocks.monotonic() + ends_in
    with Peer(lambda line: line.peer.closing.wait(5)) as peer:
        answer = call(peer.url(), gate=gate)
        late = clocks.monotonic() - gate.ends_at
        assert len(peer.lines) == (ends_in > 0)
    assert "the lease" in answer.error
    if ends_in < 0:
        assert nothing_was_sent(answer)
    else:
        assert is_lost(answer)
        with on_a_quiet_machine():
            assert late < 0.6


def test_what_strikes_as_the_first_byte_goes_finds_it_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a task's time limit does: nobody knows whether it went."""
    monkeypatch.setattr(Connection, "_send_in_pieces", Mock(side_effect=SystemExit))
    gate = Gate()
    with Peer(answering(echo)) as peer, pytest.raises(SystemExit):
        call(peer.url(), gate=gate)
    assert gate.sent_at is not None


class Watching(Gate):
    """Opens once the server has hung up, as many times as it does."""

    def __init__(self, peer: Peer, times: int) -> None:
        self.peer, self.times, self.waits = peer, times, 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits <= self.times:
            assert self.peer.has_closed(self.waits)
            time.sleep(0.002)  # a wait too short to notice is not looked at


@pytest.mark.parametrize(("times", "waits"), [(1, 2), (9, 3)])
def test_a_server_that_hangs_up_during_the_wait_is_connected_to_again(
    times: int, waits: int
) -> None:
    """Three times at most; nothing was sent until then."""

    def script(line: Line) -> None:
        if len(line.peer.lines) > times:
            answering(echo)(line)

    with Peer(script) as peer:
        gate = Watching(peer, times)
        answer = call(peer.url(), data="x", gate=gate)
        assert (len(peer.seen), gate.waits) == (int(times < 3), waits)
    if times < 3:
        assert body_of(answer) == b"x"
    else:
        assert nothing_was_sent(answer) and "before anything is sent" in answer.error


CLOSED = "{} closed the connection without an answer"


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (lambda line: None, CLOSED),
        (Line.reset, CLOSED),
        (lambda line: line.peer.closing.wait(5), "no answer from {} within the read timeout of 0.1 s"),
    ],
    ids=["closes", "resets", "is silent"],
)  # fmt: skip
def test_what_is_not_answered_is_a_sent_call(then: Callable[[Line], Any], why: str) -> None:
    def script(line: Line) -> None:
        line.read()
        then(line)

    with Peer(script) as peer:
        answer = call(peer.url("/?token=" + SECRET), timeouts=Timeouts(read=0.1))
    assert is_lost(answer)
    assert answer.error == why.format(f"127.0.0.1:{peer.port}")


@pytest.mark.parametrize("is_answered", [False, True])
def test_what_is_given_up_is_taken_back_from_the_kernel(is_answered: bool) -> None:
    """By a reset: after an orderly end the kernel delivers what it still holds."""
    ends: list[object] = []

    def script(line: Line) -> None:
        line.read()
        if is_answered:
            line.send(answer_bytes())
        try:
            ends.append(line.sock.recv(1))
        except ConnectionResetError:
            ends.append("reset")

    with Peer(script) as peer:
        answer = call(peer.url(), timeouts=Timeouts(read=0.1 if not is_answered else 5))
        assert is_lost(answer) is not is_answered
        close_idle_connections(0)
        assert peer.has_closed(1)
    assert ends == [b"" if is_answered else "reset"]


def test_until_its_answer_a_gate_asks_its_connection_whether_all_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Connection, "has_arrived", lambda _: False)
    gate, seen = Gate(), list[bool]()

    def script(line: Line) -> None:
        line.read()
        wait_until(lambda: gate.is_whole, 5)
        seen.append(gate.has_arrived())
        line.send(answer_bytes())

    with Peer(script) as peer:
        assert body_of(call(peer.url(), gate=gate)) == b"ok"
    assert (seen, gate.has_arrived()) == ([False], True)


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells")
def test_of_a_connection_that_is_gone_nobody_knows_what_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a kernel that does not know the question, as of any other system: all has."""
    one, closed = Connection("localhost", 80), socket.socket()
    closed.close()
    for one.sock in (None, closed):
        assert not one.has_arrived()
    for error in (errno.EBADF, errno.ENOTCONN, errno.ENOTTY, errno.ENOSYS):
        monkeypatch.setattr(connection.fcntl, "ioctl", Mock(side_effect=OSError(error, "no")))
        assert one.has_arrived() is (error in (errno.ENOTTY, errno.ENOSYS))
    monkeypatch.setattr(connection, "_UNCONFIRMED", None)
    assert one.has_arrived() is True


def test_each_piece_is_sent_within_what_is_left_of_the_calls_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_PIECE", 2)
    one, left, done = Connection("localhost", 80), iter([3.0, 2.0, 1.0]), list[Any]()
    one.sock = Mock(gettimeout=lambda: None, settimeout=done.append)
    one.sock.send = lambda piece: done.append(bytes(piece)) or len(piece)
    trip = SimpleNamespace(gate=Gate(), timeouts=Timeouts(), seconds_left=lambda _: next(left))
    one._send_in_pieces(trip, memoryview(b"hello"))
    assert done == [3.0, b"he", 2.0, b"ll", 1.0, b"o"]


@pytest.mark.parametrize(
    ("arrived", "is_late", "by"),
    [(None, False, 3.0), (None, True, 9.0), (2.0, True, 3.0), (5.0, False, 5.0)],
)
def test_what_was_sent_has_arrived_by_the_latest_instant_that_was_seen(
    arrived: Any, is_late: bool, by: float
) -> None:
    gate = Gate()
    gate.arrived_at, gate.is_late = arrived, is_late
    assert gate.latest_arrival(clocks.Mono(3.0), clocks.Mono(9.0)) == by


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_the_kernel_delivers_at_once_and_no_longer_than_the_call_may_take() -> None:
    with Peer(answering(answer_bytes())) as peer:
        for total in (7.0, 3.0):
            call(peer.url(), timeouts=Timeouts(total=total))
            (kept,) = kept_connections()
            left = kept.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert 0 < left <= total * 1000
            assert kept.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
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
        b"HTTP/1.1 200 OK\r\n" + b"X-Y: 1\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello",
    ],
)
def test_garbage_is_a_sent_call_without_an_answer(garbage: bytes) -> None:
    with Peer(once(garbage)) as peer:
        answer = call(peer.url())
    assert is_lost(answer) or (answer.sent and garbage.endswith(b"hello"))
    assert SECRET not in answer.error


@settings(max_examples=examples(40, 100))
@given(
    begin=st.sampled_from([
        b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, br\r\n\r\n",
        b"HTTP/1.1 302 \xff\r\nLocation: ", b"HTTP/1.1 200 OK\r\nContent-Type: ",
        b"HTTP/1.1 200 OK\r\nSet-Cookie: ",
    ]),
    data=st.binary(max_size=300),
    end=st.sampled_from([b"", b"\r\n\r\n"]),
)  # fmt: skip
def test_no_answer_makes_it_raise(begin: bytes, data: bytes, end: bytes) -> None:
    with Peer(once(begin + data + end)) as peer:
        answer = call(peer.url(), timeouts=Timeouts(total=2))
    assert answer.sent


@pytest.mark.parametrize(("stays", "is_secure"), [(False, False), (True, False), (True, True)])
def test_an_answer_before_the_request_is_whole_counts(
    certificate: Certificate, stays: bool, is_secure: bool
) -> None:
    """Whether the server closes or not; and what of the request is left goes to no other call."""

    def script(line: Line) -> None:
        line.read_head()
        close = "" if stays else "close"
        line.send(answer_bytes(b"too large", "413 Content Too Large", Connection=close))
        if stays:
            line.peer.closing.wait(5)

    policy, context = LOOPBACK, None
    if is_secure:
        policy, context = trusting(certificate), certificate.server
    hurried = Timeouts(read=0.6)
    with Peer(script, context=context) as peer, within(8):
        for count in (1, 2):
            answer = call(peer.url(), data=LARGE, timeouts=hurried, policy=policy)
            assert (answer.response.status_code, answer.response.text) == (413, "too large")
            assert answer.sent and len(peer.lines) == count


def test_a_server_that_answers_well_and_reads_on_gets_the_whole_request() -> None:
    sizes: list[int] = []

    def script(line: Line) -> None:
        line.read_head()
        line.send(answer_bytes(b"reading")[:-3])
        line.peer.closing.wait(0.05)
        sizes.append(read_all(line))
        line.send(b"ing")

    with Peer(script) as peer:
        assert body_of(call(peer.url(), data=LARGE)) == b"reading"
    assert sizes == [len(LARGE)]


# --- Connections that are kept


def test_as_many_connections_are_kept_as_were_used_at_once() -> None:
    together = threading.Barrier(40, timeout=20)

    def make() -> None:
        for _ in range(3):
            assert call(peer.url(), gate=Recording(together.wait)).error == ""

    with Peer(answering(echo)) as peer:
        threads = [threading.Thread(target=make) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(peer.lines), len(peer.seen), len(kept_connections())) == (40, 120, 40)


@pytest.mark.parametrize(
    ("answer", "method"),
    [
        (answer_bytes(b"", "204 No Content", Content_Length=""), "post"),
        (answer_bytes(b"", "304 Not Modified", Content_Length="", Transfer_Encoding="chunked"), "post"),
        (answer_bytes(b"", Content_Encoding="gzip"), "post"),
        (answer_bytes(gzip.compress(b"x" * 10), Content_Encoding="gzip"), "post"),
        (answer_bytes(b"2\r\nok\r\n0\r\n\r\n", Content_Length="", Transfer_Encoding="chunked"), "post"),
        (answer_bytes(b"x" * 200_000), "post"),
        (answer_bytes(b"", "302 Found", Location="/there"), "post"),
        # the answer to it has no body, whatever it says
        (answer_bytes(b"", Content_Length="9999", Content_Encoding="gzip"), "head"),
    ],
)  # fmt: skip
def test_a_connection_is_used_again_after_every_kind_of_whole_answer(
    answer: bytes, method: str
) -> None:
    with Peer(answering(answer)) as peer:
        for _ in range(3):
            answered = call(peer.url(), method)
            assert (answered.response is not None, answered.error) == (True, "")
            assert method != "head" or body_of(answered) == b""
        assert len(peer.lines) == 1


def test_a_connection_idle_for_too_long_is_not_used_again(clock: Clock) -> None:
    """Nor one that grew too old in the gate; and what no call would take is closed."""

    def wait_long() -> None:
        clock.ahead += 2

    with Peer(answering(echo)) as peer, Peer(answering(echo)) as other:
        call(peer.url())
        for idle, connections in ((1.4, 1), (1.6, 2)):
            clock.ahead += idle
            assert call(peer.url()).error == ""
            assert len(peer.lines) == connections
        assert call(peer.url(), gate=Recording(wait_long)).error == ""
        assert (len(peer.lines), len(peer.seen)) == (3, 4)
        clock.ahead += 1.6
        call(other.url())
        close_idle_connections()
        assert peer.has_closed(3)
        assert not other.line(1).is_over.is_set()
        call(other.url())
        assert len(other.lines) == 1


def test_a_connection_in_which_anything_waits_is_not_used_again() -> None:
    """Its end, or an answer that nobody asked for."""
    more, sent = threading.Event(), threading.Event()

    def script(line: Line) -> None:
        line.read()
        line.send(answer_bytes(b"mine"))
        if line is line.peer.line(1):
            assert more.wait(5)
            line.send(answer_bytes(b"not asked for"))
            sent.set()
            line.has_ended()

    with Peer(script) as peer:
        call(peer.url())
        more.set()
        assert sent.wait(5)
        for count in (2, 3):
            assert body_of(call(peer.url(), data="x")) == b"mine"
            assert peer.has_closed(count)
            assert len(peer.lines) == count


def test_a_connection_checked_under_other_networks_is_not_used_again() -> None:
    with Peer(answering(echo)) as peer:
        call(peer.url(), policy=LOOPBACK)
        call(peer.url(), policy=Policy(allowed_networks=("127.0.0.1/32",)))
        assert len(peer.lines) == 2
        assert call(peer.url(), policy=Policy()).refused
        assert len(peer.lines) == 2


def test_connections_to_few_places_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_POOLS", 2)
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(answering(echo))) for _ in range(3)]
        for peer in peers:
            call(peer.url())
        assert peers[0].has_closed(1)
        for peer in (*peers[1:], peers[0]):
            call(peer.url())
        assert [len(peer.lines) for peer in peers] == [2, 1, 1]


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
        (kept,) = kept_connections()
        assert SECRET not in json.dumps(vars(kept), default=str)
        assert not hasattr(kept, "trip")


# --- A process that lacks what a request takes

WANTS = [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM]
OTHERS = [errno.ECONNREFUSED, errno.ENETUNREACH, errno.EADDRNOTAVAIL]


def is_starved(answer: Answer) -> bool:
    assert "this worker's process may have no more" in answer.error
    return answer.starved and answer.dropped and not (answer.sent or answer.refused)


@few_threads("callqueue-lookup localhost")
def test_what_was_wanting_is_not_remembered() -> None:
    """And without a thread no name is looked up. Calls that want something: test_room.py."""
    with Peer(answering(echo)) as peer:
        with no_descriptors():
            assert is_starved(call(peer.url()))
        assert call(peer.url()).response is not None
    assert is_starved(call("http://localhost:1/"))


@pytest.mark.parametrize("where", ["_new_conn", "_send_in_pieces"])
@pytest.mark.parametrize("error", [*WANTS, *OTHERS])
def test_what_the_kernel_has_no_more_of_is_told_from_what_is_the_other_sides(
    where: str, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it connects, and where it takes no first byte."""

    monkeypatch.setattr(Connection, where, Mock(side_effect=OSError(error, "no more")))
    with Peer(answering(echo)) as peer:
        answer = call(peer.url())
    assert is_starved(answer) if error in WANTS else nothing_was_sent(answer)
    assert answer.starved == answer.dropped == (error in WANTS)


# --- Names


@pytest.mark.parametrize("code", [socket.EAI_AGAIN, socket.EAI_NONAME])
def test_a_name_that_does_not_resolve_or_a_refused_connection_sends_nothing(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    refused = call(f"http://127.0.0.1:{port}/?token={SECRET}")
    assert refused.error == f"no connection to 127.0.0.1:{port}: Connection refused"
    unknown = Mock(side_effect=socket.gaierror(code, "Name or service not known"))
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    answer = call("http://nowhere.test/?token=" + SECRET)
    assert answer.error == "the name nowhere.test does not resolve: Name or service not known"
    assert nothing_was_sent(answer) and nothing_was_sent(refused)
    assert not (answer.refused or answer.starved or refused.refused)


def test_resolvers_that_hang_are_left_behind_and_bounded_in_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()
    began: list[str] = []

    def getaddrinfo(host: str, *_: Any, **__: Any) -> Any:
        began.append(host)
        if host == "gone.test":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        over.wait(60)

    monkeypatch.setattr(aside, "MOST_LEFT", 2)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    late = "resolving the name slow.test took longer than the total timeout of 0.3 s"
    none = "resolving the name slow.test is not tried: 2 before this one have had no answer yet"
    for why in (late, late, none, none):
        with within(1):
            answer = call("http://slow.test/", timeouts=Timeouts(total=0.3))
        assert nothing_was_sent(answer) and answer.error == why
    other = call("http://gone.test/").error
    over.set()
    assert other == "the name gone.test does not resolve: no such name", "others are tried"
    assert began == ["slow.test", "slow.test", "gone.test"]


def test_a_name_leads_to_the_addresses_that_were_checked_and_to_none_where_any_is_refused(
    name_is: Callable[..., Names],
) -> None:
    """Each in turn; and who changes between the check and the connection is checked anew."""
    with Peer(answering(echo)) as peer:
        name_is(["127.0.0.1", "10.0.0.1"])
        answer = call(peer.url(host="mixed.test"))
        assert nothing_was_sent(answer) and answer.refused and peer.lines == []
        assert "mixed.test" in answer.error and "10.0.0.1 is private" in answer.error
        names = name_is(["127.0.0.1"], ["10.0.0.1"])
        assert body_of(call(peer.url(host="rebinding.test"), data="x")) == b"x"
        assert names.lookups == ["rebinding.test"]
        assert peer.seen[0].headers["host"] == f"rebinding.test:{peer.port}"
        close_idle_connections(0)
        assert call(peer.url(host="rebinding.test")).refused
        assert len(peer.lines) == 1
        name_is([], ["127.0.0.2", "127.0.0.1"])
        assert nothing_was_sent(call(peer.url(host="two.test")))
        assert body_of(call(peer.url(host="two.test"), data="x")) == b"x"


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells")
@pytest.mark.parametrize("how", ["is late", "is read late", "ends late", "never ends"])
def test_it_is_known_when_an_answer_came_however_late_it_is_read(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A process whose threads wait for each other has no slow API. An answer without a length has
    come when its connection ends; of one that never ends nobody knows.
    """
    wait_at_most, has_answered = connection._set_timeout, threading.Event()

    def read_late(sock: Any, seconds: float) -> None:
        if gate.is_whole and has_answered.wait(5):
            time.sleep(0.3)
        wait_at_most(sock, seconds)

    def script(line: Line) -> None:
        line.read()
        time.sleep(0.3 * (how == "is late"))
        length = {"ends late": "", "never ends": "9"}.get(how, "1")
        line.send(answer_bytes(b"x", Content_Length=length))
        has_answered.set()
        line.peer.closing.wait(0.3 if how == "ends late" else 9)

    if how == "is read late":
        monkeypatch.setattr(connection, "_set_timeout", read_late)
    gate = Gate()
    with Peer(script) as peer:
        patience = Timeouts(5, 0.3 if how == "never ends" else 5, 5)
        answer = call(peer.url("/"), gate=gate, timeouts=patience)
        read_at = clocks.monotonic()
    assert answer.broken is (gate.answered_at is None) is (how == "never ends")
    if gate.answered_at is not None:
        since = read_at if how == "is read late" else answer.sent_at
        assert abs(gate.answered_at - since) >= 0.25


# --- TLS: whom the client trusts, and slow or early servers behind it


@pytest.fixture
def secure(certificate: Certificate) -> Iterator[Peer]:
    certificate.names.clear()
    with Peer(answering(echo), context=certificate.server) as peer:
        yield peer


def trusting(certificate: Certificate) -> Policy:
    return LOOPBACK._replace(verify=str(certificate.path))


def _stays(line: Line) -> None:
    line.peer.closing.wait(5)


@pytest.mark.parametrize("trusts", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_a_certificate_that_is_not_trusted_or_has_expired_is_sent_nothing(
    certificate: Certificate,
    expired: Certificate,
    monkeypatch: pytest.MonkeyPatch,
    trusts: bool,
    ends: bool,
) -> None:
    """The environment's are not trusted."""
    own = expired if ends else certificate
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, str(own.path))
    policy = trusting(own) if trusts else LOOPBACK
    with Peer(answering(echo), context=own.server) as peer:
        answer = call(peer.url("/?token=" + SECRET), data=SECRET, policy=policy)
        assert len(peer.seen) == (trusts and not ends)
    if trusts and not ends:
        return
    assert nothing_was_sent(answer) and not answer.refused
    why = "certificate has expired" if trusts else "self-signed certificate"
    name = f"127.0.0.1:{peer.port}"
    assert answer.error == f"no TLS connection to {name}: certificate not accepted, {why}"


def test_connections_are_shared_by_calls_that_trust_the_same_only(
    secure: Peer, certificate: Certificate
) -> None:
    """Without verify any certificate is accepted."""
    for policy in (trusting(certificate), LOOPBACK._replace(verify=False)) * 3:
        assert body_of(call(secure.url(), data="x", policy=policy)) == b"x"
    assert nothing_was_sent(call(secure.url(), data="x"))
    assert len(secure.lines) == 3


def test_the_name_is_what_the_certificate_must_be_for(
    secure: Peer, certificate: Certificate, name_is: Callable[..., Names]
) -> None:
    name_is(["127.0.0.1"])
    url, policy = secure.url(host="api.test"), trusting(certificate)
    assert body_of(call(url, data="x", policy=policy)) == b"x"
    assert certificate.names[-1] == "api.test"
    assert secure.seen[0].headers["host"] == f"api.test:{secure.port}"
    answer = call(secure.url(host="other.test"), policy=policy)
    assert nothing_was_sent(answer)
    assert "not valid for 'other.test'" in answer.error


def test_who_does_not_speak_tls_or_has_no_certificates_to_trust_is_sent_nothing(
    secure: Peer, tmp_path: Path
) -> None:
    def refuses(line: Line) -> None:
        line.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    hurried = Timeouts(connect=0.2)
    for script, why in ((refuses, "no TLS connection"), (_stays, "the connect timeout of 0.2 s")):
        with Peer(script) as peer, within(3):
            answer = call(peer.url().replace("http:", "https:"), timeouts=hurried)
        assert nothing_was_sent(answer) and why in answer.error
    answer = call(secure.url(), policy=LOOPBACK._replace(verify=str(tmp_path / "missing.pem")))
    assert nothing_was_sent(answer) and "missing.pem" in answer.error


def test_slow_tls_servers_are_bounded_too(certificate: Certificate) -> None:
    def drips(line: Line) -> None:
        line.read()
        line.drip(answer_bytes(b"x" * 10000))

    own = {"policy": trusting(certificate), "timeouts": HURRIED}
    for script, size in ((drips, 1), (_stays, 30_000_000)):
        with Peer(script, context=certificate.server) as peer, within(4):
            answer = call(peer.url(), data="x" * size, **own)
        with on_a_quiet_machine():
            assert "connecting to" not in answer.error
        assert is_lost(answer)


def test_what_tls_did_not_take_may_have_been_sent_in_part(
    secure: Peer, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a plain connection it is known that nothing was."""
    monkeypatch.setattr(
        Connection, "_send_in_pieces", Mock(side_effect=OSError(errno.ECONNRESET, "reset"))
    )
    assert is_lost(call(secure.url(), policy=trusting(certificate)))
    with Peer(answering(echo)) as plain:
        assert nothing_was_sent(call(plain.url()))


def test_a_tls_connection_is_used_again_unless_more_than_its_answer_is_in_it(
    secure: Peer, certificate: Certificate
) -> None:
    """What came in one record with the answer waits decrypted; a session's ticket is no reason."""
    gate = Recording(lambda: time.sleep(0.05))
    for count in (1, 2, 3):
        answer = call(secure.url(), data="x", policy=trusting(certificate), gate=gate)
        assert body_of(answer) == b"x"
        assert (len(gate.waits), len(secure.lines)) == (count, 1)
    more = answer_bytes(b"not asked for" * 1000)
    with Peer(answering(answer_bytes(b"mine") + more), context=certificate.server) as peer:
        for count in (1, 2):
            assert body_of(call(peer.url(), policy=trusting(certificate))) == b"mine"
            assert len(peer.lines) == count
