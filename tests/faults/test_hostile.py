"""A hostile vendor and a leaky environment, against real workers: answers without end, proxies, and
what the broker sees.
"""

from __future__ import annotations

import gzip
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from callqueue import Rule
from callqueue.exceptions import InvalidCall
from callqueue.execution import wire
from callqueue.models import CallAttempt, CallQueue
from callqueue.security.secrets import Secret
from callqueue.texts import decoded
from tests.faults.stage import Stage, Status, children_of, wait_until
from tests.support.verdicts import on_a_quiet_machine

GIGABYTE = 1 << 30
MOST_MEMORY = 80 << 20  # bytes by which a worker may grow for a body that it may read a megabyte of
FLAT = (
    24 << 20
)  # bytes by which a process may grow over thousands of what it refuses or cannot read
LOOPBACK = wire.Policy(allowed_networks=("127.0.0.0/8",))
PAYLOAD = "patient-zero-payload"


class Hostile:
    """Serves bodies that no one should read to their end; which one, the path says."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.socket.getsockname()[1])
        self.sent: dict[str, int] = {}
        self.connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with closing(peer), suppress(OSError):
            path = peer.recv(65536).split(b" ")[1].decode().lstrip("/")
            for piece in BODIES[path]():
                peer.sendall(piece)
                self.sent[path] = self.sent.get(path, 0) + len(piece)


def a_gigabyte() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"x" * 65536
    for _ in range(GIGABYTE // len(chunk)):
        yield b"10000\r\n" + chunk + b"\r\n"
    yield b"0\r\n\r\n"


@lru_cache
def folded(how: str) -> bytes:
    """A few kilobytes that unfold into 128 megabytes."""
    import brotli

    zeros = b"\0" * (128 << 20)
    return (
        gzip.compress(zeros, compresslevel=1)
        if how == "gzip"
        else bytes(brotli.compress(zeros, quality=1))
    )


def a_gzip_bomb() -> Iterator[bytes]:
    body = folded("gzip")
    yield b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    yield body


def a_brotli_bomb() -> Iterator[bytes]:
    body = folded("brotli")
    yield b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: %d\r\n\r\n" % len(body)
    yield body


def nested_gzip() -> Iterator[bytes]:
    body = gzip.compress(folded("gzip"))
    yield b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, gzip\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    yield body


def one_byte_a_second() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
    while True:
        yield b"x"
        time.sleep(1)


def headers_without_end() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n"
    for number in range(10_000_000):
        yield b"X-%d: %s\r\n" % (number, b"y" * 1000)


def one_header_without_end() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nX-Long: "
    for _ in range(GIGABYTE // 65536):
        yield b"y" * 65536


BODIES: dict[str, Callable[[], Iterator[bytes]]] = {
    "gigabyte": a_gigabyte,
    "gzip": a_gzip_bomb,
    "brotli": a_brotli_bomb,
    "nested": nested_gzip,
    "drip": one_byte_a_second,
    "headers": headers_without_end,
    "header": one_header_without_end,
}


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    for how in ("gzip", "brotli"):
        folded(how)  # not while a worker waits
    server = Hostile()
    yield server
    server.socket.close()


def peak_memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_answers_without_end_cost_little_time_and_little_memory(
    stage: Stage, hostile: Hostile
) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux tells a process's peak memory")
    stage.rule(total=2.5, release=60.0)
    worker = stage.worker(concurrency=1)
    stage.dispenser()
    stage.wait_for_status(stage.send()[0], Status.DONE)
    (child,) = children_of(worker.pid)
    before = peak_memory(child)
    calls = {
        path: CallQueue.objects.send(
            {"method": "post", "params": {"url": hostile.url(path)}}, rule="r", unique_key=path
        )
        for path in BODIES
    }
    wait_until(lambda: not CallQueue.objects.filter(status__in=(0, 1, 2)).exists(), 60)
    assert children_of(worker.pid) == [child], "the worker's process died of it"
    assert peak_memory(child) - before < MOST_MEMORY
    assert hostile.sent["gigabyte"] < 64 << 20
    for path, call in calls.items():
        assert call is not None
        call.refresh_from_db()
        attempt = call.attempts.get()
        with on_a_quiet_machine():
            assert (attempt.finished_at - attempt.started_at).total_seconds() < 2.5 + 1.0, path
        assert call.answer is None or len(call.answer.body) <= 65536
        expected = (
            Status.UNKNOWN if path.startswith("header") else Status.DONE
        )  # a status counts, a half head does not
        assert call.status == expected, (path, call.status, call.error_message)
        assert attempt.error_message, f"{path}: the attempt does not say what was wrong"


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.django_db
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="only Linux tells a process's memory"
)
def test_no_refused_send_and_no_answers_charset_stays_in_memory(
    length: Callable[[Any, Any], Any], settings: Any
) -> None:
    """Every one is another: its host, and the charset that it claims, as long as they like."""
    settings.CALLQUEUE = {"RULES": {"r": Rule()}}
    count, long = length((2000, 20_000), (100_000, 2000))
    padding = "😀" * (long // 4)

    def refuse(number: int) -> None:
        with pytest.raises(InvalidCall):
            CallQueue.objects.send(
                {"method": "get", "params": {"url": f"https://{number}{padding}/"}}, rule="r"
            )

    def answer(number: int) -> None:
        response = wire.request(
            "get",
            {"url": server.url(str(number))},
            policy=LOOPBACK,
            timeouts=wire.Timeouts(5, 5, 10),
        ).response
        assert response is not None
        assert response.text == decoded(response.content, response.encoding) == "ok"
        assert decoded(b"ok", response.headers["Content-Type"].partition("=")[2]) == "ok"

    with Claiming("x" * long) as server:
        for number in range(200):
            refuse(number), answer(number)
        before = resident()
        for number in range(200, count):
            refuse(number), answer(number)
        wire.close_idle()
    assert resident() - before < FLAT


class Claiming:
    """Answers every request with its path as the charset of a text, and more of the same
    behind it.
    """

    def __init__(self, padding: str) -> None:
        self.padding = padding.encode()

    def __enter__(self) -> Claiming:
        self.socket = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}/{path}"

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self.socket.accept()
                threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: text/plain; charset=x%s%s\r\n\r\nok"
        with closing(peer), suppress(OSError):
            while request := peer.recv(65536):
                peer.sendall(head % (request.split(b" ")[1].lstrip(b"/"), self.padding))


def test_proxies_and_netrc_of_the_environment_are_ignored(
    stage: Stage, hostile: Hostile, tmp_path: Path
) -> None:
    proxy = f"http://127.0.0.1:{hostile.port}"
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        stage.processes.environment |= {name: proxy, name.lower(): proxy}
    stage.processes.environment |= {
        "NO_PROXY": "",
        "no_proxy": "",
        "NETRC": str(tmp_path / "netrc"),
        "HOME": str(tmp_path),
    }
    (tmp_path / "netrc").write_text("default login someone password netrc-password\n")
    (tmp_path / ".netrc").write_text("default login someone password netrc-password\n")
    stage.worker(concurrency=1)
    stage.dispenser()
    call = stage.send(path="/echo", method="get")[0]
    stage.wait_for_status(call, Status.DONE)
    (arrival,) = stage.arrivals_of(call)
    assert "authorization" not in arrival.headers
    assert hostile.connections == 0


def test_messages_carry_ids_and_nothing_else(stage: Stage) -> None:
    """What anyone sees who can read the broker: the task's name, attempts' ids."""
    dispenser = stage.dispenser()
    stage.send(3, path=f"/ok?patient={PAYLOAD}", key=PAYLOAD, unique_key=None)
    wait_until(lambda: CallAttempt.objects.count() == 3, 20)
    dispenser.stop()
    queue = stage.processes.broker.queue("one")
    seen = 0
    with stage.processes.broker.connection() as connection:
        simple = connection.SimpleQueue(queue)
        while seen < 3:
            message = simple.get(timeout=5)
            everything = json.dumps([message.body if isinstance(message.body, str) else bytes(message.body).decode(),
                                     message.headers, message.properties], default=str)  # fmt: skip
            assert PAYLOAD not in everything
            assert message.content_type == "application/json"
            (ids,), kwargs, _ = message.payload
            assert all(isinstance(pk, int) for pk in ids)
            assert not kwargs
            seen += len(ids)
            message.ack()
        simple.close()


def test_a_dump_and_the_logs_of_a_real_run_hold_no_payload(stage: Stage, tmp_path: Path) -> None:
    """PostgreSQL's own dump, and all that workers and dispensers said, with Celery at its most
    talkative.
    """
    import subprocess

    from cryptography.fernet import Fernet
    from django.db import connection

    from tests.faults.private import program

    dumper = program("/usr/lib/postgresql/*/bin/pg_dump", "pg_dump")
    extra = f'"ENCRYPTION_KEYS": ["{Fernet.generate_key().decode()}"], "SECRETS": {{"KEY": "sk-live-5e1f-secret"}},'
    stage.rule(extra=extra)
    worker = stage.worker(concurrency=1, arguments=["--loglevel", "DEBUG"])
    dispenser = stage.dispenser()
    params = {
        "json": {"patient": PAYLOAD, "token": Secret("KEY")},
        "headers": {"Authorization": Secret("KEY")},
    }
    for path in ("/echo", "/status/400", "/fail/1/x", "/reset", "/truncate"):
        CallQueue.objects.send(
            {"method": "put", "params": {"url": stage.vendor.url(path), **params}}, rule="r"
        )
    wait_until(lambda: not CallQueue.objects.exclude(status__in=(3, 4, 7, 2)).exists(), 30)
    where = connection.settings_dict
    address = ["-h", where["HOST"], "-p", str(where["PORT"]), "-U", where["USER"]]
    dumped = subprocess.run(
        [dumper, *address, where["NAME"]], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert "callqueue_callattempt" in dumped
    for text in (PAYLOAD, "sk-live-5e1f-secret"):
        assert text not in dumped
        assert text not in worker.log
        assert text not in dispenser.log
