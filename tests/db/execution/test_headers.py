"""What a call or a client names itself arrives as it was given, once, however it is spelt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from asgiref.sync import async_to_sync
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import callqueue
from callqueue import Rule
from callqueue.models import CallQueue
from tests.support import behaviour
from tests.support.peer import Peer, answer_bytes, answering

Rules = Callable[..., None]
NEARBY = {"ALLOWED_NETWORKS": ["127.0.0.0/8"]}
SPELLINGS = ["Idempotency-Key", "idempotency-key", "IDEMPOTENCY-KEY"]
BODIES: list[dict[str, Any]] = [{"json": {"a": 1}}, {"data": {"a": "1"}}, {"data": "text"}, {}]
# What somebody here sets by itself: the rule, requests, urllib3, http.client, a body, `auth`.
SET_BY_OURSELVES = ["Idempotency-Key", "User-Agent", "Accept", "Accept-Encoding", "Content-Type",
                    "Cookie", "Authorization"]  # fmt: skip


@pytest.fixture
def server() -> Iterator[Peer]:
    with Peer(answering(answer_bytes(b""))) as server:
        yield server


def taken(server: Peer) -> list[tuple[str, str]]:
    """The header lines of the one request that came: names in lower case, and values."""
    [request] = server.seen
    server.seen.clear()
    head = request.raw.partition(b"\r\n\r\n")[0].decode("latin-1")
    pairs = (line.split(": ", 1) for line in head.split("\r\n")[1:])
    return [(name.lower(), value) for name, value in pairs]


@hypothesis_settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(drawn=st.data())
def test_no_header_goes_twice_and_the_calls_own_wins(
    rules: Rules, server: Peer, drawn: st.DataObject
) -> None:
    """Whoever sets which header by itself, and however it is spelt; and none that is taken away."""
    names = drawn.draw(st.lists(st.sampled_from(SET_BY_OURSELVES), unique=True))
    spelt: dict[str, str | None] = {
        "".join(drawn.draw(st.sampled_from([c.lower(), c.upper()])) for c in name): f"own-{number}"
        for number, name in enumerate(names)
    }
    if "Idempotency-Key" not in names and drawn.draw(st.booleans()):
        spelt[drawn.draw(st.sampled_from(SPELLINGS))] = None
    params = {"url": server.url("/orders"), "headers": spelt, **drawn.draw(st.sampled_from(BODIES))}
    auth = drawn.draw(st.sampled_from([{}, {"auth": ["user", "word"]}]))
    params |= auth | drawn.draw(st.sampled_from([{}, {"cookies": {"a": "b"}}]))
    rules(more=NEARBY)
    call = CallQueue.objects.send({"method": "post", "params": params})
    assert behaviour.run() == 1
    lines = taken(server)
    arrived = dict(lines)
    assert len(arrived) == len(lines), "a name twice"
    for name, value in spelt.items():
        # as in requests: `auth` is what it says
        is_auth = auth and name.lower() == "authorization"
        assert arrived.get(name.lower()) == ("Basic dXNlcjp3b3Jk" if is_auth else value)
    if not {"idempotency-key"} & {name.lower() for name in spelt}:
        assert arrived["idempotency-key"] == str(call.idempotency_key)


def by_session(url: str, headers: dict[str, str]) -> None:
    with requests.Session() as session:
        session.mount("http://", callqueue.PermitAdapter())
        session.post(url, json={}, headers=headers, timeout=30)


def by_httpx(url: str, headers: dict[str, str]) -> None:
    httpx = pytest.importorskip("httpx")
    with httpx.Client(transport=callqueue.PermitTransport()) as client:
        client.post(url, json={}, headers=headers)


def by_httpx_async(url: str, headers: dict[str, str]) -> None:
    httpx = pytest.importorskip("httpx")

    async def post() -> None:
        async with httpx.AsyncClient(transport=callqueue.AsyncPermitTransport()) as client:
            await client.post(url, json={}, headers=headers)

    async_to_sync(post)()


@pytest.mark.parametrize("own", SPELLINGS)
@pytest.mark.parametrize("post", [by_session, by_httpx, by_httpx_async])
def test_the_idempotency_key_of_a_client_is_the_one_that_arrives(
    rules: Rules, server: Peer, post: Any, own: str
) -> None:
    rules(default=Rule(hosts=["127.0.0.1"], idempotency_header="Idempotency-Key"), more=NEARBY)
    post(server.url("/orders"), {own: "order-7"})
    assert [value for name, value in taken(server) if name == "idempotency-key"] == ["order-7"]
