"""The modules of Python that the product finds simulated under their names: time, threading, queue,
random, secrets; and what tasks wait in.
"""

from __future__ import annotations

import math
import queue
import random
import secrets
import threading
import time
import types
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tests.simulation.scheduler import MICRO, Task

if TYPE_CHECKING:
    from tests.simulation.doors import Doors

START = datetime(2026, 3, 2, 10, 0, tzinfo=UTC)  # what the database's clock shows at first
LEAST_WAIT = 2e-5  # seconds


def of(real: Any, doors: Doors) -> Any:
    """The simulated one of such a module."""
    made = {
        time: _time, threading: _threading, queue: _queue, random: _random, secrets: _secrets,
    }  # fmt: skip
    return made[real](doors)


def module(name: str, real: Any, **names: Any) -> Any:
    """A module that is the real one but for these names."""
    fake = types.ModuleType(name)
    fake.__dict__.update({key: value for key, value in vars(real).items() if key[:2] != "__"})
    fake.__dict__.update(names)
    return fake


def _time(doors: Doors) -> Any:
    def read(*_: Any) -> float:
        return doors.monotonic()

    def wall() -> float:
        return START.timestamp() + doors.scheduler.now / MICRO

    def sleep(seconds: float) -> None:
        doors.scheduler.sleep(seconds)

    def wall_ns() -> int:
        return round(START.timestamp()) * 10**9 + doors.scheduler.now * 1000

    names = dict.fromkeys(("monotonic", "clock_gettime", "perf_counter"), read)
    # No time goes by while a thread computes.
    return module(
        "time", time, sleep=sleep, time=wall, time_ns=wall_ns, thread_time=lambda: 0.0, **names
    )


def datetime_of(doors: Doors) -> Any:
    class SimulatedDatetime(datetime):
        """Shows the database's clock: where the product asks it, the host's is the database's."""

        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return START + timedelta(microseconds=doors.scheduler.now + doors.clock_set)

    class _Meta(type):
        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, datetime)

    return _Meta("datetime", (SimulatedDatetime,), {})


class Local:
    """threading.local, for each task."""

    def __init__(self, doors: Doors) -> None:
        object.__setattr__(self, "_doors", doors)
        object.__setattr__(self, "_outside", {})

    def _own(self) -> dict[str, Any]:
        doors = object.__getattribute__(self, "_doors")
        task = doors.scheduler.current if doors.scheduler else None
        if task is None:
            return object.__getattribute__(self, "_outside")
        return task.locals.setdefault(id(self), {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self._own()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._own()[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self._own()[name]
        except KeyError:
            raise AttributeError(name) from None


class Waiters:
    """Tasks that wait for something, each until a time of its own."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._tasks: list[Task] = []

    def wait_until(self, is_so: Callable[[], bool], seconds: float | None) -> bool:
        scheduler = self._doors.scheduler
        end = None if seconds is None else scheduler.now + math.ceil(seconds * MICRO)
        while not is_so():
            left = None if end is None else (end - scheduler.now) / MICRO
            if left is not None and left <= 0:
                return False
            task = scheduler.alive()
            self._tasks.append(task)
            try:
                scheduler.wait(left)
            finally:
                if task in self._tasks:
                    self._tasks.remove(task)
        return True

    def wake(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            self._doors.scheduler.wake(task)


def _threading(doors: Doors) -> Any:
    class Event:
        def __init__(self) -> None:
            self._is_set, self._waiters = False, Waiters(doors)

        def is_set(self) -> bool:
            return self._is_set

        def set(self) -> None:
            self._is_set = True
            self._waiters.wake()

        def clear(self) -> None:
            self._is_set = False

        def wait(self, timeout: float | None = None) -> bool:
            # However short, it takes a while: who looks again and again sees time go by.
            seconds = None if timeout is None else max(timeout, LEAST_WAIT)
            return self._waiters.wait_until(self.is_set, seconds)

    class Semaphore:
        def __init__(self, value: int = 1) -> None:
            self._left, self._waiters = value, Waiters(doors)

        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            seconds = (None if timeout in (None, -1) else timeout) if blocking else 0.0
            if self._left <= 0 and not self._waiters.wait_until(lambda: self._left > 0, seconds):
                return False
            self._left -= 1
            return True

        def release(self) -> None:
            self._left += 1
            self._waiters.wake()

        def locked(self) -> bool:
            return self._left <= 0

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(self, *_: Any) -> None:
            self.release()

    class Thread:
        def __init__(
            self,
            group: Any = None,
            target: Any = None,
            name: str | None = None,
            args: Any = (),
            kwargs: Any = None,
            *,
            daemon: Any = None,
        ) -> None:
            self.name, self.daemon = name or "thread", daemon
            self._work = lambda: target(*args, **(kwargs or {}))
            self._is_over = Event()

        def start(self) -> None:
            process = doors.scheduler.alive().process
            name = f"{process.name}.{self.name}{len(process.tasks)}"
            task = doors.scheduler.start(process, name, self._work)
            task.on_end.append(self._is_over.set)

        def join(self, timeout: float | None = None) -> None:
            self._is_over.wait(timeout)

        def is_alive(self) -> bool:
            return not self._is_over.is_set()

    return module(
        "threading",
        threading,
        Event=Event,
        Thread=Thread,
        Lock=Semaphore,
        Semaphore=Semaphore,
        BoundedSemaphore=Semaphore,
        local=lambda: Local(doors),
        get_ident=lambda: id(doors.scheduler.current),
    )


def _queue(doors: Doors) -> Any:
    class SimpleQueue:
        def __init__(self, maxsize: int = 0) -> None:
            self._items: deque[Any] = deque()
            self._waiters = Waiters(doors)

        def __class_getitem__(cls, item: Any) -> Any:
            return cls

        def put(self, item: Any, *_: Any, **__: Any) -> None:
            self._items.append(item)
            self._waiters.wake()

        put_nowait = put

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if not self._waiters.wait_until(lambda: bool(self._items), timeout if block else 0.0):
                raise queue.Empty
            return self._items.popleft()

        def get_nowait(self) -> Any:
            return self.get(block=False)

        def empty(self) -> bool:
            return not self._items

        def qsize(self) -> int:
            return len(self._items)

    return module("queue", queue, SimpleQueue=SimpleQueue, Queue=SimpleQueue)


def _random(doors: Doors) -> Any:
    def drawn(name: str) -> Any:
        return lambda *given: getattr(doors.scheduler.stream("product"), name)(*given)

    names = ("random", "uniform", "randint", "choice", "shuffle", "expovariate", "randrange")
    return module("random", random, **{name: drawn(name) for name in names})


def _secrets(doors: Doors) -> Any:
    def token_hex(size: int = 32) -> str:
        return f"{doors.scheduler.stream('secrets').getrandbits(8 * size):0{2 * size}x}"

    def randbits(size: int) -> int:
        return doors.scheduler.stream("bits").getrandbits(size)

    return module("secrets", secrets, token_hex=token_hex, randbits=randbits)
