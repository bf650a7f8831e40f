"""The maker: makes in this process what its dispenser releases, without broker and workers.

In: attempts that a pass has begun as it charged them. Out: the ends of their calls, in the
database. HTTP calls and those of handlers, tasks too, are made by the threads of the process's
flight, as in a worker; it takes no more of either than it has room for. Unknown calls are
reconciled in threads beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from callqueue import aside, broker, callbacks
from callqueue.dispatch.release_pass import Begins, Begun
from callqueue.dispatch.room import Room
from callqueue.execution import claim, in_flight, starvation
from callqueue.handlers import HTTP_METHODS
from callqueue.maintenance import reconcile

SLOTS = 4  # a process has room for as many HTTP calls as a worker with so many
HANDLED = 8  # calls of handlers at most: each has a thread, and perhaps a connection to a database
ASKING = 4  # threads that ask reconcile hooks at most


class Maker:
    """Makes the calls of one process. It has SLOTS times CALLS_PER_SLOT HTTP calls in flight at
    most, and HANDLED others. `leave` when no more are to come.
    """

    kind = "run"
    concurrency = SLOTS

    def __init__(self, using: str) -> None:
        self.using = using
        in_flight.know_worker(self)
        self.flight = in_flight.flight_of(using)
        self._asking: list[aside.Errand] = []

    def room(self) -> Room:
        """What may be released now; nothing while this process lacks what calls need."""
        under_way = list(self.flight.under_way.values())
        http = sum(job.call.method in HTTP_METHODS for job in under_way)
        most = 0 if starvation.pause.is_on else min(in_flight.most(), self.flight.crew.most())
        return Room(most - http, min(most, HANDLED) - (len(under_way) - http))

    def begins(self) -> Begins:
        """Who begins what the next pass releases."""
        return Begins(claim.name_worker(), claim.READS)

    def take(self, begins: Begins, begun: Begun) -> None:
        """Have these calls made."""
        jobs = claim.take_begun(self.using, begun.rows, begun.reading)
        self.flight.take_off(jobs)

    def reconcile(self, using: str, queues: Sequence[str]) -> None:
        """Ask what became of unknown calls, where there are any: beside what asks already, since a
        hook may hang.
        """
        self._asking = [one for one in self._asking if one.is_under_way]
        if queues and len(self._asking) < ASKING:
            errand = aside.Errand("reconcile", lambda: reconcile.ask_due(using))
            self._asking.append(errand)

    def leave(self) -> None:
        """Wait until what is in flight has ended, and for what announces it."""
        in_flight.tell_to_go()
        try:
            in_flight.land()
            broker.leave(callbacks.SENDING)
        finally:
            in_flight.know_worker(None)
