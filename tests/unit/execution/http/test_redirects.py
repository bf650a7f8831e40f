"""Redirects: each is the answer, whatever it says; nothing goes where it points."""

from __future__ import annotations

import pytest

from tests.support.peer import (
    SECRET,
    Peer,
    Recording,
    answer_bytes,
    answering,
    call,
    echo,
    redirecting,
)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 305, 307, 308, 399])
@pytest.mark.parametrize("method", ["get", "head", "post", "put", "patch", "delete", "options"])
def test_a_redirect_is_the_answer(method: str, status: int) -> None:
    gate = Recording()
    with Peer(answering(echo)) as other, Peer(answering(echo)) as peer:
        moved = redirecting(other.url("/there"), f"{status} Moved")
        with Peer(answering(moved, echo)) as peer:
            answer = call(peer.url("/here"), method, gate=gate, headers={"Authorization": SECRET})
            assert len(peer.seen) == 1
        assert other.lines == []
    assert answer.response is not None and (answer.error, answer.refused) == ("", False)
    assert answer.response.status_code == status and answer.response.history == []
    assert answer.response.headers["Location"] == other.url("/there")
    assert len(gate.waits) == 1


def test_a_redirect_to_itself_is_asked_for_once() -> None:
    with Peer(answering(redirecting("/"))) as peer:
        answer = call(peer.url("/"))
        assert len(peer.seen) == 1
    assert answer.response is not None and answer.response.status_code == 302


@pytest.mark.parametrize(
    "location", ["", "http://[", "file:///etc/passwd", "http://a\x00b/", "x" * 60_000]
)
def test_a_location_that_is_none_is_no_error(location: str) -> None:
    with Peer(answering(answer_bytes(b"", "302 Found", Location=location))) as peer:
        answer = call(peer.url())
    assert answer.response is not None
    assert (answer.response.status_code, answer.error) == (302, "")
