"""A process that lacks what a request takes says so, and that nothing was sent: it is neither the
request's fault nor the other side's.
"""

from __future__ import annotations

import errno
import socket
import threading
from typing import Any

import pytest

from callqueue.execution import connection, resolver
from callqueue.execution.connection import Connection
from callqueue.execution.wire import Answer
from tests.support.peer import Peer, answering, call, echo
from tests.support.starving import no_descriptors

WANTS = [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM]


def is_starved(answer: Answer) -> bool:
    assert "this worker's process may have no more" in answer.error
    return answer.starved and answer.dropped and not (answer.sent or answer.refused)


def test_without_descriptors_nothing_is_connected() -> None:
    with Peer(answering(echo)) as peer:
        with no_descriptors():
            answer = call(peer.url())
        assert is_starved(answer)
        assert "Too many open files" in answer.error
        assert call(peer.url()).response is not None
        assert len(peer.lines) == 1


@pytest.mark.parametrize("host", ["localhost", "nowhere.invalid"])
def test_without_descriptors_no_name_is_taken_for_one_that_does_not_exist(host: str) -> None:
    with no_descriptors():
        assert is_starved(call(f"http://{host}:1/"))


def test_without_descriptors_no_certificate_is_taken_for_one_that_is_missing() -> None:
    connection._context.cache_clear()
    with no_descriptors():
        assert is_starved(call("https://127.0.0.1:1/"))
    assert not call("https://127.0.0.1:1/").starved  # and the failure is not remembered


@pytest.mark.parametrize("want", WANTS)
def test_whatever_the_kernel_has_no_more_of(want: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(want, "no more")

    monkeypatch.setattr(Connection, "_new_conn", refuse)
    assert is_starved(call("http://127.0.0.1:1/"))


@pytest.mark.parametrize("other", [errno.ECONNREFUSED, errno.ENETUNREACH, errno.EADDRNOTAVAIL])
def test_what_is_the_other_sides_is_a_failure(other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(other, "no way")

    monkeypatch.setattr(Connection, "_new_conn", refuse)
    answer = call("http://127.0.0.1:1/")
    assert not answer.starved
    assert not answer.dropped


@pytest.mark.parametrize("want", WANTS)
def test_a_kernel_that_takes_no_first_byte(want: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(want, "no more")

    monkeypatch.setattr(Connection, "_push", refuse)
    with Peer(answering(echo)) as peer:
        assert is_starved(call(peer.url()))


def test_without_a_thread_to_look_a_name_up(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "lookup":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert is_starved(call("http://localhost:1/"))
    assert resolver._lookups._value == resolver.LOOKUPS  # type: ignore[attr-defined]


def test_a_name_that_does_not_resolve_is_no_want(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert not call("http://nowhere.test/").starved
