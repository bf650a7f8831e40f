"""The doors of the product, each led to the scheduler: clocks, sleeps, locks, threads, randomness,
the database, the broker. Nothing else of it is replaced.

Modules name what they use (`time`, `threading`, `queue`, ...), and find the simulated one under that
name. What a module keeps for its process is kept for each simulated process.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import os
import queue
import random
import secrets
import sys
import threading
import time
import types
import uuid
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.simulation.scheduler import MICRO, Process, Scheduler, Task

START = datetime(2026, 3, 2, 10, 0, tzinfo=UTC)  # what the database's clock shows at first
LEAST_WAIT = 2e-5  # seconds


class Doors:
    """Led to the scheduler of the run that goes on."""

    def __init__(self) -> None:
        self.scheduler: Scheduler = None  # type: ignore[assignment]
        self.clock_set = 0  # microseconds by which the database's clock was set
        self.modules = [
            module
            for name, module in sorted(sys.modules.items())
            if name.partition(".")[0] == "callqueue" and module is not None
        ]
        self._kept: list[tuple[Any, str, Any]] = []
        self._entered: Process | None = None

    # --- What the simulated modules are made of

    def monotonic(self) -> float:
        """What the current process's own clock shows."""
        task = self.scheduler.current
        return self.scheduler.now / MICRO + (task.process.ahead if task else 0.0)

    def shown(self) -> int:
        """What the database's clock shows: microseconds since the epoch."""
        return START_US + self.scheduler.now + self.clock_set

    def install(self) -> None:
        """Put the doors in. For the life of this Python process."""
        fakes = {time: _time(self), threading: _threading(self), queue: _queue(self)}
        fakes |= {random: _random(self), secrets: _secrets(self)}
        for module in self.modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, types.ModuleType) and value in fakes:
                    setattr(module, name, fakes[value])
                elif isinstance(value, threading.local):
                    setattr(module, name, Local(self))
                elif value is datetime:
                    setattr(module, name, _datetime(self))
                elif value is time.sleep:
                    setattr(module, name, fakes[time].sleep)
            self._kept += [(module, name, vars(module)[name]) for name in _kept_names(module)]
        uuid.uuid4 = lambda: uuid.UUID(
            int=self.scheduler.stream("uuid").getrandbits(128), version=4
        )
        os.getpid = self._getpid(os.getpid)  # forks are told by it
        self._fake_django()
        self._fake_settings()

    def _getpid(self, real: Callable[[], int]) -> Callable[[], int]:
        def getpid() -> int:
            task = self.scheduler.current if self.scheduler else None
            return 1000 + self.scheduler.processes.index(task.process) if task else real()

        return getpid

    def _fake_django(self) -> None:
        from django.db import connections
        from django.utils import timezone

        connections._connections = Local(self)
        timezone.now = lambda: (
            START + timedelta(microseconds=self.scheduler.now if self.scheduler else 0)
        )

    def _fake_settings(self) -> None:
        from callqueue import conf

        real = conf.current

        def current() -> Any:
            task = self.scheduler.current if self.scheduler else None
            return real() if task is None else task.process.config

        current.cache_clear = real.cache_clear  # type: ignore[attr-defined]
        for module in self.modules:
            for name, value in list(vars(module).items()):
                if value is real:
                    setattr(module, name, current)

    # --- What a process keeps

    def enter(self, process: Process) -> None:
        """Give modules what this process keeps in them."""
        left = self._entered
        if left is not None:
            left.memory = {i: vars(module)[name] for i, (module, name, _) in enumerate(self._kept)}
        self._entered = process
        for i, (module, name, fresh) in enumerate(self._kept):
            value = process.memory[i] if process.memory else copy.copy(fresh)
            setattr(module, name, value)

    def begin(self, scheduler: Scheduler) -> None:
        """A run begins."""
        self.scheduler, self.clock_set, self._entered = scheduler, 0, None
        scheduler.enter_process = self.enter


START_US = round(START.timestamp()) * MICRO


def _kept_names(module: types.ModuleType) -> list[str]:
    """The names of what a module keeps between calls: containers, and whatever it assigns by
    `global`.
    """
    kinds = (dict, list, set, deque)
    names = {
        name
        for name, value in vars(module).items()
        if isinstance(value, kinds) and name == name.lower() and not name.startswith("__")
    }
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):
        return []
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names.update(node.names)
    return sorted(names & assigned & set(vars(module)) - {"_registered", "_lookups"})


# --- The simulated modules


def _module(name: str, real: Any, **names: Any) -> Any:
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

    names = dict.fromkeys(("monotonic", "clock_gettime", "perf_counter"), read)
    return _module("time", time, sleep=sleep, time=wall, **names)


