"""TLS: whom the client trusts, and slow or early servers behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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
    within,
)


@pytest.fixture
def secure(certificate: Certificate) -> Iterator[Peer]:
    certificate.names.clear()
    with Peer(answering(echo), context=certificate.server) as peer:
        yield peer


def trusting(certificate: Certificate) -> Policy:
    return LOOPBACK._replace(verify=str(certificate.path))


def _stays(line: Line) -> None:
    line.peer.closing.wait(5)


@pytest.mark.parametrize("trusts", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_a_certificate_that_is_not_trusted_or_has_expired_is_sent_nothing(
    certificate: Certificate,
    expired: Certificate,
    monkeypatch: pytest.MonkeyPatch,
    trusts: bool,
    ends: bool,
) -> None:
    """The environment's are not trusted."""
    own = expired if ends else certificate
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, str(own.path))
    policy = trusting(own) if trusts else LOOPBACK
    with Peer(answering(echo), context=own.server) as peer:
        answer = call(peer.url("/?token=" + SECRET), data=SECRET, policy=policy)
        assert len(peer.seen) == (trusts and not ends)
    if trusts and not ends:
        return
    assert nothing_was_sent(answer) and not answer.refused
    why = "certificate has expired" if trusts else "self-signed certificate"
    name = f"127.0.0.1:{peer.port}"
    assert answer.error == f"no TLS connection to {name}: certificate not accepted, {why}"


def test_connections_are_shared_by_calls_that_trust_the_same_only(
    secure: Peer, certificate: Certificate
) -> None:
    """Without verify any certificate is accepted."""
    for policy in (trusting(certificate), LOOPBACK._replace(verify=False)) * 3:
        assert body_of(call(secure.url(), data="x", policy=policy)) == b"x"
    assert nothing_was_sent(call(secure.url(), data="x"))
    assert len(secure.lines) == 3


def test_the_name_is_what_the_certificate_must_be_for(
    secure: Peer, certificate: Certificate, name_is: Callable[..., Names]
) -> None:
    name_is(["127.0.0.1"])
    url, policy = secure.url(host="api.test"), trusting(certificate)
    assert body_of(call(url, data="x", policy=policy)) == b"x"
    assert certificate.names[-1] == "api.test"
    assert secure.seen[0].headers["host"] == f"api.test:{secure.port}"
    answer = call(secure.url(host="other.test"), policy=policy)
    assert nothing_was_sent(answer)
    assert "not valid for 'other.test'" in answer.error


def test_who_does_not_speak_tls_or_has_no_certificates_to_trust_is_sent_nothing(
    secure: Peer, tmp_path: Path
) -> None:
    def refuses(line: Line) -> None:
        line.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    hurried = Timeouts(connect=0.2)
    for script, why in ((refuses, "no TLS connection"), (_stays, "the connect timeout of 0.2 s")):
        with Peer(script) as peer, within(3):
            answer = call(peer.url().replace("http:", "https:"), timeouts=hurried)
        assert nothing_was_sent(answer) and why in answer.error
    answer = call(secure.url(), policy=LOOPBACK._replace(verify=str(tmp_path / "missing.pem")))
    assert nothing_was_sent(answer) and "missing.pem" in answer.error


def test_slow_tls_servers_are_bounded_and_an_early_answer_counts(certificate: Certificate) -> None:
    def drips(line: Line) -> None:
        line.read()
        line.drip(answer_bytes(b"x" * 10000))

    def answers_early(line: Line) -> None:
        line.read_head()
        line.send(answer_bytes(b"too large", "413 Content Too Large"))
        line.peer.closing.wait(5)

    # time enough for a handshake on a busy machine
    own = {"policy": trusting(certificate), "timeouts": HURRIED._replace(total=1.0)}
    for script, size in ((drips, 1), (_stays, 30_000_000)):
        with Peer(script, context=certificate.server) as peer, within(4):
            assert is_lost(call(peer.url(), data="x" * size, **own))
    own["timeouts"] = Timeouts(read=0.2, total=5)
    with Peer(answers_early, context=certificate.server) as peer:
        answer = call(peer.url(), data="x" * 20_000_000, **own)
    assert answer.response is not None and answer.response.status_code == 413


def test_a_tls_connection_is_used_again_unless_more_than_its_answer_is_in_it(
    secure: Peer, certificate: Certificate
) -> None:
    """What came in one record with the answer waits decrypted. A session's ticket is no reason, in
    the gate or in a connection that is kept.
    """
    gate = Recording(lambda: time.sleep(0.05))
    for count in (1, 2, 3):
        answer = call(secure.url(), data="x", policy=trusting(certificate), gate=gate)
        assert body_of(answer) == b"x"
        assert (len(gate.waits), len(secure.lines)) == (count, 1)
    more = answer_bytes(b"not asked for" * 1000)
    with Peer(answering(answer_bytes(b"mine") + more), context=certificate.server) as peer:
        for count in (1, 2):
            assert body_of(call(peer.url(), policy=trusting(certificate))) == b"mine"
            assert len(peer.lines) == count
