"""The clock jumps: never over the limit, no stall longer than a window, and no dearer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from callqueue import (
    FixedWindow,
    Retry,
    Rule,
    SlidingWindow,
    TokenBucket,
    clocks,
    conf,
    database,
    states,
    transitions,
)
from callqueue.database import ClockNow, from_us, server_clock
from callqueue.dispatch.chores import Chores
from callqueue.dispatch.dispenser import Membership, give_sign_of_life
from callqueue.dispatch.release_pass import ensure_state_rows, release
from callqueue.execution import judging, recorder, request, telling, wire
from callqueue.execution.claim import begin
from callqueue.execution.connection import Trip
from callqueue.ledger import holds, ledger_time, settings
from callqueue.ledger.ledger_time import LedgerNow
from callqueue.ledger.transaction import transaction as in_time
from callqueue.limits.budgets import book_of
from callqueue.limits.kinds import SECOND
from callqueue.look import look
from callqueue.maintenance import cleanup, recovery
from callqueue.models import (
    CallAttempt,
    CallQueue,
    DispenserState,
    Hold,
    KeyTurn,
    LedgerState,
    RuleState,
)
from callqueue.transitions import Job, Result
from tests.support.behaviour import response, send


class Clocks:
    """The database's clock and this process's monotonic one, both at a test's command."""

    def __init__(self) -> None:
        self.wall, self.mono = timezone.now(), 1000.0
        self._later: list[tuple[float, Callable[[], Any]]] = []

    def pass_by(self, seconds: float) -> None:
        self.jump(seconds)
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
        server_clock.ahead = self.wall - timezone.now()

    @property
    def ledger(self) -> datetime:
        """Ledger time, as of now."""
        return self.wall - timedelta(microseconds=ledger_time.moved("default"))


@pytest.fixture
def two_clocks(monkeypatch: pytest.MonkeyPatch, settings: Any, transactional_db: None) -> Clocks:
    settings.CALLQUEUE = {"RULES": {"r": Rule(limits=[SlidingWindow("20/m", jitter=0.05)])}}
    monkeypatch.setattr(telling, "SLOW", 0.0)
    two_clocks = at_command(monkeypatch)
    monkeypatch.setattr(ledger_time, "time", SimpleNamespace(sleep=two_clocks.pass_by))
    ensure_state_rows("default", list(conf.current().rules))
    url = {"method": "get", "params": {"url": "http://vendor.example/"}}
    CallQueue.objects.send_many([url] * 100, rule="r")
    CallQueue.objects.update(due_at_dt=two_clocks.wall, ready=True)
    ledger_time.watch("default").look()
    two_clocks.pass_by(1)  # it is no newcomer any more
    return two_clocks


