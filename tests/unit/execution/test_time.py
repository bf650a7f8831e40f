"""Servers that are slow on purpose: when a call ends, and what it costs this process until then."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

import pytest

from callqueue.execution.wire import Timeouts
from tests.support.busy import BUSY
from tests.support.peer import (
    HURRIED,
    Clock,
    Line,
    Peer,
    Recording,
    Script,
    answer_bytes,
    answering,
    body_of,
    call,
    echo,
    is_lost,
    nothing_was_sent,
    within,
    without_end,
)


def test_time_spent_in_the_gate_counts_against_no_timeout(clock: Clock) -> None:
    def sleep() -> None:
        clock.ahead += 1000

    with Peer(answering(echo)) as peer:
        answer = call(peer.url(), data="x", gate=Recording(sleep))
    assert body_of(answer) == b"x"
    assert answer.response is not None
    assert answer.response.elapsed.total_seconds() < 5


def test_a_timeout_that_is_over_before_the_send_sends_nothing() -> None:
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        time.sleep(0.05)
        url = f"http://127.0.0.1:{full.getsockname()[1]}/"
        answer = call(url, timeouts=Timeouts(connect=0.2, total=5))
    assert nothing_was_sent(answer)
    assert "the connect timeout of 0.2 s" in answer.error
    with Peer(answering(echo)) as peer:
        call(peer.url())
        assert nothing_was_sent(call(peer.url(), timeouts=Timeouts(total=0)))
    assert len(peer.seen) == 1


@pytest.mark.parametrize("how", list(BUSY))
def test_a_server_that_keeps_us_busy_costs_half_a_second_of_cpu_at_most(how: str) -> None:
    """This thread's own, on a machine of usual speed; before, it was all of the total timeout."""
    head, piece, why = BUSY[how]
    with Peer(without_end(head, piece)) as peer:
        before = time.thread_time()
        # it may wait for a turn on a machine with other work: only its own time is judged
        answer = call(peer.url(), timeouts=Timeouts(total=60))
        spent = time.thread_time() - before
        assert peer.has_closed(1)
    assert why in answer.error
    assert answer.truncated == (answer.response is not None)
    assert not answer.broken
    assert spent < 0.5 * slowness()


def slowness() -> float:
    """How many times as long as on a machine of usual speed a calculation takes here and now, where
    it takes longer.
    """
    before = time.thread_time()
    sum(number * number for number in range(1_000_000))
    return max(1.0, (time.thread_time() - before) / 0.04)


def _drips(head: bytes, drip: bytes) -> Script:
    def script(line: Line) -> None:
        line.read()
        line.send(head)
        line.drip(drip)

    return script


def _reads_nothing(line: Line) -> None:
    line.peer.closing.wait(5)


def _reads_a_little(line: Line) -> None:
    while not line.peer.closing.wait(0.01) and line.sock.recv(1000):
        pass


DRIP = b"HTTP/1.1 200 OK and so on and on" * 100


@pytest.mark.parametrize(
    ("script", "size"),
    [
        (_drips(b"", DRIP), 1),
        (_drips(b"HTTP/1.1 200 OK\r\n", DRIP), 1),
        (_drips(b"HTTP/1.1 200 OK\r\nX-One: ", DRIP), 1),
        (_reads_nothing, 12_000_000),
        (_reads_a_little, 12_000_000),
    ],
)
def test_a_head_that_drips_or_a_server_that_hardly_reads_ends_with_the_total_timeout(
    script: Script, size: int
) -> None:
    with Peer(script) as peer, within(4):
        answer = call(peer.url(), data="x" * size, timeouts=HURRIED)
    assert is_lost(answer)
    assert "the total timeout of 0.3 s" in answer.error


CHUNKED = answer_bytes(b"", Content_Length="", Transfer_Encoding="chunked")
TOTAL, READ = Timeouts(connect=5, read=5, total=1.0), Timeouts(read=0.1)


@pytest.mark.parametrize(
    ("head", "drip", "timeouts", "why"),
    [
        (answer_bytes(b"", Content_Length="10000"), b"x" * 10000, TOTAL, "the total timeout of 1 s"),
        (answer_bytes(b"", Content_Length="", Connection="close"), b"x" * 10000, TOTAL, "the total timeout of 1 s"),
        (CHUNKED, b"1\r\nx\r\n" * 1000, TOTAL, "the total timeout of 1 s"),
        (CHUNKED + b"1\r\nx\r\n0\r\n", b"X: y\r\n" * 1000, TOTAL, "the total timeout of 1 s"),
        (answer_bytes(b"x", Content_Length="100"), b"", READ, "the read timeout of 0.1 s"),
    ],
)  # fmt: skip
def test_a_body_that_drips_ends_with_the_total_timeout_and_keeps_what_came(
    head: bytes, drip: bytes, timeouts: Timeouts, why: str
) -> None:
    """One that stalls, with the read timeout."""

    def script(line: Line) -> None:
        _drips(head, drip)(line)
        line.peer.closing.wait(5)

    with Peer(script) as peer, within(5):
        for count in (1, 2):
            answer = call(peer.url(), timeouts=timeouts)
            assert answer.response is not None and answer.response.status_code == 200
            assert (answer.broken, answer.truncated) == (True, False)
            assert body_of(answer).startswith(b"x")
            assert why in answer.error
            assert len(peer.lines) == count
