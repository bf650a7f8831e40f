"""The database's clock jumps: never over the limit, and no stall longer than a window."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.utils import timezone

from callqueue import Rule, SlidingWindow, clocks, conf, database, states
from callqueue.database import server_clock
from callqueue.dispatch.dispenser import Membership
from callqueue.dispatch.release_pass import ensure_states, release
from callqueue.execution import judging, recorder, request, telling, wire
from callqueue.execution.claim import begin
from callqueue.execution.connection import Trip
from callqueue.ledger import holds, ledger_time, settings
from callqueue.ledger.transaction import transaction as in_time
from callqueue.limits.budgets import bind
from callqueue.maintenance import cleanup, recovery
from callqueue.management.commands import callqueue_dispenser
from callqueue.models import (
    CallAttempt,
    CallQueue,
    DispenserState,
    Hold,
    KeyTurn,
)
from callqueue.transitions import Job, Result
from tests.support.behaviour import response


class Clocks:
    """The database's clock and this process's monotonic one, both at a test's command."""

    def __init__(self) -> None:
        self.wall, self.mono = timezone.now(), 1000.0
        self._later: list[tuple[float, Callable[[], Any]]] = []

    def pass_by(self, seconds: float) -> None:
        self.wall += timedelta(seconds=seconds)
        self.mono += seconds
        due = [do for at, do in self._later if at <= self.mono]
        self._later = [one for one in self._later if one[0] > self.mono]
        for do in due:
            do()

    def after(self, seconds: float, do: Callable[[], Any]) -> None:
        """Have another process do this then."""
        self._later.append((self.mono + seconds, do))

    def jump(self, seconds: float) -> None:
        self.wall += timedelta(seconds=seconds)

    @property
    def ledger(self) -> datetime:
        """Ledger time, as of now."""
        return self.wall - timedelta(microseconds=ledger_time.moved("default"))


def _shown(two_clocks: Clocks) -> str:
    """The database's clock for a statement. Where no statement reads and writes by it, none needs
    to bring it.
    """
    is_read = connection.vendor == "postgresql"
    return f"CAST('{two_clocks.wall.isoformat()}' AS timestamptz)" if is_read else "NULL"


@pytest.fixture
def two_clocks(monkeypatch: pytest.MonkeyPatch, settings: Any, transactional_db: None) -> Clocks:
    settings.CALLQUEUE = {"RULES": {"r": Rule(limits=[SlidingWindow("20/m", jitter=0.05)])}}
    monkeypatch.setattr(telling, "SLOW", 0.0)
    two_clocks = Clocks()
    monkeypatch.setattr(database, "clock", lambda using: two_clocks.wall)
    monkeypatch.setattr(database, "clock_sql", lambda using: _shown(two_clocks))
    monkeypatch.setattr(clocks, "monotonic", lambda: two_clocks.mono)
    monkeypatch.setattr(ledger_time, "time", SimpleNamespace(sleep=two_clocks.pass_by))
    monkeypatch.setattr(ledger_time, "_watches", {})
    ensure_states("default", list(conf.current().rules))
    url = {"method": "get", "params": {"url": "http://vendor.example/"}}
    CallQueue.objects.send_many([url] * 100, rule="r")
    CallQueue.objects.update(due_at_dt=two_clocks.wall)
    ledger_time.watch("default").look()
    two_clocks.pass_by(1)  # it is no newcomer any more
    return two_clocks


def released(two_clocks: Clocks) -> int:
    """What the next passes release within a tenth of a second: a pass that finds the clock jumped
    looks again.
    """
    count = 0
    for _ in range(5):
        count += len(release("default", ["r"]).released)
        two_clocks.pass_by(0.02)
    return count


def answer_all(two_clocks: Clocks) -> None:
    def work(locked: Any) -> None:
        instants = dict.fromkeys(("started_at", "sent_at", "finished_at"), locked.now)
        CallAttempt.objects.open().update(**instants, outcome=states.SUCCEEDED)

    in_time("default", work)