def at_command(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """What this process and its statements read from now on."""
    two_clocks = Clocks()

    def shown(using: str) -> str:
        """Where no statement reads and writes by the database's clock, none needs to bring it."""
        is_read = connection.vendor == "postgresql"
        return f"CAST('{two_clocks.wall.isoformat()}' AS timestamptz)" if is_read else "NULL"

    monkeypatch.setattr(server_clock, "ahead", timedelta(0))  # and of those by Django's words
    monkeypatch.setattr(database, "clock", lambda using: two_clocks.wall)
    monkeypatch.setattr(database, "clock_sql", shown)
    monkeypatch.setattr(clocks, "monotonic", lambda: two_clocks.mono)
    monkeypatch.setattr(ledger_time, "_watches", {})
    return two_clocks


def released(two_clocks: Clocks) -> int:
    """What passes release in a tenth of a second: one that finds a jump looks again."""
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


STRICT, LAX = (book_of({"r": Rule(limits=[SlidingWindow(f"{n}/m")])}) for n in (2, 40))


def rates_in_force() -> set[str]:
    """Once somebody with the laxer settings has joined."""
    book = settings.Party("default").join(LAX)
    return {str(budget.limit.rate) for budget in book.budgets["r"]}


@pytest.mark.parametrize("who", ["has looked", "has not looked", "is new"])
def test_a_dispenser_that_nobody_has_heard_before_a_jump_is_no_more_silent_after_it(
    two_clocks: Clocks, who: str
) -> None:
    """It was taken for long dead, and the laxer limit held: by one that begins just then, too."""
    settings.Party("default").join(STRICT)
    others = ledger_time.watch("default")
    others.look()
    two_clocks.jump(7200)
    if who == "has looked":
        others.look()
    if who == "is new":
        ledger_time.forget_readings()
        two_clocks.after(0.1, others.look)
    assert rates_in_force() == {"2/m", "40/m"}
    two_clocks.pass_by(settings.LONG_SILENCE.total_seconds() + 1)
    assert rates_in_force() == {"40/m"}


@pytest.mark.parametrize("begins", [False, True], ids=["nobody begins", "one begins"])
def test_who_leaves_while_the_clock_jumps_leaves_the_opinion_that_others_hold(
    two_clocks: Clocks, begins: bool
) -> None:
    """Two days: longer than the silent are remembered."""
    stays = Membership("default", "stays", lambda: STRICT)
    goes = settings.Party("default")
    stays.follow_settings()
    goes.join(STRICT)
    others = ledger_time.watch("default")
    others.look()
    two_clocks.jump(86400 * 2)
    if begins:
        ledger_time.forget_readings()
        give_sign_of_life("default", "new")
        others.look()
    goes.leave()
    assert rates_in_force() == {"2/m", "40/m"}


def test_a_sign_of_life_by_a_clock_that_was_set_and_set_back_holds_nothing(
    two_clocks: Clocks,
) -> None:
    """Its row was put right with the jump, and the ledger lies where it lay before."""
    own = conf.current().book
    one = Membership("default", "me", lambda: own)
    one.runs = True
    watch = ledger_time.watch("default")
    watch.look()
    before = ledger_time.moved("default")
    two_clocks.pass_by(0.5)
    two_clocks.jump(86400)
    one.heartbeat()
    two_clocks.pass_by(0.1)
    watch.look()
    assert ledger_time.moved("default") != before
    two_clocks.pass_by(1)
    two_clocks.jump(-86400)
    watch.look()
    assert 0 < ledger_time.moved("default") - before < 10  # microseconds
    two_clocks.pass_by(3)
    one.heartbeat()
    assert not Hold.objects.exists()


def test_a_sign_of_life_by_a_clock_that_was_set_back_is_put_right(two_clocks: Clocks) -> None:
    """Taken for long dead, its limit would count no more."""
    party, others = settings.Party("default"), ledger_time.watch("default")
    party.join(STRICT)
    others.look()
    two_clocks.pass_by(1)
    two_clocks.jump(-3600)
    party.heartbeat()
    give_sign_of_life("default", "me", digest=party.digest)
    two_clocks.pass_by(0.1)
    others.look()
    assert settings._has_live_dispenser("default", party.digest, two_clocks.ledger)
    assert rates_in_force() == {"2/m", "40/m"}


@pytest.mark.parametrize("jump", [3600.0005, -3600.0005, 0.1003])
def test_ledger_time_errs_late_by_less_than_it_is_moved_by_at_least(
    two_clocks: Clocks, jump: float
) -> None:
    before = two_clocks.ledger
    two_clocks.jump(jump)
    ledger_time.watch("default").look()
    assert timedelta(0) <= before - two_clocks.ledger <= timedelta(milliseconds=1)


@pytest.mark.parametrize("begin_to_age", [answer_all, tell_of_all])
@pytest.mark.parametrize("jump", [86400, 5, -86400, -5])
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


@pytest.mark.parametrize("jump", [3600, -5, -3600])
def test_what_is_to_come_comes_as_soon_as_it_was_to_and_what_is_over_is_over(
    two_clocks: Clocks, jump: int
) -> None:
    """The app's own waits get no longer where the clock is set back; an appointment stays."""
    assert released(two_clocks) == 20
    begun, wall = two_clocks.mono, two_clocks.wall
    retry, later, dead, kept, was_due, was_dead = CallQueue.objects.new().order_by("pk")[:6]
    due, just_now = wall + timedelta(seconds=10), wall - timedelta(seconds=1)
    for call, columns in (
        (retry, {"status": states.ERROR, "ready": False, "due_at_dt": due}),
        (later, {"ready": False, "due_at_dt": due}),
        (dead, {"method": states.PERMIT, "expires_at_dt": due}),
        (kept, {"expires_at_dt": due}),
        (was_due, {"status": states.ERROR, "ready": False, "due_at_dt": just_now}),
        (was_dead, {"method": states.PERMIT, "expires_at_dt": just_now}),
    ):
        CallQueue.objects.filter(pk=call.pk).update(**columns)
    now = database.to_us(two_clocks.ledger)
    waits = {"rule": "r", "priority": 0, "key": "k", "blocked_on": "room"}
    KeyTurn.objects.create(**waits, served=now, blocked_until=now + 10**6)
    holds.lay("default", ["r"], "rule", "", timedelta(seconds=30), "", source="provider")
    turns = list(KeyTurn.objects.values())
    two_clocks.pass_by(1)
    two_clocks.jump(jump)
    wrong = two_clocks.ledger  # as it is until somebody looks
    lease = wrong + timedelta(seconds=90)
    CallAttempt.objects.update(started_at=wrong, lease_until=lease)
    two_clocks.pass_by(1)
    ledger_time.watch("default").look()

    went_by = two_clocks.mono - begun
    read = {call.pk: call for call in CallQueue.objects.all()}
    back = jump if jump < 0 else 0
    for instant in (read[retry.pk].due_at_dt, read[dead.pk].expires_at_dt):
        assert (instant - wall).total_seconds() == pytest.approx(10 + back, abs=0.5)
    assert read[later.pk].due_at_dt == read[kept.pk].expires_at_dt == due
    assert max(read[was_due.pk].due_at_dt, read[was_dead.pk].expires_at_dt) < two_clocks.wall
    assert list(KeyTurn.objects.values()) == turns
    (lease,) = set(CallAttempt.objects.values_list("lease_until", flat=True))
    assert (lease - two_clocks.ledger).total_seconds() == pytest.approx(89, abs=0.1)
    left = (Hold.objects.get().until - two_clocks.ledger).total_seconds()
    assert left == pytest.approx(30 - went_by, abs=0.1)


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="one writes at a time")
def test_a_retry_that_an_application_has_locked_is_not_waited_for(two_clocks: Clocks) -> None:
    """Nor is a frozen pass, with the ledger's row in hand."""
    first, second = CallQueue.objects.order_by("pk")[:2]
    due = two_clocks.wall + timedelta(seconds=10)
    CallQueue.objects.filter(pk__lte=second.pk).update(
        status=CallQueue.Status.ERROR, ready=False, due_at_dt=due
    )
    two_clocks.jump(-3600)

    def look() -> None:
        ledger_time.watch("default").look()
        connection.close()

    looks = threading.Thread(target=look, daemon=True)
    with transaction.atomic():
        CallQueue.objects.select_for_update().get(pk=first.pk)
        RuleState.objects.select_for_update().get(rule="r")
        looks.start()
        looks.join(10)
        assert not looks.is_alive()
    assert CallQueue.objects.get(pk=first.pk).due_at_dt == due
    assert CallQueue.objects.get(pk=second.pk).due_at_dt < two_clocks.wall + timedelta(seconds=11)


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="one writes at a time")
@pytest.mark.parametrize("jump", [0, 3600, -3600], ids=["agrees", "forward", "back"])
def test_an_attempt_that_an_application_has_locked_is_not_waited_for(
    two_clocks: Clocks, jump: float
) -> None:
    """It has cancelled the call of one that nobody has begun, and takes its time to commit. MariaDB
    would lock all open ones on its way to those that it changes.
    """
    ended = {"finished_at": two_clocks.wall, "outcome": states.SUCCEEDED}
    own = {"number": 1, "rule": "r", "released_at": two_clocks.wall, "cost": 1, "calls": 1}
    CallAttempt.objects.bulk_create(
        CallAttempt(call_id=10**9 + n, **own, **(ended if n > 5 else {})) for n in range(500)
    )
    for statement in database.dialect("default").vacuum:
        with connection.cursor() as cursor:
            cursor.execute(statement.format(CallAttempt._meta.db_table))
    two_clocks.jump(jump)
    new = ledger_time.Watch("default")

    def look() -> None:
        if jump:
            ledger_time.watch("default").look()
        else:
            new.look()
            new.agree()
        connection.close()

    looks = threading.Thread(target=look, daemon=True)
    with transaction.atomic():
        locked = CallAttempt.objects.unbegun().order_by("pk")[:1]
        assert len(locked.select_for_update()) == 1
        looks.start()
        looks.join(10)
        assert not looks.is_alive()
    assert new.is_agreed if not jump else ledger_time.watch("default").look() == 0


def test_a_dispenser_without_any_work_looks_at_the_clock(two_clocks: Clocks) -> None:
    CallQueue.objects.all().delete()
    before = ledger_time.now("default")
    two_clocks.jump(3600)
    Chores("default", lambda: None).maintain()
    assert ledger_time.now("default") - before < timedelta(seconds=1)