def _datetime(doors: Doors) -> Any:
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

    return _module(
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

    return _module("queue", queue, SimpleQueue=SimpleQueue, Queue=SimpleQueue)


def _random(doors: Doors) -> Any:
    def drawn(name: str) -> Any:
        return lambda *given: getattr(doors.scheduler.stream("product"), name)(*given)

    names = ("random", "uniform", "randint", "choice", "shuffle", "expovariate", "randrange")
    return _module("random", random, **{name: drawn(name) for name in names})


def _secrets(doors: Doors) -> Any:
    def token_hex(size: int = 32) -> str:
        return f"{doors.scheduler.stream('secrets').getrandbits(8 * size):0{2 * size}x}"

    return _module("secrets", secrets, token_hex=token_hex)


# --- The database


class Broken(Exception):
    """What stands for the driver's error; `pgcode` as psycopg2 has it."""

    def __init__(self, text: str, pgcode: str | None = None) -> None:
        super().__init__(text)
        self.pgcode = pgcode


class OnDatabase:
    """What a task does on the database, one step after the other: between two, anything may happen
    to it. `before` and `after` are told of each step, with the connection it is made on.
    """

    def __init__(self, doors: Doors, server: Any) -> None:
        self.doors, self.server = doors, server
        self.before: Callable[[Task, str, Any], None] = lambda task, what, wrapper: None
        self.after: Callable[[Task, str, Any], None] = lambda task, what, wrapper: None
        self.wrappers: dict[Process, list[Any]] = {}

    def install(self) -> None:
        from django.db import connections

        create = connections.create_connection

        def create_connection(alias: str) -> Any:
            wrapper = create(alias)
            wrapper.execute_wrappers.append(self._statement)
            wrapper.sim_is_cut = False
            task = self._task()
            if task is not None:
                self.wrappers.setdefault(task.process, []).append(wrapper)
            return wrapper

        connections.create_connection = create_connection
        kind = type(connections["default"])
        for name in ("_commit", "_rollback", "_close"):
            setattr(kind, name, getattr(self, name)(getattr(kind, name)))
        self.server.install(self.doors)

    def _task(self) -> Task | None:
        return self.doors.scheduler.current if self.doors.scheduler else None

    def _statement(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        task, wrapper = self._task(), context["connection"]
        if task is None:
            return execute(sql, params, many, context)
        self.before(task, str(sql), wrapper)
        self._check(wrapper)
        try:
            result = self.server.run(task, execute, str(sql), params, many, context)
        except Exception as error:
            self.doors.scheduler.tell(f"{type(error).__name__}: {str(error).strip()[:200]}")
            raise
        self.after(task, str(sql), wrapper)
        self._check(wrapper)
        return result

    def _check(self, wrapper: Any) -> None:
        from django.db import OperationalError

        if wrapper.sim_is_cut:
            wrapper.errors_occurred = True
            cause = Broken("server closed the connection unexpectedly")
            raise OperationalError(*cause.args) from cause

    def cut(self, wrapper: Any) -> None:
        """A connection is gone, and with it what was not committed."""
        if wrapper.connection is not None and not wrapper.sim_is_cut:
            wrapper.sim_is_cut = True
            self.server.undo(wrapper.connection)

    def _commit(self, real: Any) -> Any:
        return self._ending(real, "COMMIT")

    def _rollback(self, real: Any) -> Any:
        return self._ending(real, "ROLLBACK")

    def _ending(self, real: Any, what: str) -> Any:
        def end(wrapper: Any) -> Any:
            task = self._task()
            if task is None or wrapper.connection is None:
                return real(wrapper)
            self.before(task, what, wrapper)
            self._check(wrapper)
            self.server.show_now()
            result = real(wrapper)
            self.after(task, what, wrapper)
            self._check(wrapper)
            return result

        return end

    def _close(self, real: Any) -> Any:
        def close(wrapper: Any) -> Any:
            if self._task() is None or wrapper.connection is None:
                return real(wrapper)
            wrapper.sim_is_cut = False
            self.server.close(wrapper.connection)
            return None

        return close

    def bury(self, process: Process) -> None:
        """The sessions of a process that is dead end, and undo what was not committed."""
        for wrapper in self.wrappers.pop(process, []):
            if wrapper.connection is not None:
                self.server.close(wrapper.connection)
                wrapper.connection = None

    def part(self, task: Task) -> None:
        """A thread has ended: nobody has the connection that it leaves open."""
        from django.db import connections

        own = task.locals.get(id(connections._connections), {})
        for wrapper in own.values():
            if wrapper.connection is not None:
                self.server.close(wrapper.connection)
                wrapper.connection = None
