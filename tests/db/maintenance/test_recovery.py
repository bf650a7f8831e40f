"""What is left behind comes back, once: leases, losses, expiry, callbacks, sends."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import connection, transaction
from django.utils import timezone

from callqueue import Rule, SlidingWindow, callbacks, database
from callqueue import broker as messages
from callqueue.dispatch.dispenser import Dispenser
from callqueue.ledger import ledger_time, ready_calls
from callqueue.maintenance import recovery
from callqueue.models import CallAttempt, CallQueue
from tests.support import behaviour
from tests.support.behaviour import WHEN_LOST, Vendor, release, send
from tests.support.locking import fresh, status_of

Rules = Callable[..., None]
Status = CallQueue.Status
WIDE = SlidingWindow("10000/s")


def overdue(**more: Any) -> int:
    """All open attempts are past their lease, as if that time had gone by."""
    return CallAttempt.objects.open().update(
        lease_until=ledger_time.now("default") - timedelta(seconds=60), **more
    )


def begun(call: CallQueue) -> CallAttempt:
    """The call's attempt, begun by a worker that is never heard of again."""
    assert release() == [call]
    then = ledger_time.now("default") - timedelta(seconds=61)
    overdue(released_at=then, started_at=then, worker="gone:1:x")
    return call.attempts.get(finished_at=None)


def test_what_no_worker_began_waits_again_and_was_not_charged(rules: Rules) -> None:
    rules(default=Rule(limits=[SlidingWindow("1/h")]))
    call = send()
    assert release() == [call]
    assert recovery.recover("default") == 0
    assert status_of(call) == Status.DISPATCHED, "its lease goes on"
    overdue()
    recovery.recover("default")
    assert status_of(call) == Status.NEW
    assert call.attempts.get().outcome == "voided"
    assert release() == [call], "the voided attempt was charged"
    assert list(call.attempts.values_list("number", flat=True)) == [1, 2]


def test_what_is_not_due_yet_costs_nothing_to_pass_over(rules: Rules) -> None:
    """Of calls for next week: the index ends the search at now."""
    if connection.vendor != "postgresql":
        pytest.skip("reads PostgreSQL's plan")
    rules(default=Rule(limits=[WIDE]))
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
    calls, now = CallQueue.objects.waiting(), database.ClockNow()
    for rows in (
        calls.filter(ready=False, due_at_dt__lte=now).order_by("due_at_dt"),
        calls.filter(expires_at_dt__lte=now).order_by("expires_at_dt"),
    ):
        assert "Index Cond: " in rows.explain(), rows.explain()


@pytest.mark.parametrize(
    ("sent", "made", "on_lost", "status"),
    [
        *((method, method, on_lost, status) for method, on_lost, status in WHEN_LOST),
        ("get", "post", "auto", Status.UNKNOWN),
        ("post", "GET", "auto", Status.ERROR),
        ("get", "patch", "auto", Status.UNKNOWN),
        ("", "get", "auto", Status.ERROR),
        ("", "post", "auto", Status.UNKNOWN),
    ],
)
def test_what_fell_silent_ends_as_on_lost_says_and_is_charged_from_its_end(
    rules: Rules, sent: str, made: str, on_lost: str, status: Status
) -> None:
    """It ages from there. What counts is what the data says was made, not the column `method`."""
    rules(default=Rule(limits=[SlidingWindow("1/h")], on_lost=on_lost))
    data = {"method": made, "params": {"url": "http://vendor.example/"}}
    call = send(method=sent) if sent else CallQueue.objects.create(call_data=data)
    CallQueue.objects.filter(pk=call.pk).update(call_data=data)
    ready_calls.promote_due("default")
    attempt = begun(call)
    recovery.recover("default")
    assert status_of(call) == status
    attempt.refresh_from_db()
    assert attempt.outcome == "lost"
    assert attempt.finished_at > attempt.lease_until
    assert (fresh(call).finished_at_dt is None) == (status == Status.ERROR)
    send()
    assert release() == []


def test_a_callback_that_was_never_sent_is_sent_by_a_dispenser_once(
    rules: Rules, remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it is left to the process that ended the call."""
    rules(default=Rule())
    call, sends = send(callback="shop.told"), Mock(side_effect=ConnectionError)
    monkeypatch.setattr(messages, "send_by_name", sends)
    behaviour.run()
    assert sends.called
    sends.reset_mock(side_effect=True)
    Dispenser().run_once()
    assert not sends.called
    long_ago = timezone.now() - callbacks.LEFT - timedelta(seconds=1)
    CallQueue.objects.update(finished_at_dt=long_ago, callback_at=long_ago)
    Dispenser().run_once()
    Dispenser().run_once()
    assert [one.args[2] for one in sends.call_args_list] == [(call.pk, "done")]


def test_a_savepoint_takes_only_its_own_calls_with_it(rules: Rules, transactional_db: None) -> None:
    rules(default=Rule(limits=[WIDE]))
    with transaction.atomic():
        outer = send(unique_key="outer")
        with transaction.atomic():
            send(unique_key="inner")
            assert send(unique_key="outer") == outer
            transaction.set_rollback(True)
        again = send(unique_key="inner")
    assert list(CallQueue.objects.order_by("pk")) == [outer, again]


def test_a_call_whose_expiry_is_put_off_as_it_is_about_to_end_waits_on(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other code may write any column: what made the call overdue is looked at again, locked."""
    rules(r=Rule())
    call, other = send("r"), send("r")
    now = timezone.now()
    CallQueue.objects.update(expires_at_dt=now - timedelta(seconds=60))
    locked = database.locked

    def put_off_first(*given: Any, **how: Any) -> Any:
        CallQueue.objects.filter(pk=call.pk).update(expires_at_dt=now + timedelta(hours=1))
        return locked(*given, **how)

    monkeypatch.setattr(database, "locked", put_off_first)
    assert recovery.expire("default") == 1
    ends = dict(CallQueue.objects.values_list("pk", "status"))
    assert ends == {call.pk: Status.NEW, other.pk: Status.EXPIRED}
