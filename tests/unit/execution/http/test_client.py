"""A call that goes well, and one of which no request can be made: what comes back, and what never
leaves.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from callqueue import clocks
from callqueue.execution import wire
from callqueue.execution.wire import Answer
from tests.support.peer import (
    LOOPBACK,
    PATIENT,
    SECRET,
    Peer,
    answer_bytes,
    answering,
    body_of,
    call,
    echo,
    nothing_was_sent,
)


def test_a_call_comes_back_as_a_requests_response() -> None:
    with Peer(answering(answer_bytes(b'{"id": 7}', Content_Type="application/json"))) as peer:
        before = clocks.monotonic()
        answer = call(peer.url("/v1"), json={"a": 1})
        after = clocks.monotonic()
    response = answer.response
    assert type(response) is requests.Response
    assert (response.status_code, response.json(), response.text, response.reason) == (
        200,
        {"id": 7},
        '{"id": 7}',
        "OK",
    )
    assert response.url == peer.url("/v1")
    assert response.headers["content-type"] == "application/json"
    assert response.request.method == "POST"
    assert 0 < response.elapsed.total_seconds() < after - before
    assert answer.sent_at is not None
    assert before < answer.sent_at < after
    assert answer == Answer(response, answer.sent_at, sent=True)
    assert (peer.seen[0].method, peer.seen[0].target, peer.seen[0].body) == (
        "POST",
        "/v1",
        b'{"a": 1}',
    )


@pytest.mark.parametrize("method", ["get", "options", "head", "post", "put", "patch", "delete"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"params": {"q": "a b", "list": ["1", "2"], "none": None, "ü": "é"}},
        {"params": [["a", "1"], ["a", "2"]]},
        {"params": "raw=1&x"},
        {"json": {"name": "ü", "deep": [1, None, True]}},
        {"json": []},
        {"json": None},
        {"data": {"a": "1", "b": ["2", "3"]}},
        {"data": [["a", "1"], ["b", "ü"]]},
        {"data": "text ü"},
        {"data": ""},
        {"data": {}, "json": {"a": 1}},
        {
            "headers": {
                "X-One": "1",
                "user-agent": "own",
                "ACCEPT": "text/csv",
                "Content-Type": "text/x",
            },
            "data": "a",
        },
        {"headers": {"X-Latin": "é"}},
        {"cookies": {"a": "1", "b": "2"}},
        {"cookies": {"a": "1"}, "headers": {"Cookie": "z=1"}},
        {"auth": ["user", "pässword"]},
        {"auth": ["user", "p"], "headers": {"Authorization": "Bearer x"}},
    ],
)
def test_what_is_sent_is_what_requests_would_send(method: str, params: dict[str, Any]) -> None:
    with Peer(answering(answer_bytes(b"", "204 No Content"))) as peer:
        url = peer.url("/päth/%41?x=1#fragment")
        with requests.Session() as session:
            session.trust_env = False
            theirs = {**params, "auth": tuple(params["auth"])} if "auth" in params else params
            session.request(method, url, **theirs)
        assert call(url, method, **params).error == ""
    one, other = (
        [*sorted(seen.raw.partition(b"\r\n\r\n")[0].split(b"\r\n")), seen.body]
        for seen in peer.seen
    )
    assert other == one


def test_nothing_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password s3cr3t")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with Peer(answering(echo)) as peer:
        assert body_of(call(peer.url(), data="x")) == b"x"
    assert "authorization" not in peer.seen[0].headers


def test_no_cookie_is_kept_between_calls() -> None:
    with Peer(answering(answer_bytes(Set_Cookie="a=1; Path=/"))) as peer:
        first = call(peer.url())
        assert first.response is not None
        assert first.response.cookies["a"] == "1"
        call(peer.url())
    assert "cookie" not in peer.seen[1].headers


def test_ipv6_is_called_by_its_literal() -> None:
    with ExitStack() as stack:
        try:
            peer = stack.enter_context(Peer(answering(echo), address="::1"))
        except OSError:
            pytest.skip("no IPv6 here")
        assert body_of(call(peer.url(), data="x")) == b"x"
        assert peer.seen[0].headers["host"] == f"[::1]:{peer.port}"


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"url": "no-scheme.test/x?token=" + SECRET}, "its URL has no scheme"),
        ({"url": "http:///x?token=" + SECRET}, "its URL is not valid"),
        ({"url": "http://[::1/?token=" + SECRET}, "its URL is not valid"),
        ({"url": "http://127.0.0.1:99999/"}, "not valid"),
        (
            {"url": "http://127.0.0.1/", "headers": {"X": SECRET + "\r\nY: 1"}},
            "one of its headers is not valid",
        ),
        ({"url": "http://127.0.0.1/", "headers": {"X": SECRET + "\u2603"}}, "cannot be made"),
        ({"url": "http://127.0.0.1/", "headers": {"X:Y": SECRET}}, "cannot be made"),
        ({"url": "http://127.0.0.1/", "headers": {"X": 1}}, "cannot be made"),
        ({"url": "http://127.0.0.1/", "json": {"x": float("nan")}}, "JSON"),
        ({"url": "http://127.0.0.1/", "auth": [SECRET]}, "cannot be made"),
        ({"url": "http://127.0.0.1/", "auth": [SECRET, "\u2603"]}, "cannot be made"),
        ({}, "cannot be made"),
    ],
)
def test_what_no_request_can_be_made_of_is_refused_without_repeating_it(
    params: dict[str, Any], why: str
) -> None:
    answer = wire.request("get", params, policy=LOOPBACK, timeouts=PATIENT)
    assert nothing_was_sent(answer)
    assert answer.refused
    assert why in answer.error
    assert SECRET not in answer.error


def test_a_user_may_put_another_adapter_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(self: Any, request: requests.PreparedRequest, **_: Any) -> requests.Response:
        made_up = requests.Response()
        made_up.status_code, made_up._content, made_up.request = 202, b"made up", request
        made_up.url = request.url or ""
        return made_up

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    answer = call("http://api.example.com/", json={"a": 1})
    assert answer.response is not None
    assert (answer.response.status_code, answer.response.text) == (202, "made up")


def test_errors_of_another_adapter_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(self: Any, request: requests.PreparedRequest, **_: Any) -> requests.Response:
        raise requests.ConnectTimeout("?token=" + SECRET)

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    answer = call("http://api.example.com/")
    assert nothing_was_sent(answer)
    assert answer.error == "ConnectTimeout"
