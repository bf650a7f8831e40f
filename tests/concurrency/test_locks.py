"""A row that somebody has locked delays its own call only, and nobody's transaction is the victim
of another's order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction
from django.utils import timezone

from callqueue import Rule, callbacks, events, states, transitions
from callqueue.dispatch.release_pass import ensure_states, release
from callqueue.execution import claim, executor, recorder
from callqueue.maintenance import cleanup, recovery
from callqueue.managers import CallAttemptQuerySet
from callqueue.models import BelatedEnding, CallAttempt, CallQueue
from tests.concurrency.test_races import (
    PATIENCE,
    answered,
    end_leases,
    fresh,
    released_by,
    together,
)
from tests.support import hammer
from tests.support.behaviour import Vendor, send
from tests.support.locking import held_by_a_host, until_one_waits_for_a_lock, waiting_for_nobody

Rules = Callable[..., None]
Status = CallQueue.Status
PAST = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def row_locks() -> None:
    """SQLite has one lock for the whole database."""
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("this database has no row locks")


@contextmanager
def told_of_ends() -> Iterator[list[int]]:
    """The calls that `call_finished` names."""
    told: list[int] = []
    events.call_finished.connect(
        lambda call_id, **_: told.append(call_id), weak=False, dispatch_uid="told"
    )
    try:
        yield told
    finally:
        events.call_finished.disconnect(dispatch_uid="told")


def statuses(*calls: CallQueue) -> list[int]:
    return [fresh(call).status for call in calls]


def attempt_of(call: CallQueue) -> CallAttempt:
    return call.attempts.get()


# --- One locked row


def test_what_expires_goes_on_beside_a_call_that_is_locked(rules: Rules) -> None:
    rules(r=Rule())
    locked, free = send("r"), send("r")
    CallQueue.objects.update(expires_at_dt=timezone.now() - PAST)
    with held_by_a_host(locked.pk), waiting_for_nobody():
        assert recovery.expire("default") == 1
        assert statuses(locked, free) == [Status.NEW, Status.EXPIRED]
    assert recovery.expire("default") == 1
    assert statuses(locked) == [Status.EXPIRED]


def test_calls_of_a_rule_that_is_gone_end_beside_one_that_is_locked(rules: Rules) -> None:
    rules(r=Rule())
    locked, free = send("r"), send("r")
    CallQueue.objects.update(rule="gone", due_at_dt=timezone.now() - PAST)
    with held_by_a_host(locked.pk), waiting_for_nobody():
        assert recovery.fail_orphans("default") == 1
        assert statuses(locked, free) == [Status.NEW, Status.FAILED]
    assert recovery.fail_orphans("default") == 1


def test_what_nobody_began_is_taken_back_beside_a_call_that_is_locked(rules: Rules) -> None:
    rules(r=Rule())
    locked, free = send("r"), send("r")
    released_by("r")
    end_leases()
    with held_by_a_host(locked.pk), waiting_for_nobody():
        assert recovery.void_unbegun("default") == 1
        assert statuses(locked, free) == [Status.DISPATCHED, Status.NEW]
        assert attempt_of(locked).outcome == states.OPEN, "its call could not follow"
    assert recovery.void_unbegun("default") == 1
    assert statuses(locked) == [Status.NEW]


def test_what_fell_silent_ends_beside_a_call_that_is_locked(rules: Rules) -> None:
    rules(r=Rule())
    locked, free = send("r"), send("r")
    assert len(claim.begin("default", released_by("r"))) == 2
    end_leases()
    with held_by_a_host(locked.pk), waiting_for_nobody():
        assert recovery.end_lost("default") == 1
        assert statuses(locked, free) == [Status.DISPATCHED, Status.UNKNOWN]
        assert attempt_of(locked).outcome == states.OPEN, "its call could not follow"
    assert recovery.end_lost("default") == 1
    assert statuses(locked) == [Status.UNKNOWN]


def test_a_refused_publish_is_undone_beside_a_call_that_is_locked(rules: Rules) -> None:
    rules(r=Rule())
    locked, free = send("r"), send("r")
    ids = released_by("r")
    with held_by_a_host(locked.pk), waiting_for_nobody():
        assert transitions.undo("default", ids) == 1
        assert statuses(locked, free) == [Status.DISPATCHED, Status.NEW]
    end_leases()
    assert recovery.void_unbegun("default") == 1


def test_the_others_of_a_message_are_made_beside_a_call_that_is_locked(
    rules: Rules, remote: Vendor
) -> None:
    """Selected for update by a host, it is made as well, and its answer is recorded; what it
    becomes is written afterwards.
    """
    rules(r=Rule())
    calls = [send("r", method="post") for _ in range(32)]
    ids = released_by("r")
    with told_of_ends() as told:
        with held_by_a_host(calls[3].pk), waiting_for_nobody():
            assert executor.execute("default", ids) == 32
            assert recovery.recover("default") == 0
            assert CallQueue.objects.done().count() == 31
            assert statuses(calls[3]) == [Status.DISPATCHED]
            assert attempt_of(calls[3]).outcome == states.SUCCEEDED
            end_leases()
        assert recovery.recover("default") == 1
    assert len(remote.requests) == 32
    assert CallQueue.objects.done().count() == 32
    assert not BelatedEnding.objects.exists()
    assert sorted(told) == sorted(call.pk for call in calls)


@pytest.mark.parametrize("status", [500, 429, 200])
def test_what_is_written_afterwards_is_what_would_have_been_written(
    rules: Rules, status: int
) -> None:
    rules(r=Rule())
    first, second = (
        send("r", method="get", callback="shop.told"),
        send("r", method="get", callback="shop.told"),
    )
    jobs = {job.pk: job for job in claim.begin("default", released_by("r"))}
    reports = [answered(jobs[call.pk], status) for call in (first, second)]
    reports[1].due_at = reports[0].due_at  # the backoff is drawn
    with held_by_a_host(second.pk), waiting_for_nobody():
        assert recorder.write("default", reports) == 2
    own = {"id", "idempotency_key", "created_dt", "finished_at_dt", "callback_pending", "due_at_dt"}
    own |= {"callback_at", "callback_ask_at"}  # of each, from when its callback may be sent
    CallQueue.objects.update(callback_pending=False)
    recovery.recover("default")
    row, other = (CallQueue.objects.filter(pk=call.pk).values().get() for call in (first, second))
    assert (row["finished_at_dt"] is None) == (other["finished_at_dt"] is None)
    assert abs(row["due_at_dt"] - other["due_at_dt"]) < timedelta(
        milliseconds=5
    )  # each counts back from its own answer
    assert {k: v for k, v in row.items() if k not in own} == {
        k: v for k, v in other.items() if k not in own
    }


def test_a_call_that_went_on_or_is_gone_is_not_ended_afterwards(rules: Rules) -> None:
    rules(r=Rule())
    moved, gone = send("r"), send("r")
    reports = [answered(job) for job in claim.begin("default", released_by("r"))]
    with held_by_a_host(moved.pk, gone.pk), waiting_for_nobody():
        recorder.write("default", reports)
    CallQueue.objects.filter(pk=moved.pk).update(status=Status.NEW, ready=True)
    CallQueue.objects.filter(pk=gone.pk).delete()
    released_by("r")
    assert recovery.recover("default") == 0
    assert statuses(moved) == [Status.DISPATCHED]
    assert not BelatedEnding.objects.exists()


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_the_others_of_a_message_are_begun_beside_a_cancel_that_has_not_committed(
    rules: Rules, remote: Vendor, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    calls = [send("r") for _ in range(32)]
    ids, cancelled = released_by("r"), calls[7]
    monkeypatch.setattr(executor, "LOCKED", (0.0,))
    with held_by_a_host(cancelled.pk, first=fresh(cancelled).cancel), waiting_for_nobody():
        assert executor.execute("default", ids) == 31
        assert CallQueue.objects.done().count() == 31
    if ends == "commit":
        fresh(cancelled).cancel()
    assert executor.give_back("default", ids) is None
    assert statuses(cancelled) == [Status.CANCELLED if ends == "commit" else Status.NEW]
    assert attempt_of(cancelled).outcome == states.VOIDED
    assert len(remote.requests) == 31


def test_a_worker_gives_back_what_becomes_free_while_it_looks(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    call = send("r")
    ids = released_by("r")
    host = held_by_a_host(call.pk, first=fresh(call).cancel)
    host.__enter__()
    monkeypatch.setattr(executor.time, "sleep", lambda _: host.__exit__(None, None, None))
    assert executor.execute("default", ids) == 0
    assert statuses(call) == [Status.NEW]


def test_cleanup_goes_on_beside_a_batch_that_is_locked_whole(rules: Rules) -> None:
    rules(r=Rule())
    calls = [send("r") for _ in range(6)]
    for days, call in enumerate(reversed(calls), start=10):
        ended = timezone.now() - timedelta(days=days)
        CallQueue.objects.filter(pk=call.pk).update(
            status=Status.DONE, ready=False, finished_at_dt=ended
        )
    oldest = [call.pk for call in calls[-2:]]
    with held_by_a_host(*oldest), waiting_for_nobody():
        assert cleanup.clean("default", batch_size=2).calls == 4
    assert set(CallQueue.objects.values_list("pk", flat=True)) == set(oldest)
    assert cleanup.clean("default", batch_size=2).calls == 2


# --- The attempt's number is in every fence


@pytest.mark.parametrize("end", ["undo", "void", "lost", "record"])
def test_an_attempt_that_its_call_went_on_without_ends_alone(rules: Rules, end: str) -> None:
    """Other code made the call NEW, and its second attempt is on the wire: the first one's end is
    no reason for a third.
    """
    rules(r=Rule())
    call = send("r")
    first = released_by("r")
    jobs = claim.begin("default", first) if end in ("lost", "record") else []
    CallQueue.objects.update(status=Status.NEW, ready=True)
    (second,) = claim.begin("default", released_by("r"))
    if end == "undo":
        assert transitions.undo("default", first) == 0
    elif end == "record":
        assert recorder.write("default", [answered(jobs[0], 500)]) == 1
    else:
        CallAttempt.objects.filter(pk__in=first).update(lease_until=timezone.now() - PAST)
        assert recovery.recover("default") == 0
    ended = {
        "undo": states.VOIDED,
        "void": states.VOIDED,
        "lost": states.LOST,
        "record": states.ERRORED,
    }[end]
    assert list(call.attempts.values_list("outcome", flat=True)) == [ended, states.OPEN]
    assert statuses(call) == [Status.DISPATCHED]
    assert recorder.write("default", [answered(second)]) == 1
    assert statuses(call) == [Status.DONE]


# --- One order of locks


def test_a_cancel_that_met_a_release_is_no_victim_of_its_undo(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancel saw the call waiting, and waited for the pass that released it: it has the row
    when the publish is undone.
    """
    rules(r=Rule())
    call = send("r")
    released, has_the_row, is_undone = threading.Event(), threading.Event(), threading.Event()
    ids: list[int] = []
    ends: dict[str, Any] = {}
    real = CallAttemptQuerySet.unbegun

    def unbegun(self: CallAttemptQuerySet) -> CallAttemptQuerySet:
        if threading.current_thread() is canceller and not has_the_row.is_set():
            has_the_row.set()
            is_undone.wait(1)  # where the undo waits for this cancel, it cannot be done
        return real(self)

    def dispense() -> None:
        with transaction.atomic():
            ids.extend(r.attempt_id for r in release("default", ["r"]).released)
            released.set()
            until_one_waits_for_a_lock()

    def undo() -> None:
        assert has_the_row.wait(PATIENCE)
        ends["undone"] = transitions.undo("default", ids)
        is_undone.set()

    def cancel() -> None:
        nonlocal canceller
        canceller = threading.current_thread()
        assert released.wait(PATIENCE)
        ends["cancelled"] = CallQueue.objects.filter(pk=call.pk).cancel()

    canceller: threading.Thread | None = None
    monkeypatch.setattr(CallAttemptQuerySet, "unbegun", unbegun)
    together(dispense, cancel, undo)
    assert ends == {"undone": 0, "cancelled": 1}
    assert statuses(call) == [Status.CANCELLED]
    assert attempt_of(call).outcome == states.VOIDED


