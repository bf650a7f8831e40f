"""Connections that are kept for the next call: which, for how long, and for whom."""

from __future__ import annotations

import gzip
import json
import os
import threading
from contextlib import ExitStack

import pytest

from callqueue.execution import connection
from callqueue.execution.wire import Policy, close_idle
from tests.support.peer import (
    LOOPBACK,
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
    kept_connections,
    once,
)


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


def test_threads_share_connections_each_by_one_at_a_time() -> None:
    def meanwhile() -> None:
        thread = threading.Thread(target=call, args=(peer.url(),))
        thread.start()
        thread.join()

    with Peer(answering(echo)) as peer:
        call(peer.url())
        meanwhile()
        assert len(peer.lines) == 1
        assert call(peer.url(), gate=Recording(meanwhile)).error == ""
        assert len(peer.lines) == 2


def test_idle_connections_are_few(clock: Clock) -> None:
    with ExitStack() as stack:
        peers = [
            stack.enter_context(Peer(answering(echo))) for _ in range(connection.MOST_POOLS + 2)
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
        close_idle(0)
        assert peer.has_closed(1)
        call(peer.url())
        assert len(peer.lines) == 2


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
