"""Calls that a pass begins as it charges them go on the wire once its commit is certain."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from django.db import OperationalError, connection, transaction

import callqueue
from callqueue import Rule, SlidingWindow, database
from callqueue.dispatch import release_pass
from callqueue.dispatch.dispenser import Dispenser
from callqueue.dispatch.release_pass import Begun, Taker, ensure_state_rows, release
from callqueue.execution import claim, flight, process, request
from callqueue.ledger import rule_rows
from callqueue.maintenance import recovery
from callqueue.maker import Maker, take_off
from callqueue.models import CallAttempt, CallQueue
from tests.db.commands import run
from tests.support.behaviour import (
    Vendor,
    lose_what_became_of_its_commit,
    pass_that_commits_late,
    send,
)
from tests.support.locking import fresh, held_by_a_host
from tests.support.starving import few_threads
from tests.support.verdicts import wait_until

Rules = Callable[..., None]
Status = CallQueue.Status
pytestmark = [pytest.mark.django_db(transaction=True)]
LIMITS = [SlidingWindow("100/s")]


@pytest.fixture(autouse=True)
def _process(rules: Rules, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process of its own, with leases that do not end while a test lasts."""
    monkeypatch.setattr(process, "_flights", {})
    rules({"LEASE": {"RELEASE": 600, "GRACE": 600}}, r=Rule(limits=LIMITS))
    ensure_state_rows("default", ["r"])
    yield
    process.land(seconds=20)
    process.note_worker(None)
    database.close_kept("default")


class Slow:
    """What waits until the test says so, for a while."""

    def __init__(self, does: Any = None) -> None:
        self.does, self.began, self.goes = does, threading.Event(), threading.Event()

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.began.set()
        self.goes.wait(20)
        return 200 if self.does is None else self.does(*given, **named)


def fails_to_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next transaction of this thread does."""

    def refuse() -> None:
        monkeypatch.undo()
        raise OperationalError("database is locked")

    monkeypatch.setattr(connection, "_commit", refuse)


def make_pass(worker: str, before_the_commit: Callable[[], Any] = lambda: None) -> None:
    def take(begun: Begun) -> Callable[[bool], None]:
        clear = take_off("default", begun)
        before_the_commit()
        return clear

    release("default", ["r"], taker=Taker(worker, claim.READS, take))


def test_a_call_is_under_way_though_an_undone_pass_had_one_of_its_number(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite gives the attempts of a pass that was undone their numbers again. What the first pass
    has composed ends when the second one's call is on the wire, and is not that call.
    """
    send("r")
    composes, answers = Slow(request.disclose), Slow()
    remote.answers["/"] = answers
    with monkeypatch.context() as slowly, monkeypatch.context() as undone:
        slowly.setattr(request, "disclose", composes)
        with pytest.raises(OperationalError):
            make_pass("first", lambda: composes.began.wait(20) and fails_to_commit(undone))
    own = process.flight_of("default")
    make_pass("second")
    assert answers.began.wait(20)
    composes.goes.set()
    wait_until(lambda: len(own.under_way) == 1, 20)
    time.sleep(0.3)
    assert len(own.under_way) == 1
    landed = threading.Thread(target=own.land, kwargs={"seconds": 20})
    landed.start()
    landed.join(0.3)
    assert landed.is_alive(), "nobody waits for what is on the wire"
    answers.goes.set()
    landed.join(20)
    assert CallQueue.objects.get().status == Status.DONE
    assert len(remote.requests) == 1


