"""TLS: whom the client trusts, and slow or early servers behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from callqueue.execution.wire import Policy, Timeouts
from tests.support.peer import (
    HURRIED,
    LOOPBACK,
    SECRET,
    Certificate,
    Line,
    Names,
    Peer,
    Recording,
    answer_bytes,
    answering,
    body_of,
    call,
    echo,
    is_lost,
    nothing_was_sent,
    once,
    within,
)


@pytest.fixture
def secure(certificate: Certificate) -> Iterator[Peer]:
    certificate.names.clear()
    with Peer(answering(echo), context=certificate.server) as peer:
        yield peer


def trusting(certificate: Certificate) -> Policy:
    return replace(LOOPBACK, verify=str(certificate.path))


def test_a_self_signed_certificate_is_refused_before_anything_is_sent(secure: Peer) -> None:
    answer = call(secure.url("/?token=" + SECRET), data=SECRET)
    assert nothing_was_sent(answer)
    assert not answer.refused
    assert (
        answer.error
        == f"no TLS connection to 127.0.0.1:{secure.port}: certificate not accepted, self-signed certificate"
    )
    assert secure.seen == []


def test_environment_certificates_are_not_trusted(
    secure: Peer, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, str(certificate.path))
    assert nothing_was_sent(call(secure.url()))


def test_a_certificate_that_is_trusted_by_path_is_accepted(
    secure: Peer, certificate: Certificate
) -> None:
    for word in ("one", "two", "three"):
        assert body_of(call(secure.url(), data=word, policy=trusting(certificate))) == word.encode()
    assert len(secure.lines) == 1


def test_without_verify_any_certificate_is_accepted_and_its_connection_is_not_shared(
    secure: Peer, certificate: Certificate
) -> None:
    assert body_of(call(secure.url(), data="x", policy=replace(LOOPBACK, verify=False))) == b"x"
    assert nothing_was_sent(call(secure.url(), data="x"))
    assert body_of(call(secure.url(), data="x", policy=trusting(certificate))) == b"x"
    assert len(secure.lines) == 3


def test_the_name_is_what_the_certificate_must_be_for(
    secure: Peer, certificate: Certificate, name_is: Callable[..., Names]
) -> None:
    name_is(["127.0.0.1"])
    assert (
        body_of(call(secure.url(host="api.test"), data="x", policy=trusting(certificate))) == b"x"
    )
    assert certificate.names[-1] == "api.test"
    assert secure.seen[0].headers["host"] == f"api.test:{secure.port}"
    answer = call(secure.url(host="other.test"), policy=trusting(certificate))
    assert nothing_was_sent(answer)
    assert "not valid for 'other.test'" in answer.error


def test_certificates_that_cannot_be_read_send_nothing(secure: Peer, tmp_path: Path) -> None:
    answer = call(secure.url(), policy=replace(LOOPBACK, verify=str(tmp_path / "missing.pem")))
    assert nothing_was_sent(answer)
    assert "missing.pem" in answer.error


def test_a_server_that_does_not_speak_tls_is_sent_nothing() -> None:
    with Peer(lambda line: line.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as peer:
        assert nothing_was_sent(call(peer.url().replace("http:", "https:")))


def test_a_handshake_that_hangs_ends_with_the_connect_timeout() -> None:
    with Peer(lambda line: line.peer.closing.wait(5) and None) as peer, within(3):
        answer = call(peer.url().replace("http:", "https:"), timeouts=Timeouts(connect=0.2))
    assert nothing_was_sent(answer)
    assert "the connect timeout of 0.2 s" in answer.error


def test_slow_tls_servers_are_bounded_too(certificate: Certificate) -> None:
    def script(line: Line) -> None:
        line.read()
        line.drip(answer_bytes(b"x" * 10000))

    with Peer(script, context=certificate.server) as peer, within(3):
        assert is_lost(call(peer.url(), policy=trusting(certificate), timeouts=HURRIED))
    with (
        Peer(lambda line: line.peer.closing.wait(5) and None, context=certificate.server) as peer,
        within(4),
    ):
        answer = call(
            peer.url(), data="x" * 30_000_000, policy=trusting(certificate), timeouts=HURRIED
        )
        assert is_lost(answer)


def test_large_requests_and_answers_pass_through_tls(
    secure: Peer, certificate: Certificate
) -> None:
    data = "x" * 3_000_000
    policy = replace(trusting(certificate), max_response_bytes=5_000_000)
    assert body_of(call(secure.url(), data=data, policy=policy)) == data.encode()


def test_an_early_answer_over_tls_counts(certificate: Certificate) -> None:
    def script(line: Line) -> None:
        line.read_head()
        line.send(answer_bytes(b"too large", "413 Content Too Large"))
        line.peer.closing.wait(5)

    with Peer(script, context=certificate.server) as peer:
        answer = call(
            peer.url(),
            data="x" * 20_000_000,
            policy=trusting(certificate),
            timeouts=Timeouts(read=0.2, total=5),
        )
    assert answer.response is not None
    assert answer.response.status_code == 413


def test_a_tls_connection_closed_by_the_server_is_not_used_again(certificate: Certificate) -> None:
    with Peer(once(answer_bytes()), context=certificate.server) as peer:
        for expected in (1, 2):
            assert body_of(call(peer.url(), policy=trusting(certificate))) == b"ok"
            assert peer.has_closed(expected)
            assert len(peer.lines) == expected


def test_session_tickets_in_the_gate_are_no_reason_to_connect_again(
    secure: Peer, certificate: Certificate
) -> None:
    gate = Recording(lambda: time.sleep(0.05))
    assert body_of(call(secure.url(), data="x", policy=trusting(certificate), gate=gate)) == b"x"
    assert (len(gate.waits), len(secure.lines)) == (1, 1)