def tell_of_all(two_clocks: Clocks) -> None:
    """They are all under way, and were sent just now."""
    jobs = begin("default", list(CallAttempt.objects.open().values_list("pk", flat=True)))
    for job in jobs:
        job.gate = wire.Gate()
        job.gate.sent_at, job.gate.is_whole = two_clocks.mono, True
    if telling.tell("default", jobs) == 0:
        assert telling.tell("default", jobs) == len(jobs)  # now it knows of the jump


@pytest.mark.parametrize("who", ["has looked", "has not looked", "is new"])
def test_a_dispenser_that_nobody_has_heard_before_a_jump_is_no_more_silent_after_it(
    two_clocks: Clocks, who: str
) -> None:
    """Its limit was taken for that of one that is long dead, and the laxer one of two held: by whom
    the clock jumped while it began, too.
    """
    strict, lax = (bind({"r": Rule(limits=[SlidingWindow(f"{n}/m")])}) for n in (2, 40))
    settings.Party("default").join(strict)
    others = ledger_time.watch("default")
    others.look()
    two_clocks.jump(7200)
    if who == "has looked":
        others.look()
    if who == "is new":
        ledger_time.forget_readings()
        two_clocks.after(0.1, others.look)
    book = settings.Party("default").join(lax)
    assert {str(budget.limit.rate) for budget in book.budgets["r"]} == {"2/m", "40/m"}
    two_clocks.pass_by(settings.LONG_SILENCE.total_seconds() + 1)
    book = settings.Party("default").join(lax)
    assert {str(budget.limit.rate) for budget in book.budgets["r"]} == {"40/m"}


def test_who_leaves_while_the_clock_jumps_leaves_the_opinion_that_others_hold(
    two_clocks: Clocks,
) -> None:
    strict, lax = (bind({"r": Rule(limits=[SlidingWindow(f"{n}/m")])}) for n in (2, 40))
    stays = Membership("default", "stays", lambda: strict)
    goes = settings.Party("default")
    stays.follow_settings()
    goes.join(strict)
    two_clocks.jump(7200)
    goes.leave()
    book = settings.Party("default").join(lax)
    assert {str(budget.limit.rate) for budget in book.budgets["r"]} == {"2/m", "40/m"}


ageing = pytest.mark.parametrize(
    "begin_to_age", [answer_all, tell_of_all], ids=["answered", "told of"]
)


@ageing
@pytest.mark.parametrize("jump", [3600, 86400, 120, 5, -3600, -86400, -120, -5])
def test_a_jump_makes_no_room_and_stalls_no_longer_than_a_window(
    two_clocks: Clocks, jump: int, begin_to_age: Callable[[Clocks], None]
) -> None:
    assert released(two_clocks) == 20
    begin_to_age(two_clocks)
    two_clocks.pass_by(10)
    assert released(two_clocks) == 0
    two_clocks.jump(jump)
    for seconds in (1, 47):
        two_clocks.pass_by(seconds)
        assert released(two_clocks) == 0
    two_clocks.pass_by(3)
    assert released(two_clocks) == 20


@pytest.mark.parametrize("jump", [-3600, -5])
def test_a_retry_waits_no_longer_than_it_had_to_if_the_clock_is_set_back(
    two_clocks: Clocks, jump: int
) -> None:
    ledger_time.watch("default").look()
    CallQueue.objects.update(
        status=CallQueue.Status.ERROR,
        ready=False,
        due_at_dt=two_clocks.wall + timedelta(seconds=10),
    )
    two_clocks.pass_by(1)
    two_clocks.jump(jump)
    two_clocks.pass_by(1)
    ledger_time.watch("default").look()
    left = (
        CallQueue.objects.order_by().values_list("due_at_dt", flat=True).distinct().get()
        - two_clocks.wall
    )
    assert abs(left - timedelta(seconds=8)) < timedelta(seconds=1)


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="one writes at a time")
def test_a_retry_that_an_application_has_locked_is_not_waited_for(two_clocks: Clocks) -> None:
    """Nobody waits for an application's transaction with all rules' rows in hand."""
    first, second = CallQueue.objects.order_by("pk")[:2]
    due = two_clocks.wall + timedelta(seconds=10)
    CallQueue.objects.filter(pk__lte=second.pk).update(
        status=CallQueue.Status.ERROR, ready=False, due_at_dt=due
    )
    two_clocks.jump(-3600)
    looks = threading.Thread(target=_looked, daemon=True)
    with transaction.atomic():
        CallQueue.objects.select_for_update().get(pk=first.pk)
        looks.start()
        looks.join(10)
        assert not looks.is_alive()
    assert CallQueue.objects.get(pk=first.pk).due_at_dt == due
    assert CallQueue.objects.get(pk=second.pk).due_at_dt < two_clocks.wall + timedelta(seconds=11)


