"""The door to SQLite: whoever finds the database locked gives the turn back, and tries again when
somebody has let go. Its clock is the scheduler's.
"""

from __future__ import annotations

import re
import sqlite3
from datetime import datetime
from typing import Any

from tests.simulation.scheduler import MICRO, Task
from tests.simulation.simulated import START, Waiters


class Sqlite:
    """The connections of one run's processes, and one of the judge's own."""

    def __init__(self, path: str) -> None:
        self.doors: Any = None
        self.rings = self.most = 0
        self._path = path
        self._locked: Waiters = None  # type: ignore[assignment]
        self._monitor = sqlite3.connect(path, isolation_level=None, timeout=20)
        self._has_changed = False

    def install(self, doors: Any) -> None:
        self.doors = doors

    def begin(self) -> None:
        """Empty the tables for a run."""
        self._locked = Waiters(self.doors)
        tables = self.ask(
            "SELECT name FROM sqlite_master WHERE name LIKE 'callqueue_%' AND type = 'table'"
        )
        for (name,) in tables:
            self.ask(f"DELETE FROM {name}")
        self.ask("DELETE FROM sqlite_sequence")

    def ask(self, sql: str, params: Any = ()) -> list[Any]:
        """A statement of the judge's, outside all transactions of the run."""
        return self._monitor.execute(sql, params or ()).fetchall()

    def run(self, task: Task, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        """A statement, by the clock as it is now; where the database is locked, a while later."""
        from django.db import OperationalError

        doors = self.doors
        text = sql
        while True:
            if "'NOW'" in sql:
                shown = doors.shown() - round(START.timestamp()) * MICRO
                text = re.sub("'NOW'", f"'{_iso(shown)}'", sql)
            try:
                result = execute(text, params, many, context)
            except OperationalError as error:
                if "locked" not in str(error):
                    raise
                doors.scheduler.tell("waits for the lock")
                doors.scheduler.sleep(0.003)
                doors.scheduler.steps -= 1  # a look at the lock is none
                continue
            return result

    def instant(self, value: Any) -> int:
        """What the judge read of an instant, in microseconds since the epoch."""
        return round(datetime.fromisoformat(f"{value}+00:00").timestamp() * MICRO)

    def show_now(self) -> None:
        """Its clock is asked for in Python."""

    def undo(self, raw: Any) -> None:
        """What was not committed on this connection never happened."""
        raw.rollback()

    def close(self, raw: Any) -> None:
        raw.rollback()  # a statement that nobody has read to its end would keep its lock
        raw.close()

    def end(self) -> None:
        """Sessions were closed one by one."""

    def wake_freed(self) -> None:
        """Whoever waits looks by himself."""

    def abandon(self, task: Task) -> None:
        """Nobody waits inside the driver."""

    def bury(self, task: Task) -> None:
        """Nobody waited inside the driver."""


def _iso(microseconds: int) -> str:
    from datetime import timedelta

    instant = START + timedelta(microseconds=microseconds)
    return instant.strftime("%Y-%m-%d %H:%M:%S.") + f"{instant.microsecond:06d}"
