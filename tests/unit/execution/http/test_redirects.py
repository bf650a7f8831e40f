"""Redirects: which are followed, how far, and what does not follow to another origin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from callqueue.execution.http import redirects, target
from callqueue.execution.http.client import Dropped, Gate
from tests.support.peer import (
    FOLLOWING,
    SECRET,
    Names,
    Peer,
    Recording,
    Seen,
    answer_bytes,
    answering,
    body_of,
    call,
    echo,
    redirecting,
)


def test_a_redirect_to_a_host_of_any_length_is_kept_in_no_cache() -> None:
    target.judged.cache_clear()
    for length in (20_000, 60_000):
        location = f"http://{'a' * length}.example/"
        with Peer(answering(answer_bytes(status="302 Found", Location=location))) as peer:
            answer = call(peer.url(), policy=FOLLOWING)
        assert answer.refused
        assert "a redirect" in answer.error
    assert target.judged.cache_info().currsize == 2


def test_a_redirect_is_the_answer_unless_it_is_to_be_followed() -> None:
    with Peer(answering(redirecting("/there"))) as peer:
        answer = call(peer.url("/here"))
        assert answer.response is not None
        assert (answer.response.status_code, answer.error, answer.refused) == (302, "", False)
        assert len(peer.seen) == 1


def test_a_followed_redirect_ends_at_its_target_with_its_history() -> None:
    gate = Recording()
    with Peer(answering(redirecting("/two"), redirecting("three?x=1"), echo)) as peer:
        answer = call(peer.url("/one"), "get", policy=FOLLOWING, gate=gate)
        assert answer.response is not None
        assert answer.response.status_code == 200
        assert [past.status_code for past in answer.response.history] == [302, 302]
        assert [seen.target for seen in peer.seen] == ["/one", "/two", "/three?x=1"]
        assert len(peer.lines) == 1
    assert len(gate.waits) == 3
    assert gate.sent_at is not None
    assert gate.sent_at >= gate.waits[-1]


@pytest.mark.parametrize(
    ("method", "status", "then", "is_body_kept"),
    [
        ("post", 301, "GET", False),
        ("post", 302, "GET", False),
        ("post", 303, "GET", False),
        ("put", 303, "GET", False),
        ("delete", 302, "GET", False),
        ("head", 302, "HEAD", False),
        ("head", 303, "HEAD", False),
        ("put", 301, "PUT", True),
        ("post", 307, "POST", True),
        ("post", 308, "POST", True),
        ("patch", 307, "PATCH", True),
    ],
)
def test_methods_change_on_redirects_as_they_do_in_browsers(
    method: str, status: int, then: str, is_body_kept: bool
) -> None:
    moved = answer_bytes(b"", f"{status} Moved", Location="/there")
    with Peer(answering(moved, answer_bytes(b""))) as peer:
        call(
            peer.url(), method, policy=FOLLOWING, **({} if method == "head" else {"json": {"a": 1}})
        )
    onward = peer.seen[1]
    assert onward.method == then
    assert onward.body == (b'{"a": 1}' if is_body_kept else b"")
    assert ("content-type" in onward.headers) is is_body_kept


PRIVATE = {
    "Authorization": f"Bearer {SECRET}",
    "Cookie": f"session={SECRET}",
    "Proxy-Authorization": SECRET,
    "X-Api-Key": SECRET,
    "Api-Key": SECRET,
    "apikey": SECRET,
    "X-Auth-Token": SECRET,
    "X-Access-Token": SECRET,
    "X-Amz-Security-Token": SECRET,
    "Ocp-Apim-Subscription-Key": SECRET,
    "X-Hub-Signature-256": SECRET,
    "X-Vault-Token": SECRET,
    "X-Client-Secret": SECRET,
    "X-Custom": f"Bearer {SECRET}",
    "Idempotency-Key": SECRET,
}


@pytest.mark.parametrize("status", ["302 Found", "307 Temporary Redirect"])
def test_credentials_do_not_follow_to_another_port(status: str) -> None:
    with (
        Peer(answering(echo)) as other,
        Peer(answering(redirecting(other.url("/there"), status))) as peer,
    ):
        answer = call(
            peer.url(), policy=FOLLOWING, headers={**PRIVATE, "X-Trace": "kept"}, json={"a": 1}
        )
        assert answer.response is not None
        assert answer.response.status_code == 200
        assert peer.seen[0].headers["x-api-key"] == SECRET
        assert SECRET.encode() not in other.seen[0].raw
        assert other.seen[0].headers["x-trace"] == "kept"
        assert other.seen[0].headers["host"] == f"127.0.0.1:{other.port}"


def test_auth_and_cookies_do_not_follow_to_another_host(name_is: Callable[..., Names]) -> None:
    name_is(["127.0.0.1"])
    with Peer(
        answering(
            lambda seen: (
                redirecting(peer.url("/x", host="other.test")) if seen.target == "/" else echo(seen)
            )
        )
    ) as peer:
        call(peer.url(), policy=FOLLOWING, auth=["me", SECRET], cookies={"session": SECRET})
    assert "authorization" in peer.seen[0].headers
    assert "cookie" in peer.seen[0].headers
    assert not {"authorization", "cookie"} & peer.seen[1].headers.keys()


def test_credentials_do_not_come_back_with_the_redirect_that_returns() -> None:
    with (
        Peer(answering(lambda seen: redirecting(f"{first.url('/back')}"))) as other,
        Peer(
            answering(lambda seen: redirecting(other.url()) if seen.target == "/" else echo(seen))
        ) as first,
    ):
        call(first.url(), policy=FOLLOWING, headers=PRIVATE)
        assert first.seen[1].target == "/back"
        assert SECRET.encode() not in first.seen[1].raw


def test_credentials_stay_on_the_same_origin() -> None:
    with Peer(answering(redirecting("/there", "307 Temporary Redirect"), echo)) as peer:
        call(peer.url(), policy=FOLLOWING, headers=PRIVATE)
    assert {name: peer.seen[1].headers[name.lower()] for name in PRIVATE} == PRIVATE


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("http://a.test/", "http://a.test:80/x", True),
        ("https://a.test/", "https://a.test:443/x", True),
        ("http://a.test/", "https://a.test/", True),
        ("https://a.test/", "http://a.test/", False),
        ("http://a.test:8080/", "https://a.test:8443/", False),
        ("http://a.test/", "http://b.test/", False),
        ("http://a.test/", "http://sub.a.test/", False),
        ("http://a.test/", "http://a.test:81/", False),
    ],
)
def test_an_origin_is_scheme_host_and_port(one: str, other: str, is_same: bool) -> None:
    assert redirects.is_same_origin(one, other) is is_same


@pytest.mark.parametrize(
    "location",
    ["http://10.0.0.1/", "http://0xa.1/", "//169.254.169.254/latest/meta-data", "http://[::ffff:10.0.0.1]/", "file:///etc/passwd",
     "ftp://127.0.0.1/", "gopher://127.0.0.1:25/", "http://me:pass@127.0.0.1/", "http://private.test/",
     "http://127.0.0.1:99999/", "http://[::1/", "javascript:alert(1)"],
)  # fmt: skip
def test_a_redirect_to_where_nothing_may_go_is_refused_there(
    location: str, name_is: Callable[..., Names]
) -> None:
    name_is(["10.0.0.1"])
    with Peer(answering(redirecting(location))) as peer:
        answer = call(peer.url(), policy=FOLLOWING)
        assert (answer.refused, answer.sent) == (True, True)
        assert answer.error != ""
        assert len(peer.seen) == 1


def test_a_redirect_to_a_host_outside_of_the_allowed_ones_is_refused(
    name_is: Callable[..., Names],
) -> None:
    names = name_is(["127.0.0.1"])
    with Peer(answering(redirecting("http://evil.test/"))) as peer:
        answer = call(peer.url(), policy=replace(FOLLOWING, allowed_hosts=("127.0.0.1",)))
    assert answer.refused
    assert answer.error == "a redirect was not followed: the host evil.test is not in ALLOWED_HOSTS"
    assert answer.response is not None
    assert answer.response.status_code == 302
    assert names.lookups == []


def test_a_redirect_to_a_closed_host_is_not_followed() -> None:
    """Another rule's host: its limits would not see the request."""
    with Peer(answering(answer_bytes(status="302 Found", Location="http://localhost:9/"))) as peer:
        answer = call(
            peer.url(), policy=replace(FOLLOWING, closed_hosts=("api.example.com", "localhost"))
        )
    assert answer.refused
    assert (
        answer.error
        == "a redirect was not followed: the host localhost is another rule's, with limits of its own"
    )
    assert answer.redirects == 0