def _looked() -> None:
    try:
        ledger_time.watch("default").look()
    finally:
        connection.close()


def test_the_permit_of_a_process_that_died_lives_no_longer_if_the_clock_is_set_back(
    two_clocks: Clocks,
) -> None:
    """Passes would charge it, and take that back, for as long as the clock was set back."""
    lives = two_clocks.wall + timedelta(seconds=8)
    dead = CallQueue.objects.create(
        rule="r", method=states.PERMIT, call_data={}, ready=True, expires_at_dt=lives
    )
    kept = CallQueue.objects.create(rule="r", call_data={}, ready=True, expires_at_dt=lives)
    two_clocks.pass_by(1)
    two_clocks.jump(-3600)
    ledger_time.watch("default").look()
    dead.refresh_from_db(), kept.refresh_from_db()
    left = (dead.expires_at_dt - two_clocks.wall).total_seconds()
    assert left == pytest.approx(7, abs=0.5)
    assert kept.expires_at_dt == lives, "an appointment stays"


def test_a_scheduled_call_keeps_its_instant(two_clocks: Clocks) -> None:
    ledger_time.watch("default").look()
    due = two_clocks.wall + timedelta(seconds=10)
    CallQueue.objects.update(ready=False, due_at_dt=due)
    two_clocks.pass_by(1)
    two_clocks.jump(3600)
    two_clocks.pass_by(1)
    ledger_time.watch("default").look()
    assert CallQueue.objects.order_by().values_list("due_at_dt", flat=True).distinct().get() == due


@ageing
def test_what_begins_to_age_after_the_jump_keeps_its_own_time(
    two_clocks: Clocks, begin_to_age: Callable[[Clocks], None]
) -> None:
    assert released(two_clocks) == 20
    two_clocks.pass_by(5)
    two_clocks.jump(3600)
    begin_to_age(two_clocks)  # recorded on the new clock, before any dispenser saw the jump
    two_clocks.pass_by(1)
    assert released(two_clocks) == 0
    two_clocks.pass_by(58)
    assert released(two_clocks) == 0
    two_clocks.pass_by(2)
    assert released(two_clocks) == 20


