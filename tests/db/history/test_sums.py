"""Sums are the attempts that ended, however late they are recorded, whoever adds up, and when."""

from __future__ import annotations

import random
from bisect import bisect_left
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import OperationalError, connection

from callqueue import Rule, clocks, database, states
from callqueue.history import sums
from callqueue.history.sums import BOUNDS, DAY_S, EVER, HOUR_S, MINUTE_S, QUARTER_S, Sums
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt, CallQueue, Sum, Summed
from tests.support.locking import together

pytestmark = pytest.mark.django_db

ENDS = (*states.OUTCOMES, states.SUCCEEDED, states.SUCCEEDED)


class Clock:
    """Ledger time, which goes on when it is told to."""

    def __init__(self) -> None:
        self.now = database.EPOCH + timedelta(days=20_000, hours=12, seconds=7)
        self.moved = 0  # seconds

    def go_on(self, seconds: float) -> datetime:
        self.now += timedelta(seconds=seconds)
        return self.now

    @property
    def us(self) -> int:
        return database.to_us(self.now)

    @property
    def seconds(self) -> int:
        return self.us // 1_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    read = lambda using: clocks.Reading(made.us, 0.0, 0.0, made.moved * 1_000_000)  # noqa: E731
    monkeypatch.setattr(ledger_time, "read", read)
    return made


def keep(using: str = "default") -> None:
    """Until there is nothing to add: a slow machine takes more calls than a fast one."""
    before = None
    while (now := list(Summed.objects.using(using).values_list("until", "settled"))) != before:
        before = now
        sums.bring_up_to_date(using)


@pytest.fixture(autouse=True)
def two_rules(rules: Any) -> None:
    rules(pay=Rule(), chat=Rule())


@pytest.fixture
def several_writers(transactional_db: None) -> None:
    if connection.vendor == "sqlite":
        pytest.skip("one writer at a time")


def attempt(at: datetime, outcome: str = states.SUCCEEDED, **columns: Any) -> CallAttempt:
    """One that was sent a tenth of a second before it ended."""
    began = at - timedelta(seconds=0.1)
    values = {"call_id": 1, "number": 1, "rule": "pay", "queue": "celery", "sent_at": began}
    values |= {"released_at": began, "started_at": began, "finished_at": at, "outcome": outcome}
    return CallAttempt.objects.create(**(values | columns))


def bucket(seconds: float) -> int:
    return bisect_left(BOUNDS, seconds)


def counted(rule: str) -> Sums:
    """What the attempts come to, one by one."""
    found = Sums()
    for one in CallAttempt.objects.filter(rule=rule, finished_at__isnull=False):
        if one.outcome != states.VOIDED:
            found.sent += 1
            found.done += one.outcome == states.SUCCEEDED
            found.failed += one.outcome in (states.ERRORED, states.GAVE_UP, states.LOST)
            found.throttled += one.outcome == states.THROTTLED
            found.lost += one.outcome == states.LOST
            if one.sent_at is not None:
                found.answers[bucket((one.finished_at - one.sent_at).total_seconds())] += 1
            call = CallQueue.objects.filter(pk=one.call_id, last_attempt=one.number).first()
            if call is not None and one.sent_at and call.due_at_dt <= one.sent_at:
                found.waits[bucket((one.sent_at - call.due_at_dt).total_seconds())] += 1
    return found


def of(rule: str, *widths: int) -> Sums:
    found = Sums()
    for row in Sum.objects.filter(rule=rule, width__in=widths):
        found.add(Sums(*(getattr(row, name) for name in sums.COLUMNS)))
    return found


def ever(rule: str = "pay") -> Sums:
    return sums.read_since_ever("default", [rule])[rule]


def settled(clock: Clock) -> None:
    """Everything is as late as it may be."""
    clock.go_on(sums.SETTLED_S + QUARTER_S)
    keep()


