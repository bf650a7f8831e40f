"""Names that do not resolve, hang, or lead where nothing may go."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from callqueue.execution import resolver
from callqueue.execution.wire import Timeouts, close_idle
from tests.support.peer import SECRET, Names, Peer, answering, body_of, call, echo, nothing_was_sent


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
    monkeypatch.setattr(resolver, "_lookups", threading.BoundedSemaphore(2))
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
        close_idle(0)
        assert call(peer.url(host="rebinding.test")).refused
        assert len(peer.lines) == 1


def test_a_name_has_each_of_its_addresses_tried_in_turn(name_is: Callable[..., Names]) -> None:
    name_is(["127.0.0.2", "127.0.0.1"])
    with Peer(answering(echo)) as peer:
        assert body_of(call(peer.url(host="two.test"), data="x")) == b"x"
