"""Releases: which calls go, in which order, under which limits. Nothing is made here."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db.models import F
from django.utils import timezone

from callqueue import Concurrency, Rule, SlidingWindow, states
from callqueue.dispatch import release_pass
from callqueue.history import audit
from callqueue.ledger import account
from callqueue.limits import kinds
from callqueue.look import look
from callqueue.models import CallAttempt, CallQueue
from callqueue.testing import run_callqueue, travel
from tests.support.behaviour import Vendor, release, send
from tests.support.ledger import CALL, answer
from tests.support.new_kind import Spaced

Rules = Callable[..., None]


def test_a_limit_counts_all_that_is_open_however_much_that_is(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account, "SAMPLE", 2)
    rules(r=Rule(limits=[Concurrency(5)]), s=Rule(limits=[Concurrency(3, per="queue")]))
    for rule in "rs" * 8:
        send(rule)
    assert [len(release()) for _ in range(3)] == [8, 0, 0]


def test_deleting_a_call_makes_no_room(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/m")]))
    send("r")
    (released,) = release()
    released.delete()
    send("r")
    assert release() == []


def test_higher_priority_first_then_the_order_of_being_due(rules: Rules) -> None:
    """What is not due yet waits, and keeps nobody back; what other code made goes too, and what it
    cancelled or deleted does not.
    """
    rules(r=Rule(limits=[SlidingWindow("4/m")]))
    later = send("r", priority=9, not_before=timezone.now() + timedelta(hours=1))
    low, high, middle = send("r"), send("r", priority=9), send("r", priority=5)
    late, cancelled, deleted = (send("r", priority=9) for _ in range(3))
    CallQueue.objects.filter(pk=cancelled.pk).update(status=states.CANCELLED)
    deleted.delete()
    made = CallQueue.objects.create(rule="r", priority=1, call_data=CALL)
    assert release() == [high, late, middle, made]
    assert low.status == states.NEW
    answer(ago=3600)
    CallQueue.objects.filter(pk=later.pk).update(due_at_dt=timezone.now() - timedelta(seconds=1))
    assert release() == [later, low]


def test_a_call_that_other_code_postpones_waits_until_then(rules: Rules) -> None:
    """It was ready by then, and nothing but its column says that it no longer is."""
    rules(r=Rule())
    calls = [send("r") for _ in range(6)]
    later = timezone.now() + timedelta(hours=1)
    CallQueue.objects.filter(pk=calls[0].pk).update(due_at_dt=later)
    CallQueue.objects.filter(pk=calls[1].pk).update(due_at_dt=F("due_at_dt") + timedelta(hours=1))
    for call in calls[2:]:
        call.due_at_dt = later
    CallQueue.objects.bulk_update([calls[2]], ["due_at_dt"])
    for call, fields in zip(calls[3:], (None, ["due_at_dt"], {"due_at_dt", "rule"}), strict=True):
        call.save(update_fields=fields)
    assert release() == []
    CallQueue.objects.update(due_at_dt=timezone.now() - timedelta(hours=1))
    assert release() == calls


def test_all_limits_must_admit_a_call(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/m"), Concurrency(3), SlidingWindow("2/h")]))
    for _ in range(6):
        send("r")
    assert len(release()) == 2


def test_a_call_that_no_limit_could_ever_admit_fails_and_keeps_nobody_back(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("50/m")]))
    heavy, broken, sound = send("r", cost=40), send("r"), send("r")
    CallQueue.objects.filter(pk=broken.pk).update(cost="many")
    rules(r=Rule(limits=[SlidingWindow("5/m")]))
    assert release() == [sound]
    heavy.refresh_from_db()
    broken.refresh_from_db()
    assert heavy.status == broken.status == states.FAILED
    assert "40" in heavy.error_message
    assert "cost" in broken.error_message


def test_under_a_shared_budget_every_key_has_its_turn(rules: Rules) -> None:
    shared = SlidingWindow("1/s", name="account")
    rules(r=Rule(limits=[SlidingWindow("9/m", per="key"), shared]))
    for key in "abcdefghijklmnopqrstuvwxyz":
        send("r", key=key), send("r", key=key)
    served = []
    for _ in range(26):
        served += [call.key for call in release()]
        answer(ago=3600)
    assert sorted(served) == list("abcdefghijklmnopqrstuvwxyz")


def test_the_next_look_comes_before_the_slot_of_the_next_call(rules: Rules, remote: Vendor) -> None:
    """Released then, it goes ahead of its slot: the broker's time is none of the limit's."""
    rules(r=Rule(limits=[SlidingWindow("1/m")]))
    with travel() as clock:
        send("r")
        run_callqueue()
        send("r")
        opens_in = release_pass.release("default", ["r"]).opens_in
        assert opens_in is not None
        clock.forward(opens_in)
        assert len(release_pass.release("default", ["r"]).released) == 1
    attempt = CallAttempt.objects.open().get()
    assert attempt.send_at > attempt.released_at


@pytest.mark.parametrize(("per", "most"), [("rule", 1), ("queue", 2), ("key", 1)])
def test_a_new_kind_of_limit_goes_through_everything(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, per: str, most: int
) -> None:
    """It is kept, stated, shown, plotted and audited like any other."""
    monkeypatch.setitem(kinds.KINDS, "Spaced", Spaced)  # type: ignore[arg-type]
    rules(r=Rule(limits=[Spaced("4/h", per=per)], queues=["a", "b"]))
    for _ in range(5):
        send("r", key="k")
    assert (len(release()), len(release())) == (most, 0)
    assert CallAttempt.objects.open().count() == most
    rule = look("default").rule("r")
    (limit,) = rule.limits
    assert (limit.used, limit.free) == (most, 0)
    assert rule.seconds()
    assert not CallQueue.objects.under_threshold("r", "k")
    assert not audit.audit("default", since=timedelta(hours=1)).exceeded
    assert CallQueue.objects.waiting()[0].forecast().reason
