"""The vendor of the tests has to be right before anything measured with it is."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.recorder import Recorder, highest_in_window, used_share


@pytest.fixture(scope="module")
def server() -> Iterator[Recorder]:
    with Recorder() as recorder:
        yield recorder


@pytest.fixture
def vendor(server: Recorder) -> Recorder:
    server.clear()
    return server


def test_the_instant_is_that_of_the_last_byte(vendor: Recorder) -> None:
    with socket.create_connection(("127.0.0.1", vendor.port)) as client:
        client.sendall(b"POST /ok HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\na")
        assert vendor.count() == 0
        last = time.monotonic()
        client.sendall(b"b")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
    (arrival,) = vendor.arrivals()
    assert arrival.at >= last
    assert arrival.body == "ab"


def read_answer(client: socket.socket) -> bytes:
    """A whole answer: its head and its body may come apart."""
    answer = b""
    while not answer.endswith(b'{"ok": true}'):
        piece = client.recv(1000)
        assert piece, f"it broke off after {answer!r}"
        answer += piece
    return answer


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not say when TCP data came")
def test_the_instant_is_the_machines_however_late_the_vendor_reads(vendor: Recorder) -> None:
    """A vendor that is kept from its processor, here by SIGSTOP, is not a client that was late."""
    process = vendor._process
    assert process is not None
    with socket.create_connection(("127.0.0.1", vendor.port)) as client:
        client.sendall(b"GET /ok HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_answer(client).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGSTOP)
        sent = time.monotonic()
        client.sendall(b"GET /ok HTTP/1.1\r\nHost: x\r\n\r\n")
        after = time.monotonic()
        threading.Timer(0.3, process.send_signal, [signal.SIGCONT]).start()
        assert read_answer(client).startswith(b"HTTP/1.1 200")
    late = vendor.arrivals()[-1]
    assert sent <= late.at <= after + 0.05
    assert late.answered_at is not None
    assert late.answered_at >= sent + 0.3


def test_the_server_ends_when_its_parent_lets_go() -> None:
    recorder = Recorder().start()
    process = recorder._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 0
    recorder.stop()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 20))
def test_the_highest_in_a_window_is_what_counting_finds(instants: list[int], window: int) -> None:
    counted = max(sum(start <= at < start + window for at in instants) for start in instants)
    assert highest_in_window(instants, window) == counted


def test_a_limit_used_to_the_full_is_a_share_of_one() -> None:
    bursts = [float(second) for second in range(11) for _ in range(20)]
    assert used_share(bursts, 20, 1.0) == pytest.approx(1.0)


def test_jitter_costs_the_share_that_it_should() -> None:
    bursts = [second * 1.05 for second in range(11) for _ in range(20)]
    assert used_share(bursts, 20, 1.0) == pytest.approx(1 / 1.05)
