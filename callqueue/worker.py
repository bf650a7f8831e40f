"""A Celery worker that releases calls, and makes some of them at once, while no dispenser process
does: `celery worker` alone is a working system. One process of all workers does so at a time: of
one worker's, the one that has its seat, a lock of the operating system's, which is free as soon as
its holder is dead; of several workers, see `alive.is_outranked`. A process that computes, or is
stopped, loses the seat to one that does not.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import IO, Any

from billiard import get_start_method
from celery import signals
from django.db import DatabaseError, InterfaceError, connections

from callqueue import conf, events, texts
from callqueue.dispatch.chores import HEARTBEAT, Chore
from callqueue.dispatch.dispenser import Dispenser, name_of_process, note_dispenser_gone
from callqueue.dispatch.publisher import MAKE_API_CALL
from callqueue.execution import process
from callqueue.ledger import ledger_time
from callqueue.look import alive
from callqueue.maker import WorkersMaker, is_consumed
from callqueue.models import CallQueue

try:
    import fcntl
except ImportError:  # Windows: a worker is one process there
    fcntl = None  # type: ignore[assignment]

LOOK = 1.0  # seconds between two looks whether others release
LONG = 0.2  # seconds after which a task is taken for one that computes
WAIT = 0.25  # seconds between two tries to have the seat, and two words of who has it
LONGEST = 60.0  # seconds at most until a process that could not release tries again
SILENT = 3.0  # seconds without a word after which another process may have it
# seconds without a sign of life after which one is overdue: a process of this host may be dead
OVERDUE = 1.5 * HEARTBEAT
LEAVING = 20.0  # seconds for which a process that ends waits for what it releases


class Seat:
    """Of a worker's processes one at a time has it. To be made before they are forked off.
    A process that has seat number n locks the byte n. One that is stopped, hangs or computes keeps
    its lock, but another may take the next number: only the last one counts.
    """

    def __init__(self) -> None:
        self.worker = os.getpid()
        self.name = name_of_process(self.worker)  # by which other workers know who has it
        self._file = _anonymous_file()  # it is open as long as the worker runs
        # shared: the last number; when (monotonic) its holder spoke last; whether that one computes
        self._said = memoryview(mmap.mmap(-1, 24)).cast("d")
        self._own_number = -1.0

    def take(self, *, is_idle: bool) -> bool:
        """Try to have it: free or, where this `is_idle`, had by one that computes or is silent."""
        number, said_at, computes = self._said
        if not self._try_lock(number):
            is_left = computes or time.monotonic() - said_at > SILENT
            number += 1
            if not (is_idle and is_left and self._try_lock(number)):
                return False
            self._said[0] = number
        self._own_number = number
        self.give_sign(computes=not is_idle)
        return True

    @property
    def was_never_taken(self) -> bool:
        return not self._said[1]

    def is_held_here(self) -> bool:
        return self._own_number == self._said[0]

    def give_sign(self, *, computes: bool) -> None:
        """Where it is held here, say so to the others, and whether its holder computes."""
        if self.is_held_here():
            self._said[2], self._said[1] = computes, time.monotonic()

    def leave(self) -> None:
        if fcntl is not None and self._own_number >= 0:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, int(self._own_number))
        self._own_number = -1.0

    def _try_lock(self, number: float) -> bool:
        try:
            if fcntl is not None:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(number))
        except OSError:
            return False
        return True


def _anonymous_file() -> IO[bytes]:
    """A file in memory, where the system has that: a container may have no folder for one."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("callqueue-seat"), "w+b")
    return tempfile.TemporaryFile()


