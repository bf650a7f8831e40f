"""Attempts age from when they were sent, answered or not, once a worker has told the ledger."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import OperationalError

from callqueue import Concurrency, Rule, SlidingWindow, TokenBucket, clocks, control
from callqueue.dispatch.dispenser import Dispenser
from callqueue.execution import claim, judging, recorder, telling, wire
from callqueue.forecast import has_room
from callqueue.ledger import ledger_time, settings
from callqueue.maintenance import recovery
from callqueue.models import CallAttempt
from callqueue.testing import travel
from callqueue.transitions import Job
from tests.support.behaviour import release, response, send

Rules = Callable[..., None]
TWO = SlidingWindow("2/10s")


def under_way(*, ago: float, rule: str = "r") -> list[Job]:
    """Begin what is released; its requests were sent so many seconds ago, as wholes."""
    open_ids = CallAttempt.objects.open().filter(started_at__isnull=True, rule=rule)
    jobs = claim.begin("default", list(open_ids.values_list("pk", flat=True)))
    for job in jobs:
        job.gate = wire.Gate()
        job.gate.sent_at, job.gate.is_whole = clocks.monotonic() - ago, True
    return jobs


def answered(job: Job, *, settled: Any = None) -> None:
    """Record that it is answered now."""
    answer = wire.Answer(response(200, {}, b"{}"), job.gate.sent_at, sent=True)
    result = judging.result_of_answer(job, answer)
    result.cost = settled
    recorder.record_once("default", [result])


def released(rules: Rules, rule: Rule, *, calls: int = 5, cost: Any = None) -> int:
    rules(r=rule)
    for _ in range(calls):
        send("r", cost=cost)
    return len(release())


def test_what_is_told_of_ages_from_when_it_was_sent(rules: Rules) -> None:
    assert released(rules, Rule(limits=[TWO])) == 2
    first, second = under_way(ago=11)
    second.gate.sent_at += 10
    assert not has_room("default", "r")
    assert telling.tell("default", [first, second]) == 2
    sent = CallAttempt.objects.get(pk=second.attempt.id).sent_at
    assert timedelta(seconds=1) <= ledger_time.now("default") - sent < timedelta(seconds=8)
    assert telling.tell("default", [first, second]) == 0
    assert has_room("default", "r")
    assert len(release()) == 1
    answered(first)
    assert len(release()) == 0


@pytest.mark.parametrize(
    "rule",
    [
        Rule(limits=[SlidingWindow("2/10s", strict=True)]),
        Rule(limits=[Concurrency(2)]),
        Rule(limits=[TWO, Concurrency(2)]),
    ],
    ids=["strict", "in flight", "window and in flight"],
)
def test_what_only_the_answer_ends_stays_charged(rules: Rules, rule: Rule) -> None:
    assert released(rules, rule) == 2
    telling.tell("default", under_way(ago=11))
    assert len(release()) == 0


def test_nothing_is_told_of_that_is_not_sent_as_a_whole_has_not_arrived_is_young_or_not_ones_own(
    rules: Rules,
) -> None:
    assert released(rules, Rule(limits=[SlidingWindow("6/10s")]), calls=6) == 6
    jobs = broken, lost, young, unsent, ended, taken = under_way(ago=11)
    broken.gate.is_whole = False
    lost.gate.has_arrived = lambda: False
    young.gate.sent_at = clocks.monotonic()
    unsent.gate = None
    CallAttempt.objects.filter(pk=ended.attempt.id).update(finished_at=ledger_time.now("default"))
    CallAttempt.objects.filter(pk=taken.attempt.id).update(worker="another")
    assert telling.tell("default", jobs) == 0
    assert not CallAttempt.objects.filter(sent_at__isnull=False).exists()


def test_what_arrived_late_ages_from_when_it_was_seen_to_have_arrived(rules: Rules) -> None:
    """What the provider counted late must not leave early because its answer is there."""
    released(rules, Rule(limits=[TWO]), calls=2)
    arrived, unseen = jobs = under_way(ago=11)
    for job in jobs:
        job.gate.has_arrived = lambda: False
    telling.tell("default", jobs)
    arrived.gate.has_arrived = lambda: True
    assert telling.tell("default", jobs) == 1
    sent = CallAttempt.objects.get(pk=arrived.attempt.id).sent_at
    assert ledger_time.now("default") - sent < timedelta(seconds=10)
    for job in jobs:
        answered(job)
    assert len(release()) == 0
    attempt = CallAttempt.objects.get(pk=unseen.attempt.id)
    assert attempt.sent_at == attempt.finished_at  # between two looks: nobody knows when


def test_a_database_that_is_away_is_told_later(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    released(rules, Rule(limits=[TWO]))
    jobs = under_way(ago=11)
    with monkeypatch.context() as away:
        away.setattr(
            telling.transitions, "tell_when_sent", Mock(side_effect=OperationalError("gone"))
        )
        assert telling.tell("default", jobs) is None
    assert not any(job.gate.is_told for job in jobs)
    assert telling.tell("default", jobs) == 2


def test_what_only_tallied_limits_count_is_not_told_of(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Telling would be for nothing. It goes by what is in force, not by its own settings."""
    monkeypatch.setattr(settings, "LATELY", 0.0)
    assert released(rules, Rule(limits=[SlidingWindow("5000/m")]), calls=2) == 2
    jobs = under_way(ago=11)
    assert telling.tell("default", jobs) == 0
    control.change_limit("default", "r", "r#0", "2/10s")
    assert telling.tell("default", jobs) == 2
    send("r")
    assert len(release()) == 1


