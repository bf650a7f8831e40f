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

from celery.exceptions import SoftTimeLimitExceeded
from django.db import DatabaseError, InterfaceError, connections

from callqueue import clocks, database, events, telemetry, transitions
from callqueue.execution import claim, judging, request, results, thread_pool
from callqueue.handlers import HTTP_METHODS
from callqueue.maintenance import breaker
from callqueue.transitions import Job, Result

LOCKED = (0.05, 0.1, 0.2, 0.4, 0.8)  # seconds between looks at attempts that somebody has locked
# seconds that a worker that is told to go at once stays for what has just been answered
LEAVING = 1.0
SOON = 0.02  # seconds within which the calls of a message should all be sent, those that are due


def execute(
    using: str, attempt_ids: Sequence[int], *, inline: bool = False, interruptible: bool = False
) -> int:
    """Make the calls of these attempts, those that are still to be begun; the count of them.

    HTTP calls run side by side unless `inline`; others one after the other in this thread, which
    may use the ORM. In a thread that is `interruptible`, by a time limit, no HTTP call runs.
    Whatever is raised in this thread, what has been sent is recorded and what has not is given
    back; then it is raised again.
    """
    message = _Message(using, attempt_ids)
    try:
        return message.make(inline, interruptible)
    except BaseException as struck:
        message.leave(struck)
        striker = _striker(struck)
        if striker is not None and striker is not struck:
            raise striker from struck
        raise


class _Message:
    """The calls of one message, in this worker: some are made in this thread, the others are the
    thread pool's.
    """

    def __init__(self, using: str, attempt_ids: Sequence[int]) -> None:
        self.using, self.attempt_ids, self.worker = using, attempt_ids, claim.name_worker()
        self.jobs: list[Job] | None = None
        self.owed: list[Result] = []
        self.shift: thread_pool.Shift[Job, Result] | None = None

    def make(self, inline: bool, interruptible: bool) -> int:
        """Begin, make and record them; the count of those begun."""
        self.jobs = jobs = claim.begin(self.using, self.attempt_ids, self.worker)
        apart, here = _shared_out(jobs, inline, interruptible)
        make = telemetry.traced(request.make)
        self.shift = thread_pool.Shift(apart, make)
        self.owed = [judging.unfit(job) for job in jobs if job.unfit is not None]
        self._record_owed()
        for ended in self.shift.run(_hands(apart)):
            _record(self.using, ended)
        for job in here:
            self.owed = [make(job)]
            self._record_owed()
        if len(jobs) < len(self.attempt_ids):
            _give_back(self.using, self.attempt_ids)
        return len(jobs)

    def leave(self, struck: BaseException) -> None:
        """Give back what was not sent, and record what was: all of it where the process lives on,
        else what ends in a moment.
        """
        database.close_all()  # what struck may have done so in the middle of an answer
        striker = _striker(struck)
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
            _record(self.using, self.owed)
            self.owed = []


def _record(using: str, ended: Sequence[Result]) -> None:
    """Record, and keep trying while the database is away and a lease still runs: the answers are in
    hand.

    A result that cannot be stored keeps none of the others from it.
    """
    pause = 0.05
    while True:
        try:
            _lay_holds(using, ended)
            results.record(using, ended)
            break
        except Exception as error:
            if _striker(error) is not None:
                raise
            if not database.may_pass(error):
                return _record_apart(using, ended, error)
            _wait_for_database(using, ended, error, pause)
            pause = min(2.0, pause * 2)
    breaker.observe(using, ended)


def _lay_holds(using: str, ended: Sequence[Result]) -> None:
    for result in ended:
        if result.hold is not None:
            results.lay(using, result, result.hold)
            result.hold = None


def _wait_for_database(using: str, ended: Sequence[Result], error: Exception, pause: float) -> None:
    """Wait for a moment, while a lease still runs; else raise the error again."""
    why = type(error).__name__
    if database.in_transaction(using):
        # A test's: what broke it stays broken, and its connection is not ours to close.
        raise error
    if clocks.monotonic() + pause >= max(result.job.lease_ends for result in ended):
        events.emit("database_away", during="record", error=why, calls=len(ended))
        raise error
    events.emit("record_delayed", calls=len(ended), error=why)
    connections[using].close()
    time.sleep(pause)


def _record_apart(using: str, ended: Sequence[Result], error: Exception) -> None:
    """Record each result by itself, and one that cannot be stored without its texts."""
    if len(ended) > 1:
        for result in ended:
            _record(using, [result])
    elif not ended[0].is_bare:
        _record(using, [results.without_texts(ended[0], error)])
    else:  # its lease decides
        job, why = ended[0].job, type(error).__name__
        facts = {"call_id": job.pk, "rule": job.rule_name, "attempt": job.number}
        events.emit("record_failed", **facts, error=why)


def _shared_out(
    jobs: Sequence[Job], inline: bool, interruptible: bool
) -> tuple[list[Job], list[Job]]:
    """The jobs that are made side by side, by the thread pool, and those that this thread makes."""
    sound = [job for job in jobs if job.unfit is None]
    wired = [job for job in sound if job.method in HTTP_METHODS and not inline]
    if len(wired) > 1 or (wired and interruptible):
        return wired, [job for job in sound if job.method not in HTTP_METHODS]
    return [], sound


def _hands(jobs: Sequence[Job]) -> int:
    """How many threads begin: one for each call that has an instant of its own, connected and
    waiting when it comes, and enough for the others to be sent within a few milliseconds, as long
    as answers take as long as the last ones.
    """
    untimed = [job.rule_name for job in jobs if job.send_at is None]
    waits = sum(map(request.expected_wait, untimed))
    return len(jobs) - len(untimed) + round(waits / SOON)


def _give_back(using: str, attempt_ids: Sequence[int]) -> None:
    """Give back what somebody had locked when the others were begun, if it is free soon; else
    recovery does, past its lease.
    """
    give_back = partial(claim.give_back, using, attempt_ids)
    for pause in LOCKED:
        if not database.persist(using, give_back, during="begin"):
            return
        time.sleep(pause)


def _striker(raised: BaseException | None) -> BaseException | None:
    """The time limit or signal that was raised, even if something went wrong because of it; None
    where this thread failed by itself, and would again.
    """
    while isinstance(raised, Exception) and not isinstance(raised, SoftTimeLimitExceeded):
        raised = raised.__context__
    return raised