def test_what_fails_once_calls_are_under_way_takes_none_of_them_back(
    rules: Rules, remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass has to tell of a call that nothing will ever admit: the other was made twice."""
    answers = Slow()
    remote.answers["/"] = answers
    good, bad = send("r"), send("r", "/costly")
    CallQueue.objects.filter(pk=bad.pk).update(cost={"calls": 101})
    releases = Dispenser(maker=Maker("default"))
    with monkeypatch.context() as failing:
        failing.setattr(
            release_pass.callbacks, "log_and_announce", Mock(side_effect=OperationalError("away"))
        )
        with pytest.raises(OperationalError):
            releases.tick()
    assert answers.began.wait(20)
    releases.tick()
    answers.goes.set()
    process.land(seconds=20)
    releases.tick()
    process.land(seconds=20)
    assert fresh(good).status == Status.DONE
    assert fresh(bad).status == Status.FAILED
    assert remote.paths() == ["/"]
    assert list(good.attempts.values_list("outcome", flat=True)) == ["succeeded"]


def test_what_was_handed_over_in_part_waits_for_nobody(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread is refused, and whoever is to note that fails, too."""

    monkeypatch.setattr(request, "_waits", {})  # nobody knows yet that one thread would do
    monkeypatch.setattr(flight.starvation, "shortage", flight.starvation.Shortage())
    failing = Mock(level=0, handle=Mock(side_effect=OSError("no space left")))
    monkeypatch.setattr(logging.getLogger("callqueue"), "handlers", [failing])
    for _ in range(3):
        send("r")
    with few_threads(flight.NAME, most=1), pytest.raises(OSError, match="no space"):
        make_pass("me")
    own = process.flight_of("default")
    wait_until(lambda: not own.under_way, 20)
    assert CallQueue.objects.new().count() == 3
    assert not remote.requests


@callqueue.handler("noted")
def note(params: Any, context: Any) -> None:
    made.append("noted")


made: list[str] = []


def test_no_handler_does_anything_before_its_charge_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made.clear()
    stands, wait = threading.Event(), flight.Clearance.wait
    monkeypatch.setattr(flight.Clearance, "wait", lambda one: stands.set() or wait(one))
    call = CallQueue.objects.send({"method": "noted", "params": {}}, rule="r")
    with monkeypatch.context() as undone, pytest.raises(OperationalError):
        make_pass("first", lambda: stands.wait(20) and fails_to_commit(undone))
    process.land(seconds=20)
    assert made == []
    make_pass("second")
    process.land(seconds=20)
    assert (fresh(call).status, made) == (Status.DONE, ["noted"])


HOOKS = {
    "asks the database in vain": "with connection.cursor() as cursor: cursor.execute('SELECT 1 FROM nowhere')",
    "closes connections": "connection.close()",
    "is undone": "with transaction.atomic(savepoint=False): raise ValueError",
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_is_read_does_nothing_to_the_pass_that_has_charged_its_calls(
    rules: Rules, remote: Vendor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """Django commits what the database has undone, and says nothing: calls were charged to nobody."""
    name = f"unread_{list(HOOKS).index(hook)}_{connection.vendor}"
    source = f"from django.db import connection, transaction\n{HOOKS[hook]}\nown = None\n"
    (tmp_path / f"{name}.py").write_text(source, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    shared = [SlidingWindow("100/s", name="shared")]
    rules(r=Rule(limits=shared), odd=Rule(limits=shared, classify=f"{name}.own"))
    good, odd = send("r"), send("odd", "/odd")
    releases = Dispenser(maker=Maker("default"))
    for _ in range(3):
        with suppress(OperationalError):
            releases.run_once(maintain=False)
        process.land(seconds=20)
    assert remote.paths().count("/") == 1
    assert fresh(good).status == Status.DONE
    assert fresh(odd).status in (Status.FAILED, Status.DONE)
    assert CallAttempt.objects.filter(call=good.pk).count() == 1


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="there is no server")
@pytest.mark.parametrize("makes", [True, False])
def test_a_commit_that_comes_through_after_its_connection_was_lost_leaves_nothing_begun(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch, makes: bool
) -> None:
    """Looked for too early, the attempts were not there yet, and their calls UNKNOWN later."""
    call, published = send("r"), list[Any]()
    maker = Maker("default") if makes else None
    releases = Dispenser(maker=maker, publish=lambda using, batch: published.extend(batch))
    releases.chores.is_loop = True
    late = pass_that_commits_late(monkeypatch, releases.tick)
    releases.tick()
    for commit in late:
        commit()
    end = time.monotonic() + 20
    while not (published or fresh(call).status == Status.DONE) and time.monotonic() < end:
        time.sleep(max(0.0, min(0.05, releases.tick())))
    releases.chores.wait(seconds=20)  # else one is under way while the tables are emptied
    process.land(seconds=20)
    outcomes = list(call.attempts.order_by("pk").values_list("outcome", flat=True))
    assert outcomes == ["voided", "succeeded" if makes else ""]
    assert len(remote.requests) == makes
    assert len(published) == (not makes)


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="it locks no rows")
def test_what_is_locked_when_it_is_taken_back_is_not_lost(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application has the call's row in hand: it waits again as soon as that is over."""
    call = send("r")
    releases = Dispenser(maker=Maker("default"))
    lose_what_became_of_its_commit(monkeypatch, releases)
    assert CallAttempt.objects.open().filter(started_at__isnull=False).count() == 1
    with held_by_a_host(call.pk):
        releases.tick()
    recovery.recover("default")  # a chore that took its time rests, and its next round comes later
    releases.run_once()
    process.land(seconds=20)
    assert fresh(call).status == Status.DONE
    assert len(remote.requests) == 1


def test_nobody_runs_it_inside_a_transaction(remote: Vendor) -> None:
    """What is charged there is perhaps never committed, and no other thread sees it."""
    call = send("r")
    with transaction.atomic():
        ran = run("run", "--for", "0.5")
    assert ran.code == 2
    assert "transaction" in ran.error
    assert not remote.requests
    assert not call.attempts.exists()


def test_who_ends_while_the_database_is_away_takes_back_what_is_perhaps_committed_once_it_is_there(
    remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployment restarts both: the call that nobody sent would be unknown."""
    call, releases = send("r"), Dispenser(maker=Maker("default"))
    lose_what_became_of_its_commit(monkeypatch, releases)
    away = OperationalError("the database system is shutting down")
    away_at_first = Mock(wraps=rule_rows.try_lock, side_effect=[away, away, *[DEFAULT] * 99])
    monkeypatch.setattr(rule_rows, "try_lock", away_at_first)
    stop = threading.Event()
    stop.set()
    releases.run(stop=stop)
    assert fresh(call).status == Status.NEW
    assert not CallAttempt.objects.open().exists()