def test_hosts_that_select_a_call_for_update_and_cancel_it_do_not_deadlock(rules: Rules) -> None:
    rules(r=Rule())
    call = send("r")
    released_by("r")
    has_it = threading.Event()

    def careful() -> int:
        with transaction.atomic():
            CallQueue.objects.select_for_update().get(pk=call.pk)
            has_it.set()
            until_one_waits_for_a_lock()
            return CallQueue.objects.filter(pk=call.pk).cancel()

    def plain() -> int:
        assert has_it.wait(PATIENCE)
        return CallQueue.objects.filter(pk=call.pk).cancel()

    assert together(careful, plain) == [1, 0]
    assert statuses(call) == [Status.CANCELLED]


def test_a_cancel_announces_what_it_cancelled_and_nothing_else(rules: Rules) -> None:
    rules(r=Rule())
    calls = [send("r") for _ in range(3)]
    calls[0].cancel()
    with told_of_ends() as told:
        assert CallQueue.objects.all().cancel() == 2
        assert CallQueue.objects.all().cancel() == 0
    assert sorted(told) == sorted(call.pk for call in calls[1:])


def test_a_call_that_two_dispensers_find_expired_is_announced_once(rules: Rules) -> None:
    rules(r=Rule())
    for _ in range(10):
        calls = [send("r") for _ in range(20)]
        CallQueue.objects.waiting().update(expires_at_dt=timezone.now() - PAST)
        with told_of_ends() as told:
            assert sum(together(*[lambda: recovery.expire("default")] * 4)) <= 20
            recovery.expire("default")
            # Who found them expired, too late, may have had them locked as they were announced.
            CallQueue.objects.expired().update(finished_at_dt=timezone.now() - PAST)
            callbacks.ask_for_owed("default")
        assert sorted(told) == sorted(call.pk for call in calls)


