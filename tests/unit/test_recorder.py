"""The vendor of the tests has to be right before anything measured with it is."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import requests
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


def test_a_request_is_recorded_with_all_that_matters(vendor: Recorder) -> None:
    before = time.monotonic()
    answer = requests.post(
        vendor.url("/ok", a="1"), json={"b": 2}, headers={"Idempotency-Key": "k"}, timeout=5
    )
    (arrival,) = vendor.arrivals()
    assert answer.json() == {"ok": True}
    assert (arrival.method, arrival.path, arrival.query) == ("POST", "/ok", {"a": "1"})
    assert (arrival.idempotency_key, arrival.body, arrival.status) == ("k", '{"b": 2}', 200)
    assert arrival.answered_at is not None
    assert before <= arrival.at <= arrival.answered_at <= time.monotonic()


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


def test_a_hanging_request_is_recorded_and_never_answered(vendor: Recorder) -> None:
    with pytest.raises(requests.ReadTimeout):
        requests.get(vendor.url("/hang"), timeout=0.1)
    (arrival,) = vendor.arrivals()
    assert (arrival.status, arrival.answered_at) == (None, None)


def test_each_behaviour_is_what_it_says(vendor: Recorder) -> None:
    def get(path: str, **query: int) -> requests.Response:
        return requests.get(vendor.url(path, **query), timeout=5)

    refused = get("/status/429", after=7)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "7")
    for name in ("a", "b"):
        codes = [get(f"/fail/2/{name}").status_code for _ in range(4)]
        assert codes == [500, 500, 200, 200]
    with pytest.raises(requests.ConnectionError):
        get("/reset")
    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        get("/truncate")
    assert vendor.count() == 11
    with pytest.raises(TimeoutError, match="11 of 12"):
        vendor.wait_for(12, timeout=0.05)


def test_a_held_request_is_answered_when_released(vendor: Recorder) -> None:
    answers: list[requests.Response] = []
    caller = threading.Thread(
        target=lambda: answers.append(requests.get(vendor.url("/hold/a"), timeout=10))
    )
    caller.start()
    vendor.wait_for(1)
    assert vendor.release("b") == 0
    assert vendor.release("a") == 1
    caller.join(10)
    assert answers[0].json() == {"ok": True, "held": "a"}


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
