"""Clients of `requests` and `httpx` under permits: each request takes one, and is judged."""

from __future__ import annotations

import gzip
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import requests
from asgiref.sync import async_to_sync, sync_to_async

import callqueue
from callqueue import Breaker, Concurrency, HoldUntil, NotNow, Rule, SlidingWindow, states
from callqueue.exceptions import InvalidCall
from callqueue.models import CallAttempt, CallQueue, Hold
from callqueue.testing import travel
from tests.support.stub import Stub, serving

Rules = Callable[..., None]


def answer(path: str, times: int) -> tuple[int, dict[str, str], bytes]:
    """The status that the path names; /redirect leads to /200, /flaky fails once."""
    status, headers = 200, {}
    if path == "/redirect":
        status, headers = 302, {"Location": "/200"}
    elif path == "/flaky":
        status = 503 if times == 1 else 200
    elif path == "/429":
        status, headers = 429, {"Retry-After": "30"}
    elif path[1:].isdigit():
        status = int(path[1:])
    return status, headers, b'{"usage": 7}'


@pytest.fixture
def provider() -> Iterator[Stub]:
    with serving(answer) as stub:
        yield stub


@pytest.fixture
def stub(provider: Stub) -> str:
    """Its address."""
    return provider.url


@pytest.fixture(params=["requests", "httpx2", "httpx2 async", "httpx", "httpx async"])
def get(request: pytest.FixtureRequest) -> Callable[..., int]:
    """Each client: the status of a path, which is asked for under these options."""
    name, _, is_async = request.param.partition(" ")
    library = pytest.importorskip(name)

    def by_requests(stub: str, path: str, **options: Any) -> int:
        with requests.Session() as session:
            session.mount("http://", callqueue.PermitAdapter(**options))
            return session.get(stub + path, timeout=30).status_code

    def by_httpx(stub: str, path: str, **options: Any) -> int:
        transport = callqueue.PermitTransport(**options)
        with library.Client(transport=transport, follow_redirects=True) as client:
            return int(client.get(stub + path).status_code)

    async def by_httpx_async(stub: str, path: str, **options: Any) -> int:
        transport = callqueue.AsyncPermitTransport(**options)
        async with library.AsyncClient(transport=transport, follow_redirects=True) as client:
            return int((await client.get(stub + path)).status_code)

    if name == "requests":
        return by_requests
    return async_to_sync(by_httpx_async) if is_async else by_httpx


@contextmanager
def streamed(httpx: Any, url: str, **options: Any) -> Iterator[Any]:
    client = httpx.Client(transport=callqueue.PermitTransport(**options))
    with client, client.stream("GET", url) as response:
        yield response


@asynccontextmanager
async def streamed_beside(httpx: Any, url: str) -> AsyncIterator[Any]:
    client = httpx.AsyncClient(transport=callqueue.AsyncPermitTransport())
    async with client, client.stream("GET", url) as response:
        yield response


def outcomes() -> list[tuple[str, int | None]]:
    rows = CallAttempt.objects.order_by("pk")
    return list(rows.values_list("outcome", "response_status"))


def test_each_request_is_an_attempt_with_its_status(rules: Rules, provider: Stub, get: Any) -> None:
    """One that follows a redirect, and one that fails, too; a host without a rule passes."""
    rules(r=Rule(hosts=["127.0.0.1"], limits=[SlidingWindow("9/h")]))
    assert get(provider.url, "/200", label="reports") == 200
    assert get(provider.url, "/404") == 404
    assert get(provider.url, "/500") == 500
    assert get(provider.url, "/redirect") == 200
    assert len(provider.seen) == 5
    with pytest.raises(Exception, match="Connection refused|connection attempts failed"):
        get("http://127.0.0.1:1", "/200")
    of_redirect = [("gave up", 302), ("succeeded", 200)]
    ends = [("succeeded", 200), ("gave up", 404), ("failed", 500), *of_redirect, ("failed", None)]
    assert outcomes() == ends
    assert "Connect" in CallAttempt.objects.latest("pk").error_message
    assert CallAttempt.objects.filter(call__path="reports").count() == 1
    assert not CallAttempt.objects.open().exists()
    assert not CallQueue.objects.exclude(status__in=states.FINAL).exists(), "one is never retried"
    rules(r=Rule(hosts=["api.example.com"]))
    assert get(provider.url, "/200") == 200 and len(outcomes()) == 6
    assert get(provider.url, "/200", rule="r") == 200 and len(outcomes()) == 7


def test_retries_of_the_adapter_would_take_no_permit_and_are_refused() -> None:
    with pytest.raises(InvalidCall, match="max_retries: would send a request again"):
        callqueue.PermitAdapter(max_retries=2)


def test_a_refusal_holds_the_rule(rules: Rules, provider: Stub, get: Any) -> None:
    rules(r=Rule(hosts=["127.0.0.1"]))
    assert get(provider.url, "/429") == 429
    assert outcomes() == [("throttled", 429)] and Hold.objects.get().source == "provider"
    with pytest.raises(NotNow, match="held"):
        get(provider.url, "/200", wait=0)
    assert provider.seen == ["/429"]


