"""`permit`, `apermit` and `permitted`: the same ledger for calls that are not queued."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from inspect import isasyncgenfunction, isawaitable, isgeneratorfunction
from types import TracebackType
from typing import Any, TypeVar

from asgiref.sync import iscoroutinefunction, sync_to_async

from callqueue import clocks
from callqueue.exceptions import NotNow
from callqueue.permits.asking import Options, Wanted
from callqueue.permits.granted import AsyncPermit, Permit
from callqueue.permits.waiting import STANDS_STILL, Waiter
from callqueue.transitions import Job

F = TypeVar("F", bound=Callable[..., Any])
# What a thread that waits does; the testing kit moves its clock instead.
sleep = time.sleep
TRIES = 3  # permits, one after the other: a process may stand still until the lease of one is over


class permit:
    """`with callqueue.permit("stripe", wait=2.0) as permit:` a call that is made here, as soon as
    every limit of its rule admits it.

    `rule`: its name; without it `url` decides, as for `send`. `key`, `cost`: as for `send`.
    `priority`: likewise, but one above the rule's where none is given. `wait`: seconds for which it
    may wait for its turn (None: as long as it takes; 0: not at all), else NotNow. `lease`: seconds
    after which it is taken for lost, should its process die (None: the rule's total timeout and
    LEASE["GRACE"]). `label`: what people are shown.

    Raises InvalidCall or UnknownRule when it is made, and NotNow when the block is entered. May be
    entered any number of times, by threads and coroutines side by side.
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
        self._wanted = Options(rule, key, cost, priority, wait, lease, label).as_wanted(url)
        self._entered: list[tuple[Any, Any]] = []  # by whom, and the permit

    def __enter__(self) -> Permit:
        granted = begin(self._wanted)
        self._entered.append((_thread_and_task(), granted))
        return granted

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> Any:
        """End and return the permit that this thread and task entered last, else anybody's."""
        who = _thread_and_task()  # frameworks leave a block in another thread than they entered it
        own = [one for one in self._entered if one[0] == who] or self._entered
        if not own:
            raise RuntimeError("this permit is left more often than it was entered")
        ended = own[-1]
        self._entered.remove(ended)
        ended[1].end_with(ended[1].result_of(error))
        return ended[1]


class apermit(permit):
    """`async with callqueue.apermit("llm") as permit:` a permit for coroutines."""

    async def __aenter__(self) -> AsyncPermit:
        granted = await abegin(self._wanted)
        self._entered.append((_thread_and_task(), granted))
        return granted

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._end(error).wait_until_written()

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
    or coroutine, takes a permit. `url`, `key` and `cost` may be callables of its arguments. The
    label is its name where none is given.
    """
    if callable(rule):
        raise TypeError("write @callqueue.permitted(...), with the rule's name")

    def decorate(function: F) -> F:
        if isgeneratorfunction(function) or isasyncgenfunction(function):
            raise TypeError("permitted: a generator would go on after its permit; use permit in it")
        if not callable(function):
            raise TypeError("permitted decorates functions: write it below @classmethod")
        name = getattr(function, "__qualname__", "") if label is None else label
        options = Options(rule, key, cost, priority, wait, lease, name)

        def permit_for(kind: type[permit], args: Any, kwargs: Any) -> Any:
            def resolved(value: Any) -> Any:
                return value(*args, **kwargs) if callable(value) else value

            given = replace(options, key=resolved(key), cost=resolved(cost))
            return kind(url=resolved(url), **vars(given))

        if iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__):

            @wraps(function, updated=())
            async def within_apermit(*args: Any, **kwargs: Any) -> Any:
                async with permit_for(apermit, args, kwargs):
                    return await function(*args, **kwargs)

            return within_apermit  # type: ignore[return-value]

        @wraps(function, updated=())
        def within_permit(*args: Any, **kwargs: Any) -> Any:
            with permit_for(permit, args, kwargs):
                if isawaitable(found := function(*args, **kwargs)):
                    getattr(found, "close", bool)()
                    raise TypeError("permitted: it gives an awaitable; decorate an `async def`")
                return found

        return within_permit  # type: ignore[return-value]

    return decorate


def begin(asked: Wanted) -> Permit:
    """A permit, its slot open and its lease running; this thread waits. NotNow: none to be had."""
    for _ in range(TRIES):
        waiter = Waiter(asked)
        try:
            while not isinstance(found := waiter.step(), Job):
                sleep(found)
            while (left := waiter.seconds_until_slot()) > 0:
                sleep(left)
        except BaseException:
            waiter.withdraw()
            raise
        if _lease_runs(found):
            return Permit(waiter.using, found)
    raise NotNow(None, STANDS_STILL)


async def abegin(asked: Wanted) -> AsyncPermit:
    """As `begin`, while a coroutine waits."""
    for _ in range(TRIES):
        waiter, stepping = Waiter(asked), None
        try:
            found: Job | float = 0.0
            while not isinstance(found, Job):
                await _sleep(found)
                stepping = asyncio.ensure_future(sync_to_async(waiter.step)())
                found = await asyncio.shield(stepping)
            while (left := waiter.seconds_until_slot()) > 0:
                await _sleep(left)
        except BaseException:
            await asyncio.shield(_withdraw(waiter, stepping))
            raise
        if _lease_runs(found):
            return AsyncPermit(waiter.using, found)
    raise NotNow(None, STANDS_STILL)


async def _withdraw(waiter: Waiter, stepping: asyncio.Future[Any] | None) -> None:
    if stepping is not None:
        await asyncio.wait([stepping])
    await sync_to_async(waiter.withdraw)()


async def _sleep(seconds: float) -> None:
    if sleep is time.sleep:
        await asyncio.sleep(seconds)
    elif seconds:
        sleep(seconds)


def _lease_runs(job: Job) -> bool:
    return clocks.monotonic() < job.lease_ends_at  # a process may have stood still since


def _thread_and_task() -> Any:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident(), task and id(task)
