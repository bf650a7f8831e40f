"""The flight: the thread of a process that begins, looks after and records its HTTP calls, however
many messages they came in; and the threads that make them.

In: messages that board. Out: the ends of their calls, in the database. It alone uses the database
for them, so a process has one connection for its calls, whatever its pool. What is not HTTP is
begun here, and left to the message's task. Never has more calls under way than it may.

The calls of a message run side by side, in as few threads as keep them moving. A thread costs more
than a fast call, so the first does one call after the other; another joins when nothing has ended
for a few milliseconds, and where calls are known to be slow all have a thread from the start. What
has ended is handed over soon: the limits wait for it. A thread ends when no job is left, and so
does a connection to a database that a hook opened in it.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from callqueue import clocks, database, events, telemetry, transitions
from callqueue.execution import claim, judging, recorder, request, starvation, telling, wire
from callqueue.execution.connection import IDLE_SECONDS
from callqueue.execution.telling import TELL
from callqueue.handlers import HTTP_METHODS
from callqueue.transitions import Job, Result

RECORDED = 2.0  # seconds past the last lease that a process which leaves waits for the last record

# seconds that a process that goes at once stays for what has just been answered
LEAVING = 1.0
SOON = 0.02  # seconds within which the calls of a message should all be sent, those that are due
# seconds of a wait for an answer in which no other thread gets further: all share one interpreter
OWN = 0.002
# seconds for which a message waits for room before what is left of it goes on to another process
HELD = 0.03
UNSERVED = "nothing was sent: this worker's process may have no more threads"

T = TypeVar("T")


class Message:
    """The attempts of one message. Its task waits until it is `settled`."""

    def __init__(self, attempt_ids: Sequence[int]) -> None:
        self.waiting = list(attempt_ids)  # those that are still to be begun
        self.count = 0  # how many of them were begun
        self.left: list[int] = []  # those for which there was no room: others may have some
        self.queue = ""  # that it came by, once one of them was begun
        self.moved = 0.0  # when one was begun last, in monotonic seconds
        self.here: list[Job] = []  # what its task makes
        self.error: Exception | None = None
        self.is_left = False  # its task went away
        self.settled = threading.Event()


class Flight:
    """What this process has in flight; `most` says how many calls may be, 0 where the process goes.
    All but `board`, `take_off` and `land` is done by its own thread.
    """

    def __init__(self, using: str, most: Callable[[], int]) -> None:
        self.using, self.most, self.pid = using, most, os.getpid()
        self.bell: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self.boarding: list[Message] = []
        self.begun: deque[list[Job]] = deque()  # handed over, and not under way yet
        self.batches: list[Batch] = []
        # those that may have news, in order: a slow answer costs no looks
        self.live: dict[Batch, None] = {}
        self.told = 0.0  # when the ledger was told last, in monotonic seconds
        self.landed = threading.Event()
        self.landing = threading.Lock()  # whether it has landed is decided by one at a time
        thread = threading.Thread(target=self._fly, name="callqueue-flight", daemon=True)
        thread.start()

    def board(self, attempt_ids: Sequence[int], seconds: float | None) -> Message:
        """Hand over attempts, and wait until they are under way and there is room for more, or it
        shows that there is none for some of them.
        """
        message = Message(attempt_ids)
        with self.landing:
            self.landed.clear()
            self.boarding.append(message)
        self.bell.put(None)
        try:
            if not message.settled.wait(seconds):
                self._leave(message, seconds)
        except BaseException:  # a time limit strikes the task, or the process ends
            self._leave(message, LEAVING)
            self._void(message)
            raise
        return message

    def take_off(self, jobs: Sequence[Job]) -> None:
        """Hand over jobs that this process has begun, whatever their methods; returns at once. Room
        for them is the caller's to see to: see `room`.
        """
        with self.landing:
            self.landed.clear()
            self.begun.append(list(jobs))
        self.bell.put(None)

    def room(self) -> int:
        """How many more calls may be handed over now."""
        waiting = sum(map(len, list(self.begun)))
        return 0 if starvation.pause.is_on else max(0, self.most() - self._count() - waiting)

    def _leave(self, message: Message, seconds: float | None) -> None:
        """Begin no more of it. What its task was to make, and does not know of, is given back."""
        message.is_left = True
        self.bell.put(None)
        message.settled.wait(seconds)

    def land(self, *, seconds: float | None) -> None:
        """Wait until nothing is in flight, or nothing can be any more."""
        now = latest = clocks.monotonic()
        end = now + (math.inf if seconds is None else seconds)
        while not self.landed.wait(TELL) and now < min(end, latest + RECORDED):
            leases = [job.lease_ends for batch in list(self.batches) for job in batch.jobs]
            now, latest = clocks.monotonic(), max([latest, *leases])

    # --- What its thread does

    def _fly(self) -> None:
        while True:
            try:
                self._turn()
            except BaseException as error:  # all that is in flight would hang
                events.emit("listener_failed", receiver="in_flight", error=type(error).__name__)
                time.sleep(TELL)

    def _turn(self) -> None:
        """Wait for news; record what has ended, begin what has room, and look after the rest."""
        self._wait()
        self._record(self._ended())
        self.batches = [batch for batch in self.batches if not batch.is_over]
        while self.begun:
            self._launch(self.begun.popleft())
        self._begin_waiting()
        self._settle()
        if self.batches and time.monotonic() - self.told >= TELL:
            self.told = time.monotonic()
            if self._connected(lambda: telling.tell(self.using, self._under_way())) is None:
                self.told += telling.AWAY

    def _wait(self) -> None:
        is_restless = self.live or any(map(self._may_go_on, self.boarding))
        is_waited_for = self.batches or self.boarding or self.begun
        timeout = STALL if is_restless else TELL if is_waited_for else IDLE_SECONDS
        with suppress(queue.Empty):
            self._hear(self._next(timeout, is_idle=not is_waited_for))
            while True:
                self._hear(self.bell.get_nowait())

    def _next(self, timeout: float, *, is_idle: bool) -> Batch | None:
        """What rings next. Once nothing has been in flight for a while, connections are closed that
        no call takes any more: each is a descriptor.
        """
        try:
            return self.bell.get(timeout=timeout)
        except queue.Empty:
            if not is_idle:
                raise
        wire.close_idle()
        return self.bell.get()

    def _hear(self, batch: Batch | None) -> None:
        if batch is not None:
            self.live[batch] = None

    def _ended(self) -> list[Result]:
        """What has ended, of all messages together, and is taken herewith."""
        ended: list[Result] = []
        for batch in list(self.live):
            unserved = batch.unserved()
            batch.ended += [transitions.after_void(job, UNSERVED) for job in unserved]
            some = batch.look()
            batch.taken += len(some)
            ended += some
            if not batch.is_restless:
                self.live.pop(batch)  # until a thread of it rings
        return ended

    def _record(self, results: Sequence[Result]) -> None:
        """Record. What cannot be recorded before its lease ends is left to recovery."""
        if not results:
            return
        try:
            self._connected(lambda: recorder.record(self.using, results))
        except Exception as error:
            for result in results:
                events.emit("record_failed", **result.job.facts, error=type(error).__name__)

    def _begin_waiting(self) -> None:
        """Begin what messages have waiting, as far as there is room, in one statement."""
        wanted: dict[int, Message] = {}
        most = self.most()
        room = 0 if starvation.pause.is_on else most - self._count()
        for message in list(self.boarding):
            if message.is_left or not most:
                message.waiting = []
            for pk in message.waiting[: max(0, room - len(wanted))]:
                wanted[pk] = message
        if not wanted:
            return
        try:
            jobs = self._connected(lambda: claim.begin(self.using, list(wanted)))
        except Exception as error:
            for message in wanted.values():
                message.error, message.waiting = error, []
            return
        for message in dict.fromkeys(wanted.values()):
            begun = [job for job in jobs if wanted[job.attempt_id] is message]
            message.waiting = [pk for pk in message.waiting if pk not in wanted]
            message.count += len(begun)
            message.moved = time.monotonic()
            message.queue = begun[0].queue if begun else message.queue
            self._start(message, begun)

    def _start(self, message: Message, jobs: Sequence[Job]) -> None:
        """Send HTTP calls on their way, and leave the others to the message's task."""
        flown = [job for job in jobs if job.unfit is not None or job.method in HTTP_METHODS]
        here = [job for job in jobs if job.unfit is None and job.method not in HTTP_METHODS]
        message.here += here
        self._launch(flown)

    def _launch(self, jobs: Sequence[Job]) -> None:
        """Send jobs on their way, and record those that cannot be made any more."""
        sound = [job for job in jobs if job.unfit is None]
        if sound:
            make = telemetry.traced(request.make)
            batch = Batch(sound, make, self.bell)
            self.batches.append(batch)
            self.live[batch] = None
            batch.begin(_threads_for(sound))
        self._record([judging.unfit(job) for job in jobs if job.unfit is not None])

    def _settle(self) -> None:
        """Let the tasks go whose calls are under way, if there is room for others, and those that
        wait for room in vain. What a task that went away was to make is given back.
        """
        most = self.most()
        has_room = not most or (self._count() < most and not starvation.pause.is_on)
        for message in list(self.boarding):
            if self._may_go_on(message) and time.monotonic() - message.moved >= HELD:
                message.left, message.waiting = message.waiting, []
            elif message.waiting or not (has_room or message.here or message.is_left):
                continue
            self.boarding.remove(message)
            if message.is_left:
                self._void(message)
            message.settled.set()
        with self.landing:
            if not self.batches and not self.boarding and not self.begun:
                self.landed.set()

    @staticmethod
    def _may_go_on(message: Message) -> bool:
        """Whether a part of it was begun here, and the rest may be begun elsewhere."""
        return bool(message.waiting and message.count)

    def _void(self, message: Message) -> None:
        """Record that what its task was to make was not sent."""
        left, message.here = message.here, []
        self._record([transitions.after_void(job, request.LEFT) for job in left])

    def _count(self) -> int:
        return sum(batch.count - batch.taken - len(batch.raised) for batch in self.batches)

    def _under_way(self) -> list[Job]:
        """The jobs whose ends are not recorded."""
        ended = {id(result.job) for batch in self.batches for result in batch.ended}
        return [job for batch in self.batches for job in batch.jobs if id(job) not in ended]

    def _connected(self, work: Callable[[], T]) -> T:
        """What `work` returns, done with the connection that this process keeps."""
        try:
            with database.kept_connection(self.using):
                return work()
        finally:
            database.close_all()  # what a listener opened