def test_the_rule_classifies_and_settles(rules: Rules, stub: str, get: Any) -> None:
    def classify(response: requests.Response) -> Any:
        return HoldUntil(60, "by its body") if response.json()["usage"] == 7 else None

    rules(
        r=Rule(
            hosts=["127.0.0.1"],
            limits=[SlidingWindow("100/h", unit="tokens")],
            classify=classify,
            settle=lambda response: {"tokens": response.json()["usage"]},
        )
    )
    assert get(stub, "/200", cost={"tokens": 90}) == 200
    assert outcomes() == [("throttled", 200)]
    assert CallAttempt.objects.get().cost["tokens"] == 7
    assert Hold.objects.get().reason == "by its body"


def test_the_breaker_trips_as_it_does_for_workers(rules: Rules, stub: str, get: Any) -> None:
    rules(r=Rule(hosts=["127.0.0.1"], breaker=Breaker(failures=2)))
    get(stub, "/500")
    get(stub, "/500")
    assert Hold.objects.get().source == "breaker"
    with pytest.raises(NotNow):
        get(stub, "/200", wait=0)
    with travel(seconds=31):
        assert get(stub, "/200", wait=0) == 200
        assert get(stub, "/200", wait=0) == 200


def test_the_rule_sees_what_the_client_has_read_that_leaves_early(
    httpx: Any, rules: Rules, stub: str
) -> None:
    def classify(response: requests.Response) -> Any:
        return HoldUntil(60, "read") if b"usage" in response.content else None

    rules(r=Rule(hosts=["127.0.0.1"], classify=classify))

    async def read_some() -> None:
        async with streamed_beside(httpx, stub + "/200") as response:
            async for _ in response.aiter_raw():
                break

    async_to_sync(read_some)()
    assert Hold.objects.get().reason == "read"


def test_the_client_gets_the_answer_as_it_is(httpx: Any, rules: Rules, stub: str) -> None:
    rules(r=Rule(hosts=["127.0.0.1"], settle=lambda response: None))
    with httpx.Client(transport=callqueue.PermitTransport()) as client:
        answer = client.get(stub + "/404")
        assert answer.elapsed.total_seconds() >= 0 and answer.content == b'{"usage": 7}'
        with client.stream("GET", stub + "/404") as response:
            assert b"".join(response.iter_raw()) == b'{"usage": 7}'
            assert response.http_version == "HTTP/1.1"


@pytest.mark.parametrize("leave", ["read", "close", "with"])
@pytest.mark.parametrize("by", ["requests", "httpx", "httpx async"])
def test_a_stream_is_in_flight_until_it_is_read_or_closed(
    httpx: Any, rules: Rules, stub: str, by: str, leave: str
) -> None:
    rules(r=Rule(hosts=["127.0.0.1"], limits=[Concurrency(1)]))

    def is_open() -> bool:
        row = CallAttempt.objects.get()
        return row.finished_at is None and row.sent_at is not None

    def by_requests() -> bool:
        with requests.Session() as session:
            session.mount("http://", callqueue.PermitAdapter())
            response = session.get(stub + "/200", stream=True)
            was_open = is_open()
            {"read": lambda: response.content}.get(leave, response.close)()
        return was_open

    def by_httpx() -> bool:
        with streamed(httpx, stub + "/200") as response:
            was_open = is_open()
            {"read": response.read, "close": response.close}.get(leave, bool)()
        return was_open

    async def by_httpx_async() -> bool:
        async with streamed_beside(httpx, stub + "/200") as response:
            was_open = await sync_to_async(is_open)()
            if leave != "with":
                await {"read": response.aread, "close": response.aclose}[leave]()
        return was_open

    ways = {"requests": by_requests, "httpx": by_httpx}
    assert ways.get(by, async_to_sync(by_httpx_async))()
    row = CallAttempt.objects.get()
    assert row.outcome == "succeeded" and row.response_status == 200


@pytest.mark.parametrize("by", ["requests", "httpx"])
@pytest.mark.parametrize("limit", [SlidingWindow("100/h", unit="tokens"), Concurrency(1)])
def test_what_nobody_has_read_frees_no_charge(
    rules: Rules, httpx: Any, stub: str, by: str, limit: Any
) -> None:
    """A `settle` that counts in the body; one that goes by headers is asked all the same."""
    told: list[int] = []

    def cost(response: requests.Response) -> dict[str, int]:
        told.append(int(response.headers["Content-Length"]))
        return {"tokens": len(response.content)}

    rules(r=Rule(hosts=["127.0.0.1"], limits=[limit], settle=cost))
    if by == "requests":
        with requests.Session() as session:
            session.mount("http://", callqueue.PermitAdapter(cost={"tokens": 90}))
            assert len(session.get(stub + "/200", stream=True).content) == 12
    else:
        with streamed(httpx, stub + "/200", cost={"tokens": 90}):
            pass
    row = CallAttempt.objects.get()
    assert (row.outcome, row.cost["tokens"], told) == ("succeeded", 90, [12])


