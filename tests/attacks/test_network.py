"""Into the network behind the workers: every spelling of an address, in every form of a URL, by
`send`, by a row, by a redirect.

A canary listens on loopback and must hear nothing. The resolver here is the most obliging there is:
it reads every spelling that any resolver reads, so that nothing is refused merely because this
machine's knows less.
"""

from __future__ import annotations

import socket
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address
from typing import Any
from urllib.parse import unquote

import pytest

from callqueue import Rule, SlidingWindow
from callqueue.exceptions import CallQueueError
from callqueue.models import CallQueue
from tests.db.security.test_what_goes_out import (
    ELSEWHERE,
    LOOPBACK,
    Listener,
    has_loopback_6,
    make,
    smuggled,
)
from tests.support import behaviour

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


def spellings(address: str) -> list[str]:
    """One IPv4 address in the ways that inet_aton, IDNA and IPv6 know."""
    number = int(IPv4Address(address))
    a, b, c, d = IPv4Address(address).packed
    return [
        address, f"{address}.", str(number), f"{number:#x}", f"0{number:o}", f"{a}.{number & 0xFFFFFF}", f"{a}.{b}.{c << 8 | d}",
        f"{a:#x}.{b:#x}.{c:#x}.{d:#x}", f"0{a:o}.0{b:o}.0{c:o}.0{d:o}", f"{a:#x}.{number & 0xFFFFFF}", f"00000{a:o}.{b}.{c}.{d}",
        address.replace(".", "。"), address.replace(".", "．"), address.replace(".", "%2e"),
        "".join(f"%{ord(letter):02x}" for letter in address),
        "".join(chr(0xFF10 + int(letter)) if letter.isdigit() else letter for letter in address),
        f"[::ffff:{address}]", f"[::ffff:{a:02x}{b:02x}:{c:02x}{d:02x}]", f"[::{address}]", f"[64:ff9b::{address}]",
        f"[2002:{a:02x}{b:02x}:{c:02x}{d:02x}::]", f"[::ffff:0:{address}]", f"[2a00::5efe:{address}]",
    ]  # fmt: skip


def resolve_obligingly(monkeypatch: pytest.MonkeyPatch, inside: str = "127.0.0.1") -> None:
    """A resolver that reads every spelling, and knows every name of NAMES as `inside`."""
    original = socket.getaddrinfo

    def answer(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        text = unicodedata.normalize(
            "NFKC", unquote(host.decode() if isinstance(host, bytes) else str(host))
        ).rstrip(".")
        if text.lower() in {name.rstrip(".").lower() for name in NAMES}:
            text = inside
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
    _made_and_refused(accepted)


@pytest.mark.slow
def test_nothing_inside_is_reached_by_a_row_that_never_saw_send(
    rules: Rules, canaries: list[Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other code wrote."""
    resolve_obligingly(monkeypatch)
    rules(default=Rule(limits=[WIDE], connect_timeout=1, total_timeout=2))
    _made_and_refused([smuggled(url, method="get") for url in urls(canaries)])


def _made_and_refused(calls: list[CallQueue]) -> None:
    while behaviour.run():
        pass
    for call in calls:
        call.refresh_from_db()
        assert call.status == CallQueue.Status.FAILED, (call.call_data, call.error_message)
        assert set(call.attempts.values_list("sent_at", flat=True)) == {None}


# --- redirects: from a server that may be called, to one that may not

LOCATIONS = [
    "http://{host}:{port}/",
    "HTTP://{host}:{port}/",
    "//{host}:{port}/",
    "///{host}:{port}/",
    "\\\\{host}:{port}\\",
    "/\\{host}:{port}/",
    "http:\\\\{host}:{port}/",
    "http:///{host}:{port}/",
    "http:{host}:{port}",
    "  http://{host}:{port}/  ",
    "http://{host}\t:{port}/",
    "http://{host}%00:{port}/",
    "http://127.0.0.1@{host}:{port}/",
    "http://127.0.0.1\\@{host}:{port}/",
    "http://127.0.0.1,{host}:{port}/",
    "http://{host}:{port}#@127.0.0.1/",
    "http://{host}:{port}\\.127.0.0.1/",
]


def locations(port: int) -> list[str]:
    made = [f"http://{host}:{port}/" for host in [*spellings("127.0.0.2"), *NAMES, "[::1]"]]
    made += [form.format(host="127.0.0.2", port=port) for form in LOCATIONS]
    return made + [scheme.format(port=port) for scheme in SCHEMES]


@pytest.fixture
def honest(rules: Rules, listen: Listen) -> Listener:
    """A server that may be called, on 127.0.0.1, and answers with a redirect; nothing else on
    loopback may be called.
    """
    rules(
        default=Rule(limits=[WIDE], connect_timeout=1, total_timeout=3),
        more={"ALLOWED_NETWORKS": ["127.0.0.1/32"]},
    )
    return listen("127.0.0.1")


def _elsewhere(location: str, status: int) -> bytes:
    return f"HTTP/1.1 {status} Elsewhere\r\nLocation: {location}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()


def redirected(
    honest: Listener, location: str, status: int = 302, method: str = "get"
) -> CallQueue:
    honest.answer = _elsewhere(location, status)
    call = CallQueue.objects.send(
        {"method": method, "params": {"url": f"http://127.0.0.1:{honest.port}/"}}
    )
    assert call is not None
    return make(call)


def test_no_location_leads_inside(
    honest: Listener, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor anywhere else: no redirect is followed."""
    resolve_obligingly(monkeypatch, "127.0.0.2")
    trap = listen("127.0.0.2", port=honest.port)
    for number, location in enumerate(locations(honest.port), start=1):
        call = redirected(honest, location)
        assert call.status == CallQueue.Status.FAILED, (location, call.error_message)
        assert (honest.connections, trap.connections) == (number, 0), location


@pytest.mark.slow
@pytest.mark.parametrize("status", [301, 303, 307, 308])
@pytest.mark.parametrize("method", ["get", "post"])
def test_no_location_leads_inside_with_any_status(
    honest: Listener, listen: Listen, monkeypatch: pytest.MonkeyPatch, status: int, method: str
) -> None:
    resolve_obligingly(monkeypatch, "127.0.0.2")
    trap = listen("127.0.0.2", port=honest.port)
    for location in locations(honest.port):
        assert redirected(honest, location, status, method).status == CallQueue.Status.FAILED, (
            location
        )
        assert trap.connections == 0, location
