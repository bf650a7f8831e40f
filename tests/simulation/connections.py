"""The door that statements go through, and the connections that processes have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.doors import Doors
from tests.simulation.scheduler import Process, Task


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

    def end(self) -> None:
        """The run is over: nobody keeps a session."""
        for process in list(self.wrappers):
            self.bury(process)
        self.server.end()

    def part(self, task: Task) -> None:
        """A thread has ended: nobody has the connection that it leaves open."""
        from django.db import connections

        self.server.bury(task)
        own = task.locals.get(id(connections._connections), {})
        for wrapper in own.values():
            if wrapper.connection is not None:
                self.server.close(wrapper.connection)
                wrapper.connection = None