MOST = 5000
ENCODINGS = {"plain": lambda body: body, "gzip": gzip.compress}


def asked(httpx: Any, url: str, by: str) -> bytes:
    """The whole body as the client gets it."""
    if by == "async, by parts":

        async def get() -> bytes:
            async with streamed_beside(httpx, url) as response:
                return b"".join([part async for part in response.aiter_bytes()])

        return async_to_sync(get)()
    with streamed(httpx, url) as response:
        return bytes(response.read())


@pytest.mark.parametrize("size", [0, MOST, MOST + 1, 400_000])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("limit", [SlidingWindow("99/h"), Concurrency(1)])
@pytest.mark.parametrize("by", ["sync, at once", "async, by parts"])
def test_a_verdict_reads_no_more_than_a_worker_would_and_the_client_gets_all(
    httpx: Any, rules: Rules, size: int, encoding: str, limit: Any, by: str
) -> None:
    seen: list[bytes] = []
    body = random.Random(size).randbytes(size)
    sent = ENCODINGS[encoding](body)
    headers = {} if encoding == "plain" else {"Content-Encoding": encoding}
    rules(
        r=Rule(
            hosts=["127.0.0.1"], limits=[limit], settle=lambda answer: seen.append(answer.content)
        ),
        more={"MAX_RESPONSE_BYTES": MOST},
    )
    with serving(lambda path, times: (200, headers, sent)) as stub:
        assert asked(httpx, stub.url, by) == body
    assert seen == [body[: len(seen[0])]] and len(seen[0]) <= MOST
    row = CallAttempt.objects.get()
    assert (row.outcome, row.response_status) == ("succeeded", 200) and row.finished_at is not None
    if size <= MOST:
        assert len(seen[0]) == size and row.error_message == ""
    else:
        assert f"cut at {MOST} bytes" in row.error_message


def test_a_small_body_that_unfolds_without_end_is_not_unfolded_for_a_verdict(
    httpx: Any, rules: Rules
) -> None:
    seen: list[int] = []
    bomb = gzip.compress(bytes(40_000_000))
    rules(
        r=Rule(hosts=["127.0.0.1"], settle=lambda answer: seen.append(len(answer.content))),
        more={"MAX_RESPONSE_BYTES": 100_000},
    )
    with serving(lambda path, times: (200, {"Content-Encoding": "gzip"}, bomb)) as stub:
        tracemalloc.start()
        with streamed(httpx, stub.url) as response:
            assert b"".join(response.iter_raw()) == bomb
            response.close()
            most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert seen == [100_000] and most < 8_000_000


def test_a_body_that_is_not_folded_as_it_says_is_judged_as_it_came(
    httpx: Any, rules: Rules
) -> None:
    seen: list[bytes] = []
    rules(r=Rule(hosts=["127.0.0.1"], settle=lambda answer: seen.append(answer.content)))
    answer = 200, {"Content-Encoding": "gzip"}, b"as it came"
    with serving(lambda path, times: answer) as stub, streamed(httpx, stub.url) as response:
        assert b"".join(response.iter_raw()) == b"as it came"
    assert seen == [b"as it came"]


def test_nothing_is_read_before_the_client_reads_it(httpx: Any, rules: Rules) -> None:
    """What was read by the time it leaves is what the rule settles by."""
    seen: list[bytes] = []
    asked_for: list[int] = []

    class Endless(httpx.SyncByteStream):
        is_closed = False

        def __iter__(self) -> Iterator[bytes]:
            while True:
                asked_for.append(1)
                yield b"x" * 1000

        def close(self) -> None:
            self.is_closed = True

    endless = Endless()
    rules(
        r=Rule(hosts=["h.example"], settle=lambda answer: seen.append(answer.content)),
        more={"MAX_RESPONSE_BYTES": MOST},
    )
    inner = httpx.MockTransport(lambda request: httpx.Response(200, stream=endless))
    with streamed(httpx, "http://h.example/", transport=inner) as response:
        assert not asked_for
        coming = response.iter_raw()
        assert next(coming) == next(coming) == b"x" * 1000
    assert endless.is_closed and len(asked_for) == 2
    assert seen == [b"x" * 2000]
    assert "cut at" in CallAttempt.objects.get().error_message


def test_an_answer_that_never_came_by_a_wire_is_judged_at_once(httpx: Any, rules: Rules) -> None:
    rules(r=Rule(hosts=["h.example"], settle=lambda answer: answer.json()["usage"]))
    inner = httpx.MockTransport(lambda request: httpx.Response(200, json={"usage": 3}))
    with httpx.Client(transport=callqueue.PermitTransport(transport=inner)) as client:
        assert client.get("http://h.example/").json() == {"usage": 3}
    row = CallAttempt.objects.get()
    assert (row.outcome, row.calls, row.finished_at is not None) == ("succeeded", 3, True)