def test_a_jump_that_a_worker_reads_is_left_for_a_look_and_no_earlier_slot_is_believed(
    two_clocks: Clocks,
) -> None:
    watch, before = ledger_time.watch("default"), ledger_time.now("default")
    _, steady_from = watch.keep_and_narrow(ledger_time.read("default"))
    two_clocks.pass_by(1)
    assert watch.keep_and_narrow(ledger_time.read("default"))[1] == steady_from
    two_clocks.jump(60)
    off = ledger_time.read("default")
    assert watch.keep_and_narrow(off) == (off, off.at)
    watch.look()
    assert ledger_time.now("default") - before < timedelta(seconds=2)


def test_what_ended_a_little_later_than_it_is_has_ended_now_and_was_sent_when_it_was(
    two_clocks: Clocks,
) -> None:
    early, late = (timedelta(seconds=seconds) for seconds in (-1, 0.005))
    released(two_clocks)
    answer_all(two_clocks)
    first, second = CallAttempt.objects.order_by("pk")[:2]
    sent_at, ended = two_clocks.ledger + early, {"finished_at": two_clocks.ledger + late}
    CallAttempt.objects.filter(pk=first.pk).update(sent_at=sent_at, **ended)
    CallAttempt.objects.filter(pk=second.pk).update(sent_at=two_clocks.ledger + late, **ended)
    two_clocks.jump(60)
    ledger_time.watch("default").look()
    first.refresh_from_db()
    second.refresh_from_db()
    assert (first.sent_at, first.finished_at) == (sent_at, second.finished_at)
    assert second.sent_at == second.finished_at <= two_clocks.ledger


