"""The kit in async tests: in a loop of its own, and in Django's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from callqueue import Rule, apermit, database
from callqueue.models import CallQueue
from callqueue.testing import FakeTransport, Sent, arun_callqueue

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
