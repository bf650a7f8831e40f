"""The door to a real PostgreSQL: a statement that waits for a lock gives the turn back.

psycopg2 calls `wait` while an answer is awaited. The answer is awaited in earnest, unless the
server says that the statement waits for somebody's lock: then its task waits until whoever holds
the lock has ended. The server's clock is the scheduler's, whatever sessions ask for it: a sequence,
which no transaction undoes, behind functions that hide those of the server.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import psycopg2
import psycopg2.extensions as driver

from tests.simulation.scheduler import MICRO, Scheduler, Task

KEPT = (
    6  # sessions that are left open for the next run: to open one takes longer than many statements
)
EMPTIED = 50  # times at most that the tables are emptied for a run
SOON = 0.003  # real seconds that an answer is awaited before the server is asked what it waits for
USED = """
SELECT relname FROM pg_class
WHERE relkind = 'r' AND relname LIKE 'callqueue\\_%' AND pg_relation_size(oid) > 0 ORDER BY relname
"""


# those of processes: the server's own, which vacuum its catalogs, come and go as they like
SESSIONS = (
    "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND backend_type = 'client backend'"
)


def _in_time(connect: Callable[[], Any]) -> Any:
    """A session. A server that has no more of them just now is not the product's fault."""
    for _ in range(1500):
        try:
            return connect()
        except Exception as error:
            if "too many clients" not in str(error):
                raise
            time.sleep(0.2)
    return connect()


class _Deadlock(Exception):
    """What stands for the driver's error."""

    pgcode = "40P01"


