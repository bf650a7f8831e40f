"""A dispenser in a worker. Real workers: tests/acceptance/test_a_worker_alone.py."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from celery import current_app
from cryptography.fernet import Fernet
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

import callqueue
from callqueue import (
    Concurrency,
    Rule,
    SlidingWindow,
    broker,
    conf,
    database,
    tasks,
    texts,
    transitions,
    worker,
)
from callqueue.dispatch import publisher
from callqueue.dispatch.dispenser import Dispenser, give_sign_of_life, note_dispenser_gone
from callqueue.dispatch.publisher import MAKE_API_CALL, Message
from callqueue.dispatch.release_pass import Begun, Taker, ensure_state_rows, release
from callqueue.exceptions import InvalidCall
from callqueue.execution import claim, flight, process, recorder, request
from callqueue.ledger import ledger_time
from callqueue.limits.in_force import digest_of, opinion_of
from callqueue.look import alive
from callqueue.look.alive import BEAT, BUSY, RUN, STEADY, WORKER
from callqueue.maker import WorkersMaker, is_consumed, take_off
from callqueue.models import CallAttempt, CallQueue, DispenserState
from callqueue.transitions import Job
from callqueue.worker import Releaser, Seat
from tests.support.behaviour import Vendor, lose_what_became_of_its_commit, send
from tests.support.verdicts import wait_until
from tests.support.waiters import new_waiter, pass_now

Rules = Callable[..., None]
Status = CallQueue.Status
pytestmark = [pytest.mark.django_db(transaction=True)]


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Message]]:
    """What is sent to workers; whatever is in flight has landed at the end."""
    sent: list[Message] = []
    monkeypatch.setattr(process, "_flights", {})
    monkeypatch.setattr(publisher, "publish", lambda using, batch: sent.extend(batch))
    yield sent
    process.land(seconds=20)
    database.close_kept("default")


@pytest.fixture
def consumes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def consume(*queues: str) -> None:
        monkeypatch.setattr(current_app.amqp.queues, "_consume_from", dict.fromkeys(queues))

    return consume


def dispenser(published: list[Message]) -> Dispenser:
    return Dispenser(
        maker=WorkersMaker("default"), publish=lambda using, batch: published.extend(batch)
    )


# --- What it makes


def test_it_makes_the_first_calls_of_its_queues_and_publishes_the_rest(
    rules: Rules, remote: Vendor, published: list[Message], consumes: Callable[..., None]
) -> None:
    consumes("here")
    rules(
        {"DISPENSER": {"IN_WORKERS": 3}},
        r=Rule(queues="here", limits=[SlidingWindow("100/s")]),
        other=Rule(queues="elsewhere", limits=[SlidingWindow("100/s")]),
    )
    calls = [send("r") for _ in range(5)]
    theirs = send("other")
    task = CallQueue.objects.send({"method": "celery_task", "params": {"name": "x"}}, rule="r")
    assert task is not None
    assert dispenser(published).run_once(maintain=False) == 7
    process.land(seconds=20)
    made = [CallQueue.objects.get(pk=call.pk).status for call in calls]
    assert made == [Status.DONE] * 3 + [Status.DISPATCHED] * 2
    assert len(remote.requests) == 3
    to_workers = {pk for _, ids in published for pk in ids}
    unbegun = CallAttempt.objects.filter(started_at=None)
    assert to_workers == set(unbegun.values_list("pk", flat=True))
    assert {theirs.pk, task.pk} < set(unbegun.values_list("call", flat=True))
    lease = timedelta(seconds=conf.current().release_lease)
    assert all(one.lease_until - one.released_at == lease for one in unbegun)


def test_where_it_makes_any_the_release_of_the_others_waits_for_the_disk_too(
    rules: Rules, remote: Vendor, published: list[Message], consumes: Callable[..., None]
) -> None:
    """What may be on the wire is not to be forgotten. Of what it does not make nothing is read."""
    consumes("here")
    rules({"DISPENSER": {"IN_WORKERS": 1}}, r=Rule(queues="here"))
    send("r"), send("r")
    mixed = dispenser(published)
    with CaptureQueriesContext(connection) as said:
        mixed.run_once(maintain=False)
    queries = [one["sql"] for one in said.captured_queries]
    updates = [sql for sql in queries if sql.startswith("UPDATE") and "dispatched_at_dt" in sql]
    assert not any("synchronous_commit" in sql for sql in updates)
    assert len(updates) == 2
    reading = [sql for sql in queries if "call_data" in sql and "UPDATE" in sql]
    assert len(reading) == (connection.vendor == "postgresql")


def test_while_the_broker_is_away_it_goes_on_with_what_it_makes_itself(
    rules: Rules, remote: Vendor, consumes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that hangs would keep all back, each time."""
    refused: list[int] = []

    def refuse(using: str, batch: Sequence[Message]) -> None:
        refused.append(transitions.void_and_log(using, [pk for _, ids in batch for pk in ids]))
        raise publisher.BrokerAway("it says nothing")

    consumes("here")
    rules({"DISPENSER": {"IN_WORKERS": 2}}, r=Rule(queues="here"))
    for _ in range(7):
        send("r")
    monkeypatch.setattr(publisher, "ALONE", 20.0)
    releases = Dispenser(maker=WorkersMaker("default"), publish=refuse)
    assert releases.run_once(maintain=False) == 7
    for made in (4, 6):
        process.land(seconds=20)
        assert releases.run_once(maintain=False) == 2
        process.land(seconds=20)
        assert len(remote.requests) == made
    assert refused == [5]
    releases.outbox.alone_until = 0.0
    send("r"), send("r")
    releases.run_once(maintain=False)
    assert refused == [5, 1]


