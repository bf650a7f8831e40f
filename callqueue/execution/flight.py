"""The flight: the thread of a process that begins, looks after and records its HTTP calls, however
many messages they came in; and the threads that make them. It alone uses the database for them, so
a process has one connection for its calls, whatever its pool.

Calls run side by side, in as few threads as keep them moving. A thread costs more than a fast call,
so one does call after call; another joins when nothing has ended for a few milliseconds, and where
calls are known to be slow all have a thread from the start. A thread without a job is kept for a
moment; a connection to a database that a hook opened in it is not.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from callqueue import clocks, database, events, telemetry, transitions
from callqueue.execution import claim, judging, recorder, request, starvation, telling, wire
from callqueue.execution.connection import IDLE_SECONDS
from callqueue.execution.telling import TELL
from callqueue.transitions import Job, Result

RECORDED = 2.0  # seconds past the last lease that a process which leaves waits for the last record

# seconds that a process that goes at once stays for what has just been answered
LEAVING = 1.0
SOON = 0.02  # seconds within which the calls of a message should all be sent, those that are due
# seconds of an answer's latency that are taken for this process's own work, in which no other
# thread gets further. A kernel with 250 ticks a second measures no finer
OWN = 0.004
# seconds for which a message waits for room before what is left of it goes on to another process
HELD = 0.03
STALL = 0.003  # seconds without an end after which another thread joins
# seconds without an end after which what has ended is handed over, when all jobs are begun
QUIET = 0.004
HEARD = 0.001  # seconds that whoever gives a clearance waits at most for the first job to go
AGE = 0.012  # seconds after which what has ended is handed over in any case: limits wait for it
# the same while jobs are still to begin: fast calls are best recorded together
PENDING_AGE = 0.05
# threads that compose requests before their clearance: who gives it waits until these have begun
AHEAD = 4
LINGER = 1.0  # seconds for which a thread without a job is kept
UNSERVED_S = 1.0  # seconds after which a job that no thread can be had for is handed back
# seconds between two lines that say that there are no more threads, and for which that is believed
MINUTE = 60.0
NAME = "callqueue-calls"  # of each thread that makes calls
UNSERVED = "nothing was sent: this worker's process may have no more threads"

T = TypeVar("T")


class Message:
    """The attempts of one message. Its task waits until it is `settled`."""

    def __init__(self, attempt_ids: Sequence[int]) -> None:
        self.waiting = list(attempt_ids)  # those that are still to be begun
        self.count = 0  # how many of them were begun
        self.left: list[int] = []  # those for which there was no room: others may have some
        self.queue = ""  # that it came by, once one of them was begun
        self.begun_at = 0.0  # when one was begun last, in monotonic seconds
        self.error: Exception | None = None
        self.is_abandoned = False  # its task went away
        self.settled = threading.Event()

    @property
    def is_partly_begun(self) -> bool:
        """Whether some of it was begun here and some was not, which may be begun elsewhere."""
        return bool(self.waiting and self.count)


class Clearance:
    """What jobs wait for that may not be begun yet: none is sent or recorded before it is given."""

    def __init__(self) -> None:
        self._is_begun: bool  # once that is given
        self._given, self._heard = threading.Event(), threading.Event()

    def wait(self) -> bool:
        """Whether the jobs are begun, once that is known."""
        self._given.wait()
        self._heard.set()
        return self._is_begun

    def give(self, *, is_begun: bool) -> None:
        """Tell them, and wait HEARD for the first of them to go: they share an interpreter."""
        self._is_begun = is_begun
        self._given.set()
        self._heard.wait(HEARD)


class Flight:
    """What this process has in flight; `max_in_flight` calls at most, 0 where the process goes.
    Whoever calls its public methods puts something into its inbox: a message that boards, jobs that
    take off, an event to be set when nothing is in flight, or None, for a look. All else is done by
    its own thread.
    """

    def __init__(self, using: str, max_in_flight: Callable[[], int]) -> None:
        self.using, self.max_in_flight, self.pid = using, max_in_flight, os.getpid()
        self.inbox: queue.SimpleQueue[Message | list[Job] | threading.Event | None]
        self.inbox = queue.SimpleQueue()
        self.boarding: list[Message] = []
        self.landings: list[threading.Event] = []
        # by `id`, until it is taken to be recorded: another attempt of this number may have been a
        # pass's that was undone
        self.under_way: dict[int, Job] = {}
        self.crew = Crew(self._make, self._ring)
        self.is_watching = True  # it looks every few milliseconds, without being rung for
        self.seen = 0  # how many ended jobs were seen that are not taken yet
        # in monotonic seconds: when the first and the last of them were seen, when any job began or
        # ended last, and when the ledger was told last
        self.first_seen_at, self.last_seen_at, self.moved_at, self.told_at = 0.0, 0.0, 0.0, 0.0
        threading.Thread(target=self._fly, name="callqueue-flight", daemon=True).start()

    def board(self, attempt_ids: Sequence[int], seconds: float | None) -> Message:
        """Hand over attempts; wait until they are under way and there is room for more, or some
        find none (`left`). After `seconds` (None: never) no more begin; it returns in as many more.
        """
        message = Message(attempt_ids)
        self.inbox.put(message)
        try:
            if not message.settled.wait(seconds):
                self._abandon(message, seconds)
        except BaseException:  # a time limit strikes the task, or the process ends
            self._abandon(message, LEAVING)
            raise
        return message

    def take_off(self, jobs: Sequence[Job]) -> Callable[[bool], None]:
        """Hand over jobs that this process is beginning, whatever their methods, and return at
        once. Their requests are composed, and wait for clearance: what this returns is to be called
        with whether the jobs are begun. The caller has seen that there is `room` for them.
        """
        clearance, unfit = Clearance(), [job for job in jobs if job.unfit is not None]
        fit = [job for job in jobs if job.unfit is None]
        threads = _threads_for(fit)

        def clear(is_begun: bool) -> None:
            clearance.give(is_begun=is_begun)
            if is_begun and threads > AHEAD:  # its own thread may wait for the database
                self.crew.add((), threads - AHEAD)
            # Only now: so one thread less wakes before they are sent.
            self.inbox.put(unfit if is_begun else [])

        for job in fit:
            job.clearance = clearance
        try:
            self._hand_to_crew(fit, min(threads, AHEAD))
        except BaseException:  # some may have a thread already, which would wait for ever
            clear(False)
            raise
        return clear

    def room(self) -> int:
        """How many more calls there is room for: none while this process lacks what they need."""
        most = min(self.max_in_flight(), self.crew.max_jobs())
        return 0 if starvation.shortage.is_on else int(max(0, most - len(self.under_way)))

    def land(self, *, seconds: float | None) -> None:
        """Wait until nothing is in flight, or leases are over; `seconds` (None: any) at most."""
        landed = threading.Event()
        self.inbox.put(landed)
        now = latest = clocks.monotonic()
        end = now + (math.inf if seconds is None else seconds)
        while not landed.wait(TELL) and now < min(end, latest + RECORDED):
            leases = [job.lease_ends_at for job in list(self.under_way.values())]
            now, latest = clocks.monotonic(), max([latest, *leases])

    def _abandon(self, message: Message, seconds: float | None) -> None:
        message.is_abandoned = True
        self.inbox.put(None)
        message.settled.wait(seconds)

    def _make(self, job: Job) -> Result | None:
        """Make a call; what came of it, None where it was not begun after all."""
        result = telemetry.traced(request.make)(job)
        return result if _is_begun(job) else None

    def _ring(self) -> None:
        """Wake the flight, unless it looks by itself. Idle threads do: waking at each end costs."""
        if not self.is_watching or len(self.crew.ended) >= len(self.under_way):
            self.inbox.put(None)

    # --- What its thread does

    def _fly(self) -> None:
        while True:
            try:
                self._do_round()
            except BaseException as error:  # all that is in flight would hang
                events.emit("listener_failed", receiver="in_flight", error=type(error).__name__)
                time.sleep(TELL)

    def _do_round(self) -> None:
        """Wait for news; record what has ended, begin what has room, and look after the rest."""
        self._wait_for_news()
        self._record(self._take_ended())
        self._begin_waiting()
        self._let_tasks_go()
        if self.under_way and time.monotonic() - self.told_at >= TELL:
            self.told_at = time.monotonic()
            ended = {id(job) for job, _ in list(self.crew.ended)}
            open_ = [job for key, job in list(self.under_way.items()) if key not in ended]
            if self._with_connection(lambda: telling.tell(self.using, open_)) is None:
                self.told_at += telling.AWAY

    def _wait_for_news(self) -> None:
        # for STALL where it looks by itself; else until it is rung, or TELL for what it looks after
        self.is_watching = False
        has_news = self.crew.pending or self.crew.ended  # read after that: what ends later rings
        self.is_watching = bool(has_news or any(one.is_partly_begun for one in self.boarding))
        is_waited_for = self.under_way or self.boarding
        timeout = STALL if self.is_watching else TELL if is_waited_for else IDLE_SECONDS
        try:
            self._take_in(self.inbox.get(timeout=timeout))
        except queue.Empty:
            if not is_waited_for:  # for a while: no call takes what is open, and it costs
                wire.close_idle_connections()
                self._take_in(self.inbox.get())
        with suppress(queue.Empty):
            while True:
                self._take_in(self.inbox.get_nowait())

    def _take_in(self, news: Message | list[Job] | threading.Event | None) -> None:
        if isinstance(news, Message):
            self.boarding.append(news)
        elif isinstance(news, threading.Event):
            self.landings.append(news)
        elif news is not None:
            self._launch(news)

    def _take_ended(self) -> list[Result]:
        """What ended and is due to be recorded; unserved jobs, voided. A stall adds a thread."""
        crew, now = self.crew, time.monotonic()
        if len(crew.ended) > self.seen:
            self.first_seen_at = self.first_seen_at if self.seen else now
            self.last_seen_at = self.moved_at = now
            self.seen = len(crew.ended)
        elif crew.pending and now - self.moved_at >= STALL:
            crew.wake_or_start()
            self.moved_at = now
        is_due = (
            self.seen >= len(self.under_way)
            or (not crew.pending and now - self.last_seen_at >= QUIET)
            or now - self.first_seen_at >= (PENDING_AGE if crew.pending else AGE)
        )
        taken = [crew.ended.popleft() for _ in range(self.seen)] if is_due else []
        self.seen -= len(taken)
        results = [result for _, result in taken if result is not None]
        unserved = crew.take_unserved()
        for job in [*(job for job, _ in taken), *unserved]:
            self.under_way.pop(id(job), None)
        voided = [transitions.after_void(job, UNSERVED) for job in unserved if _is_begun(job)]
        return [*results, *voided]

    def _record(self, results: Sequence[Result]) -> None:
        """Record. What cannot be recorded before its lease ends is left to recovery."""
        if not results:
            return
        try:
            self._with_connection(lambda: recorder.record(self.using, results))
        except Exception as error:
            for result in results:
                events.emit("record_failed", **result.job.facts, error=type(error).__name__)

    def _begin_waiting(self) -> None:
        """Begin and launch what messages have waiting, as far as there is room, all together."""
        wanted: dict[int, Message] = {}
        most, room = self.max_in_flight(), self.room()
        for message in self.boarding:
            if message.is_abandoned or not most:
                message.waiting = []
            for pk in message.waiting[: max(0, room - len(wanted))]:
                wanted[pk] = message
        if not wanted:
            return
        try:
            jobs = self._with_connection(lambda: claim.begin(self.using, list(wanted)))
        except Exception as error:
            for message in wanted.values():
                message.error, message.waiting = error, []
            return
        for message in dict.fromkeys(wanted.values()):
            begun = [job for job in jobs if wanted[job.attempt.id] is message]
            message.waiting = [pk for pk in message.waiting if pk not in wanted]
            message.count += len(begun)
            message.begun_at = time.monotonic()
            message.queue = begun[0].attempt.queue if begun else message.queue
        self._launch(jobs)

    def _launch(self, jobs: Sequence[Job]) -> None:
        """Send jobs on their way, and record those that cannot be made any more."""
        self.moved_at = time.monotonic()
        fit = [job for job in jobs if job.unfit is None]
        self._hand_to_crew(fit, _threads_for(fit))
        self._record([judging.result_of_unfit(job) for job in jobs if job.unfit is not None])

    def _hand_to_crew(self, jobs: Sequence[Job], threads: int) -> None:
        """Have these made, by so many more threads of the crew. Any thread may call it."""
        self.under_way.update((id(job), job) for job in jobs)
        if jobs:
            self.crew.add(jobs, threads)

    def _let_tasks_go(self) -> None:
        """Let the tasks go whose calls are under way, if there is room for others; and those that
        wait for room in vain; and who waits in `land`, if nothing is in flight.
        """
        has_room = not self.max_in_flight() or self.room() > 0
        for message in list(self.boarding):
            if message.is_partly_begun and time.monotonic() - message.begun_at >= HELD:
                message.left, message.waiting = message.waiting, []
            elif message.waiting or not (has_room or message.is_abandoned):
                continue
            self.boarding.remove(message)
            message.settled.set()
        while self.landings and not self.under_way and not self.boarding:
            self.landings.pop().set()

    def _with_connection(self, work: Callable[[], T]) -> T:
        """What `work` returns, done with the connection that this process keeps."""
        try:
            with database.kept_connection(self.using):
                return work()
        finally:
            database.close_all()  # what a listener opened


def _is_begun(job: Job) -> bool:
    """Whether the job is begun. Waits until that is known."""
    return job.clearance is None or bool(job.clearance.wait())


def _threads_for(jobs: Collection[Job]) -> int:
    """How many threads begin: one for each call with an instant of its own, and enough for the
    others to be sent within SOON seconds, if answers take as long as the last ones.
    """
    untimed = [job.call.rule for job in jobs if job.attempt.send_at is None]
    waits = sum(max(0.0, request.expected_latency(rule) - OWN) for rule in untimed)
    return len(jobs) - len(untimed) + round(waits / SOON)


class Crew:
    """The threads of a process that make its calls: `pending` jobs in, what has `ended` out, None
    where nothing came of it or `work` raised. Each thread that finds no more to do calls `ring`.
    """

    def __init__(self, work: Callable[[Job], Result | None], ring: Callable[[], None]) -> None:
        self.work, self.ring = work, ring
        self.pending: deque[Job] = deque()
        self.ended: deque[tuple[Job, Result | None]] = deque()
        # what wakes each thread that has no job; who takes one out of here decides what it does
        self.resting: dict[queue.SimpleQueue[None], None] = {}
        self.threads: set[threading.Thread] = set()
        self.refused_at = math.inf  # when no thread was to be had first, while jobs are pending
        self.full_at = self.said_at = -math.inf  # when that was so last, and when it was said
        self.threads_when_full = 0  # how many threads there were then

    def add(self, jobs: Iterable[Job], threads: int) -> None:
        """Have these made, by so many more threads; by one at least, unless others are pending."""
        least = 0 if self.pending else 1
        self.pending.extend(jobs)
        for _ in range(min(max(least, threads), len(self.pending))):
            if not self.wake_or_start():
                break

    def wake_or_start(self) -> bool:
        """Have one more thread work, that rests or is new; False where the system gives no more."""
        with suppress(KeyError):
            self.resting.popitem()[0].put(None)
            return True
        thread = None
        try:
            thread = threading.Thread(target=self._run, name=NAME, daemon=True)
            self.threads.add(thread)
            thread.start()
        except (RuntimeError, MemoryError) as error:
            self.threads.discard(thread)
            self._note_refusal(error)
            return False
        return True

    def max_jobs(self) -> float:
        """How many jobs have threads: for a minute after a refusal, as many as then. Or inf."""
        is_full = time.monotonic() - self.full_at < MINUTE
        return max(1, self.threads_when_full) if is_full else math.inf

    def take_unserved(self) -> list[Job]:
        """Take the jobs that have waited in vain for a thread: another process may have one."""
        if not self.pending:
            self.refused_at = math.inf
        taken: list[Job] = []
        if time.monotonic() - self.refused_at >= UNSERVED_S:
            with suppress(IndexError):
                while True:
                    taken.append(self.pending.popleft())
            self.refused_at = math.inf  # those that come now have waited for nothing
        return taken

    def _note_refusal(self, error: Exception) -> None:
        self.full_at, self.threads_when_full = time.monotonic(), len(self.threads)
        self.refused_at = min(self.refused_at, self.full_at)
        if self.full_at - self.said_at >= MINUTE:
            self.said_at = self.full_at
            events.emit("threads_exhausted", waiting=len(self.pending), error=str(error))

    def _run(self) -> None:
        wake = queue.SimpleQueue[None]()
        while True:
            self._make_pending()
            self.resting[wake] = None
            self.ring()
            try:
                wake.get(timeout=LINGER)
            except queue.Empty:
                if self.resting.pop(wake, self) is None:
                    self.threads.discard(threading.current_thread())
                    return
                # somebody has taken it, to wake this thread

    def _make_pending(self) -> None:
        while True:
            try:
                job = self.pending.popleft()
            except IndexError:
                database.close_all()
                return
            result = None
            try:
                database.close_failed()
                result = self.work(job)
            except BaseException:  # its lease decides
                pass
            self.ended.append((job, result))
