"""Makers: they make in this process, by its flight, what its dispenser releases, or a part."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from celery import current_app

from callqueue import broker, callbacks, clocks, conf
from callqueue.dispatch import publisher
from callqueue.dispatch.next_look import ROOMY, Room
from callqueue.dispatch.release_pass import Begun, Taker
from callqueue.execution import claim, process, starvation
from callqueue.handlers import HTTP_METHODS
from callqueue.look.alive import RUN, WORKER

SLOTS = 4  # a process has room for as many HTTP calls as a worker with so many
HANDLED = 8  # calls of handlers at most: each has a thread, and perhaps a connection to a database
HUNG = 64  # of those past their lease, at most so many take no room of others, only threads


class Maker:
    """Makes all that its process releases, tasks and other handlers' calls too, without broker and
    workers. At most SLOTS times CALLS_PER_SLOT HTTP calls are in flight, and HANDLED others.
    """

    kind = RUN
    concurrency = SLOTS

    def __init__(self, using: str) -> None:
        self.using = using
        process.note_worker(self)
        self.flight = process.flight_of(using)

    def room(self) -> Room:
        """What may be released now; nothing while this process lacks what calls need."""
        under_way, now = list(self.flight.under_way.values()), clocks.monotonic()
        http = sum(job.call.method in HTTP_METHODS for job in under_way)
        handled = [job for job in under_way if job.call.method not in HTTP_METHODS]
        hung = min(HUNG, sum(job.lease_ends_at < now for job in handled))
        most = (
            0
            if starvation.shortage.is_on
            else min(process.max_in_flight(), self.flight.crew.max_jobs())
        )
        return Room(most - http, min(most, HANDLED + hung) - len(handled))

    def taker(self) -> Taker:
        return Taker(claim.new_worker_name(), claim.READS, partial(take_off, self.using))

    def leave(self) -> None:
        """Take no more, and wait for what is in flight, and for messages that are being sent."""
        process.tell_to_go()
        try:
            process.land()
            broker.finish_sending(callbacks.SENDING)
        finally:
            process.note_worker(None)


class WorkersMaker:
    """Makes a few HTTP calls of the queues that its worker consumes; others are published."""

    kind = WORKER

    def __init__(self, using: str) -> None:
        self.using = using

    def room(self) -> Room:
        return ROOMY

    def taker(self) -> Taker | None:
        """Who begins the next pass's first calls; None where this process has enough to do."""
        flight = process.flight_of(self.using)
        most = min(conf.current().in_workers - len(flight.under_way), flight.room())
        if most <= 0:
            return None
        suits = cache(is_consumed)
        suits("")  # now: a router of the project's is not asked with the rules' rows locked
        take = partial(take_off, self.using)
        return Taker(claim.new_worker_name(), claim.READS, take, suits, most)


def take_off(using: str, begun: Begun) -> Callable[[bool], None]:
    """Have these calls made, once what this returns is told that they are begun."""
    jobs = claim.take_begun(using, begun.rows, begun.reading)
    return process.flight_of(using).take_off(jobs)


def is_consumed(queue: str) -> bool:
    """Whether this process's worker consumes a queue, by the name that rules have for it."""
    name = queue or broker.queue_of(current_app, publisher.MAKE_API_CALL)
    return name in current_app.amqp.queues.consume_from
