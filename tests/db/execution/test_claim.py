"""Of those who begin an attempt one makes its call; what cannot be made is left out or fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery.utils.threads import LocalStack
from django.db import connection
from django.db.models import F
from django.utils import timezone

from callqueue import Retry, Rule, SlidingWindow, conf, database, tasks
from callqueue.dispatch.release_pass import LEAD
from callqueue.execution import claim, executor, process
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt, CallQueue, LedgerState
from callqueue.testing import travel
from tests.support.behaviour import Vendor, release, send
from tests.support.locking import fresh

Rules = Callable[..., None]
Status = CallQueue.Status


def attempts_of(call: CallQueue) -> list[int]:
    return list(call.attempts.values_list("pk", flat=True))


def all_attempts() -> list[int]:
    return list(CallAttempt.objects.values_list("pk", flat=True))


def test_a_call_that_can_no_longer_be_made_fails_with_the_reason_and_the_rest_go_on(
    rules: Rules, remote: Vendor
) -> None:
    rules(r=Rule(), gone=Rule())
    orphan, handlerless, sound = send("gone"), send("r"), send("r")
    formless = CallQueue.objects.create(rule="r", call_data={"method": "get"})
    CallQueue.objects.filter(pk=handlerless.pk).update(call_data={"method": "fax", "params": {}})
    assert orphan in release()
    rules(r=Rule())
    release()  # no dispenser has it either
    executor.execute("default", all_attempts())
    assert fresh(sound).status == Status.DONE
    whys = {orphan: "gone", handlerless: "fax", formless: "its call_data is no dict with 'method'"}
    for call, why in whys.items():
        assert fresh(call).status == Status.FAILED
        assert why in fresh(call).error_message


def test_the_lease_that_a_begin_writes_ends_with_the_workers_own(rules: Rules) -> None:
    """Neither sooner, nor by more than a release may be ahead of its slot. First sent, first."""
    rules(r=Rule(total_timeout=7, limits=[SlidingWindow("1000/s")]), slow=Rule(total_timeout=70))
    with travel(hours=1):
        send("r"), send("slow")
        release()
        ahead = F("released_at") + timedelta(seconds=600)
        CallAttempt.objects.filter(rule="r").update(send_at=ahead)
        jobs = {job.call.rule: job for job in claim.begin("default", all_attempts())}
    assert list(jobs) == ["slow", "r"]
    for name, seconds, within in (("r", 607, 60), ("slow", 70, LEAD)):
        attempt, job = CallAttempt.objects.get(rule=name), jobs[name]
        own = job.lease_ends_at - job.clock.before
        written = (attempt.lease_until - attempt.started_at).total_seconds()
        assert own == pytest.approx(seconds + conf.current().grace, abs=within)
        assert own - 0.001 <= written <= own + LEAD


@pytest.mark.parametrize("change", [{"status": Status.CANCELLED}, {"last_attempt": 2}])
def test_an_attempt_that_its_call_does_not_wait_for_is_not_made(
    rules: Rules, remote: Vendor, change: dict[str, Any]
) -> None:
    rules(r=Rule())
    call = send("r")
    release()
    CallQueue.objects.filter(pk=call.pk).update(**change)
    assert executor.execute("default", attempts_of(call)) == 0
    assert not remote.requests and fresh(call).status == change.get("status", Status.DISPATCHED)


@pytest.mark.parametrize("change", [{"rule": "full"}, {"key": "full"}, {"cost": 6}])
def test_what_other_code_changed_after_its_release_is_not_made_by_the_old_charge(
    rules: Rules, remote: Vendor, change: dict[str, Any]
) -> None:
    """It would be over the limit that counts it now."""
    an_hour = SlidingWindow("5/h", per="key")
    rules(default=Rule(limits=[an_hour]), full=Rule(limits=[an_hour]))
    for options in ({"rule": "full", "key": "k"}, {"key": "full"}):
        send(cost=5, **options)
    executor.execute("default", [pk for call in release() for pk in attempts_of(call)])
    call = send(key="k")
    assert release() == [call]
    CallQueue.objects.filter(pk=call.pk).update(**change)
    assert executor.execute("default", attempts_of(call)) == 0
    assert fresh(call).status == Status.NEW
    assert call.attempts.get().outcome == "voided"
    assert release() == []
    assert len(remote.requests) == 2


def test_a_begin_whose_answer_was_lost_is_taken_as_its_own_and_no_one_elses(rules: Rules) -> None:
    rules(r=Rule())
    send("r")
    release()
    ids = all_attempts()
    first = claim.begin("default", ids, "a-worker")
    again = claim.begin("default", ids, "a-worker")
    assert [job.attempt.id for job in first] == [job.attempt.id for job in again] == ids
    assert claim.begin("default", ids, "another-worker") == []


FORGED = [10**30, -(10**30), 2**63, 0, -1, "1", "x", None, 1.5, float("nan"), [], {}, "\0"]


@pytest.mark.parametrize(("what", "begins"), [("moved", False), ("agreements", True)])
def test_a_begin_that_read_before_the_ledger_was_moved_begins_nothing(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, what: str, begins: bool
) -> None:
    """Its lease would be by the clock as it was, and be over before the call is sent. Where a
    process has come and agreed to ledger time, that is as it was.
    """
    rules(r=Rule())
    call = send("r")
    release()
    ledger_time.ensure_rows("default")
    takes = claim.transitions.begin

    def moved_first(*given: Any) -> set[int]:
        LedgerState.objects.update(**{what: F(what) + 3_600_000_000})
        return takes(*given)

    monkeypatch.setattr(claim.transitions, "begin", moved_first)
    assert bool(claim.begin("default", attempts_of(call))) is begins
    assert CallAttempt.objects.filter(started_at__isnull=False).exists() is begins
    assert begins or fresh(call).status == Status.NEW, "and waits for another release"


def test_a_message_with_ids_that_no_database_takes_fails_no_other(
    rules: Rules, remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts of many messages are begun by one statement."""
    rules(r=Rule())
    send("r")
    release()
    ids = all_attempts()
    assert tasks.make_api_call([*FORGED, *ids, *FORGED]) == 1
    assert len(remote.requests) == 1
    for forged in FORGED:
        with suppress(TypeError):  # what is no list of ids fails its own task
            assert tasks.make_api_call(forged) == 0
    boarded: list[list[int]] = []
    monkeypatch.setattr(process, "take_attempts", lambda using, ids, task: boarded.append(ids))
    monkeypatch.setattr(tasks.make_api_call, "request_stack", LocalStack())
    tasks.make_api_call.push_request(called_directly=False, is_eager=False)
    tasks.make_api_call.run([*FORGED, *ids])
    assert boarded == [ids]