class Postgres:
    """The connections of one run's processes, and one of the judge's own."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self.doors: Any = None
        self.monitor = _in_time(connect)
        self.monitor.autocommit = True
        self.waiting: dict[Task, Any] = {}
        self._dying: dict[Task, tuple[Any, int]] = {}  # who waits for a lock, and is to die
        self.rings = 0  # how often tasks waited for each other
        self._free: list[Any] = []
        self._used: set[Any] = set()
        self.most = 0  # sessions that processes had at a time
        self._shown = -1
        self._is_hub = False
        self._may_have_freed = False
        self.users: dict[int, Any] = {}  # by the server's process, ours that had it last
        self.on_waited: Callable[[Task, float, list[Any]], None] = lambda task, seconds, ahead: None

    def install(self, doors: Any) -> None:
        """Let processes have their sessions from here."""
        from django.db.backends.postgresql.base import DatabaseWrapper

        self.doors = doors
        real = DatabaseWrapper.get_new_connection

        def get_new_connection(wrapper: Any, params: Any) -> Any:
            if doors.scheduler is not None and doors.scheduler.current is not None:
                doors.scheduler.alive()  # what cleans up after a death gets no session
            raw = self._free.pop() if self._free else _in_time(lambda: real(wrapper, params))
            self._used.add(raw)
            self.most = max(self.most, len(self._used))
            return raw

        DatabaseWrapper.get_new_connection = get_new_connection
        driver.set_wait_callback(self.wait)

    @property
    def scheduler(self) -> Scheduler | None:
        return self.doors.scheduler if self.doors else None

    def begin(self) -> None:
        """Empty the tables for a run: to no pages, so that each run finds its rows at the same
        places. TRUNCATE would do the same, but makes and unlinks a hundred files.
        """
        self.waiting.clear()
        self.most = 0
        self._may_have_freed = False
        self._shown = -1
        # The server may still be about to end a session that the last run has lost.
        for _ in range(EMPTIED):
            used = [name for (name,) in self.ask(USED)]
            if not used:
                break
            self.ask(";".join(f"DELETE FROM {name}" for name in used))
            self.ask(f"VACUUM (INDEX_CLEANUP ON) {', '.join(used)}")
        assert not used, f"{used} still have pages"
        self.ask(";".join(f"SELECT setval('{name}', 1, FALSE)" for name in self.sequences))
        self.show(self.doors.shown())

    @cached_property
    def sequences(self) -> list[str]:
        found = self.ask("SELECT sequencename FROM pg_sequences WHERE sequencename <> 'now'")
        return sorted(name for (name,) in found)

    # --- What tasks do

    def run(self, task: Task, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        """A statement, by the clock as it is now."""
        from django.db import OperationalError

        self.users[context["connection"].connection.info.backend_pid] = task.process
        if not many and ("TIMESTAMP()" in sql or sql.startswith("INSERT")):
            sql = self.prefix(self.doors.shown()) + sql
        try:
            result = execute(sql, params, many, context)
            # What was waited for may wait for another now, that has just got its lock.
            self._may_have_freed |= not context["connection"].in_atomic_block or "SAVEPOINT" in sql
            return result
        except OperationalError as error:
            self._may_have_freed = True
            if task.state != "victim":
                raise
            task.state = None
            raise OperationalError("deadlock detected") from _Deadlock(str(error))

    def show_now(self) -> None:
        """Somebody who waits for a lock may go on now, and read the clock."""
        self._may_have_freed = True
        if self.waiting:
            self.show(self.doors.shown())

    def undo(self, raw: Any) -> None:
        """What was not committed on this connection never happened."""
        self._may_have_freed = True
        with self._of_the_hub():
            if not raw.closed:
                raw.rollback()

    def close(self, raw: Any) -> None:
        """Nobody uses the session any more: another process may have it."""
        self._used.discard(raw)
        if raw.closed:
            return
        self.undo(raw)
        self._free.append(raw)

    def end(self) -> None:
        """A run is over: no more sessions stay open than the next one will want."""
        for raw in [*self._used, *self._free[KEPT:]]:
            raw.close()
        self._used.clear()
        del self._free[KEPT:]
        end = time.monotonic() + 60
        while (left := self.ask(SESSIONS)[0][0]) > KEPT + 1:
            assert time.monotonic() < end, f"{left} sessions are open after a run"
            time.sleep(0.01)

    @contextmanager
    def _of_the_hub(self) -> Iterator[None]:
        """What is asked now is awaited here, whatever task has its turn."""
        before, self._is_hub = self._is_hub, True
        try:
            yield
        finally:
            self._is_hub = before

    # --- The clock

    def show(self, instant: int) -> None:
        """Set the server's clock (microseconds since the epoch), for whoever asks from now on."""
        if instant != self._shown:
            self._shown = instant
            self.ask(f"SELECT setval('sim.now', {instant})")

    def prefix(self, instant: int) -> str:
        """A statement to put before another, so that this one finds the clock right."""
        if instant == self._shown:
            return ""
        self._shown = instant
        return f"SELECT setval('sim.now', {instant});"

    def ask(self, sql: str, params: Any = None) -> list[Any]:
        """A statement of the judge's, outside all transactions of the run."""
        with self._of_the_hub(), self.monitor.cursor() as cursor:
            cursor.execute(sql, params)
            return cursor.fetchall() if cursor.description else []

    def instant(self, value: Any) -> int:
        """What the judge read of an instant, in microseconds since the epoch."""
        return round(value.timestamp() * MICRO)

    # --- Locks

    def wait(self, raw: Any) -> None:
        """Until the driver has its answer."""
        patience = SOON
        while (state := raw.poll()) != driver.POLL_OK:
            if state == driver.POLL_WRITE:
                select.select([], [raw.fileno()], [])
                continue
            if select.select([raw.fileno()], [], [], patience)[0]:
                continue
            patience = min(0.05, patience * 2)
            task = None if self._is_hub or not self.scheduler else self.scheduler.current
            if task is not None and self.is_blocked(raw):
                self._wait_for_lock(task, raw)

    def is_blocked(self, raw: Any) -> bool:
        pid = raw.info.backend_pid
        return bool(self.ask("SELECT cardinality(pg_blocking_pids(%s)) > 0", [pid])[0][0])

    def blockers(self, raw: Any) -> list[int]:
        return list(self.ask("SELECT pg_blocking_pids(%s)", [raw.info.backend_pid])[0][0])

    def _wait_for_lock(self, task: Task, raw: Any) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        scheduler.tell("waits for a lock")
        began, ahead = scheduler.now, {self.users.get(pid) for pid in self.blockers(raw)}
        self.waiting[task] = raw
        if self._is_ring(task):
            task.state = "victim"
            self.rings += 1
            del self.waiting[task]
            raw.cancel()
            return
        try:
            scheduler.wait(None)
        finally:
            self.waiting.pop(task, None)
        scheduler.tell("goes on")
        self.on_waited(task, (scheduler.now - began) / MICRO, [p for p in ahead if p])

    def _is_ring(self, task: Task) -> bool:
        """Whether the task now waits for itself."""
        by_pid = {raw.info.backend_pid: one for one, raw in self.waiting.items()}
        seen: set[Task] = set()
        ahead = [task]
        while ahead:
            one = ahead.pop()
            for pid in self.blockers(self.waiting[one]):
                other = by_pid.get(pid)
                if other is task:
                    return True
                if other is not None and other not in seen:
                    seen.add(other)
                    ahead.append(other)
        return False

    def wake_freed(self) -> None:
        """After a step that may have freed locks: whoever waits for none any more goes on."""
        assert self.scheduler is not None
        if not self.waiting or not self._may_have_freed:
            return
        self._may_have_freed = False
        for task, raw in list(self.waiting.items()):
            if not self.is_blocked(raw):
                # Its statement ends by itself, or comes to wait for another lock.
                while not select.select([raw.fileno()], [], [], SOON)[0]:
                    if self.is_blocked(raw):
                        break
                else:
                    del self.waiting[task]
                    self.scheduler.wake(task)

    def abandon(self, task: Task) -> None:
        """The process of a task that waits for a lock is about to die. The driver has the session
        locked until the task has left it.
        """
        raw = self.waiting.pop(task, None)
        self._may_have_freed = True
        if raw is None:
            return
        self._dying[task] = raw, raw.info.backend_pid
        with suppress(psycopg2.Error):
            raw.cancel()

    def bury(self, task: Task) -> None:
        """A task is over. If it waited for a lock, its session goes with it."""
        if task not in self._dying:
            return
        raw, pid = self._dying.pop(task)
        raw.close()
        self._used.discard(raw)
        while self.ask("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [pid]):
            pass
