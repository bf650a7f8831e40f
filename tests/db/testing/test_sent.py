"""What was sent, and assertions that say what was sent instead, in async tests too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from callqueue import Rule, apermit, database
from callqueue.models import CallQueue
from callqueue.testing import FakeTransport, Sent, arun_callqueue, assert_call_sent
from tests.db.testing.calls import URL, send

Rules = Callable[..., None]


def test_the_fixture_lists_what_the_test_sent(rules: Rules, callqueue_sent: Sent) -> None:
    rules(default=Rule())
    callqueue_sent.assert_nothing_sent()
    first, last = send("/a"), send("/b", json={"n": 1}, key="k")
    assert list(callqueue_sent) == [first, last]
    assert callqueue_sent.last == callqueue_sent[-1] == last
    assert callqueue_sent.assert_call_sent(url=f"{URL}/b", json={"n": 1}, key="k", count=1) == last
    assert callqueue_sent.assert_call_sent(method="POST", status="new", count=2) == last
    assert callqueue_sent.assert_call_sent(url=lambda url: url.endswith("/a")) == first
    assert callqueue_sent[0] == first
    assert len(callqueue_sent) == 2


def test_assertions_say_what_was_sent_instead(rules: Rules) -> None:
    rules(default=Rule(), other=Rule())
    send("/a")
    assert assert_call_sent(url=f"{URL}/*", method="POST", rule="default") is not None
    assert_call_sent(url="*", rule="other", count=0)
    with pytest.raises(
        AssertionError,
        match=r"not sent: rule='other'; sent:\n  post https://api.example.com/a .*rule='default'",
    ):
        assert_call_sent(rule="other")
    with pytest.raises(AssertionError, match="not sent 2 times, but 1 times"):
        assert_call_sent(count=2)


GET = {"method": "get", "params": {"url": "https://api.example.com/"}}
LOOPS = {
    "asyncio.run": lambda coroutine: asyncio.run(_of(coroutine)),
    "Django's": lambda coroutine: async_to_sync(_of)(coroutine),
}


async def _of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    finally:
        await sync_to_async(database.close_all)()  # the connection of the ORM's own thread


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.usefixtures("transactional_db")
def test_an_async_test_sends_runs_and_looks(
    rules: Callable[..., None],
    callqueue_sent: Sent,
    callqueue_transport: FakeTransport,
    loop: str,
) -> None:
    rules(default=Rule())
    callqueue_transport.default = 200

    async def test() -> None:
        assert_sent = sync_to_async(callqueue_sent.assert_call_sent)
        await assert_sent(count=0)
        await CallQueue.objects.asend(GET, key="a")
        await assert_sent(method="get", key="a", count=1)
        with pytest.raises(AssertionError, match="not sent: key='b'"):
            await assert_sent(key="b")
        assert await arun_callqueue(until_idle=True) == 1
        call = await assert_sent(status="done")
        assert call.status == CallQueue.Status.DONE
        async with apermit("default", label="x"):
            pass
        await assert_sent(method="permit", label="x", status="done")

    LOOPS[loop](test())