def test_what_was_told_of_and_then_lost_ages_from_when_it_was_sent(rules: Rules) -> None:
    assert released(rules, Rule(limits=[TWO])) == 2
    telling.tell("default", under_way(ago=11))
    CallAttempt.objects.update(lease_until=ledger_time.now("default") - timedelta(seconds=1))
    assert recovery.end_lost("default") == 2
    assert len(release()) == 2


def test_what_the_answer_adds_to_the_cost_is_charged_from_the_answer(rules: Rules) -> None:
    tokens = SlidingWindow("100/10s", unit="tokens")
    assert released(rules, Rule(limits=[tokens]), cost={"tokens": 50}) == 2
    jobs = under_way(ago=11)
    telling.tell("default", jobs)
    answered(jobs[0], settled={"tokens": 110})  # 60 more than it was charged, as of now
    assert len(release()) == 0
    answered(jobs[1], settled={"tokens": 10})
    assert len(release()) == 0
    attempt = CallAttempt.objects.get(pk=jobs[0].attempt.id)
    later = attempt.finished_at - timedelta(seconds=11)
    CallAttempt.objects.filter(pk=attempt.pk).update(finished_at=later)
    assert len(release()) == 2


def test_what_several_answers_made_dearer_than_the_burst_is_owed(rules: Rules) -> None:
    bucket = TokenBucket("100/h", burst=100, unit="tokens")
    settles = Rule(limits=[bucket], settle=lambda answer: None)
    assert released(rules, settles, cost={"tokens": 50}) == 2
    for job in under_way(ago=0):
        answered(job, settled={"tokens": 100})
    together = ledger_time.now("default")
    CallAttempt.objects.update(sent_at=together, finished_at=together)
    with travel(minutes=61):
        assert release() == []


def test_keys_that_wait_for_room_are_woken_by_what_was_told_of(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/4s", per="key")]))
    for key in "abab":
        send("r", key=key)
    assert len(release()) == 2
    assert len(release()) == 0
    telling.tell("default", under_way(ago=11))
    assert len(release()) == 2


@pytest.mark.usefixtures("transactional_db")
def test_a_dispenser_that_waits_for_an_answer_goes_on_when_the_ledger_is_told(rules: Rules) -> None:
    rules(r=Rule(limits=[TokenBucket("10/s", burst=1)]))
    for _ in range(2):
        send("r")
    dispenser = Dispenser(publish=lambda *_: True)
    dispenser.tick()
    group = dispenser.groups[("r",)]
    assert group.waits_for_answer
    group.look_at = float("inf")  # no pass but by news
    dispenser.tick()
    assert CallAttempt.objects.count() == 1
    telling.tell("default", under_way(ago=5))
    dispenser.tick()
    assert CallAttempt.objects.count() == 2


@pytest.mark.parametrize(
    ("limit", "within"),
    [(TWO, 20), (TokenBucket("2/10s", burst=2), 10)],
    ids=["window", "bucket"],
)
def test_what_was_told_of_late_ages_late(rules: Rules, limit: Any, within: float) -> None:
    """Else nobody would see that it has aged away, and keys would go on waiting for the answer."""
    released(rules, Rule(limits=[limit]))
    telling.tell("default", under_way(ago=3600))
    now = ledger_time.now("default")
    for sent in CallAttempt.objects.values_list("sent_at", flat=True):
        assert now - sent < timedelta(seconds=within)
    assert len(release()) == 2