@pytest.mark.parametrize("seed", range(3))
def test_settled_sums_are_the_count_of_the_attempts(clock: Clock, seed: int) -> None:
    """Attempts are recorded up to an hour after their ends; sums are added up now and then."""
    chance, late = random.Random(seed), list[tuple[datetime, dict[str, Any]]]()
    keep()
    for _ in range(50):
        now = clock.go_on(chance.choice((0.1, 4, 20, 300)))
        for _ in range(chance.randrange(4)):
            end = now - timedelta(seconds=chance.random())
            sent = end - timedelta(seconds=chance.choice((0.05, 0.2, 7, 90)))
            due = sent - timedelta(seconds=chance.choice((-30, 0, 0.6, 45, 5000)))
            call = CallQueue.objects.create(
                rule="pay", due_at_dt=due, last_attempt=chance.choice((1, 2)), call_data={}
            )
            columns = {
                "call_id": chance.choice((call.pk, 987_654)),
                "rule": chance.choice(("pay", "chat")),
                "outcome": (outcome := chance.choice(ENDS)),
                "sent_at": None if outcome == states.LOST else sent,
                "finished_at": end,
            }
            at = now + timedelta(seconds=chance.choice((0, 0, 1, 30, 3600)))
            late.append((at, columns))
        for one in [one for one in late if one[0] <= now]:
            late.remove(one)
            attempt(one[0], **one[1])
        if chance.random() < 0.5:
            before = {name: ever(name) for name in ("pay", "chat")}
            keep()
            assert all(before[name].beyond(ever(name)) == Sums() for name in before)
    for at, columns in late:
        attempt(at, **columns)
    settled(clock)
    for name in ("pay", "chat"):
        assert of(name, QUARTER_S) == of(name, EVER) == counted(name)
    assert counted("pay").sent > 10