# --- Unique keys


def test_sends_of_the_same_unique_keys_in_another_order_do_not_deadlock(rules: Rules) -> None:
    rules(r=Rule())
    for number in range(15):
        keys = [f"{number}-{i}" for i in range(30)]
        one, other = together(
            lambda keys=keys: ids_by_key(keys), lambda keys=keys: ids_by_key(keys[::-1])
        )
        assert one == other


def ids_by_key(keys: list[str]) -> dict[str, int]:
    data = {"method": "get", "params": {"url": "http://vendor.example/"}}
    with transaction.atomic():
        calls = CallQueue.objects.send_many(
            [{"call_data": data, "unique_key": key} for key in keys], rule="r", batch_size=7
        )
    assert [call.unique_key for call in calls] == keys
    return {str(call.unique_key): call.pk for call in calls}


LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_under_every_isolation_a_unique_key_gives_its_call_or_the_databases_own_error(
    rules: Rules, level: str, many: bool
) -> None:
    rules(r=Rule())
    with connection.cursor() as cursor:
        which = (
            "CHARACTERISTICS AS TRANSACTION" if connection.vendor == "postgresql" else "TRANSACTION"
        )
        cursor.execute(f"SET SESSION {which} ISOLATION LEVEL {level}")
    others: list[int] = []
    try:
        with transaction.atomic():
            assert (
                CallQueue.objects.count() == 0
            )  # from here on the transaction sees what there is now
            in_another_connection(lambda: others.append(send("r", unique_key="order-1").pk))
            mine = (
                ids_by_key(["order-0", "order-1"])["order-1"]
                if many
                else send("r", unique_key="order-1").pk
            )
    except DatabaseError as error:
        assert is_serialization_error(error), error
        assert level != "READ COMMITTED"
    else:
        assert [mine] == others
    finally:
        connection.close()


def in_another_connection(work: Callable[[], Any]) -> None:
    """What a serializable transaction's reads keep out (MariaDB's) is not waited for: there is
    nothing to find then.
    """
    if connection.vendor == "mysql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT @@session.transaction_isolation"
                if not connection.mysql_is_mariadb
                else "SELECT @@tx_isolation"
            )
            if cursor.fetchone()[0] == "SERIALIZABLE":
                pytest.skip("another sender waits for a serializable transaction to end")
    together(work)


def is_serialization_error(error: DatabaseError) -> bool:
    """PostgreSQL's 40001; MariaDB's deadlock, and its record that changed."""
    cause = error.__cause__
    code = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or error.args[0]
    return code in ("40001", 1213, 1020)


# --- All of it together


def test_nobody_is_the_victim_of_a_deadlock(
    settings: Any, transactional_db: None, remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short form of tests/faults/test_locks.py."""
    settings.CALLQUEUE = hammer.SETTINGS
    ensure_states("default", list(hammer.SETTINGS["RULES"]))
    monkeypatch.setattr(executor, "LOCKED", (0.0,))
    everybody = hammer.Hammer(remote)
    everybody.run(4)
    everybody.judge()