def test_ten_redirects_are_followed_and_no_more() -> None:
    def count(seen: Seen) -> bytes:
        number = int(seen.target[1:])
        return redirecting(f"/{number - 1}") if number else answer_bytes(b"there")

    with Peer(answering(count)) as peer:
        assert body_of(call(peer.url("/10"), policy=FOLLOWING)) == b"there"
        answer = call(peer.url("/11"), policy=FOLLOWING)
    assert answer.response is not None
    assert answer.response.status_code == 302
    assert "more than 10 redirects" in answer.error
    assert len(peer.seen) == 11 + 11


def test_a_call_dropped_at_a_later_hop_was_sent() -> None:
    class Closing(Gate):
        hops = 0

        def wait(self) -> None:
            self.hops += 1
            if self.hops == 2:
                raise Dropped("too late")

    with Peer(answering(redirecting("/there"))) as peer:
        answer = call(peer.url(), policy=FOLLOWING, gate=Closing())
    assert (answer.response, answer.dropped, answer.sent) == (None, True, True)
    assert answer.sent_at is not None


def test_a_redirect_without_a_location_is_the_answer() -> None:
    with Peer(answering(answer_bytes(b"", "302 Found"))) as peer:
        answer = call(peer.url(), policy=FOLLOWING)
    assert answer.response is not None
    assert (answer.response.status_code, answer.error) == (302, "")
