"""Records what came of attempts, and keeps trying while the database is away and a lease still
runs.

In: results. A result that cannot be stored keeps none of the others from it. What to write, and
whether it is still this worker's to write, `results` knows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from celery.exceptions import SoftTimeLimitExceeded
from django.db import connections

from callqueue import clocks, database, events
from callqueue.execution import results
from callqueue.execution.starvation import starved
from callqueue.maintenance import breaker
from callqueue.transitions import Job, Result


def record(using: str, ended: Sequence[Result], told: Sequence[Job] = ()) -> None:
    """Record, and keep trying while the database is away and a lease still runs: the answers are in
    hand. The ledger is told of `told`, which are under way, in the same breath, if all goes well.

    A result that cannot be stored keeps none of the others from it.
    """
    pause = 0.05
    while True:
        try:
            _lay_holds(using, ended)
            results.write(using, ended, told)
            break
        except Exception as error:
            if interruption(error) is not None:
                raise
            if not database.may_pass(error) and not starved(error):
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
            record(using, [result])
    elif not ended[0].is_bare:
        record(using, [results.without_texts(ended[0], error)])
    else:  # its lease decides
        events.emit("record_failed", **ended[0].job.facts, error=type(error).__name__)


def interruption(raised: BaseException | None) -> BaseException | None:
    """The time limit or signal that was raised, even if something went wrong because of it; None
    where this thread failed by itself, and would again.
    """
    while isinstance(raised, Exception) and not isinstance(raised, SoftTimeLimitExceeded):
        raised = raised.__context__
    return raised
