"""This process and its calls in flight: it goes on with the HTTP calls of its messages when their
tasks have ended, so that a slow answer keeps no slot from other tasks. A process that is told to
go, or has run as many tasks as it may, waits for them; where one dies, leases decide.
"""

from __future__ import annotations

import atexit
import math
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from billiard import current_process
from billiard.compat import mem_rss
from celery import current_app, signals

from callqueue import broker, conf, database, events
from callqueue.execution import executor, starvation
from callqueue.execution.flight import LEAVING, Flight, Message

_flights: dict[str, Flight] = {}
_lock = threading.Lock()
_worker: tuple[int, Any] = (0, None)  # the id of the worker's process, and the worker
# shared by a worker and the children of its pool: not 0 once it is told to go
_told: mmap.mmap | bytearray = bytearray(1)
_tasks = 0  # that this process has run
# what `land` calls first, with its `seconds`: each ends somebody who puts calls into flight
before_landing: list[Callable[[float | None], None]] = []


def take_attempts(using: str, attempt_ids: Sequence[int], task: Any) -> int:
    """Begin these attempts, if still to be begun, and get their calls under way; the count. Waits
    until there is room for another. What has no room here goes on to another process; what was not
    begun well before a time limit of the task is given back, and all where no thread can be had.
    """
    try:
        flight = flight_of(using)
    except (RuntimeError, MemoryError) as error:
        starvation.shortage.begin(str(error))
        _give_back(using, attempt_ids)
        starvation.shortage.wait_out(patience(task))  # others have its messages meanwhile
        return 0
    message = flight.board(attempt_ids, patience(task))
    if message.error is not None:
        raise message.error
    if message.left:
        with database.kept_connection(using):
            _hand_on(using, message, task)
        flight.board([], patience(task))
    elif message.count < len(attempt_ids):
        _give_back(using, attempt_ids)
    return message.count


def make_calls_here(using: str, attempt_ids: Sequence[int], task: Any) -> int:
    """Wait out a shortage, make calls in this thread; the count. Gives back if told to go."""
    starvation.shortage.wait_out(patience(task))
    if not max_in_flight():
        _give_back(using, attempt_ids)
        return 0
    with database.kept_connection(using):
        return executor.execute(using, attempt_ids)


def _give_back(using: str, attempt_ids: Sequence[int]) -> None:
    with database.kept_connection(using):
        executor.give_back_once_free(using, attempt_ids)


def _hand_on(using: str, message: Message, task: Any) -> None:
    """Let another process begin what is left; where the broker takes no message, give it back."""
    options, lasts = broker.database_kwargs(using), conf.current().release_lease
    try:
        broker.send(task, (message.left,), options, queue=message.queue, lasts=lasts)
    except Exception as error:
        why = broker.why_away(task.app, error)
        events.emit("publish_failed", queue=message.queue, messages=1, error=why)
        executor.give_back_once_free(using, message.left)


def land(*, seconds: float | None = None) -> None:
    """Put no more into flight; wait `seconds` for each flight (None: leases), then for messages."""
    for end in before_landing:
        end(seconds)
    for own in list(_flights.values()):
        if own.pid == os.getpid():
            own.land(seconds=seconds)
    broker.finish_sending()


def patience(task: Any) -> float | None:
    """For how many seconds the task may wait without coming near a time limit; None: for ever."""
    own = task.request.timelimit or ()
    of_task = (task.time_limit, task.soft_time_limit)
    of_app = (current_app.conf.task_time_limit, current_app.conf.task_soft_time_limit)
    limits = [limit for limit in (*own, *of_task, *of_app) if limit]
    return min(limits) / 3 if limits else None


def max_in_flight() -> int:
    """How many calls this process may have in flight: CALLS_PER_SLOT for each of its slots, but no
    more than it has descriptors for; none where the worker was told to go. A child of the prefork
    pool is one slot; the process of any other pool has them all.
    """
    if is_told_to_go():
        return 0
    pid, worker = _worker
    slots = getattr(worker, "concurrency", 1) if pid == os.getpid() else 1
    wanted = conf.current().calls_per_slot * (slots if isinstance(slots, int) else 1)
    return int(min(wanted, starvation.descriptors_for_calls()))


def is_told_to_go() -> bool:
    return bool(_told[0])


def flight_of(using: str) -> Flight:
    """This process's flight, not its parent's; begun if need be. RuntimeError: no thread for it."""
    with _lock:
        flight = _flights.get(using)
        if flight is None or flight.pid != os.getpid():
            flight = _flights[using] = Flight(using, max_in_flight)
        return flight


# --- What Celery tells


def _receives(signal: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    connect: Callable[[Callable[..., None]], Callable[..., None]] = signal.connect
    return connect


@_receives(signals.worker_init)
def note_worker(sender: Any, **_: Any) -> None:
    """Note the worker, not told to go: of this process, and of children that it forks."""
    global _worker, _told
    _worker, _told = (os.getpid(), sender), mmap.mmap(-1, 1)


@_receives(signals.worker_shutting_down)
def tell_to_go(**_: Any) -> None:
    """Note that the worker goes: messages that come after this are given back."""
    _told[0] = 1


@_receives(signals.worker_process_shutdown)
def _wait_as_child_goes(**_: Any) -> None:
    """Wait: a child of the prefork pool was told to go. Told once more, it goes at once."""
    land()


@_receives(signals.worker_shutdown)
def _wait_as_worker_goes(**_: Any) -> None:
    """Wait: the worker stops warmly, and another pool than prefork has its calls here."""
    land()


@_receives(signals.task_postrun)
def _count_task(task: Any, **_: Any) -> None:
    """Count a task, if not eager. A child's last waits for flights: no other comes until then."""
    global _tasks
    if not task.request.is_eager:
        _tasks += 1
        if _is_replaced_now(getattr(current_process(), "_target", None)):
            land(seconds=patience(task))


def _is_replaced_now(child: Any) -> bool:
    """Whether a child of the prefork pool ran as many tasks as it may, or has too much memory."""
    most_kb = getattr(child, "max_memory_per_child", None) or math.inf
    return _tasks >= (getattr(child, "maxtasks", None) or math.inf) or mem_rss() > most_kb


atexit.register(land, seconds=LEAVING)