def _threads_for(jobs: Sequence[Job]) -> int:
    """How many threads begin: one for each call that has an instant of its own, connected and
    waiting when it comes, and enough for the others to be sent within a few milliseconds, as long
    as answers take as long as the last ones.
    """
    untimed = [job.rule_name for job in jobs if job.send_at is None]
    waits = sum(max(0.0, request.expected_wait(rule) - OWN) for rule in untimed)
    return len(jobs) - len(untimed) + round(waits / SOON)


STALL = 0.003  # seconds without an end after which another thread joins
# seconds without an end after which what has ended is handed over, when all jobs are begun
QUIET = 0.004
AGE = 0.012  # seconds after which what has ended is handed over in any case
# seconds after which it is while jobs are still to begin: fast calls are best recorded together
PENDING_AGE = 0.05
# seconds between two lines that say that there are no more threads, and for which that is believed
MINUTE = 60.0
NAME = "callqueue-calls"  # of each thread
UNSERVED_S = 1.0  # seconds after which a job that no thread can be had for is handed back


def most() -> float:
    """How many jobs this process has threads for, as far as is known: as many as it had when no
    other was to be had, for a minute.
    """
    is_full = time.monotonic() - refusal.at < MINUTE
    return max(1, refusal.count) if is_full else math.inf