def write(call: CallQueue, how: str, **columns: Any) -> None:
    """Write these columns, as other code may."""
    for name, value in columns.items():
        setattr(call, name, value)
    unique = ["id"] if connection.features.supports_update_conflicts_with_target else None
    fields = {"update_fields": [*columns], "unique_fields": unique}
    if how == "update":
        CallQueue.objects.filter(pk=call.pk).update(**columns)
    elif how == "bulk_update":
        CallQueue.objects.bulk_update([call], [*columns])
    elif how == "save":
        call.save(update_fields=[*columns])
    elif how == "upsert":
        CallQueue.objects.bulk_create([call], update_conflicts=True, **fields)
    else:
        CallQueue.objects.bulk_create([call], None, False, True, *fields.values())


@pytest.mark.parametrize("how", ["update", "bulk_update", "save", "upsert", "upsert by place"])
@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize("then", ["a worker begins it", "nobody does", "nothing", "a release"])
def test_what_other_code_postpones_waits_until_then(
    rules: Rules, remote: Vendor, how: str, is_stale: bool, then: str
) -> None:
    """Before its release or after it; but what has been begun is under way."""
    rules(r=Rule())
    call, hour = send("r"), timedelta(hours=1)
    stale, later = fresh(call), call.due_at_dt + hour
    if then != "a release":
        assert release() == [call]
    changed = stale if is_stale else fresh(call)
    write(changed, how, due_at_dt=F("due_at_dt") + hour if how == "update" and is_stale else later)
    if then == "a worker begins it":
        assert executor.execute("default", attempts_of(call)) == 0
    elif then == "nobody does":
        call.attempts.update(lease_until=call.created_dt - hour)
    elif then == "nothing":
        CallQueue.objects.filter(pk=call.pk).update(due_at_dt=call.created_dt)
        assert executor.execute("default", attempts_of(call)) == 1
        return
    assert release() == []
    assert fresh(call).status == Status.NEW and fresh(call).due_at_dt == later
    with travel(hours=1, seconds=1):
        assert release() == [call]
    assert not remote.requests