class Stop(threading.Event):
    """An event that is set, too, once `is_over` says so; a wait for it does not notice that."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self._is_over = is_over

    def is_set(self) -> bool:
        return super().is_set() or self._is_over()


class Releaser:
    """Releases in this process of a worker, in a thread of its own, while that has the seat."""

    def __init__(self, using: str, seat: Seat) -> None:
        self.using, self.seat, self.pid = using, seat, os.getpid()
        self.tasks: dict[str, float] = {}  # under way: when each began, in monotonic seconds
        self.is_releasing = self._ends = self._resigns = False
        self._stop = Stop(self._is_over)
        self._thread = threading.Thread(target=self._run, name="callqueue-releaser", daemon=True)
        self._thread.start()

    @property
    def kind(self) -> str:
        """BUSY while a task computes here, which keeps the interpreter; else WORKER."""
        began = min(list(self.tasks.values()), default=float("inf"))
        return alive.BUSY if time.monotonic() - began > LONG else alive.WORKER

    def end(self, seconds: float | None = None) -> None:
        """Release no more; wait for what is being released, LEAVING or so many seconds at most."""
        self._ends = True
        self._stop.set()
        if self.is_releasing:
            self._thread.join(LEAVING if seconds is None else min(LEAVING, seconds))

    def _is_over(self) -> bool:
        return self._ends or process.is_told_to_go()

    def _has_to_stop(self) -> bool:
        return self._is_over() or not self.seat.is_held_here()

    def _run(self) -> None:
        """Release while it has the seat; try to have it, until this process ends."""
        # A pass has to be some time after the first look at the clock, so that is now.
        with suppress(DatabaseError, InterfaceError):
            ledger_time.watch(self.using).seconds_to_settle()
            if self.seat.was_never_taken:
                _bury_dead(self.using, self.seat)
        connections[self.using].close()
        pause = LOOK
        while not self._is_over():
            if self.seat.take(is_idle=self.kind == alive.WORKER):
                began = time.monotonic()
                try:
                    threading.Thread(
                        target=self._give_signs, name="callqueue-seat", daemon=True
                    ).start()
                    self._wait_and_release()
                    pause = LOOK
                except BaseException as error:
                    events.emit("listener_failed", receiver="worker", error=type(error).__name__)
                    is_again = time.monotonic() - began < LONGEST
                    pause = min(LONGEST, 2 * pause) if is_again else LOOK
                self.seat.leave()
                connections[self.using].close()
                if self._is_over():
                    return  # at once: the process that ends waits for this thread
                time.sleep(pause)
            time.sleep(WAIT)

    def _give_signs(self) -> None:
        """Say again and again that it has the seat. Who releases may be waiting for a database."""
        while self.seat.is_held_here():
            self.seat.give_sign(computes=self.kind == alive.BUSY)
            time.sleep(WAIT)

    def _wait_and_release(self) -> None:
        """Wait while another is to release; then release until this one is outranked or to stop."""
        while not self._has_to_stop() and self._is_outranked():
            time.sleep(LOOK)
        if self._has_to_stop():
            return
        dispenser = Dispenser(self.using, maker=WorkersMaker(self.using), name=self.seat.name)
        look = Chore("seat", LOOK, lambda: self._resign_if_outranked(dispenser), aside=False)
        dispenser.chores.table += (look,)
        self._stop, self._resigns, self.is_releasing = Stop(self._has_to_stop), False, True
        try:
            dispenser.run(stop=self._stop)
            # Else another process of the worker goes on, by the same name.
            if self._resigns or process.is_told_to_go():
                dispenser.leave()
        finally:
            self.is_releasing = False

    def _is_outranked(self) -> bool:
        """Have the dead leave; whether another is to release. No, where the database is away."""
        try:
            _bury_dead(self.using, self.seat, overdue=OVERDUE)
            return alive.is_outranked(self.using, self.kind, self.seat.name, releases=False)
        except (DatabaseError, InterfaceError):
            connections[self.using].close()
            return False

    def _resign_if_outranked(self, dispenser: Dispenser) -> None:
        """Say of what kind it is by now, and stop where another goes first."""
        kind = self.kind
        if kind != dispenser.membership.kind:
            dispenser.membership.kind = kind
            dispenser.chores.start_over()  # say so
        if alive.is_outranked(self.using, kind, self.seat.name):
            self._resigns = True
            self._stop.set()


def _bury_dead(using: str, seat: Seat, *, overdue: float = 0.0) -> None:
    """Have workers of this host leave that were killed, and whose last sign is at least `overdue`
    seconds old: nobody need wait for them. One that runs, and is taken for dead since another
    container has the same host's name, says so with its next sign of life.
    """
    latest = ledger_time.now(using) - timedelta(seconds=overdue)
    for sign in alive.running_dispensers(using) if fcntl is not None else ():
        host, _, rest = sign.name.partition(":")
        is_workers = sign.kind in (alive.WORKER, alive.BUSY) and sign.name != seat.name
        is_here = is_workers and host == texts.host_name() and sign.at <= latest
        if is_here and not _is_running(int(rest.split(":")[0]), seat.worker):
            note_dispenser_gone(using, sign.name)


def _is_running(pid: int, own_pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != own_pid  # of an earlier worker that had the same one, as in a container


# --- What Celery tells

_seat: Seat | None = None
_releaser: Releaser | None = None


def _releaser_here() -> Releaser | None:
    return _releaser if _releaser is not None and _releaser.pid == os.getpid() else None


def _is_to_release_here() -> bool:
    """Whether IN_WORKERS is on, and this worker consumes a queue of the rules."""
    config = conf.current()
    queues = {queue for rule in config.rules.values() for queue in rule.queue_names}
    return bool(config.in_workers) and any(map(is_consumed, queues))


def _begin_releasing() -> None:
    global _releaser
    if _seat is not None and _releaser_here() is None and _is_to_release_here():
        _releaser = Releaser(str(CallQueue.objects.db_for_write), _seat)


def _worker_begins(**_: Any) -> None:
    global _seat
    _seat = Seat()


def _process_begins(**_: Any) -> None:
    """Begin to release. Not in the worker's own process, where the solo pool sends this signal."""
    if _seat is not None and _seat.worker != os.getpid():
        _begin_releasing()


def _worker_is_ready(sender: Any, **_: Any) -> None:
    """Begin to release, unless the worker forks: then it must have no threads."""
    from celery.concurrency.prefork import TaskPool

    if not isinstance(sender.pool, TaskPool) or get_start_method() != "fork":
        _begin_releasing()


def _worker_has_ended(**_: Any) -> None:
    """Take leave, as perhaps no process had the seat to do so: others need not wait for silence."""
    if _seat is not None and _is_to_release_here():
        with suppress(DatabaseError, InterfaceError):
            note_dispenser_gone(str(CallQueue.objects.db_for_write), _seat.name)


def _task_begins(task_id: str, task: Any, kwargs: Any, **_: Any) -> None:
    """Note when a task began; not one that has HTTP calls made: that is soon done, or waits."""
    own = _releaser_here()
    if own is not None and (task.name != MAKE_API_CALL or (kwargs or {}).get("here")):
        own.tasks[task_id] = time.monotonic()


def _task_ends(task_id: str, **_: Any) -> None:
    own = _releaser_here()
    if own is not None:
        own.tasks.pop(task_id, None)


def _process_ends(seconds: float | None) -> None:
    own = _releaser_here()
    if own is not None:
        own.end(seconds)


signals.worker_init.connect(_worker_begins, weak=False)
signals.worker_process_init.connect(_process_begins, weak=False)
signals.worker_ready.connect(_worker_is_ready, weak=False)
signals.worker_shutdown.connect(_worker_has_ended, weak=False)
signals.task_prerun.connect(_task_begins, weak=False)
signals.task_postrun.connect(_task_ends, weak=False)
process.before_landing.append(_process_ends)
