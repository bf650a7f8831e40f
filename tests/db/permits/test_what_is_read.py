"""What a transport of httpx reads of an answer for its verdict: no more than a worker would, and the
client gets all of it.
"""

from __future__ import annotations

import gzip
import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync

import callqueue
from callqueue import Concurrency, Rule, SlidingWindow
from callqueue.models import CallAttempt
from tests.support.stub import serving

Rules = Callable[..., None]

MOST = 5000
ENCODINGS = {"plain": lambda body: body, "gzip": gzip.compress}


def asked(httpx: Any, url: str, by: str, read: str) -> bytes:
    """The whole body as the client gets it."""
    if by == "async":

        async def get() -> bytes:
            client = httpx.AsyncClient(transport=callqueue.AsyncPermitTransport())
            async with client, client.stream("GET", url) as response:
                if read == "by parts":
                    return b"".join([part async for part in response.aiter_bytes()])
                return bytes(await response.aread())

        return async_to_sync(get)()
    client = httpx.Client(transport=callqueue.PermitTransport())
    with client, client.stream("GET", url) as response:
        if read == "by parts":
            return b"".join(response.iter_bytes())
        return bytes(response.read())


@pytest.mark.parametrize("size", [0, 10, MOST - 1, MOST, MOST + 1, 3 * MOST, 400_000])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("limit", [SlidingWindow("99/h"), Concurrency(1)])
@pytest.mark.parametrize(("by", "read"), [("sync", "at once"), ("async", "by parts")])
def test_a_verdict_reads_no_more_than_a_worker_would_and_the_client_gets_all(
    httpx: Any, rules: Rules, size: int, encoding: str, limit: Any, by: str, read: str
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
        assert asked(httpx, stub.url, by, read) == body
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
        transport = callqueue.PermitTransport()
        tracemalloc.start()
        with httpx.Client(transport=transport) as client:
            with client.stream("GET", stub.url) as response:
                assert b"".join(response.iter_raw()) == bomb
            most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert seen == [100_000] and most < 8_000_000


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
    client = httpx.Client(transport=callqueue.PermitTransport(transport=inner))
    with client, client.stream("GET", "http://h.example/") as response:
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
