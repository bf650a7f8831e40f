"""A connection against servers that answer early, late, wrongly or not at all: how far a call got."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from callqueue import clocks
from callqueue.execution.wire import Answer, Dropped, Gate, Timeouts
from tests.support.peer import (
    SECRET,
    Clock,
    Line,
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

# --- The gate


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


def test_a_refused_connection_sends_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    answer = call(f"http://127.0.0.1:{port}/?token={SECRET}")
    assert nothing_was_sent(answer)
    assert answer.error == f"no connection to 127.0.0.1:{port}: Connection refused"


# --- Sent, and no answer


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
            (kept,) = kept_connections()
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
        answer = call(peer.url(), timeouts=Timeouts(total=2))
    assert answer.sent


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
