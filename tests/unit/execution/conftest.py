"""A clock that is moved, a name server, a certificate, and connections that end with their test."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from callqueue.execution import trip
from callqueue.execution.wire import close_idle
from tests.support.peer import Certificate, Clock, Names


@pytest.fixture(autouse=True)
def _no_connection_outlives_its_test() -> Iterator[None]:
    yield
    close_idle(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr(trip, "clock", moved)
    return moved


@pytest.fixture
def name_is(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Names]:
    real = socket.getaddrinfo

    def install(*answers: list[str]) -> Names:
        names = Names(list(answers))

        def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
            if str(host).endswith(".test"):
                return names(host, port, *args, **kwargs)
            return real(host, port, *args, **kwargs)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        return names

    return install


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Self-signed, for api.test and 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "api.test")])
    now = datetime.datetime.now(datetime.UTC)
    alternatives = [x509.DNSName("api.test"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    private = path.with_name("key.pem")
    path.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, private)
    made = Certificate(path, context)
    context.sni_callback = lambda sock, server_name, own: made.names.append(server_name)
    return made
