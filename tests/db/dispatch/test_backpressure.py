"""No more lies in the broker than workers begin; they have all at once when they come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import pytest

import callqueue
from callqueue import Rule, SlidingWindow, transitions
from callqueue.dispatch import choosing, release_pass
from callqueue.dispatch.choosing import LEAST
from callqueue.dispatch.release_pass import ensure_state_rows
from callqueue.execution import claim, recorder
from callqueue.ledger import ledger_time
from callqueue.ledger.account import SAMPLE
from callqueue.maintenance import recovery
from callqueue.models import CallAttempt, CallQueue
from tests.support.ledger import CALL
from tests.support.locking import answered

Rules = Callable[..., None]
SHORT = {"LEASE": {"RELEASE": 2, "GRACE": 30}}  # seconds: the least that a queue gets on trust


def passes(*rules: str) -> list[int]:
    """The attempts that passes release until none releases any more."""
    ids: list[int] = []
    ensure_state_rows("default", rules)
    for _ in range(100):
        made = release_pass.release("default", list(rules))
        ids += [one.attempt_id for one in made.released]
        if not made.released:
            return ids
    raise AssertionError("passes release for ever")


def a_lease_later() -> None:
    """As if the leases of all that nobody has begun were over."""
    now = ledger_time.now("default")
    CallAttempt.objects.unbegun().update(
        released_at=now - timedelta(seconds=3), lease_until=now - timedelta(seconds=1)
    )
    recovery.recover("default")


def test_with_workers_away_a_rule_keeps_one_message_an_attempt_that_is_open(rules: Rules) -> None:
    """One attempt is released again and again; the others' turn comes once somebody begins it."""
    rules(SHORT, r=Rule(limits=[SlidingWindow("400/d")]))
    CallQueue.objects.send_many([CALL] * 600, rule="r")
    assert len(passes("r")) == LEAST
    made = release_pass.release("default", ["r"])
    assert not made.next_look.goes_on
    assert 0 < made.opens_in <= choosing.AGAIN / 1_000_000, "it looks again soon"
    for _ in range(20):
        a_lease_later()
        assert len(passes("r")) == 1
    assert CallAttempt.objects.open().count() == 1
    assert CallAttempt.objects.count() == LEAST + 20


def test_what_is_open_of_one_rule_hides_nothing_that_is_open_of_another(rules: Rules) -> None:
    """Of rules that share a tallied limit only a sample of what is open is read: a fills it."""
    shared = SlidingWindow("9000/h", name="account")
    rules(SHORT, a=Rule(limits=[shared]), b=Rule(limits=[shared]))
    now = ledger_time.now("default")
    longer = {"released_at": now, "started_at": now, "lease_until": now + timedelta(hours=1)}
    CallAttempt.objects.bulk_create(
        CallAttempt(call_id=number, number=1, rule="a", queue="callqueue", **longer)
        for number in range(1, SAMPLE + 1)
    )
    released = 0
    for _ in range(6):
        CallQueue.objects.send_many([CALL] * 10, rule="b")
        released += len(passes("a", "b"))
    assert released == LEAST


def test_when_workers_come_back_everything_goes_at_once(rules: Rules) -> None:
    rules(SHORT, r=Rule())
    CallQueue.objects.send_many([CALL] * 600, rule="r")
    passes("r")
    a_lease_later()
    (probe,) = passes("r")
    (job,) = claim.begin("default", [probe])
    first = passes("r")
    assert len(first) == LEAST + 1
    recorder.record_once("default", [answered(job), *map(answered, claim.begin("default", first))])
    assert len(passes("r")) == LEAST + len(first) + 1, "as many more as were answered just now"


def test_workers_that_keep_up_have_all_they_can_begin(rules: Rules) -> None:
    rules(SHORT, r=Rule())
    CallQueue.objects.send_many([CALL] * 600, rule="r")
    rounds = 0
    while CallQueue.objects.waiting().exists():
        rounds += 1
        recorder.record_once(
            "default", [answered(job) for job in claim.begin("default", passes("r"))]
        )
    assert rounds <= 6, "32, 64, 128, and so on"
    assert CallQueue.objects.done().count() == 600


def test_what_was_begun_more_than_a_quarter_of_the_lease_ago_shows_nothing(rules: Rules) -> None:
    rules(SHORT, r=Rule())
    CallQueue.objects.send_many([CALL] * 100, rule="r")
    recorder.record_once("default", [answered(job) for job in claim.begin("default", passes("r"))])
    then = ledger_time.now("default") - timedelta(seconds=0.7)
    CallAttempt.objects.update(**dict.fromkeys(("started_at", "sent_at", "finished_at"), then))
    assert len(passes("r")) == LEAST


def test_who_makes_calls_of_its_own_is_no_worker_of_the_queue(rules: Rules) -> None:
    rules(SHORT, r=Rule())
    CallQueue.objects.send_many([CALL] * 100, rule="r")
    assert len(passes("r")) == LEAST
    with callqueue.permit("r", wait=0):
        assert passes("r") == []


def queues_of(ids: list[int]) -> Counter[str]:
    return Counter(CallAttempt.objects.filter(pk__in=ids).values_list("queue", flat=True))


def test_calls_go_by_the_queue_whose_workers_are_there(rules: Rules) -> None:
    """While both are silent, both are tried."""
    rules(SHORT, r=Rule(queues=["away", "there"]))
    CallQueue.objects.send_many([CALL] * 10, rule="r")
    passes("r")
    a_lease_later()
    assert queues_of(passes("r")) == {"away": 1, "there": 1}
    assert passes("r") == []
    there = list(CallAttempt.objects.open().filter(queue="there").values_list("pk", flat=True))
    assert len(claim.begin("default", there)) == 1
    a_lease_later()
    CallQueue.objects.send_many([CALL] * 16, rule="r")
    assert queues_of(passes("r")) == {"there": 24, "away": 1}, "in case somebody listens again"


@pytest.mark.parametrize(
    ("lease", "allowed"), [(0.1, 32), (10, 32), (60, 180), (300, 900), (86400, 1000)]
)
def test_what_a_queue_gets_on_trust_grows_with_the_lease(lease: float, allowed: int) -> None:
    assert choosing.trusted_count(lease) == allowed


@pytest.mark.parametrize("why", ["cancelled", "refused by the broker", "failed"])
def test_what_comes_back_for_another_reason_is_no_silence(rules: Rules, why: str) -> None:
    rules(SHORT, r=Rule())
    CallQueue.objects.send_many([CALL] * 20, rule="r")
    ids = passes("r")
    if why == "cancelled":
        CallQueue.objects.all().cancel()
        CallQueue.objects.all().requeue()
    elif why == "failed":
        recorder.record_once("default", [answered(job, 500) for job in claim.begin("default", ids)])
        CallQueue.objects.all().requeue()
    else:
        transitions.void_and_log("default", ids)
    assert len(passes("r")) == 20
