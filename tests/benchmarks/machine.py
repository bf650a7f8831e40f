"""What processes cost: CPU seconds and resident memory from /proc, by the role that a process
plays.

In: roles, each with a test of a process's id and title. Out: seconds per role over a span, with
processes that ended meanwhile. Of shared servers it counts the backends of this benchmark's
databases, and the background processes in full.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
EVERY = 0.1  # seconds between two looks

IsRole = Callable[[int, str], bool]


def postgresql(*databases: str) -> IsRole:
    """The backends of these databases, and the server's own processes."""
    own = ("walwriter", "background writer", "checkpointer", "launcher")

    def is_role(pid: int, title: str) -> bool:
        if not title.startswith("postgres:"):
            return False
        return any(f" {name} " in title for name in databases) or any(word in title for word in own)

    return is_role


def rabbitmq(pid: int, title: str) -> bool:
    return "beam.smp" in title and "rabbit" in title


def family(root: int) -> IsRole:
    """A process, its children and theirs: all that share its session."""
    return lambda pid, title: _session(pid) == root


def is_child_of_this(pid: int) -> bool:
    """Whether this process, or one that it started in its own session, is the one's parent."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return False
    return parent == os.getpid()


class Meter:
    """CPU by role while it is open: `with Meter(roles) as meter: ...; meter.seconds`."""

    def __init__(self, roles: dict[str, IsRole]) -> None:
        self.roles = roles
        self._before: dict[int, float] = {}
        self._latest: dict[int, float] = {}
        self._role_of: dict[int, str | None] = {}
        self._stop = threading.Event()

    def __enter__(self) -> Meter:
        self._look()
        self._before = dict(self._latest)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    @property
    def seconds(self) -> dict[str, float]:
        found = dict.fromkeys(self.roles, 0.0)
        for pid, latest in self._latest.items():
            role = self._role_of[pid]
            if role is not None:
                found[role] += latest - self._before.get(pid, 0.0)
        return found

    def _watch(self) -> None:
        while not self._stop.wait(EVERY):
            self._look()

    def _look(self) -> None:
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            pid = int(entry.name)
            if pid not in self._role_of:
                title = _title(pid)
                self._role_of[pid] = next(
                    (role for role, is_role in self.roles.items() if is_role(pid, title)), None
                )
            if self._role_of[pid] is not None and (used := cpu_seconds(pid)) is not None:
                self._latest[pid] = used


def cpu_seconds(pid: int) -> float | None:
    """User and system time of a process and its threads; None once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / TICK


def resident_mb(root: int) -> float:
    """Private memory of a process and all that share its session, in MB (proportional share where
    it is known).
    """
    total = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and _session(int(entry.name)) == root:
            total += _kilobytes(int(entry.name))
    return total / 1024


def _kilobytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _title(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode("utf-8", "replace")
        )
    except OSError:
        return ""


def wait_until(is_so: Callable[[], bool], timeout: float, every: float = 0.02) -> float:
    """The monotonic instant at which it was found to be so; TimeoutError otherwise."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if is_so():
            return time.monotonic()
        time.sleep(every)
    raise TimeoutError(f"not within {timeout} s")
