"""History is counted once as attempts end, however late they are recorded, whoever counts."""

from __future__ import annotations

import random
from collections import Counter as Bag
from datetime import datetime, timedelta
from typing import Any

import pytest

from callqueue import FixedWindow, Rule, SlidingWindow, TokenBucket, database
from callqueue.limits.kinds import Concurrency
from callqueue.maintenance.history import prune
from callqueue.models import CallAttempt, CallQueue, Counted, Peak, Total
from callqueue.operations import audit, counting, histograms, history
from callqueue.operations.counting import Counter

pytestmark = pytest.mark.django_db

OUTCOMES = ("succeeded", "succeeded", "failed", "throttled", "lost", "gave up", "voided")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The database's clock, which goes on when it is told to."""

    class Clock:
        now = database.EPOCH + timedelta(days=20_000, hours=12, seconds=7)

        def go_on(self, seconds: float) -> datetime:
            self.now += timedelta(seconds=seconds)
            return self.now

    made = Clock()
    monkeypatch.setattr(database, "clock", lambda using: made.now)
    monkeypatch.setattr(counting, "SPENT", 3600.0)  # a slow machine counts as far as a fast one
    return made


def count(counter: Counter | None = None) -> Counter:
    counter = counter or Counter("default")
    while counter.count():
        pass
    return counter


def attempt(began: datetime, **fields: Any) -> CallAttempt:
    columns = {"call_id": 1, "number": 1, "rule": "pay", "queue": "celery", **fields}
    return CallAttempt.objects.create(released_at=began, started_at=began, **columns)


def end(one: CallAttempt, at: datetime, outcome: str = "succeeded") -> None:
    sent = None if outcome == "voided" else at - timedelta(milliseconds=100)
    CallAttempt.objects.filter(pk=one.pk).update(finished_at=at, sent_at=sent, outcome=outcome)


def summed(**scope: Any) -> Bag[str]:
    found: Bag[str] = Bag()
    for row in Total.objects.filter(**scope):
        found.update({name: getattr(row, name) for name in history.COUNTED})
    return found


@pytest.mark.parametrize("seed", range(4))
def test_every_attempt_is_counted_once_however_late_it_is_recorded(
    clock: Any, rules: Any, seed: int
) -> None:
    """Attempts begin, end, and are recorded up to two minutes after their end; two processes count
    in turn, and one of them begins anew.
    """
    rules(pay=Rule(limits=[SlidingWindow("100/s")]), chat=Rule())
    chance = random.Random(seed)
    clock.go_on(-60)
    counters = [count(), Counter("default")]
    under_way: list[tuple[CallAttempt, datetime, datetime]] = []
    expected: dict[str, Bag[str]] = {"pay": Bag(), "chat": Bag(), "a": Bag()}
    for _ in range(60):
        now = clock.go_on(chance.choice((0.1, 1, 4, 20)))
        for _ in range(chance.randrange(5)):
            key = chance.choice(("", "a", "b"))
            one = attempt(now, rule=chance.choice(("pay", "chat")), key=key)
            ends = now + timedelta(seconds=chance.choice((0, 0.5, 3, 60)))
            under_way.append((one, ends, ends + timedelta(seconds=chance.choice((0, 1, 30, 120)))))
        for item in [item for item in under_way if item[2] <= now]:
            under_way.remove(item)
            outcome = chance.choice(OUTCOMES)
            end(item[0], item[1], outcome)
            if outcome != "voided":
                kind = {"succeeded": "done", "throttled": "throttled"}.get(outcome, "failed")
                came_to = {"sent": 1, kind: 1} | ({"lost": 1} if outcome == "lost" else {})
                expected[item[0].rule].update(came_to)
                if item[0].key == "a":
                    expected["a"].update(came_to)
        if chance.random() < 0.5:
            counters[1] = chance.choice((counters[1], Counter("default")))
            count(chance.choice(counters))
    for one, ends, _ in under_way:
        end(one, ends)
        expected[one.rule].update(sent=1, done=1)
        if one.key == "a":
            expected["a"].update(sent=1, done=1)
    clock.go_on(300)
    count(counters[0])
    clock.go_on(300)
    count(counters[1])
    assert not Counted.objects.get().pending
    for width in history.KEPT:
        for rule in ("pay", "chat"):
            assert summed(rule=rule, key="", width=width) == expected[rule]
    assert summed(key="a", width=history.QUARTER) == expected["a"]
    assert sum(expected["pay"].values()) > 20