def test_a_begin_that_finds_nothing_to_begin_reads_the_clock_between_two_instants_of_its_own(
    monkeypatch: pytest.MonkeyPatch, transactional_db: None
) -> None:
    """It waits for later slots by what it read: had it read later, they would go early."""
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

    def __init__(self, two_clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.clocks = "one", two_clocks
        self.watches: dict[str, ledger_time.Watch] = {}
        monkeypatch.setattr(ledger_time, "watch", self.watch)

    def watch(self, using: str) -> ledger_time.Watch:
        return self.watches.setdefault(self.now, ledger_time.Watch(using))

    def be(self, name: str) -> ledger_time.Watch:
        self.now = name
        return self.watch("default")

    def look(self, *names: str, times: int = 1, then: float = 0.0) -> None:
        """These look at the clock one after the other; then so many seconds go by."""
        for _ in range(times):
            for name in names:
                self.be(name).look()
            self.clocks.pass_by(then)

    def be_new(self) -> None:
        """One that has just begun; while it waits until the clock is known, a dispenser looks."""

        def pass_by(seconds: float) -> None:
            self.clocks.pass_by(seconds)
            self.look("dispenser")
            self.be("newcomer")

        self.be("newcomer")
        ledger_time.time.sleep = pass_by  # type: ignore[assignment]


@pytest.fixture
def others(two_clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> Others:
    return Others(two_clocks, monkeypatch)


def counts_for_a_window(two_clocks: Clocks) -> None:
    """What has just ended does so, and no longer."""
    assert released(two_clocks) == 0
    two_clocks.pass_by(60.5)
    assert released(two_clocks) == 20


def used_up(two_clocks: Clocks) -> None:
    assert released(two_clocks) == 20
    answer_all(two_clocks)


@pytest.mark.parametrize(
    "jumps", [(50, 50), (-3600, 3605), (-3600, 3600), (-3600, 3590), (3600, -3600), (3600, 0)]
)
@pytest.mark.parametrize("who", ["sleeper", "dispenser", "idler", "beginner"])
def test_who_missed_one_jump_of_two_deals_with_what_is_left(
    two_clocks: Clocks, others: Others, jumps: tuple[float, float], who: str
) -> None:
    """The dispenser sees both jumps, and the others neither."""
    others.look("sleeper", "dispenser", times=2, then=1)
    used_up(two_clocks)
    others.look("idler")
    others.be("beginner")
    begin("default", [0])
    two_clocks.pass_by(1)
    two_clocks.jump(jumps[0])
    others.look("dispenser", then=1)
    two_clocks.jump(jumps[1])
    others.be(who)
    assert released(two_clocks) == 0
    others.look("dispenser")
    others.look(who, then=1)  # it may be new once more
    two_clocks.pass_by(60.5)
    assert released(two_clocks) == 20


@pytest.mark.parametrize("forward", [3590, 3600])
def test_who_has_looked_for_a_while_goes_by_what_it_saw_though_nobody_has_agreed_since(
    two_clocks: Clocks, others: Others, forward: float
) -> None:
    """Others saw it set back, and died: by what they say, an hour has gone by."""
    others.be("dispenser").settle()
    others.look("idler", "dispenser", times=3, then=0.5)
    used_up(two_clocks)
    others.look("idler")
    two_clocks.jump(-3600)
    others.look("dispenser", then=0.1)
    two_clocks.jump(forward)
    others.be("idler")
    assert released(two_clocks) == 0
    two_clocks.pass_by(61)
    assert released(two_clocks) == 20


def look_twice_a_second(two_clocks: Clocks, others: Others, seconds: float, *who: str) -> None:
    for _ in range(round(seconds * 2)):
        for name in who:
            others.be(name).look()
        two_clocks.pass_by(0.5)


@pytest.mark.parametrize("forward", [3590, 3600])
def test_a_clock_that_is_set_back_and_forward_before_all_have_looked_ends_no_charge(
    two_clocks: Clocks, others: Others, forward: float
) -> None:
    """One alone has seen that, after somebody had agreed: what it ended by the late time was an hour
    too old for the dispenser, which had seen nothing.
    """
    look_twice_a_second(two_clocks, others, 2, "dispenser", "worker")
    others.be("dispenser").settle()
    others.be("worker").settle()
    used_up(two_clocks)
    two_clocks.jump(-3600)
    others.look("newcomer", then=0.8)
    others.be("newcomer").settle()
    others.be("worker").look()
    two_clocks.pass_by(0.1)
    two_clocks.jump(forward)
    others.be("dispenser")
    assert released(two_clocks) == 0
    look_twice_a_second(two_clocks, others, 61, "dispenser", "worker")
    others.be("dispenser")
    assert released(two_clocks) == 20


def test_who_was_frozen_while_it_found_the_clock_set_back_gives_others_the_time_to_see_it_again(
    two_clocks: Clocks, others: Others
) -> None:
    """What it found was put right meanwhile; and the clock was set back once more just before it
    woke, and forward just after.
    """
    look_twice_a_second(two_clocks, others, 2, "dispenser", "worker")
    others.be("dispenser").settle()
    others.be("worker").settle()
    used_up(two_clocks)
    for back in (-50, -3600):
        others.be("newcomer").look()
        look_twice_a_second(two_clocks, others, 1, "dispenser")
        others.be("newcomer").settle()
        others.watches.pop("newcomer")
        others.be("dispenser").look()
        two_clocks.jump(back)
        others.be("worker").look()
        two_clocks.pass_by(0.1)
        two_clocks.jump(-back)
        others.be("dispenser").look()
        two_clocks.pass_by(0.4)
    assert released(two_clocks) == 0


@pytest.fixture
def mistaken(two_clocks: Clocks, others: Others) -> Callable[[], None]:
    """Has one that read the clock first just after it was set back, and not since, take ledger time
    for early: it sets it back.
    """
    look_twice_a_second(two_clocks, others, 2, "dispenser")
    others.be("dispenser").settle()
    two_clocks.jump(-3600)
    others.be("newcomer").look()
    others.be("third").look()
    look_twice_a_second(two_clocks, others, 3, "dispenser", "third")
    others.be("third").settle()

    def looks() -> None:
        before = two_clocks.ledger
        others.be("dispenser").look()
        others.be("newcomer").look()
        assert 3599 < (before - two_clocks.ledger).total_seconds() < 3601

    return looks


@pytest.mark.parametrize("forward", [3590, 3600])
def test_who_sets_ledger_time_back_by_mistake_ends_no_charge(
    two_clocks: Clocks, others: Others, mistaken: Callable[[], None], forward: float
) -> None:
    """To others, a clock that is put forward just then makes up for it."""
    used_up(two_clocks)
    mistaken()
    two_clocks.pass_by(0.2)
    two_clocks.jump(forward)
    others.be("dispenser")
    assert released(two_clocks) == 0


@pytest.mark.parametrize("back", [-50, -3600])
def test_who_sees_the_clock_set_back_makes_up_for_no_mistake_of_others(
    two_clocks: Clocks, others: Others, mistaken: Callable[[], None], back: float
) -> None:
    """What they have written by that would be too old."""
    assert released(two_clocks) == 20
    others.be("dispenser").look()
    mistaken()
    two_clocks.pass_by(0.1)
    others.be("newcomer")
    answer_all(two_clocks)
    two_clocks.pass_by(0.1)
    two_clocks.jump(back)
    others.be("dispenser").look()
    for _ in range(10):
        assert released(two_clocks) == 0


@pytest.mark.parametrize("jump", [-1.5, -3600])
@pytest.mark.parametrize("slept", [0.1, 5])
def test_who_knows_of_a_jump_before_newcomers_leaves_what_they_have_written(
    two_clocks: Clocks, others: Others, slept: float, jump: float
) -> None:
    """Were ledger time put forward for its sake, what they have made would count no more."""
    others.look("sleeper", then=1)
    others.look("sleeper")
    two_clocks.jump(jump)
    others.be("newcomer")
    assert released(two_clocks) == 20
    if slept > ledger_time.SETTLED:
        answer_all(two_clocks)
        two_clocks.pass_by(slept)
    for who in ("sleeper", "newcomer"):
        others.be(who)
        assert released(two_clocks) == 0
    answer_all(two_clocks)
    two_clocks.pass_by(60.5)
    assert released(two_clocks) == 20


def test_who_only_records_has_agreed_before(two_clocks: Clocks, others: Others) -> None:
    """Else who saw the clock before it was set back, and not since, puts ledger time forward."""
    others.look("sleeper", then=1)
    assert released(two_clocks) == 20
    two_clocks.jump(-3600)
    others.look("newcomer", then=1)
    answer_all(two_clocks)
    others.be("sleeper")
    counts_for_a_window(two_clocks)


def test_who_came_before_others_dealt_with_a_jump_takes_over_what_they_say_of_it(
    two_clocks: Clocks, others: Others
) -> None:
    """What it read first was in no frame: set back to that, holds would stay for a day."""
    others.look("dispenser", times=2, then=1)
    true, began = two_clocks.ledger, two_clocks.mono
    two_clocks.jump(-86_400)
    others.look("newcomer", "dispenser", then=0.3)
    two_clocks.jump(-1)
    others.look("dispenser", "newcomer")
    went_by = two_clocks.mono - began
    assert abs((two_clocks.ledger - true).total_seconds() - went_by) < 0.011


def test_leases_and_holds_get_no_longer_where_ledger_time_stays_late(
    two_clocks: Clocks, others: Others
) -> None:
    """Somebody has agreed since the dispenser looked, so nobody makes up for a clock set back."""
    others.look("dispenser", then=2)
    others.be("dispenser").settle()
    ids = [one.attempt_id for one in release("default", ["r"], batch=2).released]
    assert len(begin("default", ids[:1])) == 1
    attempts = CallAttempt.objects.filter(pk__in=ids).order_by("pk")
    holds.lay("default", ["r"], "key", "k", timedelta(seconds=30), "", source="operator")
    hold = Hold.objects.get()
    lasted = [one.lease_until - two_clocks.ledger for one in attempts]
    two_clocks.jump(-3600)
    others.look("newcomer", then=1)
    others.be("newcomer").settle()
    for who in ("dispenser", "newcomer", "last", "dispenser"):
        others.look(who, then=1)
        others.be(who).settle()
        now = two_clocks.ledger
        for before, attempt in zip(lasted, attempts.all(), strict=True):
            assert -5.1 < (attempt.lease_until - now - before).total_seconds() < 0.1
        hold.refresh_from_db()
        assert 24.9 < (hold.until - now).total_seconds() < 30.1


def just_before(
    monkeypatch: pytest.MonkeyPatch, name: str, do: Callable[[], Any], of: Any = ledger_time
) -> None:
    """Have this happen just before this is called for the first time."""
    real = getattr(of, name)

    def call(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(of, name, real)
        do()
        return real(*args, **options)

    monkeypatch.setattr(of, name, call)


@pytest.mark.parametrize("between", ["look", "_mend_what_is_ahead"])
def test_a_clock_set_back_while_one_agrees_puts_nothing_in_the_future(
    two_clocks: Clocks, others: Others, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    """What had ended by the wrong time would count no more, and a hold would be over."""
    two_clocks.pass_by(1)
    others.be("dispenser").settle()
    used_up(two_clocks)
    holds.lay("default", ["r"], "key", "k", timedelta(seconds=600), "", source="operator")
    until = Hold.objects.get().until
    others.look("newcomer")

    def jumps() -> None:
        others.look("dispenser")
        two_clocks.pass_by(0.1)
        two_clocks.jump(-3600)
        others.be("newcomer")

    two_clocks.pass_by(0.4)
    others.look("dispenser", then=0.4)
    newcomer = others.be("newcomer")
    just_before(monkeypatch, between, jumps, newcomer if between == "look" else ledger_time)
    newcomer.agree()
    two_clocks.pass_by(0.1)
    others.look("dispenser")
    assert released(two_clocks) == 0
    assert Hold.objects.get().until == until


def test_who_agreed_before_the_clock_was_set_back_says_nothing_of_the_time_since(
    two_clocks: Clocks, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had read the clock, and committed only once another had come: to that one somebody had
    agreed since. Who was away puts ledger time forward, and what that one wrote was too old.
    """
    others.look("dispenser", then=1)
    others.be("dispenser").settle()
    others.look("agreer", "dispenser", then=0.4)
    others.look("dispenser")
    assert released(two_clocks) == 20
    others.look("dispenser")

    def meanwhile() -> None:
        two_clocks.jump(-3600)
        others.look("newcomer")
        others.be("agreer")

    just_before(monkeypatch, "_agree", meanwhile)
    others.be("agreer").agree()
    two_clocks.pass_by(1)
    others.be("newcomer")
    answer_all(two_clocks)
    two_clocks.pass_by(1)
    others.be("dispenser")
    counts_for_a_window(two_clocks)


def test_another_agreement_with_the_number_of_one_that_a_copy_has_lost_is_another(
    two_clocks: Clocks, others: Others
) -> None:
    """The copy lagged by a moment, and its server's clock is behind: who had seen the one that was
    lost took the count for unchanged, put ledger time forward, and what had ended counted no more.
    """
    others.look("dispenser", then=1)
    others.be("dispenser").settle()
    others.look("lost", "dispenser", then=1)
    assert released(two_clocks) == 20
    copied = LedgerState.objects.get(pk=ledger_time.OF_AGREED)
    others.be("lost").agree()
    others.look("dispenser")
    copied.save()
    two_clocks.jump(-3600)
    others.look("newcomer", then=1)
    answer_all(two_clocks)
    two_clocks.pass_by(1)
    others.be("dispenser")
    assert released(two_clocks) == 0


@pytest.mark.parametrize("first", ["look", "check"])
def test_a_clock_that_is_put_forward_again_while_ledger_time_is_late_makes_nothing_too_early(
    two_clocks: Clocks, others: Others, first: str
) -> None:
    """One who came after it had been set back has written by the late time, and is gone. Who still
    waited whether ledger time stays late found that it no longer was, and the hold was over.
    """
    others.look("dispenser", then=1)
    others.be("dispenser").settle()
    others.look("agreer", then=0.4)
    others.look("dispenser", then=0.4)
    others.be("agreer").agree()
    two_clocks.jump(-3600)
    others.look("newcomer", then=0.3)
    others.look("dispenser", then=0.46)
    others.be("newcomer").agree()
    holds.lay("default", ["r"], "key", "k", timedelta(seconds=600), "", source="operator")
    others.look("dispenser")
    two_clocks.jump(3600)
    if first == "check":
        with pytest.raises(ledger_time.Jumped), transaction.atomic():
            ledger_time.check_for_jump("default", ledger_time.read("default"))
    others.look("dispenser", times=4, then=0.3)
    assert 590 < (Hold.objects.get().until - two_clocks.ledger).total_seconds() < 600
    assert not others.be("dispenser").wants_look


def test_who_was_away_sees_that_ledger_time_was_moved_though_it_was_by_as_much_to_and_fro(
    two_clocks: Clocks, others: Others
) -> None:
    """Else it puts ledger time forward at once, and what others have written is too early."""
    others.look("dispenser", then=1)
    others.be("dispenser").settle()
    others.look("dispenser", "away", times=3, then=0.4)
    two_clocks.jump(-3600)
    others.look("newcomer", "dispenser", "away")
    two_clocks.jump(-3600)
    others.look("dispenser", times=4, then=0.41)
    others.look("newcomer")  # it finds that ledger time is early by what it read first
    holds.lay("default", ["r"], "key", "k", timedelta(seconds=600), "", source="operator")
    until = Hold.objects.get().until - two_clocks.ledger
    others.look("away")
    off = Hold.objects.get().until - two_clocks.ledger - until
    assert abs(off) < timedelta(milliseconds=1)


def test_a_hold_that_was_made_longer_since_the_clock_was_set_back_gets_no_shorter(
    two_clocks: Clocks, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one that goes by what another has agreed, before that one has shortened what is ahead."""
    others.look("dispenser", then=1)
    others.be("dispenser").settle()
    hold = ("default", ["r"], "key", "k")
    holds.lay(*hold, timedelta(seconds=30), "", source="provider")
    two_clocks.jump(-3600)
    others.look("quick", "last", then=1)

    def lay() -> None:
        others.look("quick")
        holds.lay(*hold, timedelta(hours=2), "", source="provider")
        others.be("last")

    just_before(monkeypatch, "_mend_what_is_ahead", lay)
    others.be("last").agree()
    left = Hold.objects.get().until - two_clocks.ledger
    assert 7190 < left.total_seconds() < 7201


def test_who_is_frozen_while_it_shortens_what_is_ahead_cuts_nothing_that_has_begun_since(
    two_clocks: Clocks, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than what lies ahead is told by; and the clock was set back just before it wakes:
    by that, what others have begun meanwhile lies ahead. A dispenser puts ledger time right.
    """
    for _ in range(3):
        others.be("dispenser").look()
        two_clocks.pass_by(0.5)
    others.be("dispenser").settle()

    def meanwhile() -> None:
        for _ in range(180):
            others.be("dispenser").look()
            two_clocks.pass_by(0.5)
            if _ == 170:
                ids = [one.attempt_id for one in release("default", ["r"], batch=1).released]
                assert len(begin("default", ids)) == 1
                lasts = timedelta(seconds=600)
                holds.lay("default", ["r"], "key", "k", lasts, "", source="operator")
        others.be("dispenser").look()
        two_clocks.jump(-3600)
        others.be("frozen")

    frozen = others.be("frozen")
    frozen.look()
    two_clocks.pass_by(0.8)
    others.be("dispenser").look()
    just_before(monkeypatch, "_mend_what_is_ahead", meanwhile)
    others.be("frozen").agree()
    lease, until = CallAttempt.objects.get().lease_until, Hold.objects.get().until
    two_clocks.pass_by(0.1)
    others.be("dispenser").look()
    now = two_clocks.ledger
    assert 80 < (lease - now).total_seconds() < 90
    assert 590 < (until - now).total_seconds() < 600


def test_what_is_ahead_is_shortened_by_as_few_statements_however_much_it_is(
    two_clocks: Clocks, others: Others
) -> None:
    """A database may have a million open attempts, and records wait meanwhile."""
    others.look("dispenser", then=1)
    others.be("dispenser").settle()
    for _ in range(9):
        send("r")
        ids = [one.attempt_id for one in release("default", ["r"], batch=1).released]
        assert len(begin("default", ids)) == 1
        others.look("dispenser", then=0.4)
    two_clocks.jump(-3600)
    others.look("newcomer", then=1)
    with CaptureQueriesContext(connection) as made:
        others.be("newcomer").agree()
    assert len(made) < 18
    ahead = [
        lease - two_clocks.ledger
        for lease in CallAttempt.objects.open().values_list("lease_until", flat=True)
    ]
    assert len(ahead) == 9
    assert max(ahead) < timedelta(seconds=100)


def test_a_key_waits_no_longer_where_ledger_time_stays_late(
    two_clocks: Clocks, others: Others, rules: Any
) -> None:
    rules(keyed=Rule(limits=[SlidingWindow("1/3s", per="key")]))
    others.look("dispenser", then=2)
    others.be("dispenser").settle()
    for _ in range(2):
        send("keyed", key="k")
    ensure_state_rows("default", ["keyed"])
    release("default", ["keyed"])
    answer_all(two_clocks)
    assert release("default", ["keyed"]).released == []
    two_clocks.jump(-3600)
    others.look("newcomer", then=1)
    others.be("newcomer").settle()
    look_twice_a_second(two_clocks, others, 2, "dispenser")
    release("default", ["keyed"])
    two_clocks.pass_by(3.5)
    assert len(release("default", ["keyed"]).released) == 1


def late_by(two_clocks: Clocks, others: Others, seconds: float) -> None:
    """The clock is set back, and somebody who comes just then agrees before the dispenser looks."""
    others.look("dispenser")
    two_clocks.jump(-seconds)
    others.be("newcomer").look()
    others.be("newcomer").agree()
    others.look("dispenser")


@pytest.mark.parametrize("back", [600, 1800])
def test_a_bucket_holds_no_more_where_ledger_time_stays_late_until_it_is_as_late_as_it_was(
    two_clocks: Clocks, others: Others, rules: Any, back: int
) -> None:
    """What it held then is kept; what was under way has ended by the late time, so before that."""
    rules(r=Rule(limits=[TokenBucket("20/h", burst=20, jitter=0.05)]))
    others.look("dispenser", then=2)
    others.be("dispenser").settle()
    assert released(two_clocks) == 20
    late_by(two_clocks, others, back)
    two_clocks.pass_by(1)
    answer_all(two_clocks)
    look_twice_a_second(two_clocks, others, back, "dispenser")
    others.be("dispenser")
    filled = back * 20 // 3600
    (shown,) = look("default").rule("r").limits
    assert shown.used >= 20 - filled, "pages show no more room either"
    assert released(two_clocks) <= filled


@pytest.mark.parametrize("back", [8, 20])
@pytest.mark.parametrize(
    "limit",
    [SlidingWindow("1/6s", per="key"), TokenBucket("1/20s", burst=4, per="key")],
    ids=lambda limit: type(limit).__name__,
)
def test_a_tally_of_a_key_forgets_in_time_what_ended_by_a_time_that_stays_late(
    two_clocks: Clocks, others: Others, rules: Any, limit: Any, back: int
) -> None:
    """It was before what had left already, so nothing took it away until all was counted anew."""
    rules(keyed=Rule(limits=[limit]))
    ensure_state_rows("default", ["keyed"])
    others.look("dispenser", then=2)
    others.be("dispenser").settle()
    for _ in range(50):
        send("keyed", key="k")
    counted = two_clocks.mono

    def passes() -> int:
        others.be("dispenser").look()
        return len(release("default", ["keyed"]).released)

    while not passes() or two_clocks.mono - counted < 2 * back:
        answer_all(two_clocks)
        two_clocks.pass_by(0.5)
    late_by(two_clocks, others, back)
    two_clocks.pass_by(0.8)
    answer_all(two_clocks)
    begun = 0
    for _ in range(150):
        begun += passes()
        answer_all(two_clocks)
        two_clocks.pass_by(0.5)
    assert begun >= 2


def test_the_first_of_all_has_agreed_before_its_first_pass(
    two_clocks: Clocks, others: Others
) -> None:
    LedgerState.objects.all().delete()
    others.be("first")
    assert len(release("default", ["r"]).released) == 20
    assert LedgerState.objects.get(pk=ledger_time.OF_AGREED).agreements == 1


def test_who_is_new_waits_from_when_its_first_look_has_ended(
    two_clocks: Clocks, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took a second to connect, and the clock jumped just before it was read."""
    used_up(two_clocks)
    two_clocks.pass_by(1)
    others.look("dispenser")
    shown = database.clock_sql

    def connects(using: str) -> str:
        monkeypatch.setattr(database, "clock_sql", shown)
        two_clocks.pass_by(1)
        two_clocks.jump(3600)
        return shown(using)

    monkeypatch.setattr(database, "clock_sql", connects)
    assert others.be("newcomer").seconds_to_settle() > 0.5
    two_clocks.pass_by(0.5)
    others.look("dispenser")
    others.be("newcomer")
    assert released(two_clocks) == 0


@pytest.mark.parametrize("jump", [-0.45, 0.45, 5, -3600])
@pytest.mark.parametrize("drift", [0.3, -0.3])
def test_who_was_idle_for_an_hour_leaves_a_jump_to_those_who_saw_it(
    two_clocks: Clocks, others: Others, drift: float, jump: float
) -> None:
    """So long apart, two clocks may differ by as much as a small jump, or part of a large one."""
    others.look("newcomer", then=3600)
    two_clocks.jump(drift)
    true, began = two_clocks.ledger, two_clocks.mono
    others.look("dispenser", times=3, then=0.5)
    two_clocks.jump(jump)
    others.be_new()
    written = in_time("default", lambda locked: locked.now)
    went_by = two_clocks.mono - began
    assert 1.5 < went_by < 2.5
    assert abs((written - true).total_seconds() - went_by) < 0.011


@pytest.mark.parametrize("jump", [0.5, -0.5])
def test_who_was_frozen_before_its_pass_counts_as_new_and_releases_nothing_yet(
    two_clocks: Clocks, others: Others, jump: float
) -> None:
    """For an hour, after it had looked at the clock: what drift may hide is more than the jump."""
    for _ in range(2):
        others.look("dispenser", "frozen")
        others.be("frozen").agree()
        two_clocks.pass_by(0.5)
    two_clocks.pass_by(3600)
    others.look("dispenser", times=2, then=0.4)
    two_clocks.jump(jump)
    frozen = others.be("frozen")
    assert not release("default", ["r"]).released
    assert frozen.seconds_to_settle() > 0.5


def test_who_takes_its_own_pause_for_a_jump_makes_no_room(
    two_clocks: Clocks, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As virtual machines do. Put forward again, what it has written would be too early."""
    moved = Mock(side_effect=ledger_time.set_back)
    monkeypatch.setattr(ledger_time, "set_back", moved)
    behind = {"worker": 0.0}
    own = lambda: two_clocks.mono - behind.get(others.now, 0.0)  # noqa: E731
    monkeypatch.setattr(clocks, "monotonic", own)
    monkeypatch.setattr(ledger_time, "time", SimpleNamespace(sleep=two_clocks.pass_by))
    for _ in range(3):
        two_clocks.pass_by(0.5)
        others.look("dispenser", "worker")
    two_clocks.pass_by(40)
    behind["worker"] = 40.0
    for _ in range(2):
        others.look("dispenser")
        ids = [one.attempt_id for one in release("default", ["r"], batch=10).released]
        assert len(ids) == 10
        others.be("worker")
        results = [answered(job) for job in begin("default", ids)]
        two_clocks.pass_by(0.01)
        recorder.record("default", results)
        for _ in range(5):
            two_clocks.pass_by(0.4)
            others.look("dispenser")
    others.be("dispenser")
    two_clocks.pass_by(50)
    assert released(two_clocks) == 0
    two_clocks.pass_by(51)
    assert released(two_clocks) == 20
    assert moved.call_count < 5, "and nobody goes on moving it"


def test_what_is_begun_while_others_deal_with_a_jump_has_no_lease_of_the_wrong_time(
    two_clocks: Clocks, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They mend the leases that are there by then: it reads the clock before, and writes after."""
    others.look("dispenser", "worker", then=1)
    ids = [one.attempt_id for one in release("default", ["r"], batch=2).released]
    others.look("dispenser", then=0.1)

    def jumps() -> None:
        two_clocks.jump(-3600)
        others.look("dispenser")
        others.be("worker")

    just_before(monkeypatch, "begin", jumps, transitions)
    others.be("worker")
    assert begin("default", ids) == []
    assert not CallAttempt.objects.filter(started_at__isnull=False).exists()


def test_a_jump_that_a_slow_reading_hides_is_not_credited(two_clocks: Clocks) -> None:
    """The answer may have come at any moment of it: only the time that surely went by counts."""
    watch = ledger_time.watch("default")
    watch.look()
    last = watch.last
    two_clocks.pass_by(1)
    before = two_clocks.mono
    two_clocks.pass_by(3)
    seen = database.to_us(two_clocks.ledger) + 2_000_000
    slow = clocks.Reading(seen, before, two_clocks.mono + 3, last.moved)
    assert (watch.keep_and_credit(slow) - last.at) / 1_000_000 < 1 + 0.02


@pytest.mark.parametrize("is_new", [False, True], ids=["a dispenser's", "a command's"])
def test_a_cleanup_just_after_the_clock_has_jumped_deletes_nothing_that_counts(
    two_clocks: Clocks, others: Others, is_new: bool
) -> None:
    """A command is a process of its own, and cannot know; a dispenser deals with it soon."""
    others.look("dispenser")
    used_up(two_clocks)
    CallQueue.objects.all().delete()
    two_clocks.pass_by(1)
    others.look("dispenser")
    two_clocks.jump(86400 * 60)
    if is_new:
        others.be_new()
    cleanup.clean("default")
    assert CallAttempt.objects.count() == 20


# --- Calls under way


@pytest.fixture
def job(settings: Any, monkeypatch: pytest.MonkeyPatch, transactional_db: None) -> Job:
    """A call that a worker has begun, an hour after the last jump. The clocks are real."""
    settings.CALLQUEUE = {"RULES": {"r": Rule(limits=[SlidingWindow("20/m")])}}
    monkeypatch.setattr(ledger_time, "_watches", {})
    ensure_state_rows("default", ["r"])
    LedgerState.objects.filter(pk=ledger_time.ROW).update(moved=3_600_000_000)
    CallQueue.objects.send({"method": "get", "params": {"url": "http://vendor.example/"}}, rule="r")
    (begun,) = begin("default", [one.attempt_id for one in release("default", ["r"]).released])
    ledger_time.watch("default").since = clocks.monotonic() - 60
    return begun


def answered(job: Job, status: int = 200, headers: Any = None) -> Result:
    answer = wire.Answer(
        response=response(status, headers or {}, b"{}"), sent_at=clocks.monotonic(), sent=True
    )
    return judging.result_of_answer(job, answer)


@pytest.mark.parametrize("jump", [0.03, 0.45, 604800, -0.03, -0.45, -604800])
def test_an_answer_is_recorded_by_the_clock_as_it_is_when_it_is_recorded(
    job: Job, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """Who meets the jump first moves the ledger before he writes; the hold is as long as asked."""
    before, sent = ledger_time.moved("default"), ledger_time.now("default")
    report = answered(job, 429, {"Retry-After": "30"})
    monkeypatch.setattr(server_clock, "ahead", timedelta(seconds=jump))
    recorder.record("default", [report])
    assert (ledger_time.moved("default") - before) / 1_000_000 == pytest.approx(jump, abs=0.5)
    attempt = CallAttempt.objects.get()
    known = timedelta(microseconds=clocks.TOLERANCE)  # a move errs late
    now = ledger_time.now("default")
    assert sent - known <= attempt.sent_at <= attempt.finished_at <= now
    assert timedelta(seconds=25) <= Hold.objects.get().until - now <= timedelta(seconds=30)


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
    assert recorder.record_once("default", [report]) == 1
    attempt = CallAttempt.objects.get()
    assert sent <= attempt.sent_at <= attempt.finished_at <= ledger_time.now("default")


@pytest.mark.parametrize("base", [1.0, 0.0])
@pytest.mark.parametrize("jump", [3600, -3600])
def test_a_retry_whose_attempt_fails_after_a_jump_waits_as_long_as_it_is_to(
    job: Job, monkeypatch: pytest.MonkeyPatch, jump: float, base: float
) -> None:
    job.rule = Rule(retry=Retry(base=base))
    report = judging.result_of_failure(job, "no connection")
    wait = report.due_at - job.to_wall(report.ended_at)
    monkeypatch.setattr(server_clock, "ahead", timedelta(seconds=jump))
    before = database.clock("default")
    recorder.record_once("default", [report])
    due = CallQueue.objects.get().due_at_dt
    assert before + wait - timedelta(seconds=5) <= due <= database.clock("default") + wait


@pytest.mark.parametrize("jump", [3600, -3600])
def test_a_lease_ends_no_earlier_than_the_worker_believes(
    job: Job, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    left = job.lease_ends_at - clocks.monotonic()
    monkeypatch.setattr(server_clock, "ahead", timedelta(seconds=jump))
    assert recovery.end_lost("default") == 0
    ledger_time.watch("default").look()
    assert recovery.end_lost("default") == 0
    lease = CallAttempt.objects.get().lease_until - ledger_time.now("default")
    assert left - 5 <= lease.total_seconds() <= left + 1


def test_a_request_waits_for_its_slot_and_no_longer(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, slept = [clocks.monotonic()], list[float]()
    opens = at[0] + 5

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        at[0] += max(seconds / 2, 0.001)  # it wakes too early

    monkeypatch.setattr(clocks, "monotonic", lambda: at[0])
    monkeypatch.setattr(request, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(Job, "slot_opens_at", lambda _: opens)
    job.lease_ends_at = at[0] + 60
    request.SlotGate(job).wait()
    assert opens <= at[0] < opens + 0.1 and slept[:2] == [5, 2.5]


def test_a_request_is_sent_and_has_ended_within_its_lease_or_is_not_sent(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """time.monotonic stands still while the machine is suspended, and a lease goes on."""
    monkeypatch.setattr(request, "_waits", {"r": (0.0, 8.0)})

    def gate(left: float) -> request.SlotGate:
        job.lease_ends_at = clocks.monotonic() + left
        return request.SlotGate(job)

    narrow = Trip(wire.Timeouts(total=60), gate(20), wire.Policy())
    assert narrow.ends_at <= job.lease_ends_at
    narrow.pass_gate()
    assert narrow.ends_at <= job.lease_ends_at
    assert narrow.why_late("read", 27) == "the read timeout of 27 s"
    with pytest.raises(wire.Dropped, match="too little was left of the lease"):
        gate(7).wait()
    wide = gate(90)
    assert Trip(wire.Timeouts(total=60), wide, wire.Policy()).ends_at < job.lease_ends_at - 25
    wide.wait()
    if hasattr(time, "CLOCK_BOOTTIME"):  # only Linux counts the time for which it was suspended
        awake = time.clock_gettime(time.CLOCK_BOOTTIME)
        monkeypatch.setattr(time, "clock_gettime", lambda clock: awake + 3600)
        with pytest.raises(wire.Dropped):
            wide.wait()


# --- Ledger time, however much it counts

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
    ensure_state_rows("default", ["r"])
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


def sent_and_released(count: int) -> tuple[int, int]:
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
    assert sent_and_released(1)[0] == 1  # and counts all anew
    released, statements = sent_and_released(4)
    assert released == 4
    before = list(CallAttempt.objects.order_by("pk").values_list()[MANY - 5 :])

    monkeypatch.setattr(server_clock, "ahead", timedelta(seconds=jump))
    first, _ = sent_and_released(5)  # finds the jump, unless it is as small as a statement is slow
    assert first == 0 or abs(jump) < 1
    with CaptureQueriesContext(connection) as made:
        watched.look()
    assert len(made) < 20
    assert watched.look() == 0

    if not first:
        released, counted = sent_and_released(0)
        # what was known to be free is of before the jump: it counts, and tallies are as they were
        assert (released, counted <= statements + COUNTING) == (5, True)
    assert list(CallAttempt.objects.order_by("pk").values_list()[MANY - 5 : MANY + 5]) == before
    assert sent_and_released(ROOM)[0] == ROOM - 10, "and nothing over"


@pytest.mark.parametrize("jump", [0, *JUMPS])
def test_all_ways_to_ledger_time_agree(
    monkeypatch: pytest.MonkeyPatch, watched: ledger_time.Watch, jump: float
) -> None:
    before = ledger_time.now("default")
    monkeypatch.setattr(server_clock, "ahead", timedelta(seconds=jump))
    watched.look()
    ledger_time.ensure_rows("default")
    rows = LedgerState.objects.filter(pk=ledger_time.ROW)
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
    for one in (shifted, shifted.with_rate("2/d")):
        assert one.window(wall - by) == day


def test_what_went_before_the_clock_was_set_went_on_the_day_that_it_is_now(
    settings: Any, monkeypatch: pytest.MonkeyPatch, watched: ledger_time.Watch
) -> None:
    """The clock was wrong before: for the provider it is a second ago."""
    settings.CALLQUEUE = {"RULES": {"r": Rule(limits=[FixedWindow("2/d")])}}
    ensure_state_rows("default", ["r"])
    assert sent_and_released(3)[0] == 2
    monkeypatch.setattr(server_clock, "ahead", timedelta(days=1))
    watched.look()
    assert sent_and_released(0)[0] == 0


def test_a_copy_that_lagged_by_a_second_has_gone_back_though_somebody_has_agreed_meanwhile(
    two_clocks: Clocks, others: Others
) -> None:
    """It was the sign of life's instant that told: what is mended with a jump lies near it, too."""
    one = Membership("default", "me", lambda: conf.current().book)
    one.runs = True
    others.be("dispenser").agree()
    one.heartbeat()
    copied = [*DispenserState.objects.all(), *LedgerState.objects.all()]
    two_clocks.pass_by(1)
    others.look("newcomer")
    others.be("newcomer").agree()
    others.look("dispenser")
    assert released(two_clocks) > 0
    one.heartbeat()
    CallAttempt.objects.all().delete()
    for row in copied:
        row.save()
    one.heartbeat()
    assert Hold.objects.filter(source="restored").exists()


@pytest.mark.parametrize("since_beat", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("down", [3.0, 30.0])
def test_a_server_that_was_set_back_with_its_clock_has_gone_back(
    two_clocks: Clocks, since_beat: float, down: float
) -> None:
    """A virtual machine goes on from a snapshot, of just before the clock jumped."""
    own = conf.current().book
    one, watch = Membership("default", "me", lambda: own), ledger_time.watch("default")
    one.runs = True
    one.heartbeat()
    two_clocks.pass_by(since_beat)
    watch.look()
    remembered, then = list(DispenserState.objects.all()), two_clocks.wall
    two_clocks.pass_by(3600)
    watch.look()
    assert released(two_clocks) > 0
    one.heartbeat()
    two_clocks.pass_by(0.4)
    watch.look()
    two_clocks.pass_by(down)
    two_clocks.jump((then - two_clocks.wall).total_seconds())
    CallAttempt.objects.all().delete()
    for row in remembered:
        row.save()
    watch.look()
    one.heartbeat()
    assert Hold.objects.filter(source="restored").exists()
