"""A clock that is moved, a name server, a certificate, and connections that end with their test."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from callqueue.execution import connection
from callqueue.execution.wire import close_idle_connections
from tests.support.peer import Certificate, Clock, Names


@pytest.fixture(autouse=True)
def _no_connection_outlives_its_test() -> Iterator[None]:
    yield
    close_idle_connections(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr(connection, "clock", moved)
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


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Self-signed, for api.test and 127.0.0.1."""
    return _certificate(tmp_path_factory.mktemp("tls"), ends_in=1)


@pytest.fixture(scope="session")
def expired(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return _certificate(tmp_path_factory.mktemp("tls"), ends_in=-1)


def _certificate(folder: Path, ends_in: int) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "api.test")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    alternatives = [x509.DNSName("api.test"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - 2 * day)
        .not_valid_after(now + ends_in * day)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    coding = serialization.Encoding.PEM
    path, private = folder / "certificate.pem", folder / "key.pem"
    path.write_bytes(built.public_bytes(coding))
    no_password = serialization.NoEncryption()
    private.write_bytes(key.private_bytes(coding, serialization.PrivateFormat.PKCS8, no_password))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, private)
    made = Certificate(path, context)
    context.sni_callback = lambda sock, server_name, own: made.names.append(server_name)
    return made
