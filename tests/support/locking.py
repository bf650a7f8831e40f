"""Threads with connections of their own at the same rows, and statements that must not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, connection, connections, transaction
from django.utils import timezone

from callqueue import conf, database
from callqueue.dispatch.release_pass import release
from callqueue.execution import judging, wire
from callqueue.models import CallAttempt, CallQueue
from callqueue.transitions import Job, Result
from tests.support.behaviour import response

PATIENCE = 30  # seconds after which a thread that waits for another one has lost it


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run these at the same time in threads; what they returned, or the first exception."""
    barrier = threading.Barrier(len(works))
    ends: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def one(place: int) -> None:
        try:
            barrier.wait(PATIENCE)
            ends[place] = works[place]()
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=one, args=(n,), daemon=True) for n in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    hangs = any(thread.is_alive() for thread in threads)
    assert not hangs, "a thread hangs: a deadlock that the database does not see"
    if errors:
        raise errors[0]
    return ends


def halted(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> tuple[threading.Event, threading.Event]:
    """Whoever comes to this function sets the first event and goes on when the second is set."""
    came, may_go = threading.Event(), threading.Event()
    real = getattr(module, name)

    def halting(*args: Any) -> Any:
        came.set()
        assert may_go.wait(PATIENCE)
        return real(*args)

    monkeypatch.setattr(module, name, halting)
    return came, may_go


@contextmanager
def beside_a_frozen(work: Callable[[Callable[..., None]], Any]) -> Iterator[list[bool]]:
    """A thread does this until it calls what it is given: there it stands still until the block
    ends. Something is in the list where it was waited for, and went on by itself.
    """
    came, thaw, went_on = threading.Event(), threading.Event(), list[bool]()

    def freeze(*_: Any) -> None:
        came.set()
        went_on.append(thaw.wait(PATIENCE))

    def run() -> None:
        try:
            with suppress(DatabaseError):
                work(freeze)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert came.wait(PATIENCE)
        yield went_on
    finally:
        thaw.set()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "it waits for who was to go on beside it"


def released_by(rule: str) -> list[int]:
    """What one pass over the rule's group releases; another dispenser at work is waited for."""
    for _ in range(500):
        made = release("default", conf.current().book.groups[rule])
        if not made.next_look.streak.locked:
            return [r.attempt_id for r in made.released]
    raise AssertionError("the group stays locked")


def answered(job: Job, status: int = 200) -> Result:
    """The report of an answer, as the executor makes it."""
    answer = wire.Answer(response=response(status, {}, b"{}"), sent_at=job.clock.after, sent=True)
    return judging.result_of_answer(job, answer)


def end_leases() -> None:
    CallAttempt.objects.open().update(lease_until=timezone.now() - timedelta(seconds=1))


def fresh(call: CallQueue) -> CallQueue:
    return CallQueue.objects.get(pk=call.pk)


def status_of(call: CallQueue) -> int:
    return fresh(call).status


@contextmanager
def held_by_a_host(*pks: int, first: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """Another's transaction has these rows locked, and has done what `first` does."""

    def host(freeze: Callable[..., None]) -> None:
        with transaction.atomic():
            first()
            list(CallQueue.objects.select_for_update().filter(pk__in=pks).order_by("pk"))
            freeze()
            transaction.set_rollback(True)

    with beside_a_frozen(host):
        yield


@contextmanager
def waiting_for_nobody() -> Iterator[None]:
    """In this thread a statement that waits for a lock fails, after a second or two."""
    name, value = {
        "postgresql": ("lock_timeout", "'1500ms'"),
        "mysql": ("innodb_lock_wait_timeout", "2"),
    }[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION {name} = {value}")
    try:
        yield
    finally:
        connection.close()


def until_one_waits_for_a_lock() -> None:
    """Return once some statement waits for a row that another transaction has locked."""
    waiting = {
        "postgresql": "SELECT COUNT(*) FROM pg_locks WHERE NOT granted",
        "mysql": "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
    }[connection.vendor]
    end = time.monotonic() + PATIENCE
    while not database.rows("default", waiting)[0][0]:
        assert time.monotonic() < end, "nobody waits for a lock"
        time.sleep(
            0.15
        )  # MariaDB renews what it shows after a tenth of a second without a question
