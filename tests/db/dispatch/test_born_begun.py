"""A pass of a process that makes what it releases: its attempts are begun as they are charged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from cryptography.fernet import Fernet
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from callqueue import Rule, SlidingWindow, conf, database, states
from callqueue.dispatch.dispenser import Dispenser
from callqueue.dispatch.next_look import ROOMY, Room
from callqueue.dispatch.release_pass import Begins, Begun, ensure_states, release
from callqueue.exceptions import InvalidCall
from callqueue.execution import claim, flight, in_flight, recorder, request
from callqueue.maintenance import recovery
from callqueue.maker import take_off
from callqueue.models import CallAttempt, CallQueue
from callqueue.transitions import Job
from tests.support.behaviour import Vendor, send

Rules = Callable[..., None]
Status = CallQueue.Status
pytestmark = [pytest.mark.django_db(transaction=True)]


def begin(worker: str = "me", room: Room = ROOMY) -> list[Job]:
    """A pass of this process over rule r; the jobs that it has to make then."""
    ensure_states("default", ["r"])
    begins = Begins(worker, claim.READS)
    begun = release("default", ["r"], room=room, begins=begins).begun
    return [] if begun is None else claim.take_begun("default", begun.rows, begun.reading)


class Maker:
    """One that hands over to a list, if it does."""

    kind = "run"

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.jobs, self.names = fails, list[Any](), list[str]()

    def room(self) -> Room:
        return ROOMY

    def begins(self) -> Begins:
        self.names.append(claim.name_worker())
        return Begins(self.names[-1], claim.READS, self.take)

    def take(self, begun: Begun) -> Callable[[bool], None]:
        jobs = claim.take_begun("default", begun.rows, begun.reading)

        def clear(is_begun: bool) -> None:
            if self.fails:
                raise OperationalError("the answer to the commit was lost")
            self.jobs += jobs if is_begun else []

        return clear


@pytest.mark.parametrize("keys", [[], [Fernet.generate_key().decode()]], ids=["plain", "sealed"])
def test_a_job_is_what_a_worker_would_have_begun(
    rules: Rules, remote: Vendor, keys: list[str]
) -> None:
    rules({"ENCRYPTION_KEYS": keys}, r=Rule(limits=[SlidingWindow("100/s")]))
    options = {"key": "k", "callback": "tests.echo", "cost": {"calls": 2, "tokens": 7}}
    send("r", **options)
    (mine,) = begin()
    attempt = CallAttempt.objects.get()
    assert (attempt.worker, attempt.started_at, attempt.pk) == (
        "me",
        attempt.released_at,
        mine.attempt.id,
    )
    lease = timedelta(seconds=conf.current().lease(conf.current().rules["r"]))
    assert attempt.lease_until == attempt.released_at + lease
    send("r", **options)
    release("default", ["r"])
    (theirs,) = claim.begin("default", [CallAttempt.objects.latest("pk").pk])
    own = {"id", "worker", "due_at_dt", "idempotency_key", "released_at", "started_at"}
    for row, read in (("attempt", claim.OF_ATTEMPT), ("call", claim.READS)):
        for name in set(read) - own:
            of_mine, of_theirs = (vars(getattr(job, row))[name] for job in (mine, theirs))
            assert of_mine == of_theirs, name
    assert (mine.rule, mine.unfit) == (theirs.rule, theirs.unfit)
    assert mine.call.idempotency_key
    assert abs(mine.lease_ends - theirs.lease_ends) < 60
    recorder.record("default", [request.make(mine)])
    assert CallQueue.objects.get(pk=mine.call.pk).status == Status.DONE


def test_nobody_else_begins_it(rules: Rules) -> None:
    rules(r=Rule())
    send("r")
    (job,) = begin()
    assert not claim.begin("default", [job.attempt.id])
    assert claim.give_back("default", [job.attempt.id]) == 0
    assert CallQueue.objects.get().status == Status.DISPATCHED


def test_it_waits_for_the_disk_as_a_begin_does(rules: Rules) -> None:
    """What may be on the wire must not be forgotten; and begin is no statement of its own."""
    rules(r=Rule())
    send("r")
    with CaptureQueriesContext(
        connection,
    ) as said:
        begin()
    queries = [one["sql"] for one in said.captured_queries]
    assert not any("synchronous_commit" in sql for sql in queries)
    assert not any(sql.startswith("UPDATE") and "started_at" in sql for sql in queries)


def test_a_slot_that_is_still_to_open_is_waited_for(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/s", jitter=0.0)]))
    send("r")
    send("r")
    (first,) = begin()
    assert first.attempt.send_at is None
    recorder.record("default", [request.make(first)])
    end = time.monotonic() + 5
    jobs = begin("again")
    while not jobs and time.monotonic() < end:
        time.sleep(0.01)
        jobs = begin("again")
    (job,) = jobs
    attempt = CallAttempt.objects.latest("pk")
    assert job.attempt.send_at is not None
    assert attempt.send_at is not None
    assert job.slot_opens() > job.clock.before
    assert attempt.lease_until > attempt.send_at


def test_no_more_than_there_is_room_for(rules: Rules) -> None:
    rules(r=Rule())
    for _ in range(3):
        send("r")
        CallQueue.objects.send({"method": "celery_task", "params": {"name": "tests.x"}}, rule="r")
    methods = [job.call.method for job in begin(room=Room(http=2, handled=1))]
    assert sorted(methods) == ["celery_task", "post", "post"]
    assert CallQueue.objects.new().count() == 3


def test_what_is_perhaps_committed_and_made_by_nobody_goes_again(rules: Rules) -> None:
    """Else it would be held for its lease, and a POST end as unknown that was never sent."""
    rules(r=Rule())
    send("r")
    others = Maker()
    Dispenser(maker=others).tick()
    send("r")
    mine = Maker(fails=True)
    dispenser = Dispenser(maker=mine)
    with pytest.raises(OperationalError):
        dispenser.tick()
    assert CallAttempt.objects.open().count() == 2
    mine.fails = False
    dispenser.groups["r",].wake()
    dispenser.tick()
    (job,) = mine.jobs
    assert job.attempt.number == 2
    before = CallAttempt.objects.filter(call=job.call.pk, number__lt=job.attempt.number)
    assert set(before.values_list("outcome", flat=True)) == {states.VOIDED}
    assert CallAttempt.objects.get(call=others.jobs[0].call.pk).finished_at is None


@pytest.mark.parametrize("what", ["is made", "is undone", "cannot be made"])
def test_what_is_composed_meanwhile_is_sent_and_recorded_once_it_is_begun_for_certain(
    rules: Rules, remote: Vendor, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Sent before, it could go twice; recorded before, there is no row yet, and nobody would know
    what became of it.
    """
    stands, wait = threading.Event(), flight.Clearance.wait
    monkeypatch.setattr(flight.Clearance, "wait", lambda one: stands.set() or wait(one))
    if what == "cannot be made":
        monkeypatch.setattr(request, "disclose", Mock(side_effect=InvalidCall("params", "odd")))

    def take(begun: Begun) -> Callable[[bool], None]:
        clear = take_off("default", begun)
        assert stands.wait(20)
        assert not remote.requests
        if what == "is undone":
            monkeypatch.setattr(connection, "_commit", Mock(side_effect=OperationalError("cut")))
        return clear

    rules(r=Rule())
    ensure_states("default", ["r"])
    send("r")
    with pytest.raises(OperationalError) if what == "is undone" else nullcontext():
        release("default", ["r"], begins=Begins("me", claim.READS, take))
    monkeypatch.undo()
    in_flight.land(seconds=20)
    database.close_kept("default")
    said = CallQueue.objects.get().status, len(remote.requests), CallAttempt.objects.count()
    assert (
        said
        == {
            "is made": (Status.DONE, 1, 1),
            "is undone": (Status.NEW, 0, 0),
            "cannot be made": (Status.FAILED, 0, 1),
        }[what]
    )


def test_a_process_that_dies_leaves_them_to_their_leases(rules: Rules) -> None:
    rules({"LEASE": {"RELEASE": 300, "GRACE": 0.1}}, r=Rule(total_timeout=0.2))
    send("r")
    send("r", method="get")
    begin()
    assert recovery.recover("default") == 0
    time.sleep(0.4)
    assert recovery.recover("default") == 2
    said = dict(CallQueue.objects.values_list("method", "status"))
    assert said == {"post": Status.UNKNOWN, "get": Status.ERROR}