def test_the_peaks_are_those_of_an_audit(clock: Any, rules: Any) -> None:
    rules(
        pay=Rule(limits=[SlidingWindow("7/s", name="one"), SlidingWindow("9/m", per="key")]),
        read=Rule(limits=[SlidingWindow("7/s", name="one"), Concurrency(3)]),
        day=Rule(limits=[FixedWindow("50/h"), TokenBucket("5/s", burst=9)]),
    )
    chance = random.Random(1)
    clock.go_on(-60)
    counters = [count(), Counter("default")]
    for _ in range(80):
        now = clock.go_on(chance.choice((0.2, 1, 5)))
        for _ in range(chance.randrange(8)):
            one = attempt(
                now - timedelta(seconds=chance.random()),
                rule=chance.choice(("pay", "read", "day")),
                key=chance.choice("ab"),
            )
            end(one, now)
        count(counters[0])
        if chance.random() < 0.05:
            counters[0] = Counter("default")
            clock.go_on(20)
    clock.go_on(300)
    count(counters[0])
    judged = audit.audit("default", since=timedelta(days=1), tell=False)
    now = database.to_us(clock.now)
    budgets = {b.known_as: b for b in counters[0]._peaks.book.all_budgets()}  # type: ignore[union-attr]
    for width in history.KEPT:
        found = history.peaks("default", width, now // 1_000_000 - 4 * history.HOUR)
        assert len(found) == 5
        for finding in judged.findings:
            if finding.rule == "default":
                continue
            (name,) = (i for i, b in budgets.items() if b.limit.label == finding.name)
            assert found[name].highest == finding.highest > 0, finding
            assert found[name].allowed == finding.allowed


def test_a_share_is_that_of_an_audit(clock: Any, rules: Any) -> None:
    rules(pay=Rule(limits=[SlidingWindow("10/s"), TokenBucket("10/s", burst=10)]))
    clock.go_on(-30)
    counter = count()
    for _ in range(100):
        now = clock.go_on(0.2)
        end(attempt(now), now)
    clock.go_on(300)
    count(counter)
    (window, bucket, _) = audit.audit("default", since=timedelta(days=1), tell=False).findings
    found = history.peaks("default", history.MINUTE, 0)
    assert found["pay#0"].share == pytest.approx(window.used_share, abs=0.02)
    assert found["pay#1"].share == pytest.approx(bucket.used_share, abs=0.1)


def test_waits_and_answer_times_are_kept(clock: Any, rules: Any) -> None:
    rules(pay=Rule())
    now = clock.now - timedelta(seconds=20)
    for seconds in range(1, 101):
        call = CallQueue.objects.create(
            rule="pay", due_at_dt=now - timedelta(seconds=seconds), last_attempt=1, call_data={}
        )
        end(attempt(now, call_id=call.pk), now + timedelta(milliseconds=100))
    count()
    ((_, counts),) = (
        one
        for one in history.of_rule("default", "pay", history.RANGES[0], _now(clock))
        if one[1].sent
    )
    assert histograms.percentile(counts.waits, 0.5) == pytest.approx(50, rel=0.06)
    assert histograms.percentile(counts.waits, 0.95) == pytest.approx(95, rel=0.06)
    assert histograms.percentile(counts.answers, 0.5) == pytest.approx(0.1, rel=0.06)


def _now(clock: Any) -> int:
    return database.to_us(clock.now)


def test_what_was_there_before_is_counted_first(clock: Any, rules: Any) -> None:
    """After an upgrade, or where no dispenser ran, history is filled from the attempts."""
    rules(pay=Rule(limits=[SlidingWindow("5/s")]))
    for hours in (1, 30, 100, 160):
        at = clock.now - timedelta(hours=hours)
        end(attempt(at), at)
    count()
    assert summed(rule="pay", key="", width=history.LONG)["sent"] == 4
    assert [len(history.of_rule("default", "pay", r, _now(clock))) for r in history.RANGES] == [
        61,
        97,
        85,
    ]


def test_only_one_dispenser_counts(clock: Any, rules: Any) -> None:
    rules(pay=Rule())
    first = count()
    clock.go_on(4)
    assert not Counter("default")._is_its_turn(), "the other one counts"
    assert first._is_its_turn()
    clock.go_on(20)
    assert Counter("default")._is_its_turn(), "the other one has gone"


def test_a_clock_that_was_set_on_neither_loses_nor_doubles(clock: Any, rules: Any) -> None:
    from callqueue.ledger import clock_shift
    from callqueue.ledger.clock_shift import Jump

    rules(pay=Rule(limits=[SlidingWindow("5/h")]))
    for seconds in (10, 8, 4, 1):
        end(attempt(clock.now - timedelta(seconds=seconds)), clock.now - timedelta(seconds=seconds))
    count()
    before = summed(width=60)
    clock.go_on(3600)
    clock_shift.shift("default", Jump(_now(clock), 3600 * 1_000_000, 0, 0), [])
    clock.go_on(30)
    count()
    count()
    assert before["sent"] < summed(width=60)["sent"] == 4


def test_cleanup_deletes_what_no_range_shows(clock: Any, rules: Any) -> None:
    now = _now(clock) // 1_000_000
    for width, kept in history.KEPT.items():
        for start in (now - kept - 1, now - kept + 10):
            Total.objects.create(width=width, start=start, rule="pay")
            Peak.objects.create(width=width, start=start, budget="pay#0")
    prune("default")
    assert Total.objects.count() == Peak.objects.count() == 3


def test_attempts_of_nothing_but_themselves_are_counted(clock: Any, rules: Any) -> None:
    """An attempt need not have a call."""
    rules(pay=Rule())
    one = counting.totals_of([])
    assert one == {}
    end(
        attempt(clock.now - timedelta(seconds=9), call_id=987_654), clock.now - timedelta(seconds=9)
    )
    count()
    assert summed(width=60)["sent"] == 1


def test_a_limit_that_is_lowered_makes_no_excess_of_what_was_allowed(
    clock: Any, rules: Any
) -> None:
    """Its windows still hold what went by the rate before."""
    from callqueue.operations import control

    rules(pay=Rule(limits=[FixedWindow("100/h")]))
    clock.go_on(-60)
    counter = count()
    for at in range(90):
        end(attempt(clock.now - timedelta(seconds=at)), clock.now - timedelta(seconds=at))
    clock.go_on(30)
    count(counter)
    control.change_limit("default", "pay", "pay#0", "50/h")
    end(attempt(clock.now), clock.now)
    clock.go_on(30)
    count(counter)
    for width in history.KEPT:
        found = history.peaks("default", width, 0)["pay#0"]
        assert (found.highest, found.allowed) == (91, 100)
    clock.go_on(7200)
    for _ in range(51):
        end(attempt(clock.now), clock.now)
    clock.go_on(30)
    count(counter)
    last = Peak.objects.filter(width=60).latest("start")
    assert (last.highest, last.allowed) == (51, 50), "a real excess is one"


def test_a_call_in_flight_for_hours_keeps_nothing_waiting(clock: Any, rules: Any) -> None:
    """What went meanwhile is in the peaks, and no longer in memory; it counts as it ends."""
    rules(pay=Rule(limits=[SlidingWindow("7/s")]), slow=Rule(limits=[Concurrency(5)]))
    counter = count()
    slow = attempt(clock.now, rule="slow")
    for _ in range(60):
        now = clock.go_on(10)
        end(attempt(now), now)
        count(counter)
    assert counter._peaks is not None
    assert len(counter._peaks._upcoming) < 30
    assert Peak.objects.filter(budget="pay#0", width=60).count() >= 7
    end(slow, clock.now)
    clock.go_on(30)
    count(counter)
    assert history.peaks("default", 60, 0)["slow#0"].highest == 1


def test_a_limit_may_have_a_long_name(clock: Any, rules: Any) -> None:
    """A name is no reason for counting to end."""
    names = ["n" * 150 + "a", "n" * 150 + "b"]
    rules(pay=Rule(limits=[SlidingWindow("7/s", name=name) for name in names]))
    counter = count()
    end(attempt(clock.now), clock.now)
    clock.go_on(30)
    count(counter)
    assert {one.budget: one.highest for one in Peak.objects.filter(width=60)} == {
        history.kept_name(name): 1 for name in names
    }
    found = history.peaks("default", 60, 0, names)
    assert [found[name].highest for name in names] == [1, 1]
    series = history.series("default", names[0], history.RANGES[0], _now(clock), _now(clock))
    assert max(highest or 0 for _, highest in series) == 1


def test_keys_that_differ_in_case_and_spaces_are_counted_apart(clock: Any, rules: Any) -> None:
    rules(pay=Rule(limits=[SlidingWindow("7/s", per="key")]))
    counter = count()
    keys = ["a", "A", "a ", "ä", "a\u0308", "ss", "ß"]
    for key in keys:
        end(attempt(clock.now, key=key), clock.now)
    clock.go_on(30)
    count(counter)
    found, whole = history.of_keys("default", "pay", 3600, _now(clock), 20)
    assert whole == 7
    assert {key: counts.sent for key, counts in found} == dict.fromkeys(keys, 1)


def test_two_processes_that_count_at_once_count_once(transactional_db: None, rules: Any) -> None:
    """Threads with connections of their own, each as a dispenser that took over."""
    from threading import Thread

    from django.db import connection
    from django.utils import timezone

    if connection.vendor == "sqlite":
        pytest.skip("one writer at a time")
    rules(pay=Rule(limits=[SlidingWindow("7/s")]))
    now = timezone.now()
    for seconds in range(300):
        at = now - timedelta(seconds=seconds + 5)
        end(attempt(at, key=f"k{seconds % 3}"), at)

    def work() -> None:
        try:
            for _ in range(3):
                count()
        finally:
            connection.close()

    threads = [Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert summed(rule="pay", key="", width=60)["sent"] == 300
    assert summed(width=history.QUARTER, key="k1")["sent"] == 100
