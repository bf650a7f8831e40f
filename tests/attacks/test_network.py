"""Into the network behind the workers: every spelling of an address, in every form of a URL, by `send`,
in a row that never saw it, and in a secret. No redirect is followed: tests/unit/execution/test_wire.py.

Canaries listen on loopback and must hear nothing. The resolver here is the most obliging there is:
it reads every spelling that any resolver reads, so that nothing is refused merely because this
machine's knows less.
"""

from __future__ import annotations

import socket
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import pytest

from callqueue import Rule, Secret, SlidingWindow
from callqueue.exceptions import CallQueueError
from callqueue.models import CallQueue
from tests.support import behaviour
from tests.support.peer import Listener

LOOPBACK = """
    127.0.0.1 127.1 127.0.1 2130706433 0x7f000001 0x7f.1 0177.0.0.1 017700000001 127.0.0.1. 0 0.0.0.0 127.255.255.254
    [::1] [::ffff:127.0.0.1] [::ffff:7f00:1] [0:0:0:0:0:0:0:1] [::] [::127.0.0.1] [64:ff9b::7f00:1] [2002:7f00:1::] [::1%25lo]
    ①②⑦.0.0.1 127。0。0。1 127%2e0.0.1
""".split()  # noqa: SIM905
ELSEWHERE = """
    10.0.0.1 10.1 172.16.0.1 172.31.255.255 192.168.1.1 192.168.257 100.64.0.1 100.127.255.254 169.254.1.1
    169.254.169.254 2852039166 0xa9fea9fe [fd00:ec2::254] 169.254.170.2 100.100.100.200 168.63.129.16
    224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255 198.18.0.1 192.0.2.1 192.0.0.1
    [fe80::1] [fc00::1] [ff02::1] [64:ff9b::a00:1] [64:ff9b:1::a00:1] [2002:a00:1::] [::ffff:10.0.0.1] [2001:db8::1] [2001::1]
    [fec0::1]
""".split()  # noqa: SIM905


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


def has_loopback_6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def sent(urls: list[str]) -> list[CallQueue]:
    """The calls of what `send` does not refuse by itself."""
    accepted = []
    for url in urls:
        with suppress(CallQueueError):
            accepted.append(CallQueue.objects.send({"method": "get", "params": {"url": url}}))
    return accepted


def test_nothing_inside_is_reached_by_what_is_sent_stored_or_secret(
    rules: Callable[..., None],
    listen: Callable[..., Listener],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What `send` does not refuse by itself is a name, and the worker refuses that. It is the one who
    must not be fooled: by rows of other code or an older release, and by URLs that are a secret.
    """
    resolve_obligingly(monkeypatch)
    canaries = [listen(host) for host in ("127.0.0.1", "::1")[: 1 + has_loopback_6()]]
    ports = [canary.port for canary in canaries]
    inside = [f"http://{host}:{port}/" for port in ports for host in LOOPBACK]
    secrets = {f"S{number}": url for number, url in enumerate(inside)}
    slow = Rule(limits=[SlidingWindow("100000/s")], connect_timeout=1, total_timeout=2)
    rules(default=slow, more={"SECRETS": secrets})
    assert len(HOSTS) >= 64
    calls = sent(
        [form.format(host=host, port=ports[0]) for host in HOSTS for form in FORMS]
        + [scheme.format(port=port) for scheme in SCHEMES for port in ports]
    )
    assert CallQueue.objects.count() == len(calls), "what is refused is not written"
    names = {name.rstrip(".").lower() for name in NAMES}
    assert {call.host.rstrip(".") for call in calls} <= names
    stored: list[Any] = [*inside, *map(Secret, secrets), *(f"http://{host}/" for host in ELSEWHERE)]
    for url in stored:
        call_data = {"method": "post", "params": {"url": url}}
        calls.append(CallQueue.objects.create(call_data=call_data, method="post", ready=True))
    while behaviour.run():
        pass
    for call in calls:
        call.refresh_from_db()
        assert call.status == CallQueue.Status.FAILED, (call.call_data, call.error_message)
        attempt = call.attempts.get()  # what is refused for good is not tried again
        assert attempt.sent_at is None
    assert [canary.connections for canary in canaries] == [0] * len(canaries)