def test_what_is_perhaps_committed_and_made_by_nobody_goes_again(
    rules: Rules,
    remote: Vendor,
    published: list[Message],
    consumes: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The part that it would have made, and the part that was not published."""
    consumes("here")
    rules({"DISPENSER": {"IN_WORKERS": 1}}, r=Rule(queues="here", limits=[SlidingWindow("9/s")]))
    others = send("r")
    ensure_state_rows("default", ["r"])
    release("default", ["r"])
    claim.begin("default", [others.attempts.get().pk], "another")
    send("r"), send("r")
    releases = dispenser(published)

    lose_what_became_of_its_commit(monkeypatch, releases)
    assert CallAttempt.objects.open().count() == 3
    releases.run_once(maintain=False)
    process.land(seconds=20)
    assert len(remote.requests) == 1
    assert [len(ids) for _, ids in published] == [1]
    assert CallAttempt.objects.filter(outcome="voided").count() == 2
    assert others.attempts.get().outcome == ""


def test_a_router_of_the_projects_is_not_asked_while_a_pass_has_the_rules(
    rules: Rules,
    remote: Vendor,
    published: list[Message],
    consumes: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may ask the database, and swallow what that says."""
    asked: list[bool] = []

    def route(*_: object) -> str:
        asked.append(database.in_transaction("default"))
        return "main"

    consumes("main")
    monkeypatch.setattr(broker, "queue_of", route)
    rules(r=Rule(limits=[SlidingWindow("100/s")]))
    for _ in range(3):
        send("r")
    assert dispenser(published).run_once(maintain=False) == 3
    process.land(seconds=20)
    assert len(remote.requests) == 3
    assert asked
    assert not any(asked)


def test_a_worker_releases_where_it_consumes_a_queue_of_a_rule_by_its_name_or_the_default(
    rules: Rules, consumes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    consumes("b", "celery")
    assert list(map(is_consumed, ["a", "b", ""])) == [False, True, True]
    monkeypatch.setattr(broker, "queue_of", lambda *_: "main")
    assert list(map(is_consumed, ["a", "b", ""])) == [False, True, False]
    rules(r=Rule(queues="here"), default=Rule(queues="elsewhere"))
    assert not worker._is_to_release_here()
    consumes("b", "here", "main")
    assert is_consumed("")
    assert worker._is_to_release_here()
    rules({"DISPENSER": {"IN_WORKERS": 0}}, r=Rule(queues="here"))
    assert not worker._is_to_release_here()


# --- What is begun as it is charged


def begin() -> list[Job]:
    """A pass of this process over rule r; the jobs that it has to make then."""
    ensure_state_rows("default", ["r"])
    begun = release("default", ["r"], taker=Taker("me", claim.READS)).begun
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
    lease = timedelta(seconds=conf.current().begun_lease(conf.current().rules["r"]))
    assert attempt.lease_until == attempt.released_at + lease
    send("r", **options)
    release("default", ["r"])
    (theirs,) = claim.begin("default", [CallAttempt.objects.latest("pk").pk])
    own = {"id", "worker", "due_at_dt", "idempotency_key", "released_at", "started_at"}
    own |= {"dispatched_at_dt"}
    for row, read in (("attempt", claim.OF_ATTEMPT), ("call", claim.READS)):
        for name in set(read) - own:
            of_mine, of_theirs = (vars(getattr(job, row))[name] for job in (mine, theirs))
            assert of_mine == of_theirs, name
    assert (mine.rule, mine.unfit) == (theirs.rule, theirs.unfit)
    assert mine.call.idempotency_key
    assert abs(mine.lease_ends_at - theirs.lease_ends_at) < 60
    recorder.record("default", [request.make(mine)])
    assert CallQueue.objects.get(pk=mine.call.pk).status == Status.DONE


def test_a_permit_that_waits_is_charged_and_left_to_its_waiter(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(1)]))
    with callqueue.permit("r"):
        one = new_waiter()
        one.step()
    assert begin() == []
    charged = CallAttempt.objects.open().get()
    assert (charged.started_at, pass_now(one).attempt.id) == (None, charged.pk)


