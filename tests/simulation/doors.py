"""The doors of the product, each led to the scheduler: clocks, sleeps, locks, threads, randomness,
the database, the broker. Nothing else of it is replaced.

Modules name what they use (`time`, `threading`, `queue`, ...), and find the simulated one under that
name. What a module keeps for its process is kept for each simulated process.
"""

from __future__ import annotations

import ast
import copy
import inspect
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
from datetime import datetime, timedelta
from typing import Any

from tests.simulation import simulated
from tests.simulation.scheduler import MICRO, Process, Scheduler

START = simulated.START
START_US = round(START.timestamp()) * MICRO


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
        fakes = {
            real: simulated.of(real, self) for real in (time, threading, queue, random, secrets)
        }
        for module in self.modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, types.ModuleType) and value in fakes:
                    setattr(module, name, fakes[value])
                elif isinstance(value, threading.local):
                    setattr(module, name, simulated.Local(self))
                elif value is datetime:
                    setattr(module, name, simulated.datetime_of(self))
                elif value is time.sleep or value is time.thread_time:
                    setattr(module, name, getattr(fakes[time], value.__name__))
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
        from django.db.backends.base import base
        from django.utils import timezone

        connections._connections = simulated.Local(self)
        # savepoints are named by it: the same in each process
        base._thread = simulated.module("_thread", base._thread, get_ident=lambda: 1)
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
    return sorted(names & assigned & set(vars(module)) - {"_registered"})
