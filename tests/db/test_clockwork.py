"""The database's clock jumps: never over the limit, and no stall longer than a window."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.utils import timezone

from callqueue import Rule, SlidingWindow, clockwork, conf, database, executor, states
from callqueue.beginning import begin
from callqueue.handlers import wire
from callqueue.models import CallAttempt, CallQueue
from callqueue.releasing import ensure_states, release


class Clocks:
    """The database's clock and this process's monotonic one, both at a test's command."""

    def __init__(self) -> None:
        self.wall, self.mono = timezone.now(), 1000.0

    def pass_by(self, seconds: float) -> None:
        self.wall += timedelta(seconds=seconds)
        self.mono += seconds

    def jump(self, seconds: float) -> None:
        self.wall += timedelta(seconds=seconds)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch, settings: Any, transactional_db: None) -> Clocks:
    settings.CALLQUEUE = {"RULES": {"r": Rule(limits=[SlidingWindow("20/m")])}}
    clocks = Clocks()
    monkeypatch.setattr(database, "clock", lambda using: clocks.wall)
    monkeypatch.setattr(database, "clock_sql", lambda using: "NULL")
    monkeypatch.setattr(clockwork, "monotonic", lambda: clocks.mono)
    monkeypatch.setattr(clockwork, "_watches", {})
    ensure_states("default", list(conf.current().rules))
    url = {"method": "get", "params": {"url": "http://vendor.example/"}}
    CallQueue.objects.send_many([url] * 100, rule="r")
    CallQueue.objects.update(due_at_dt=clocks.wall)
    return clocks


def released(clocks: Clocks) -> int:
    """What the next passes release within a tenth of a second: a pass that finds the clock jumped looks again."""
    count = 0
    for _ in range(5):
        count += len(release("default", ["r"]).released)
        clocks.pass_by(0.02)
    return count


def answer_all(clocks: Clocks) -> None:
    CallAttempt.objects.open().update(
        started_at=clocks.wall, sent_at=clocks.wall, finished_at=clocks.wall, outcome=states.SUCCEEDED
    )


@pytest.mark.parametrize("jump", [3600, 86400, 120, 5])
def test_a_jump_forward_makes_no_room(clocks: Clocks, jump: int) -> None:
    assert released(clocks) == 20
    answer_all(clocks)
    clocks.pass_by(10)
    assert released(clocks) == 0
    clocks.jump(jump)
    clocks.pass_by(1)
    assert released(clocks) == 0
    clocks.pass_by(47)
    assert released(clocks) == 0
    clocks.pass_by(3)
    assert released(clocks) == 20


@pytest.mark.parametrize("jump", [-3600, -86400, -120, -5])
def test_a_jump_back_stalls_no_longer_than_a_window(clocks: Clocks, jump: int) -> None:
    assert released(clocks) == 20
    answer_all(clocks)
    clocks.pass_by(10)
    assert released(clocks) == 0
    clocks.jump(jump)
    clocks.pass_by(1)
    assert released(clocks) == 0
    clocks.pass_by(60)
    assert released(clocks) == 20


@pytest.mark.parametrize("jump", [-3600, -5, 20, 3600])
def test_a_retry_waits_as_long_as_it_had_to_wherever_the_clock_jumps(clocks: Clocks, jump: int) -> None:
    clockwork.watch("default").look()
    CallQueue.objects.update(status=CallQueue.Status.ERROR, ready=False, due_at_dt=clocks.wall + timedelta(seconds=10))
    clocks.pass_by(1)
    clocks.jump(jump)
    clocks.pass_by(1)
    clockwork.watch("default").look()
    left = CallQueue.objects.order_by().values_list("due_at_dt", flat=True).distinct().get() - clocks.wall
    assert abs(left - timedelta(seconds=8)) < timedelta(seconds=1)


def test_a_scheduled_call_keeps_its_instant(clocks: Clocks) -> None:
    clockwork.watch("default").look()
    due = clocks.wall + timedelta(seconds=10)
    CallQueue.objects.update(ready=False, due_at_dt=due)
    clocks.pass_by(1)
    clocks.jump(3600)
    clocks.pass_by(1)
    clockwork.watch("default").look()
    assert CallQueue.objects.order_by().values_list("due_at_dt", flat=True).distinct().get() == due


def test_answers_after_the_jump_keep_their_own_time(clocks: Clocks) -> None:
    assert released(clocks) == 20
    clocks.pass_by(5)
    clocks.jump(3600)
    answer_all(clocks)  # recorded on the new clock, before any dispenser saw the jump
    clocks.pass_by(1)
    assert released(clocks) == 0
    clocks.pass_by(58)
    assert released(clocks) == 0
    clocks.pass_by(2)
    assert released(clocks) == 20


def test_two_dispensers_shift_the_ledger_once(clocks: Clocks) -> None:
    first, second = clockwork.Watch("default"), clockwork.Watch("default")
    first.look(), second.look()
    assert released(clocks) == 20
    answer_all(clocks)
    before = CallAttempt.objects.values_list("finished_at", flat=True)[0]
    clocks.pass_by(10)
    first.look(), second.look()
    clocks.jump(3600)
    clocks.pass_by(1)
    first.look(), second.look()
    clocks.pass_by(1)
    first.look(), second.look()
    moved = CallAttempt.objects.values_list("finished_at", flat=True)[0] - before
    assert abs(moved - timedelta(hours=1)) < timedelta(seconds=2)


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux counts the time for which it was suspended")
def test_a_lease_goes_on_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """time.monotonic stands still then; a worker that wakes past its lease must not send."""
    job: Any = SimpleNamespace(send_at=None, lease_ends=clockwork.monotonic() + 90)
    executor.SlotGate(job).wait()
    awake = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: awake + 3600)
    with pytest.raises(wire.Dropped):
        executor.SlotGate(job).wait()


def test_a_begin_that_finds_nothing_to_begin_reads_the_clock_between_two_instants_of_its_own(
    monkeypatch: pytest.MonkeyPatch, transactional_db: None
) -> None:
    """It waits for later slots by what it read: had it read later than it thinks, they would go early."""
    read_at: list[float] = []
    clock = database.clock
    monkeypatch.setattr(clockwork, "_watches", {})
    monkeypatch.setattr(database, "clock", lambda using: (read_at.append(clockwork.monotonic()), clock(using))[1])
    assert begin("default", [0]) == []
    last = clockwork.watch("default").last
    assert last is not None
    assert last.before <= read_at[-1] <= last.after