class Batch:
    """The jobs of one message and what came of them. Each thread that leaves puts the batch into
    `bell`; no end does, since waking costs.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        work: Callable[[Job], Result],
        bell: queue.SimpleQueue[Batch | None],
    ) -> None:
        self.jobs, self.pending, self.work, self.bell = jobs, deque(jobs), work, bell
        self.ended: list[Result] = []
        self.raised: list[BaseException] = []
        self.count, self.seen, self.taken, self.threads = len(jobs), 0, 0, 0
        self.first = self.last = self.moved = 0.0
        self.refused_at = math.inf  # when no thread was to be had for it first

    def begin(self, threads: int) -> None:
        """Have `threads` more begin; others join while jobs are pending and none end."""
        for _ in range(min(max(1, threads), len(self.pending))):
            if not self._join():
                break
        self.moved = time.monotonic()

    def _join(self) -> bool:
        """Let one more thread work on it; False where the system gives this process no more. One
        that is done may be followed by another.
        """
        try:
            threading.Thread(target=self.drain, name=NAME, daemon=True).start()
        except (RuntimeError, MemoryError) as error:
            refusal.note(len(self.pending), error)
            self.refused_at = min(self.refused_at, time.monotonic())
            return False
        self.threads += 1
        return True

    def unserved(self) -> list[Job]:
        """The jobs that have waited in vain for a thread, taken herewith: another process may have
        one, and their leases run.
        """
        taken: list[Job] = []
        if time.monotonic() - self.refused_at >= UNSERVED_S:
            with suppress(IndexError):
                while True:
                    taken.append(self.pending.popleft())
        return taken

    def look(self) -> list[Result]:
        """What has ended and was not taken, once it is time to hand it over: whoever takes it says
        so in `taken`. Where jobs are pending and none has ended of late, another thread joins.
        """
        now, count = time.monotonic(), len(self.ended)
        if count > self.seen:
            self.first = self.first if self.seen > self.taken else now
            self.last = self.moved = now
            self.seen = count
        elif self.pending and self.threads < self.count and now - self.moved >= STALL:
            self._join()
            self.moved = now
        is_due = (
            self.seen + len(self.raised) == self.count
            or (not self.pending and now - self.last >= QUIET)
            or now - self.first >= (PENDING_AGE if self.pending else AGE)
        )
        return self.ended[self.taken : self.seen] if is_due else []

    @property
    def is_over(self) -> bool:
        """Whether all has been taken, but for what raised."""
        return self.taken + len(self.raised) >= self.count

    @property
    def is_restless(self) -> bool:
        """Whether to look again within `STALL`, though no thread may have left by then."""
        return bool(self.pending) or len(self.ended) > self.taken

    def drain(self) -> None:
        """Do pending jobs until there are none: what a thread does."""
        while True:
            try:
                job = self.pending.popleft()
            except IndexError:
                database.close_all()
                self.bell.put(self)
                return
            try:
                database.close_failed()
                self.ended.append(self.work(job))
            except BaseException as error:  # else the job would never seem to have ended
                self.raised.append(error)


class _Refusal:
    """That this process was given no more threads: when, how many had calls then, and when it was
    said last.
    """

    def __init__(self) -> None:
        self.at = self.said_at = -math.inf
        self.count = 0

    def note(self, waiting: int, error: Exception) -> None:
        self.at = time.monotonic()
        self.count = sum(one.name == NAME for one in threading.enumerate())
        if self.at - self.said_at >= MINUTE:
            self.said_at = self.at
            events.emit("threads_exhausted", waiting=waiting, error=str(error))


refusal = _Refusal()