def test_a_clock_that_is_back_before_anybody_looked_is_believed_again(two_clocks: Clocks) -> None:
    watch = ledger_time.watch("default")
    watch.look()
    two_clocks.pass_by(2)
    two_clocks.jump(3600)
    assert watch.credited(ledger_time.read("default")) is None

    two_clocks.jump(-3600)
    watch.look()

    assert not watch.wants_look
    assert watch.credited(ledger_time.read("default")) is not None


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By how much the ledger was moved, each time."""
    made, move = list[int](), ledger_time.move

    def noted(using: str, reading: clocks.Reading, by: int) -> clocks.Reading:
        made.append(by)
        return move(using, reading, by)

    monkeypatch.setattr(ledger_time, "move", noted)
    return made


def test_two_dispensers_move_the_ledger_once(two_clocks: Clocks, moves: list[int]) -> None:
    first, second = ledger_time.Watch("default"), ledger_time.Watch("default")
    first.look(), second.look()
    assert released(two_clocks) == 20
    answer_all(two_clocks)
    before = list(CallAttempt.objects.order_by("pk").values())
    two_clocks.pass_by(10)
    first.look(), second.look()
    two_clocks.jump(3600)
    two_clocks.pass_by(1)
    first.look(), second.look()
    two_clocks.pass_by(1)
    first.look(), second.look()
    assert released(two_clocks) == 0
    assert list(CallAttempt.objects.order_by("pk").values()) == before
    assert len(moves) == 1


@pytest.mark.skipif(
    not hasattr(time, "CLOCK_BOOTTIME"),
    reason="only Linux counts the time for which it was suspended",
)
def test_a_lease_goes_on_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """time.monotonic stands still then; a worker that wakes past its lease must not send."""
    job: Any = SimpleNamespace(slot_opens=lambda: None, lease_ends=clocks.monotonic() + 90)
    job.sound_rule, job.call = Rule(total_timeout=60), SimpleNamespace(rule="r")
    request.SlotGate(job).wait()
    awake = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: awake + 3600)
    with pytest.raises(wire.Dropped):
        request.SlotGate(job).wait()


def test_a_begin_that_finds_nothing_to_begin_reads_the_clock_between_two_instants_of_its_own(
    monkeypatch: pytest.MonkeyPatch, transactional_db: None
) -> None:
    """It waits for later slots by what it read: had it read later than it thinks, they would go
    early.
    """
    read_at: list[float] = []
    rows = database.rows
    monkeypatch.setattr(ledger_time, "_watches", {})
    monkeypatch.setattr(
        database, "rows", lambda *sql: (read_at.append(clocks.monotonic()), rows(*sql))[1]
    )
    assert begin("default", [0]) == []
    last = ledger_time.watch("default").last
    assert last is not None
    assert last.before <= read_at[-1] <= last.after


# --- Whoever meets a jump first


class Others:
    """Processes beside this one, each with what it knows of the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = "one"
        self.watches: dict[str, ledger_time.Watch] = {}
        monkeypatch.setattr(ledger_time, "watch", self.watch)

    def watch(self, using: str) -> ledger_time.Watch:
        return self.watches.setdefault(self.now, ledger_time.Watch(using))

    def be(self, name: str) -> ledger_time.Watch:
        self.now = name
        return self.watch("default")

    def be_new(self, two_clocks: Clocks) -> None:
        """One that has just begun; while it waits until the clock is known, a dispenser looks."""

        def pass_by(seconds: float) -> None:
            two_clocks.pass_by(seconds)
            self.be("dispenser").look()
            self.be("newcomer")

        self.be("newcomer")
        ledger_time.time.sleep = pass_by  # type: ignore[assignment]


