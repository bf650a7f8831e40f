"""Makes the calls of a message: claim, make, judge, record.

In: the ids of released attempts. Out: their ends, in the database. Whatever else happens, an
attempt is begun by one worker only, and what a worker records counts only while the attempt is
still its own. Never retries by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from django.db import DatabaseError, InterfaceError

from callqueue import database, telemetry, transitions
from callqueue.execution import claim, judging, recorder, request, telling, thread_pool
from callqueue.handlers import HTTP_METHODS
from callqueue.transitions import Job, Result

LOCKED = (0.05, 0.1, 0.2, 0.4, 0.8)  # seconds between looks at attempts that somebody has locked
# seconds that a worker that is told to go at once stays for what has just been answered
LEAVING = 1.0
SOON = 0.02  # seconds within which the calls of a message should all be sent, those that are due


def execute(
    using: str,
    attempt_ids: Sequence[int],
    *,
    inline: bool = False,
    begun: Sequence[Job] | None = None,
) -> int:
    """Make the calls of these attempts, those that are still to be begun or are `begun` for this
    thread; the count of them, once all are recorded.

    HTTP calls run side by side unless `inline`; others one after the other in this thread, which
    may use the ORM. Whatever is raised in this thread, what has been sent is recorded and what has
    not is given back; then it is raised again.
    """
    message = _Message(using, attempt_ids, begun)
    try:
        return message.make(inline)
    except BaseException as struck:
        message.leave(struck)
        striker = recorder.striker(struck)
        if striker is not None and striker is not struck:
            raise striker from struck
        raise


class _Message:
    """The calls of one message, in this worker: some are made in this thread, the others are the
    thread pool's.
    """

    def __init__(
        self, using: str, attempt_ids: Sequence[int], begun: Sequence[Job] | None = None
    ) -> None:
        self.using, self.attempt_ids, self.worker = using, attempt_ids, claim.name_worker()
        self.jobs = begun
        self.owed: list[Result] = []
        self.shift: thread_pool.Shift[Job, Result] | None = None

    def make(self, inline: bool) -> int:
        """Begin, make and record them; the count of those begun."""
        if self.jobs is None:
            self.jobs = claim.begin(self.using, self.attempt_ids, self.worker)
        jobs = self.jobs
        apart, here = _shared_out(jobs, inline)
        make = telemetry.traced(request.make)
        self.shift = thread_pool.Shift(apart, make)
        self.owed = [judging.unfit(job) for job in jobs if job.unfit is not None]
        self._record_owed()
        for ended in self.shift.run(hands(apart), every=telling.TELL):
            if ended:
                recorder.record(self.using, ended)
            telling.tell(self.using, self._under_way(apart))
        for job in here:
            self.owed = [make(job)]
            self._record_owed()
        if len(jobs) < len(self.attempt_ids):
            give_back(self.using, self.attempt_ids)
        return len(jobs)

    def _under_way(self, jobs: Sequence[Job]) -> list[Job]:
        """Those of the thread pool's jobs that have not ended."""
        ended = {result.job.attempt_id for result in self.shift.ended} if self.shift else set()
        return [job for job in jobs if job.attempt_id not in ended]

    def leave(self, struck: BaseException) -> None:
        """Give back what was not sent, and record what was: all of it where the process lives on,
        else what ends in a moment.
        """
        database.close_all()  # what struck may have done so in the middle of an answer
        striker = recorder.striker(struck)
        if self.jobs is None and striker is not None:
            self.jobs = claim.begin(self.using, self.attempt_ids, self.worker)
        back = self._take_back()
        with suppress(DatabaseError, InterfaceError):
            self._record_owed()
        is_dying = isinstance(striker, SystemExit | KeyboardInterrupt)
        until = time.monotonic() + LEAVING if is_dying else math.inf
        for some in self.shift.run(until=until) if self.shift else ():
            self.owed = [result for result in some if result.job.attempt_id not in back]
            with suppress(DatabaseError, InterfaceError):
                self._record_owed()

    def _take_back(self) -> set[int]:
        """Let nothing more be sent, and owe the end of what was not; the ids of those attempts."""
        jobs = self.jobs or []
        for job in jobs:
            job.is_left = True
        ended = self.shift.ended if self.shift else []
        unsent = {job.attempt_id for job in jobs if not job.is_through}
        back = unsent - {result.job.attempt_id for result in self.owed + ended}
        left = [job for job in jobs if job.attempt_id in back]
        self.owed += [transitions.after_void(job, request.LEFT) for job in left]
        return back

    def _record_owed(self) -> None:
        if self.owed:
            recorder.record(self.using, self.owed)
            self.owed = []


def _shared_out(jobs: Sequence[Job], inline: bool) -> tuple[list[Job], list[Job]]:
    """The jobs that are made side by side, by the thread pool, and those that this thread makes."""
    sound = [job for job in jobs if job.unfit is None]
    wired = [job for job in sound if job.method in HTTP_METHODS and not inline]
    is_slow = any(request.expected_wait(job.rule_name) > telling.SLOW for job in wired)
    if len(wired) > 1 or is_slow:
        return wired, [job for job in sound if job.method not in HTTP_METHODS]
    return [], sound


def hands(jobs: Sequence[Job]) -> int:
    """How many threads begin: one for each call that has an instant of its own, connected and
    waiting when it comes, and enough for the others to be sent within a few milliseconds, as long
    as answers take as long as the last ones.
    """
    untimed = [job.rule_name for job in jobs if job.send_at is None]
    waits = sum(map(request.expected_wait, untimed))
    return len(jobs) - len(untimed) + round(waits / SOON)


def give_back(using: str, attempt_ids: Sequence[int]) -> None:
    """Give back what somebody had locked when the others were begun, if it is free soon; else
    recovery does, past its lease.
    """
    void = partial(claim.give_back, using, attempt_ids)
    for pause in LOCKED:
        if not database.persist(using, void, during="begin"):
            return
        time.sleep(pause)
