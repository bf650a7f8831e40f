"""`permit`, `apermit` and `permitted`: the same ledger for calls that are not queued.

In: a rule, or the URL that is to be called. Out: a block of code that begins when every limit of
the rule admits one call more, and is charged to them until it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from inspect import iscoroutinefunction
from types import TracebackType
from typing import Any, TypeVar

from asgiref.sync import sync_to_async

from callqueue.permits import ending
from callqueue.permits.apart import apart
from callqueue.permits.asking import Wanted, wanted
from callqueue.permits.granted import AsyncPermit, Permit
from callqueue.permits.waiting import Waiter, until_slot
from callqueue.transitions import Job

F = TypeVar("F", bound=Callable[..., Any])
# What a thread that waits does; the testing kit moves its clock instead.
sleep = time.sleep


class permit:
    """`with callqueue.permit("stripe", wait=2.0) as permit:` a call that is made here, as soon as
    every limit of its rule admits it.

    `rule`: its name; without it `url` decides, as for `send`. `key`, `cost`, `priority`: as for
    `send`. `wait`: seconds for which it may wait for its turn (None: as long as it takes; 0: not at
    all), else NotNow. `lease`: seconds after which it is taken for lost, should its process die
    (None: the rule's total timeout and LEASE["GRACE"]). `label`: what people are shown.

    Raises InvalidCall or UnknownRule when it is made, and NotNow when the block is entered.
    """

    def __init__(
        self,
        rule: str | None = None,
        *,
        url: str | None = None,
        key: str | Mapping[str, str] = "",
        cost: int | Mapping[str, int] = 1,
        priority: int | None = None,
        wait: float | None = None,
        lease: float | None = None,
        label: str = "",
    ) -> None:
        self._wanted = wanted(
            rule,
            url=url,
            key=key,
            cost=cost,
            priority=priority,
            wait=wait,
            lease=lease,
            label=label,
        )
        self._permits: list[Any] = []

    def __enter__(self) -> Permit:
        granted = begin(self._wanted)
        self._permits.append(granted)
        return granted

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ended = self._permits.pop()
        ended.end_with(ended.ended(error))


class apermit(permit):
    """`async with callqueue.apermit("llm") as permit:` the same for coroutines."""

    async def __aenter__(self) -> AsyncPermit:
        granted = await abegin(self._wanted)
        self._permits.append(granted)
        return granted

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ended = self._permits.pop()
        ended.end_with(ended.ended(error))
        await ended.written()

    def __enter__(self) -> Permit:
        raise TypeError("apermit is for `async with`; use permit in a `with`")


def permitted(
    rule: str | None = None,
    *,
    url: Any = None,
    key: Any = "",
    cost: Any = 1,
    priority: int | None = None,
    wait: float | None = None,
    lease: float | None = None,
    label: str | None = None,
) -> Callable[[F], F]:
    """`@callqueue.permitted("stripe", key=lambda order: order.account)`: each call of the function,
    or coroutine, takes a permit.

    `url`, `key` and `cost` may be callables of the function's arguments. The label is the
    function's name where none is given.
    """

    def decorate(function: F) -> F:
        name = getattr(function, "__qualname__", "") if label is None else label

        def arguments(args: Any, kwargs: Any) -> dict[str, Any]:
            given = {"url": url, "key": key, "cost": cost}
            found = {
                name: value(*args, **kwargs) if callable(value) else value
                for name, value in given.items()
            }
            return {**found, "priority": priority, "wait": wait, "lease": lease, "label": name}

        if iscoroutinefunction(function):

            @wraps(function)
            async def within_apermit(*args: Any, **kwargs: Any) -> Any:
                async with apermit(rule, **arguments(args, kwargs)):
                    return await function(*args, **kwargs)

            return within_apermit  # type: ignore[return-value]

        @wraps(function)
        def within_permit(*args: Any, **kwargs: Any) -> Any:
            with permit(rule, **arguments(args, kwargs)):
                return function(*args, **kwargs)

        return within_permit  # type: ignore[return-value]

    return decorate


def begin(asked: Wanted) -> Permit:
    """A permit whose slot is open; this thread waits for it."""
    waiter = Waiter(asked)
    try:
        while not isinstance(found := waiter.step(), Job):
            sleep(found)
    except BaseException:
        waiter.withdraw()
        raise
    try:
        while (left := until_slot(found)) > 0:
            sleep(left)
    except BaseException:
        apart(waiter.using, lambda: ending.give_back(waiter.using, found))
        raise
    return Permit(waiter.using, found)


async def abegin(asked: Wanted) -> AsyncPermit:
    """A permit whose slot is open; this coroutine waits for it."""
    waiter = Waiter(asked)
    step: Callable[[], Awaitable[Job | float]] = sync_to_async(waiter.step)
    found: Job | float = 0.0
    while not isinstance(found, Job):
        stepping = asyncio.ensure_future(step())
        try:
            found = await asyncio.shield(stepping)
            if not isinstance(found, Job):
                await _asleep(found)
        except BaseException as error:
            if not stepping.done():
                await asyncio.wait([stepping])
            if stepping.done() and not stepping.cancelled() and stepping.exception() is None:
                found = stepping.result()
            await asyncio.shield(sync_to_async(_leave)(waiter, found))
            raise error
    job = found
    try:
        while (left := until_slot(job)) > 0:
            await _asleep(left)
    except BaseException:
        await asyncio.shield(sync_to_async(_leave)(waiter, job))
        raise
    return AsyncPermit(waiter.using, job)


async def _asleep(seconds: float) -> None:
    if sleep is time.sleep:
        await asyncio.sleep(seconds)
    else:
        sleep(seconds)


def _leave(waiter: Waiter, found: Job | float) -> None:
    """Nobody wants it any more."""
    if isinstance(found, Job):
        apart(waiter.using, lambda: ending.give_back(waiter.using, found))
    else:
        waiter.withdraw()