def test_what_ended_just_now_is_added_with_what_ended_before_it(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, though that fails first; and of rules that are in the settings."""
    keep()
    attempt(clock.now)
    attempt(clock.now, rule="gone")
    keep()
    assert ever() == Sums()
    clock.go_on(sums.LATE_S)
    with monkeypatch.context() as patched:
        patched.setattr(Summed, "save", Mock(side_effect=OperationalError("disk full")))
        with pytest.raises(OperationalError):
            keep()
    assert ever() == Sums()
    keep()
    keep()
    assert (ever().sent, sum(ever().waits), sum(ever().answers)) == (1, 0, 1)
    assert not Sum.objects.filter(rule="gone").exists()


def test_what_was_deleted_before_it_is_settled_stays_counted(clock: Clock) -> None:
    """Though others of its quarter of an hour are recorded late."""
    keep()
    end = clock.now
    gone = [attempt(end, states.GAVE_UP) for _ in range(3)]
    attempt(end)
    clock.go_on(60)
    keep()
    for one in gone:
        one.delete()
    attempt(end), attempt(end)
    settled(clock)
    assert (ever().sent, ever().done, ever().failed) == (6, 3, 3)
    assert of("pay", QUARTER_S) == ever()


@pytest.mark.parametrize("moved", [0, 37 * 60, -37 * 60])
def test_waits_that_nobody_can_tell_any_more_stay_counted(clock: Clock, moved: int) -> None:
    """A call that is asked for again is due anew; when it was, is wall time."""
    clock.moved = moved
    keep()
    end, due = clock.now, clock.now + timedelta(seconds=moved - 4)
    call = CallQueue.objects.create(rule="pay", due_at_dt=due, last_attempt=1, call_data={})
    attempt(end, call_id=call.pk)
    clock.go_on(60)
    keep()
    assert ever().waits[bucket(4)] == 1
    anew = clock.now + timedelta(seconds=moved)
    CallQueue.objects.filter(pk=call.pk).update(due_at_dt=anew)
    attempt(end)
    settled(clock)
    assert ever().waits[bucket(4)] == sum(ever().waits) == 1
    assert ever().sent == 2


def test_two_that_add_up_at_once_count_none_twice(several_writers: None) -> None:
    """One goes on, the others leave it to that one."""
    now = ledger_time.now("default")
    for seconds in range(300):
        attempt(now - timedelta(seconds=3 * seconds + 5))

    def work() -> None:
        for _ in range(20):
            sums.bring_up_to_date("default")

    together(*[work] * 4)
    assert of("pay", MINUTE_S) == of("pay", QUARTER_S) == ever() == counted("pay")
    assert ever().sent == 300


def test_nobody_waits_for_another_that_adds_up(several_writers: None) -> None:
    sums.bring_up_to_date("default")
    with database.writing("default"):
        assert sums._lock_progress("default") is not None
        assert together(lambda: sums.add_up("default") or sums.recount_next_quarter("default")) == [
            False
        ]


def test_after_a_long_silence_it_goes_on_in_steps(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep()
    first, step = clock.now, timedelta(seconds=sums.STEP_S)
    for hours in range(60):
        attempt(first + timedelta(hours=hours, seconds=1))
    clock.go_on(60 * HOUR_S)
    monkeypatch.setattr(sums, "SPENT_S", 0.0)  # one step, and the next one at the next call
    for steps in (1, 2):
        sums.bring_up_to_date("default")
        until = database.from_us(Summed.objects.get().until) + timedelta(seconds=sums.LATE_S)
        assert until == first + steps * step
    keep()
    assert Summed.objects.get().until == clock.us - sums.LATE_S * 1_000_000
    assert ever() == counted("pay")
    assert ever().sent == 60
    old = clock.seconds - sums.MINUTES_KEPT_S
    assert not Sum.objects.filter(width=MINUTE_S, start__lt=old).exists()


def test_what_is_old_goes_while_counters_stay(clock: Clock) -> None:
    keep()
    for _ in range(12):
        attempt(clock.go_on(20 * 60))
        keep()
    for seconds, left in ((sums.SETTLED_S, (0, 12)), (sums.QUARTERS_KEPT_S, (0, 0))):
        clock.go_on(sums.LATE_S)
        keep()
        clock.go_on(seconds)  # in which nothing ends, and somebody adds that up
        Summed.objects.update(until=clock.us - 60_000_000)
        keep()
        assert (of("pay", MINUTE_S).sent, of("pay", QUARTER_S).sent) == left
        assert ever().sent == 12


def test_reading_gives_what_was_added(clock: Clock) -> None:
    """By quarters of an hour, and of the last hour."""
    keep()
    ended, chance, began = list[int](), random.Random(5), clock.seconds
    for _ in range(120):
        clock.go_on(chance.choice((5, 60, 1200)))
        for _ in range(chance.randrange(1, 4)):
            attempt(clock.now, chance.choice((states.SUCCEEDED, states.THROTTLED)))
            ended.append(clock.seconds)
        keep()
    clock.go_on(sums.LATE_S)
    keep()
    now = clock.seconds
    recent = sums.read_recent("default", ["pay", "chat"], now)
    for width, found in ((QUARTER_S, recent["pay"].quarter), (HOUR_S, recent["pay"].hour)):
        since = now // MINUTE_S * MINUTE_S - width
        assert found.sent == sum(end >= since for end in ended) > 0
    assert recent["chat"].hour == Sums()
    to_come = sums.read_recent("default", ["pay"], began - 2 * HOUR_S)["pay"]
    assert to_come.quarter == to_come.hour == Sums(), "of a clock that was set back"
    found = sums.read_quarters("default", "pay", now - DAY_S, now + 1)
    first = (now - DAY_S) // QUARTER_S * QUARTER_S
    assert [start for start, _ in found] == list(range(first, now + 1, QUARTER_S))
    for start, one in found:
        assert one.sent == sum(start <= end < start + QUARTER_S for end in ended)
        assert one.done + one.throttled == one.sent
    assert ever() == counted("pay")


def test_a_share_of_buckets_is_within_a_bound() -> None:
    buckets = sums.new_buckets()
    assert sums.bound_of_share(buckets, 0.5) is None
    buckets[bucket(0.2)], buckets[bucket(20)], buckets[-1] = 90, 8, 2
    assert [sums.bound_of_share(buckets, share) for share in (0.5, 0.9, 0.95, 0.99)] == [
        0.25, 0.25, 30.0, float("inf"),
    ]  # fmt: skip


def test_adding_up_takes_as_many_statements_for_many_rules(
    clock: Clock, rules: Any, django_assert_max_num_queries: Any
) -> None:
    rules(**{f"p{number}": Rule() for number in range(40)})
    keep()
    for _ in range(2):
        for number in range(40):
            attempt(clock.now, rule=f"p{number}")
        clock.go_on(10)
        with django_assert_max_num_queries(14):
            assert not sums.add_up("default")
    assert all(
        one.sent == 2 for name, one in sums.read_since_ever("default", ["p0", "p39"]).items()
    )