@pytest.mark.parametrize("what", ["is made", "is undone", "cannot be made"])
def test_what_is_composed_meanwhile_is_sent_and_recorded_once_it_is_begun_for_certain(
    rules: Rules, remote: Vendor, what: str
) -> None:
    """Sent before, it could go twice; recorded before, it has no row yet."""
    monkeypatch = pytest.MonkeyPatch()
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
    ensure_state_rows("default", ["r"])
    send("r")
    with pytest.raises(OperationalError) if what == "is undone" else nullcontext():
        release("default", ["r"], taker=Taker("me", claim.READS, take))
    monkeypatch.undo()
    process.land(seconds=20)
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


# --- Which one releases


@pytest.mark.parametrize("is_there", [True, False])
def test_beats_task_dispenses_where_nobody_else_does_and_says_that_it_runs(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """Whom it leaves the work to: test_who_goes_first."""
    rules(r=Rule())
    ran = Mock()
    monkeypatch.setattr(tasks, "_dispensers", {})
    other = Dispenser(publish=lambda *_: True, name="of its own")
    other.membership.kind = STEADY
    other.run_once()
    if not is_there:
        other.leave()
    monkeypatch.setattr(Dispenser, "run", ran)
    tasks.dispense()
    assert ran.called is not is_there
    if is_there:
        assert DispenserState.objects.filter(kind=BEAT, digest="").count() == 1


def test_the_command_is_steady_and_what_runs_for_a_while_or_for_some_rules_is_not(
    rules: Rules,
) -> None:
    rules(r=Rule())

    def kind(seconds: float | None, **how: Any) -> str:
        dispenser = Dispenser(publish=lambda *_: True, **how)
        dispenser.run(stop=Mock(is_set=Mock(side_effect=[False, True, True])), seconds=seconds)
        return DispenserState.objects.get(pk=dispenser.name).kind

    assert [kind(None), kind(60.0), kind(None, rules=["r"])] == ["steady", "", ""]


@pytest.mark.parametrize(
    ("kind", "releases", "other", "is_outranked"),
    [
        (WORKER, False, STEADY, True),
        (WORKER, True, STEADY, True),
        (WORKER, False, WORKER, True),
        (BUSY, False, BUSY, True),
        (BUSY, True, WORKER, True),
        (WORKER, False, BUSY, False),
        (WORKER, False, BEAT, False),
        (WORKER, False, RUN, False),
        (WORKER, False, "", False),
        (BEAT, True, WORKER, True),
        (BEAT, True, BUSY, True),
        (BEAT, True, BEAT, False),
    ],
)
def test_who_goes_first(
    rules: Rules, kind: str, releases: bool, other: str, is_outranked: bool
) -> None:
    """Of two alike that release, one goes on."""
    rules(r=Rule())
    digest = digest_of(opinion_of(conf.current().book))

    def judged(name: str = "m") -> bool:
        own = name if kind != BEAT else ""
        return alive.is_outranked("default", kind, own, releases=releases)

    give_sign_of_life("default", "k", other, digest="other")
    assert not judged()
    give_sign_of_life("default", "k", other, digest=digest)
    assert judged() == is_outranked
    assert not judged("k") or kind == BEAT, "by himself"
    if kind == other == WORKER:
        assert [alive.is_outranked("default", kind, name) for name in "am"] == [False, True]
    DispenserState.objects.update(seen_at=ledger_time.now("default") - timedelta(seconds=21))
    assert not judged()


def test_who_comes_after_a_worker_that_was_killed_need_not_wait_for_its_silence(
    rules: Rules, seat: Seat
) -> None:
    rules(r=Rule())
    digest, host = digest_of(opinion_of(conf.current().book)), texts.host_name()
    killed = subprocess.Popen(["true"])
    killed.wait()
    dead = {f"{host}:{killed.pid}:1", f"{host}:{os.getpid()}:2"}
    others = {f"{host}:{os.getppid()}:3", f"elsewhere:{killed.pid}:4", seat.name}
    for name in dead | others:
        give_sign_of_life("default", name, WORKER, digest=digest)
    give_sign_of_life("default", f"{host}:{killed.pid}:5", STEADY, digest=digest)
    worker._bury_dead("default", seat)
    assert {one.name for one in alive.running_dispensers("default")} == {
        *others,
        f"{host}:{killed.pid}:5",
    }


@pytest.fixture
def seat(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seat]:
    """Where the system allows it, without a folder that can be written to, as in a container."""
    with monkeypatch.context() as patched:
        if hasattr(os, "memfd_create"):
            patched.setattr(tempfile, "tempdir", "/proc/nowhere")
        made = Seat()
    with made._file:
        yield made


def test_one_stands_by_for_a_dispenser_and_takes_over_at_its_end(
    rules: Rules,
    remote: Vendor,
    consumes: Callable[..., None],
    seat: Seat,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """One that seems killed may be in another container with the same host's name."""
    consumes("here")
    rules(r=Rule(queues="here"))
    digest, killed = digest_of(opinion_of(conf.current().book)), subprocess.Popen(["true"])
    killed.wait()
    give_sign_of_life("default", "d", STEADY, digest=digest)
    monkeypatch.setattr(worker, "LOOK", 0.05)
    monkeypatch.setattr(worker, "WAIT", 0.05)
    call, releaser = send("r"), Releaser("default", seat)
    request.addfinalizer(lambda: (releaser.end(), releaser._thread.join(20)))
    time.sleep(0.5)
    assert not releaser.is_releasing
    name = f"{texts.host_name()}:{killed.pid}:1"
    give_sign_of_life("default", name, WORKER, digest=digest)
    note_dispenser_gone("default", "d")
    time.sleep(0.5)
    assert not releaser.is_releasing
    overdue = timedelta(seconds=worker.OVERDUE)
    DispenserState.objects.filter(pk=name).update(seen_at=ledger_time.now("default") - overdue)
    wait_until(lambda: CallQueue.objects.get(pk=call.pk).status == Status.DONE, 10)
    assert releaser.is_releasing
    give_sign_of_life("default", "d", STEADY, digest=digest)
    wait_until(lambda: not releaser.is_releasing, 10)
    assert DispenserState.objects.get(pk=seat.name).digest == ""


def test_a_process_that_ends_waits_no_longer_than_for_what_is_being_released(
    monkeypatch: pytest.MonkeyPatch, rules: Rules, seat: Seat
) -> None:
    """Not for the pause after which its thread would have tried to have the seat again."""
    monkeypatch.setattr(worker, "LOOK", 20.0)
    monkeypatch.setattr(worker, "WAIT", 20.0)
    rules(r=Rule())
    releaser = Releaser("default", seat)
    wait_until(lambda: releaser.is_releasing, 10)
    began = time.monotonic()
    releaser.end()
    assert not releaser._thread.is_alive()
    assert time.monotonic() - began < 10


def test_tasks_that_have_calls_made_do_not_compute(
    monkeypatch: pytest.MonkeyPatch, seat: Seat
) -> None:
    monkeypatch.setattr(Releaser, "_run", lambda self: None)
    releaser = Releaser("default", seat)
    monkeypatch.setattr(worker, "_releaser", releaser)
    monkeypatch.setattr(worker, "LONG", 0.0)
    task = current_app.tasks[MAKE_API_CALL]
    worker._task_begins(task_id="1", task=task, kwargs={})
    assert releaser.kind == WORKER
    worker._task_begins(task_id="2", task=task, kwargs={"here": True})
    time.sleep(0.001)
    assert releaser.kind == BUSY
    worker._task_ends(task_id="2")
    assert releaser.kind == WORKER


def test_who_waits_for_what_is_in_flight_waits_no_longer_for_what_releases(
    monkeypatch: pytest.MonkeyPatch, seat: Seat
) -> None:
    """As a task with a time limit does, the last of a process that is replaced."""
    goes_on = threading.Event()
    monkeypatch.setattr(Releaser, "_run", lambda self: goes_on.wait(20))
    releaser = Releaser("default", seat)
    releaser.is_releasing = True  # and a database keeps it from noticing that it is to end
    monkeypatch.setattr(worker, "_releaser", releaser)
    began = time.monotonic()
    process.land(seconds=0.2)
    assert time.monotonic() - began < 5
    goes_on.set()
    process.land()
    assert not releaser._thread.is_alive()


def test_a_seat_is_one_process_s_and_free_when_it_dies(seat: Seat) -> None:
    """Whom it passes from else: tests/acceptance/test_a_worker_alone.py."""
    (asked, ask), (answers, answer) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        while os.read(asked, 1):
            os.write(answer, b"y" if seat.take(is_idle=True) else b"n")
        os._exit(0)

    def is_others() -> bool:
        os.write(ask, b"?")
        return os.read(answers, 1) == b"y"

    assert seat.take(is_idle=True)
    assert not is_others()
    seat.leave()
    assert is_others()
    assert not seat.take(is_idle=True)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert seat.take(is_idle=True)
    for one in (asked, ask, answers, answer):
        os.close(one)
