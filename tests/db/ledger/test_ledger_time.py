"""Ledger time goes on though the database's clock be set, and that costs no more where the ledger
counts more.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from callqueue import FixedWindow, Rule, SlidingWindow, clocks, database, states
from callqueue.database import ClockNow, from_us, server_clock
from callqueue.dispatch.release_pass import ensure_states, release
from callqueue.ledger import ledger_time
from callqueue.ledger.ledger_time import LedgerNow
from callqueue.limits.kinds import SECOND
from callqueue.models import CallAttempt, LedgerState
from tests.support.behaviour import send

DOUBLINGS = 13
MANY = 2**DOUBLINGS
ROOM = 20
JUMPS = [0.015, 3600, -86400 * 30]


@pytest.fixture
def watched(transactional_db: None) -> Iterator[ledger_time.Watch]:
    """This process is no newcomer."""
    ledger_time.forget_readings()
    watch = ledger_time.watch("default")
    watch.look()
    watch.since = clocks.monotonic() - 60
    yield watch
    ledger_time.forget_readings()


@pytest.fixture
def full(settings: Any, watched: ledger_time.Watch) -> None:
    """A day's window in which MANY count, and ROOM more have room."""
    window = SlidingWindow(f"{MANY + ROOM}/d")
    settings.CALLQUEUE = {"RULES": {"r": Rule(limits=[window])}}
    ensure_states("default", ["r"])
    ended = ledger_time.now("default") - timedelta(hours=12)
    CallAttempt.objects.create(
        call_id=10**9, number=1, rule="r", queue="celery", cost=1, calls=1, outcome=states.SUCCEEDED,
        released_at=ended, started_at=ended, sent_at=ended, finished_at=ended,
    )  # fmt: skip
    table = database.quoted("default", CallAttempt._meta.db_table)
    names = [f.column for f in CallAttempt._meta.concrete_fields if not f.primary_key]
    columns = ", ".join(database.quoted("default", name) for name in names)
    with connection.cursor() as cursor:
        for _ in range(DOUBLINGS):
            cursor.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {table}")


def passes(count: int) -> tuple[int, int]:
    """Send so many; how many of them one pass releases, in how many statements."""
    for _ in range(count):
        send("r")
    with CaptureQueriesContext(connection) as made:
        found = release("default", ["r"])
    return len(found.released), len(made)


COUNTING = 3  # statements: what is open, what ages, holds


@pytest.mark.parametrize("jump", JUMPS)
def test_a_clock_that_is_set_costs_few_statements_and_rewrites_no_attempt(
    full: None, monkeypatch: pytest.MonkeyPatch, watched: ledger_time.Watch, jump: float
) -> None:
    assert passes(1)[0] == 1  # and counts all anew
    released, statements = passes(4)
    assert released == 4
    before = list(CallAttempt.objects.order_by("pk").values_list()[MANY - 5 :])

    monkeypatch.setattr(server_clock, "ahead", timedelta(seconds=jump))
    first, _ = passes(5)  # finds the jump, unless it is as small as a statement is slow
    assert first == 0 or abs(jump) < 1
    with CaptureQueriesContext(connection) as made:
        watched.look()
    assert len(made) < 20
    assert watched.look() == 0

    if not first:
        released, counted = passes(0)
        # what was known to be free is of the frame of before: it counts, and tallies are as they were
        assert (released, counted <= statements + COUNTING) == (5, True)
    assert list(CallAttempt.objects.order_by("pk").values_list()[MANY - 5 : MANY + 5]) == before
    assert passes(ROOM)[0] == ROOM - 10, "and nothing over"


@pytest.mark.parametrize("jump", [0, *JUMPS])
def test_all_ways_to_ledger_time_agree(
    monkeypatch: pytest.MonkeyPatch, watched: ledger_time.Watch, jump: float
) -> None:
    before = ledger_time.now("default")
    monkeypatch.setattr(server_clock, "ahead", timedelta(seconds=jump))
    watched.look()
    ledger_time.make_frame("default")
    rows = LedgerState.objects.all()
    by_orm, wall = rows.annotate(now=LedgerNow(), wall=ClockNow()).values_list("now", "wall").get()
    reading = ledger_time.read("default")
    after = from_us(reading.at)
    error = timedelta(seconds=0.3)
    for one in (by_orm, ledger_time.now("default"), after):
        assert before - error <= one <= before + timedelta(seconds=30)
    moved = timedelta(microseconds=ledger_time.moved("default"))
    assert abs((wall - by_orm) - moved) < error
    assert ledger_time.to_wall("default", after) == from_us(reading.wall)
    late = ledger_time.now("default") + error
    assert rows.annotate(now=LedgerNow()).filter(now__lte=late).exists()


@pytest.mark.parametrize("moved", [0, 37 * 60, -37 * 60, 86400 * 40])
def test_a_calendar_is_the_walls_however_far_the_ledger_was_moved(moved: int) -> None:
    """A day that begins at midnight of the clock begins at another instant of ledger time."""
    limit, by = FixedWindow("1/d", timezone="Europe/Berlin"), moved * SECOND
    wall = database.to_us(datetime(2026, 3, 28, 17, 5, tzinfo=UTC))
    day = tuple(instant - by for instant in limit.window(wall))
    shifted = limit.moved_by(by)
    for one in (shifted, shifted.with_rate("2/d"), shifted.times(3)):
        assert one.window(wall - by) == day


def test_what_went_before_the_clock_was_set_went_on_the_day_that_it_is_now(
    settings: Any, monkeypatch: pytest.MonkeyPatch, watched: ledger_time.Watch
) -> None:
    """The clock was wrong before: for the provider it is a second ago."""
    settings.CALLQUEUE = {"RULES": {"r": Rule(limits=[FixedWindow("2/d")])}}
    ensure_states("default", ["r"])
    assert passes(3)[0] == 2
    monkeypatch.setattr(server_clock, "ahead", timedelta(days=1))
    watched.look()
    assert passes(0)[0] == 0
