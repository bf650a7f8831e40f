"""Into the network behind the workers: every spelling of an address, in every form of a URL, by
`send`. What a row says: tests/db/security/test_what_goes_out.py; no redirect is followed:
tests/unit/execution/test_wire.py.

A canary listens on loopback and must hear nothing. The resolver here is the most obliging there is:
it reads every spelling that any resolver reads, so that nothing is refused merely because this
machine's knows less.
"""

from __future__ import annotations

import socket
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import pytest

from callqueue import Rule, SlidingWindow
from callqueue.exceptions import CallQueueError
from callqueue.models import CallQueue
from tests.db.security.test_what_goes_out import (
    ELSEWHERE,
    LOOPBACK,
    has_loopback_6,
)
from tests.support import behaviour
from tests.support.peer import Listener

Rules = Callable[..., None]
Listen = Callable[..., Listener]
WIDE = SlidingWindow("100000/s")
NAMES = ["localhost", "LOCALHOST", "localhost.", "a.localhost", "inside.example", "xn--inside-6qa.example",
         "metadata.google.internal", "127.0.0.1.nip.example", "127-0-0-1.nip.example"]  # fmt: skip
HOSTS = [*LOOPBACK, *ELSEWHERE, *NAMES]
FORMS = [
    "http://{host}:{port}/",
    "HTTPS://{host}:{port}/",
    "http://vendor.example@{host}:{port}/",
    "http://{host}:{port}#@vendor.example/",
    "http://vendor.example\\@{host}:{port}/",
    "http://vendor.example%2f@{host}:{port}/",
    "http://{host}:{port}?http://vendor.example/",
    "http:\\\\{host}:{port}/",
    "http:/{host}:{port}/",
    "//{host}:{port}/",
    " http://{host}:{port}/",
    "http://{host}\t:{port}/",
    "http://vendor.example;{host}:{port}/",
]
SCHEMES = [
    "file:///etc/passwd", "ftp://127.0.0.1/", "gopher://127.0.0.1:{port}/_x", "unix:///tmp/x.sock", "http+unix://%2Ftmp%2Fx/",
    "dict://127.0.0.1:{port}/", "data:text/plain,x", "javascript:x", "jar:http://127.0.0.1!/", "httpx://127.0.0.1:{port}/", "//",
]  # fmt: skip


def resolve_obligingly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that reads every spelling, and knows every name of NAMES as loopback."""
    original = socket.getaddrinfo

    def answer(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        text = unicodedata.normalize(
            "NFKC", unquote(host.decode() if isinstance(host, bytes) else str(host))
        ).rstrip(".")
        if text.lower() in {name.rstrip(".").lower() for name in NAMES}:
            text = "127.0.0.1"
        with suppress(OSError, ValueError):
            text = socket.inet_ntoa(socket.inet_aton(text))
        return original(text, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", answer)


@pytest.fixture
def canaries(listen: Listen) -> Iterator[list[Listener]]:
    """Listeners on loopback, of both kinds where there are two; none may hear anything."""
    heard = [
        listen("127.0.0.1"),
        *([listen("::1")] if socket.has_ipv6 and has_loopback_6() else []),
    ]
    yield heard
    assert [canary.connections for canary in heard] == [0] * len(heard)


def urls(canaries: list[Listener]) -> list[str]:
    ports = [canary.port for canary in canaries]
    made = [
        form.format(host=host, port=port) for host in HOSTS for form in FORMS for port in ports[:1]
    ]
    return made + [scheme.format(port=port) for scheme in SCHEMES for port in ports]


def test_nothing_inside_is_reached_by_what_is_sent(
    rules: Rules, canaries: list[Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `send` does not refuse by itself is a name, and the worker refuses that."""
    resolve_obligingly(monkeypatch)
    rules(default=Rule(limits=[WIDE], connect_timeout=1, total_timeout=2))
    assert len(HOSTS) >= 64
    tried = urls(canaries)
    accepted = []
    for url in tried:
        try:
            call = CallQueue.objects.send({"method": "get", "params": {"url": url}})
        except CallQueueError:
            continue
        assert call is not None
        accepted.append(call)
    assert CallQueue.objects.count() == len(accepted), "what is refused is not written"
    assert {call.host.rstrip(".") for call in accepted} <= {
        name.rstrip(".").lower() for name in NAMES
    }
    while behaviour.run():
        pass
    for call in accepted:
        call.refresh_from_db()
        assert call.status == CallQueue.Status.FAILED, (call.call_data, call.error_message)
        assert set(call.attempts.values_list("sent_at", flat=True)) == {None}