@pytest.mark.parametrize("how", ["update", "bulk_update", "save"])
def test_what_other_code_postpones_and_takes_back_waits_until_then(rules: Rules, how: str) -> None:
    rules(r=Rule())
    call = send("r")
    assert release() == [call]
    write(fresh(call), "update", due_at_dt=call.due_at_dt + timedelta(hours=1))
    write(fresh(call), how, status=Status.NEW)
    assert release() == []


@pytest.mark.parametrize("how", ["save", "bulk_create"])
def test_a_copy_of_a_ready_call_that_is_due_later_waits_until_then(rules: Rules, how: str) -> None:
    rules(r=Rule())
    call = send("r")
    copied = fresh(call)
    assert copied.ready
    copied.pk, copied.idempotency_key = None, uuid4()
    copied.due_at_dt += timedelta(hours=1)
    copied.save() if how == "save" else CallQueue.objects.bulk_create([copied])
    assert release() == [call]
    call.cancel()
    with travel(hours=1, seconds=1):
        assert [one.pk for one in release()] == [copied.pk]


def test_a_call_that_was_due_by_the_clock_before_it_was_set_back_is_not_postponed(
    rules: Rules, remote: Vendor
) -> None:
    rules(r=Rule())
    call = send("r")
    with travel(hours=-1):
        assert release() == [call]
        assert executor.execute("default", attempts_of(call)) == 1


def test_a_call_that_waits_is_postponed_by_the_databases_clock(rules: Rules) -> None:
    """This host's may be ahead of it: `travel` sets the database's alone."""
    rules(r=Rule())
    call = send("r")
    with travel(hours=-2):
        later = database.clock("default") + timedelta(hours=1)
        CallQueue.objects.filter(pk=call.pk).update(due_at_dt=later)
        assert not fresh(call).ready


@pytest.mark.parametrize("is_sent", [False, True])
def test_an_instance_from_before_a_failure_does_not_bring_the_retry_forward(
    rules: Rules, remote: Vendor, is_sent: bool
) -> None:
    rules(r=Rule(retry=Retry(base=600)))
    remote.answers["/"] = 500
    call = send("r", not_before=None if is_sent else timezone.now() + timedelta(seconds=1))
    stale = call if is_sent else fresh(call)
    read = fresh(call).due_at_dt
    CallQueue.objects.update(due_at_dt=stale.created_dt)
    executor.execute("default", [pk for one in release() for pk in attempts_of(one)])
    failed = fresh(call)
    assert failed.status == Status.ERROR
    stale.priority = 3
    stale.save()
    assert (fresh(call).priority, fresh(call).due_at_dt) == (3, failed.due_at_dt)
    stale.due_at_dt = failed.created_dt - timedelta(hours=1)
    stale.save()
    assert fresh(call).due_at_dt == stale.due_at_dt
    stale.due_at_dt = read
    stale.save()
    assert fresh(call).due_at_dt == read
    again, later = fresh(call), read + timedelta(hours=1)
    CallQueue.objects.update(due_at_dt=later)
    again.refresh_from_db()
    again.due_at_dt = read
    again.save()
    assert fresh(call).due_at_dt == read


def test_an_instance_from_before_the_release_does_not_release_the_call_again(
    rules: Rules, remote: Vendor
) -> None:
    rules(r=Rule(limits=[SlidingWindow("9/s")]))
    stale = send("r")
    deferred = CallQueue.objects.only("rule").get(pk=stale.pk)
    for one in (stale, deferred):
        release()
        one.priority = 3
        one.save()
        release()
    executor.execute("default", all_attempts())
    assert len(remote.requests) == 1
    call = CallQueue.objects.get()
    assert (call.status, call.priority, call.last_attempt) == (Status.DONE, 3, 1)
    stale.save()
    stale.status = Status.CANCELLED
    stale.save(update_fields=["status"])
    call.refresh_from_db()
    assert call.status == Status.CANCELLED
    call.pk = None  # as Django's docs copy a row
    call.idempotency_key = uuid4()
    call.save()
    assert fresh(call).status == Status.CANCELLED and CallQueue.objects.count() == 2