@pytest.fixture
def others(two_clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> Others:
    return Others(monkeypatch)


def used_up(two_clocks: Clocks) -> None:
    assert released(two_clocks) == 20
    answer_all(two_clocks)


@pytest.mark.parametrize("jump", [0.02, 0.5, 60, 3600, -3600, 86400 * 7, -86400 * 7])
def test_a_begin_that_meets_the_jump_leaves_it_to_be_dealt_with(
    two_clocks: Clocks, jump: float
) -> None:
    used_up(two_clocks)
    two_clocks.pass_by(59.84)  # a hundredth before the next may be released ahead
    ledger_time.watch("default").look()
    two_clocks.jump(jump)
    assert begin("default", [0]) == []
    assert [len(release("default", ["r"]).released) for _ in range(3)] == [0, 0, 0]
    two_clocks.pass_by(60.1)
    assert released(two_clocks) == 20


@pytest.mark.parametrize("jump", [-3600, 3600])
def test_a_process_that_has_only_begun_something_moves_nothing_a_second_time(
    two_clocks: Clocks, others: Others, jump: float
) -> None:
    others.be("dispenser").look()
    others.be("worker")
    begin("default", [0])
    others.be("dispenser")
    used_up(two_clocks)
    two_clocks.jump(jump)
    two_clocks.pass_by(1)
    others.be("dispenser").look()
    two_clocks.pass_by(1)
    others.be("worker").look()
    assert released(two_clocks) == 0
    two_clocks.pass_by(60)
    assert released(two_clocks) == 20


@pytest.mark.parametrize(
    "jumps", [(3600, -3600), (-3600, 3600), (50, 50), (-50, -50), (-3600, 3605), (3600, -3595)]
)
@pytest.mark.parametrize("who", ["sleeper", "dispenser"])
def test_who_slept_through_one_jump_of_two_deals_with_what_is_left(
    two_clocks: Clocks, others: Others, jumps: tuple[float, float], who: str
) -> None:
    """Between the two, one process looks and the other sleeps; then either meets the second one
    first, and the dispenser, which saw both, looks soon.
    """
    for _ in range(2):
        others.be("sleeper").look()
        others.be("dispenser").look()
        two_clocks.pass_by(1)
    used_up(two_clocks)
    two_clocks.pass_by(1)
    two_clocks.jump(jumps[0])
    others.be("dispenser").look()
    two_clocks.pass_by(1)
    two_clocks.jump(jumps[1])
    others.be(who)
    assert released(two_clocks) == 0
    others.be("dispenser").look()
    others.be(who)
    two_clocks.pass_by(60.5)
    assert released(two_clocks) == 20


@pytest.mark.parametrize(
    "jumps", [(50, 50), (3600, 3600), (-3600, 3605), (3600, -3595), (3600, -3600), (-3600, 3600)]
)
def test_who_has_looked_once_and_long_ago_deals_with_the_last_of_two_jumps(
    two_clocks: Clocks, others: Others, jumps: tuple[float, float]
) -> None:
    """What others have moved the ledger by since then is no reason to take the rest over."""
    others.be("dispenser").look()
    two_clocks.pass_by(1)
    others.be("dispenser").look()
    used_up(two_clocks)
    others.be("idler").look()
    two_clocks.pass_by(2)
    two_clocks.jump(jumps[0])
    others.be("dispenser").look()
    two_clocks.pass_by(1)
    two_clocks.jump(jumps[1])
    others.be("idler")
    assert released(two_clocks) == 0
    others.be("dispenser").look()
    others.be("idler")
    two_clocks.pass_by(60.5)
    assert released(two_clocks) == 20


@pytest.mark.parametrize("jump", [-0.45, 0.45, 5, -3600])
@pytest.mark.parametrize("drift", [0.3, 0, -0.3])
def test_who_was_idle_for_an_hour_leaves_a_jump_to_those_who_saw_it(
    two_clocks: Clocks, others: Others, drift: float, jump: float
) -> None:
    """So long apart, two clocks may differ by as much as a small jump, and by a part of a large
    one.
    """
    others.be("newcomer").look()
    two_clocks.pass_by(3600)
    two_clocks.jump(drift)
    true, began = two_clocks.ledger, two_clocks.mono
    for _ in range(3):
        others.be("dispenser").look()
        two_clocks.pass_by(0.5)
    two_clocks.jump(jump)
    others.be_new(two_clocks)
    written = in_time("default", lambda locked: locked.now)
    went_by = two_clocks.mono - began
    assert 1.5 < went_by < 2.5
    assert abs((written - true).total_seconds() - went_by) < 0.011


def test_who_takes_its_own_pause_for_a_jump_makes_no_room(
    two_clocks: Clocks, others: Others, moves: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's machine was paused for a while and cannot tell, as virtual ones are: it finds that
    the clock has jumped, and is alone with that. Ledger time is late from then on, for all; were it
    put forward again, what the worker has written by it would be too early.
    """
    behind = {"worker": 0.0}
    own = lambda: two_clocks.mono - behind.get(others.now, 0.0)  # noqa: E731
    monkeypatch.setattr(clocks, "monotonic", own)
    monkeypatch.setattr(ledger_time, "time", SimpleNamespace(sleep=two_clocks.pass_by))
    for _ in range(3):
        two_clocks.pass_by(0.5)
        others.be("dispenser").look()
        others.be("worker").look()
    two_clocks.pass_by(40)
    behind["worker"] = 40.0
    for _ in range(2):
        others.be("dispenser").look()
        ids = [one.attempt_id for one in release("default", ["r"], batch=10).released]
        assert len(ids) == 10
        others.be("worker")
        results = [answered(job) for job in begin("default", ids)]
        two_clocks.pass_by(0.01)
        recorder.record("default", results)
        for _ in range(5):
            two_clocks.pass_by(0.4)
            others.be("dispenser").look()
    others.be("dispenser")
    two_clocks.pass_by(50)
    assert released(two_clocks) == 0
    two_clocks.pass_by(51)
    assert released(two_clocks) == 20
    assert len(moves) < 5, "and nobody goes on moving it"


def test_a_dispenser_that_runs_once_lets_those_move_the_ledger_who_saw_the_jump(
    two_clocks: Clocks, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    others.be("dispenser").look()
    recovery.beat("default", "another")
    used_up(two_clocks)
    two_clocks.pass_by(1)
    two_clocks.jump(3600)

    def wait(self: threading.Event, seconds: float | None = None) -> bool:
        others.be("dispenser").look()
        two_clocks.pass_by(seconds or 0.0)
        others.be("once")
        return False

    monkeypatch.setattr(threading.Event, "wait", wait)
    monkeypatch.setattr(callqueue_dispenser.doctor, "broker_refusal", lambda: None)
    others.be("once")
    call_command("callqueue_dispenser", "--once")
    assert CallAttempt.objects.count() == 20


def test_a_jump_that_a_slow_reading_hides_is_not_credited(two_clocks: Clocks) -> None:
    """The clock's answer may have come at any moment of it, so the time that has surely gone by
    counts and no more.
    """
    watch = ledger_time.watch("default")
    watch.look()
    watch.look()
    last = watch.last
    assert last is not None
    two_clocks.pass_by(1)
    before = two_clocks.mono
    two_clocks.pass_by(3)
    credited = watch.credited(
        clocks.Reading(
            database.to_us(two_clocks.ledger) + 2_000_000, before, two_clocks.mono + 3, last.moved
        )
    )
    assert credited is not None
    assert (credited - last.at) / 1_000_000 < 1 + 0.02


@pytest.mark.parametrize("jump", [3600, -3600])
def test_what_keys_wait_for_and_whose_turn_it_was_stays(two_clocks: Clocks, jump: int) -> None:
    now = database.to_us(two_clocks.ledger)
    KeyTurn.objects.create(
        rule="r", priority=0, key="k", served=now, blocked_on="room", blocked_until=now + 10**6
    )
    before = list(KeyTurn.objects.values())
    two_clocks.jump(jump)
    ledger_time.watch("default").look()
    assert list(KeyTurn.objects.values()) == before


@pytest.mark.parametrize("jump", [3600, -3600])
def test_a_hold_lasts_as_long_as_it_was_laid_for(two_clocks: Clocks, jump: int) -> None:
    lasts = timedelta(seconds=30)
    holds.lay("default", ["r"], "rule", "", lasts, "", source="provider")
    two_clocks.pass_by(10)
    two_clocks.jump(jump)
    ledger_time.watch("default").look()
    left = Hold.objects.get().until - two_clocks.ledger
    assert abs(left - timedelta(seconds=20)) < timedelta(seconds=0.1)
    assert released(two_clocks) == 0
    two_clocks.pass_by(20)
    assert released(two_clocks) == 20


@pytest.mark.parametrize("jump", [86400, -86400])
def test_a_hold_that_is_laid_after_the_jump_is_as_long_too(
    two_clocks: Clocks, others: Others, jump: int
) -> None:
    """By a process that has just begun, before any other has seen the jump."""
    others.be("dispenser").look()
    two_clocks.pass_by(1)
    two_clocks.jump(jump)
    others.be_new(two_clocks)
    holds.lay("default", ["r"], "rule", "", timedelta(seconds=30), "", source="provider")
    others.be("dispenser").look()
    left = Hold.objects.get().until - two_clocks.ledger
    assert abs(left - timedelta(seconds=30)) < timedelta(seconds=0.1)


@pytest.mark.parametrize("jump", [3600, -3600])
def test_a_lease_that_was_written_by_the_wrong_time_is_as_long_as_it_was_to_be(
    two_clocks: Clocks, jump: int
) -> None:
    """By a begin, which waits for nobody, before the look that finds the jump."""
    assert released(two_clocks) == 20
    ledger_time.watch("default").look()
    two_clocks.pass_by(1)
    two_clocks.jump(jump)
    wrong = two_clocks.ledger  # as it is until somebody looks
    CallAttempt.objects.update(started_at=wrong, lease_until=wrong + timedelta(seconds=90))
    two_clocks.pass_by(1)
    ledger_time.watch("default").look()
    (lease,) = set(CallAttempt.objects.values_list("lease_until", flat=True))
    assert abs(lease - two_clocks.ledger - timedelta(seconds=89)) < timedelta(seconds=0.1)


def test_nothing_that_counts_is_deleted_because_the_clock_has_jumped(two_clocks: Clocks) -> None:
    used_up(two_clocks)
    CallQueue.objects.all().delete()
    ledger_time.watch("default").look()
    two_clocks.jump(86400 * 60)
    cleanup.clean("default")
    assert CallAttempt.objects.count() == 20


@pytest.mark.parametrize("jump", [0.3, 3600, -0.3, -3600])
def test_a_sign_of_life_that_is_put_right_after_a_jump_is_no_backup(
    two_clocks: Clocks, jump: float
) -> None:
    """The dispenser had given it before it looked at the clock, and remembers it as it was."""
    me = Membership("default", "me:1", lambda: conf.current().book)
    me.runs = True
    me.follow_settings()
    two_clocks.pass_by(1)
    ledger_time.watch("default").look()
    two_clocks.jump(jump)
    me.heartbeat()
    two_clocks.pass_by(0.2)
    ledger_time.watch("default").look()
    two_clocks.pass_by(5)
    me.heartbeat()
    assert not Hold.objects.exists()
    DispenserState.objects.update(seen_at=two_clocks.ledger - timedelta(seconds=6))  # a backup
    me.heartbeat()
    assert Hold.objects.exists()


def test_a_cleanup_that_begins_just_after_the_clock_has_jumped_deletes_nothing_that_counts(
    two_clocks: Clocks, others: Others
) -> None:
    """A command is a process of its own, and cannot know; a dispenser deals with it soon."""
    others.be("dispenser").look()
    used_up(two_clocks)
    CallQueue.objects.all().delete()
    two_clocks.pass_by(1)
    others.be("dispenser").look()
    two_clocks.jump(86400 * 60)
    others.be_new(two_clocks)
    cleanup.clean("default")
    assert CallAttempt.objects.count() == 20


# --- Calls under way


@pytest.fixture
def job(settings: Any, monkeypatch: pytest.MonkeyPatch, transactional_db: None) -> Job:
    """A call that a worker has begun. The two_clocks are real; a jump is a test's."""
    settings.CALLQUEUE = {"RULES": {"r": Rule(limits=[SlidingWindow("20/m")])}}
    monkeypatch.setattr(ledger_time, "_watches", {})
    ensure_states("default", ["r"])
    CallQueue.objects.send({"method": "get", "params": {"url": "http://vendor.example/"}}, rule="r")
    (begun,) = begin("default", [one.attempt_id for one in release("default", ["r"]).released])
    ledger_time.watch("default").since = clocks.monotonic() - 60
    return begun


def answered(job: Job, status: int = 200, headers: Any = None) -> Result:
    answer = wire.Answer(
        response=response(status, headers or {}, b"{}"), sent_at=clocks.monotonic(), sent=True
    )
    return judging.of_answer(job, answer)


@pytest.mark.parametrize(
    "jump", [0.02, 0.03, 0.45, 5, 3600, 604800, -0.03, -0.45, -5, -3600, -604800]
)
def test_an_answer_is_recorded_by_the_clock_as_it_is_when_it_is_recorded(
    job: Job, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    sent = ledger_time.now("default")
    report = answered(job)
    monkeypatch.setattr(server_clock, "ahead", timedelta(seconds=jump))
    assert recorder.write("default", [report]) == 1
    attempt = CallAttempt.objects.get()
    known = timedelta(microseconds=clocks.TOLERANCE)  # a move errs late
    now = ledger_time.now("default")
    assert sent - known <= attempt.sent_at <= attempt.finished_at <= now


def test_an_instant_is_not_moved_to_before_it_was_however_long_the_clock_takes_to_answer(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network stands still for three seconds between the database's clock and this process."""
    skew, real, rows, clock = [0.0], clocks.monotonic, database.rows, database.clock

    def stall(answer: Any) -> Any:
        """Three seconds go by, for both two_clocks: for one alone it would be a jump."""
        skew[0] += 3
        server_clock.ahead += timedelta(seconds=3)
        return answer

    sent = ledger_time.now("default")
    report = answered(job)
    monkeypatch.setattr(clocks, "monotonic", lambda: real() + skew[0])
    monkeypatch.setattr(server_clock, "ahead", server_clock.ahead)
    monkeypatch.setattr(database, "rows", lambda *sql: stall(rows(*sql)))
    monkeypatch.setattr(database, "clock", lambda using: stall(clock(using)))
    assert recorder.write("default", [report]) == 1
    attempt = CallAttempt.objects.get()
    assert sent <= attempt.sent_at <= attempt.finished_at <= ledger_time.now("default")


@pytest.mark.parametrize("jump", [3600, -3600])
def test_a_retry_whose_attempt_fails_after_a_jump_waits_as_long_as_it_is_to(
    job: Job, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    report = judging.failed(job, "no connection")
    wait = report.due_at - job.wall(report.ended_at)
    monkeypatch.setattr(server_clock, "ahead", timedelta(seconds=jump))
    before = database.clock("default")
    recorder.write("default", [report])
    due = CallQueue.objects.get().due_at_dt
    assert before + wait - timedelta(seconds=5) <= due <= database.clock("default") + wait


@pytest.mark.parametrize("jump", [3600, -3600])
def test_a_hold_that_an_answer_asks_for_is_as_long_as_it_says_after_a_jump(
    job: Job, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    report = answered(job, 429, {"Retry-After": "30"})
    monkeypatch.setattr(server_clock, "ahead", timedelta(seconds=jump))
    recorder.record("default", [report])
    left = Hold.objects.get().until - ledger_time.now("default")
    assert timedelta(seconds=25) <= left <= timedelta(seconds=30)


def test_a_record_that_meets_the_jump_first_has_the_ledger_moved_before_it_writes(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what it wrote would be too early, for whoever does."""
    before = ledger_time.moved("default")
    monkeypatch.setattr(server_clock, "ahead", timedelta(seconds=-3600))
    recorder.write("default", [answered(job)])
    assert (ledger_time.moved("default") - before) / 1_000_000 == pytest.approx(-3600, abs=1)


@pytest.mark.parametrize("jump", [3600, -3600])
def test_a_lease_ends_no_earlier_than_the_worker_believes(
    job: Job, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    left = job.lease_ends - clocks.monotonic()
    monkeypatch.setattr(server_clock, "ahead", timedelta(seconds=jump))
    assert recovery.end_lost("default") == 0
    ledger_time.watch("default").look()
    assert recovery.end_lost("default") == 0
    lease = CallAttempt.objects.get().lease_until - ledger_time.now("default")
    assert left - 5 <= lease.total_seconds() <= left + 1


# --- The lease of a request


def gate(job: Job, left: float) -> request.SlotGate:
    job.lease_ends = clocks.monotonic() + left
    return request.SlotGate(job)


def test_a_request_has_ended_when_its_lease_ends(job: Job) -> None:
    narrow = gate(job, 20)
    deadline = Trip(wire.Timeouts(total=60), narrow, wire.Policy())
    assert deadline.ends <= job.lease_ends
    deadline.pass_gate()
    assert deadline.ends <= job.lease_ends
    assert deadline.why_late("read", 27) == "the read timeout of 27 s"
    wide = Trip(wire.Timeouts(total=60), gate(job, 90), wire.Policy())
    assert wide.ends < job.lease_ends - 25


def test_what_can_no_longer_be_answered_within_the_lease_is_not_sent(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "_waits", {"r": 8.0})
    gate(job, 9).wait()
    with pytest.raises(wire.Dropped, match="too little was left of the lease"):
        gate(job, 7).wait()
