"""A pass of a process that makes what it releases: its attempts are begun as they are charged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import Mock

import pytest
from cryptography.fernet import Fernet
from django.db import OperationalError, connection

from callqueue import Rule, SlidingWindow, conf, database
from callqueue.dispatch.release_pass import Begins, Begun, ensure_states, release
from callqueue.exceptions import InvalidCall
from callqueue.execution import claim, flight, in_flight, recorder, request
from callqueue.maker import take_off
from callqueue.models import CallAttempt, CallQueue
from callqueue.transitions import Job
from tests.support.behaviour import Vendor, send

Rules = Callable[..., None]
Status = CallQueue.Status
pytestmark = [pytest.mark.django_db(transaction=True)]


def begin() -> list[Job]:
    """A pass of this process over rule r; the jobs that it has to make then."""
    ensure_states("default", ["r"])
    begun = release("default", ["r"], begins=Begins("me", claim.READS)).begun
    return [] if begun is None else claim.take_begun("default", begun.rows, begun.reading)


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
