"""Makes calls in this thread, one after the other: begin, make, record. Never retries by itself.
Here run the calls that are not HTTP, and all calls of tasks that run eagerly and of the testing
kit; a worker's HTTP calls are made by its flight.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from django.db import DatabaseError, InterfaceError

from callqueue import database, telemetry, transitions
from callqueue.execution import claim, judging, recorder, request
from callqueue.transitions import Job, Result

LOCKED = (0.05, 0.1, 0.2, 0.4, 0.8)  # seconds between looks at attempts that somebody has locked


def execute(using: str, attempt_ids: Sequence[int]) -> int:
    """Make the calls of these attempts, those still to be begun; the count, once all are recorded.
    The rest is given back, `give_back_once_free`. Whatever is raised in this thread, what has been
    sent is recorded and what has not is given back; then it is raised again.
    """
    execution = _Execution(using, attempt_ids)
    try:
        return execution.make_calls()
    except BaseException as struck:
        execution.record_or_give_back(struck)
        interruption = recorder.interruption(struck)
        if interruption is not None and interruption is not struck:
            raise interruption from struck
        raise


class _Execution:
    """One execution of these attempts, and the results that it still owes where it is struck."""

    def __init__(self, using: str, attempt_ids: Sequence[int]) -> None:
        self.using, self.attempt_ids, self.worker = using, attempt_ids, claim.new_worker_name()
        self.jobs: list[Job] | None = None
        self.owed: list[Result] = []

    def make_calls(self) -> int:
        self.jobs = claim.begin(self.using, self.attempt_ids, self.worker)
        make = telemetry.traced(request.make)
        self._record([judging.result_of_unfit(job) for job in self.jobs if job.unfit is not None])
        for job in self.jobs:
            if job.unfit is None:
                self._record([make(job)])
        if len(self.jobs) < len(self.attempt_ids):
            give_back_once_free(self.using, self.attempt_ids)
        return len(self.jobs)

    def record_or_give_back(self, struck: BaseException) -> None:
        """Record what was made, void what was not sent; if the database fails, leases decide."""
        database.close_all()  # what struck may have done so in the middle of an answer
        # an interrupted begin is repeated: by the worker's name it finds what it took
        if self.jobs is None and recorder.interruption(struck) is not None:
            self.jobs = claim.begin(self.using, self.attempt_ids, self.worker)
        owed = {result.job.attempt.id for result in self.owed}
        unsent = [job for job in self.jobs or () if job.gate is None or not job.gate.is_passed]
        left = [job for job in unsent if job.attempt.id not in owed]
        with suppress(DatabaseError, InterfaceError):
            self._record([*self.owed, *(transitions.after_void(job, request.LEFT) for job in left)])

    def _record(self, results: list[Result]) -> None:
        self.owed = results
        if results:
            recorder.record(self.using, results)
            self.owed = []


def give_back_once_free(using: str, attempt_ids: Sequence[int]) -> None:
    """Void what is still to be begun, if it is free in a second or so; else recovery does."""
    void = partial(claim.give_back, using, attempt_ids)
    for pause in LOCKED:
        if not database.persist(using, void, during="begin"):
            return
        time.sleep(pause)
