"""Threads with connections of their own, at the same rows at the same time: one of them wins, and
no limit is exceeded.

They meet at barriers, and where an interleaving matters, events put them into it; nothing waits for
time to pass.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, connection, connections, transaction
from django.utils import timezone

from callqueue import (
    Concurrency,
    Retry,
    Rule,
    SlidingWindow,
    callbacks,
    clocks,
    conf,
    database,
    states,
    tasks,
)
from callqueue import broker as messages
from callqueue.dispatch.release_pass import release
from callqueue.exceptions import IllegalTransition
from callqueue.execution import claim, executor, judging, recorder, wire
from callqueue.ledger import clock_jumps, holds, rule_rows
from callqueue.maintenance import recovery
from callqueue.models import CallAttempt, CallQueue, Hold, RuleState
from callqueue.transitions import Job, Result
from tests.support.behaviour import Vendor, response, send
from tests.support.locking import until_one_waits_for_a_lock

Rules = Callable[..., None]
PATIENCE = 30  # seconds after which a thread that waits for another one has lost it
ROUNDS = 15


@pytest.fixture
def row_locks() -> None:
    """SQLite has one lock for the whole database: its transactions come one after the other."""
    if not connection.features.has_select_for_update:
        pytest.skip("this database has no row locks")


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run these at the same time, each in a thread; what they returned. The first exception that
    one raised is raised.
    """
    barrier = threading.Barrier(len(works))
    ends: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def one(place: int) -> None:
        try:
            barrier.wait(PATIENCE)
            ends[place] = works[place]()
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [
        threading.Thread(target=one, args=(place,), daemon=True) for place in range(len(works))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), (
        "a thread hangs: a deadlock that the database does not see"
    )
    if errors:
        raise errors[0]
    return ends


def released_by(rule: str) -> list[int]:
    """The attempts that one pass over the rule's group releases; another dispenser at work is
    waited for.
    """
    for _ in range(500):
        made = release("default", conf.current().book.groups[rule])
        if not made.next_look.streak.locked:
            return [r.attempt_id for r in made.released]
    raise AssertionError("the group stays locked")


def answered(job: Job, status: int = 200) -> Result:
    """The report of an answer, as the executor makes it."""
    answer = wire.Answer(response=response(status, {}, b"{}"), sent_at=job.clock.after, sent=True)
    return judging.of_answer(job, answer)


def end_leases() -> None:
    CallAttempt.objects.open().update(lease_until=timezone.now() - timedelta(seconds=1))


def fresh(call: CallQueue) -> CallQueue:
    return CallQueue.objects.get(pk=call.pk)


def test_dispensers_that_share_a_budget_release_it_once(rules: Rules) -> None:
    account = SlidingWindow("40/h", name="account")
    rules(a=Rule(limits=[account]), b=Rule(limits=[account, SlidingWindow("2/h", per="key")]))
    url = {"method": "get", "params": {"url": "http://vendor.example/"}}
    CallQueue.objects.send_many([url] * 60, rule="a")
    CallQueue.objects.send_many(
        [{"call_data": url, "key": f"k{i % 9}"} for i in range(60)], rule="b"
    )
    group = conf.current().book.groups["a"]

    def dispenser() -> int:
        return sum(len(release("default", group, batch=3).released) for _ in range(40))

    count = sum(together(*[dispenser] * 6)) + len(released_by("a"))
    assert count == 40
    assert CallAttempt.objects.count() == CallQueue.objects.dispatched().count() == 40
    assert set(CallAttempt.objects.values_list("number", flat=True)) == {1}
    of_keys = Counter(CallAttempt.objects.filter(rule="b").values_list("key", flat=True))
    assert max(of_keys.values()) <= 2


def test_dispensers_of_the_same_queues_never_overfill_one(rules: Rules) -> None:
    rules(r=Rule(queues=["e1", "e2"], limits=[SlidingWindow("7/h", per="queue")]))
    for _ in range(30):
        send("r")
    together(*[lambda: [release("default", ["r"], batch=2) for _ in range(15)]] * 4)
    released_by("r")
    assert Counter(CallAttempt.objects.values_list("queue", flat=True)) == {"e1": 7, "e2": 7}


def test_no_more_calls_are_on_the_wire_than_may_be_at_once(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule(limits=[Concurrency(3)]))
    calls = [send("r") for _ in range(40)]
    flight, lock, highest = set[int](), threading.Lock(), []

    def serve() -> int:
        with lock:
            flight.add(threading.get_ident())
            highest.append(len(flight))
        with lock:
            flight.discard(threading.get_ident())
        return 200

    remote.answers["/"] = serve
    messages: queue.Queue[int] = queue.Queue()
    finished = threading.Event()

    def dispenser() -> None:
        for _ in range(4000):
            for made in release("default", ["r"]).released:
                messages.put(made.attempt_id)
            if not CallQueue.objects.waiting().exists():
                break
        finished.set()

    def worker() -> None:
        while not (finished.is_set() and messages.empty()):
            try:
                executor.execute("default", [messages.get(timeout=0.05)])
            except queue.Empty:
                continue

    together(dispenser, dispenser, worker, worker, worker, worker, worker)
    assert CallQueue.objects.done().count() == len(calls) == len(remote.requests)
    assert max(highest) <= 3


def test_twenty_senders_of_one_unique_key_make_one_call(rules: Rules) -> None:
    rules(r=Rule())
    sent = together(*[lambda: send("r", unique_key="order-1").pk] * 20)
    assert len(set(sent)) == 1
    assert CallQueue.objects.count() == 1


def test_senders_of_a_unique_key_beside_its_end_make_at_most_one_more(rules: Rules) -> None:
    rules(r=Rule())
    for number in range(ROUNDS):
        key = f"order-{number}"
        first = send("r", unique_key=key)
        sent = together(
            lambda call=first: call.cancel(), *[lambda key=key: send("r", unique_key=key).pk] * 6
        )
        assert len({pk for pk in sent[1:] if pk != first.pk}) <= 1
        assert CallQueue.objects.filter(active_key=key).count() <= 1


def test_requeues_of_calls_with_one_unique_key_revive_one(rules: Rules) -> None:
    rules(r=Rule())
    calls = []
    for _ in range(6):
        calls.append(send("r", unique_key="order"))
        calls[-1].cancel()
    counts = together(
        *[lambda pk=call.pk: CallQueue.objects.filter(pk=pk).requeue() for call in calls]
    )
    assert sum(counts) == CallQueue.objects.new().count() == 1


def test_of_cancel_and_begin_exactly_one_wins(rules: Rules) -> None:
    rules(r=Rule())
    won: Counter[str] = Counter()
    for _ in range(ROUNDS):
        call = send("r")
        ids = released_by("r")
        cancelled, jobs = together(
            lambda pk=call.pk: CallQueue.objects.filter(pk=pk).cancel(),
            lambda ids=ids: claim.begin("default", ids),
        )
        assert cancelled + len(jobs) == 1
        attempt = fresh(call).attempts.get()
        assert (attempt.outcome == states.VOIDED, attempt.started_at is None) == (
            bool(cancelled),
            bool(cancelled),
        )
        assert fresh(call).status == (states.CANCELLED if cancelled else states.DISPATCHED)
        won["cancel" if cancelled else "begin"] += 1
    assert sum(won.values()) == ROUNDS


def test_a_cancel_that_is_under_way_when_a_worker_begins_wins(
    rules: Rules, row_locks: None
) -> None:
    rules(r=Rule())
    call, other = send("r"), send("r")
    ids = released_by("r")
    voided, begun_the_other = threading.Event(), threading.Event()

    def cancel() -> None:
        with transaction.atomic():
            CallQueue.objects.get(pk=call.pk).cancel()
            voided.set()
            assert begun_the_other.wait(PATIENCE)

    def begin() -> list[int]:
        assert voided.wait(PATIENCE)
        try:
            return [job.pk for job in claim.begin("default", ids)]
        finally:
            begun_the_other.set()

    _, begun = together(cancel, begin)
    assert begun == [other.pk]
    assert fresh(call).status == states.CANCELLED
    assert fresh(call).attempts.get().outcome == states.VOIDED


def test_a_cancel_between_a_workers_look_and_its_begin_wins(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    call = send("r")
    ids = released_by("r")
    looked, cancelled = halted(monkeypatch, claim.transitions, "begin")

    def cancel() -> None:
        assert looked.wait(PATIENCE)
        CallQueue.objects.get(pk=call.pk).cancel()
        cancelled.set()

    jobs, _ = together(lambda: claim.begin("default", ids), cancel)
    assert jobs == []
    assert fresh(call).status == states.CANCELLED
    assert fresh(call).attempts.get().outcome == states.VOIDED


def test_of_workers_with_the_same_message_one_makes_the_call(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule())
    for _ in range(ROUNDS):
        send("r")
    ids = released_by("r")
    made = together(*[lambda: executor.execute("default", ids)] * 5)
    assert sum(made) == len(remote.requests) == ROUNDS
    assert CallQueue.objects.done().count() == ROUNDS


def test_of_a_begin_and_a_recovery_of_the_unbegun_exactly_one_wins(rules: Rules) -> None:
    rules(r=Rule())
    for _ in range(ROUNDS):
        call = send("r", priority=9)
        ids = [pk for pk in released_by("r") if CallAttempt.objects.get(pk=pk).call_id == call.pk]
        end_leases()
        jobs, undone = together(
            lambda ids=ids: claim.begin("default", ids), lambda: recovery.void_unbegun("default")
        )
        assert len(jobs) + undone == 1
        assert fresh(call).status == (states.DISPATCHED if jobs else states.NEW)
        CallQueue.objects.filter(pk=call.pk).delete()


def test_recoveries_at_once_take_each_call_back_once(rules: Rules) -> None:
    rules(r=Rule(retry=Retry(max_attempts=3)))
    lost, unbegun = [send("r", method="get") for _ in range(8)], [send("r") for _ in range(8)]
    ids = released_by("r")
    of_lost = CallAttempt.objects.filter(call__in=lost)
    assert len(claim.begin("default", list(of_lost.values_list("pk", flat=True)))) == len(lost)
    end_leases()
    counts = together(*[lambda: recovery.recover("default")] * 5)
    assert sum(counts) == len(ids) == 16
    assert {fresh(call).failed_count for call in lost} == {1}
    assert {fresh(call).status for call in lost} == {states.ERROR}
    assert {fresh(call).status for call in unbegun} == {states.NEW}
    assert Counter(CallAttempt.objects.values_list("outcome", flat=True)) == {
        states.LOST: 8,
        states.VOIDED: 8,
    }


def test_of_a_record_and_a_recovery_exactly_one_counts(rules: Rules) -> None:
    rules(r=Rule())
    for _ in range(ROUNDS):
        call = send("r")
        (job,) = claim.begin("default", released_by("r"))
        end_leases()
        report = answered(job)
        recorded, ended = together(
            lambda report=report: recorder.write("default", [report]),
            lambda: recovery.end_lost("default"),
        )
        assert recorded + ended == 1
        assert fresh(call).status == (states.DONE if recorded else states.UNKNOWN)
        assert fresh(call).attempts.get().outcome == (states.SUCCEEDED if recorded else states.LOST)


def test_a_record_says_how_many_attempts_were_no_longer_its_own(
    rules: Rules, caplog: pytest.LogCaptureFixture
) -> None:
    rules(r=Rule())
    for _ in range(3):
        send("r")
    jobs = claim.begin("default", released_by("r"))
    past = timezone.now() - timedelta(seconds=60)
    CallAttempt.objects.filter(pk=jobs[0].attempt_id).update(lease_until=past)
    assert recovery.end_lost("default") == 1
    caplog.set_level("INFO", "callqueue")
    assert recorder.write("default", [answered(job) for job in jobs]) == 2
    assert "attempt_refused attempts=1 " in caplog.text


def test_a_late_record_changes_nothing_of_a_call_that_was_requeued(rules: Rules) -> None:
    rules(r=Rule())
    for _ in range(ROUNDS):
        call = send("r")
        (job,) = claim.begin("default", released_by("r"))
        end_leases()
        recovery.recover("default")
        report = answered(job)

        def requeue_and_release(call: CallQueue = call) -> int:
            CallQueue.objects.get(pk=call.pk).requeue()
            return len(released_by("r"))

        recorded, again = together(
            lambda report=report: recorder.write("default", [report]), requeue_and_release
        )
        again = again or len(
            released_by("r")
        )  # a pass leaves out a row that the record is just looking at
        assert (recorded, again) == (0, 1)
        assert fresh(call).status == states.DISPATCHED
        assert [a.outcome for a in fresh(call).attempts.all()] == [states.LOST, states.OPEN]
        call.attempts.all().delete()


def test_of_a_requeue_and_a_record_that_failed_the_call_neither_is_lost(rules: Rules) -> None:
    rules(r=Rule(retry=Retry(max_attempts=1)))
    for _ in range(ROUNDS):
        call = send("r")
        (job,) = claim.begin("default", released_by("r"))
        report = answered(job, 500)

        def requeue(call: CallQueue = call) -> bool:
            try:
                CallQueue.objects.get(pk=call.pk).requeue()
            except IllegalTransition:
                return False
            return True

        recorded, requeued = together(
            lambda report=report: recorder.write("default", [report]), requeue
        )
        assert recorded == 1
        call = fresh(call)
        assert call.attempts.get().outcome == states.ERRORED
        assert (call.status, call.failed_count) == (
            (states.NEW, 0) if requeued else (states.FAILED, 1)
        )
        call.delete()


def test_calls_that_someone_has_locked_are_passed_over(rules: Rules, row_locks: None) -> None:
    rules(r=Rule())
    first, second = send("r"), send("r")
    locked, released = threading.Event(), threading.Event()

    def editor() -> None:
        with transaction.atomic():
            CallQueue.objects.select_for_update().get(pk=first.pk)
            locked.set()
            assert released.wait(PATIENCE)

    def dispenser() -> list[int]:
        assert locked.wait(PATIENCE)
        ids = released_by("r")
        released.set()
        return ids

    _, ids = together(editor, dispenser)
    assert [CallAttempt.objects.get(pk=pk).call_id for pk in ids] == [second.pk]


def test_cancels_requeues_and_passes_over_the_same_calls_do_not_deadlock(
    rules: Rules, remote: Vendor
) -> None:
    rules(r=Rule(retry=Retry(base=0, jitter=False)))
    calls = [send("r", method="get") for _ in range(30)]
    remote.answers["/"] = iter_answers()

    def dispenser() -> None:
        for _ in range(12):
            ids = [r.attempt_id for r in release("default", ["r"], batch=7).released]
            if ids:
                executor.execute("default", ids)

    def operator() -> None:
        for _ in range(6):
            CallQueue.objects.all().cancel()
            CallQueue.objects.cancelled().requeue()

    together(
        dispenser,
        dispenser,
        operator,
        operator,
        lambda: [recovery.recover("default") for _ in range(6)],
    )
    recovery.recover("default")  # ends what an operator had locked when it was answered
    for call in calls:
        attempts = list(fresh(call).attempts.all())
        assert [a.number for a in attempts] == list(range(1, len(attempts) + 1))
        assert (fresh(call).status == states.DISPATCHED) == any(
            a.outcome == states.OPEN for a in attempts
        )
    assert sum(a.started_at is not None for a in CallAttempt.objects.all()) == len(remote.requests)


def test_a_callback_that_is_being_sent_is_sent_by_nobody_else(
    rules: Rules, row_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    call, others = (
        send("r", callback="shop.told"),
        [send("r", callback="shop.told") for _ in range(2)],
    )
    long_ago = timezone.now() - callbacks.LEFT - timedelta(seconds=60)
    CallQueue.objects.update(
        status=states.DONE, ready=False, callback_pending=True, finished_at_dt=long_ago
    )
    told: list[int] = []
    monkeypatch.setattr(messages, "send_by_name", lambda app, name, args: told.append(args[0]))
    came, may_go = halted(monkeypatch, messages, "send_by_name")

    def another() -> int:
        assert came.wait(PATIENCE)
        monkeypatch.setattr(messages, "send_by_name", lambda app, name, args: told.append(args[0]))
        try:
            return tasks.announce(ids)
        finally:
            may_go.set()

    ids = [call.pk, *(other.pk for other in others)]
    counts = together(lambda: tasks.announce([call.pk]), another)
    assert counts == [1, len(others)]
    assert sorted(told) == sorted([call.pk, *(other.pk for other in others)])
    assert not CallQueue.objects.filter(callback_pending=True).exists()


def iter_answers() -> Callable[[], int]:
    statuses: Iterator[int] = iter([500, 200] * 500)
    lock = threading.Lock()

    def answer() -> int:
        with lock:
            return next(statuses)

    return answer


def halted(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> tuple[threading.Event, threading.Event]:
    """Whoever comes to this function sets the first event and goes on when the second is set."""
    came, may_go = threading.Event(), threading.Event()
    real = getattr(module, name)

    def halting(*args: Any) -> Any:
        came.set()
        assert may_go.wait(PATIENCE)
        return real(*args)

    monkeypatch.setattr(module, name, halting)
    return came, may_go


# --- Holds, and the clock


@pytest.mark.parametrize("seconds", [60, None])
def test_a_hold_that_another_makes_longer_meanwhile_stays_as_long(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, seconds: int | None
) -> None:
    """Two answers ask for holds at once; the longer one, or one without an end, is written between
    the other's look and write.
    """
    rules(r=Rule())
    now = database.clock("default")
    longer = None if seconds is None else now + timedelta(seconds=seconds)
    holds.lay("default", ["r"], "rule", "", now + timedelta(seconds=3), "first", source="provider")
    manager, looked = type(Hold.objects.all()), []
    get_or_create = manager.get_or_create

    def and_then_another(self: Any, *args: Any, **named: Any) -> Any:
        found = get_or_create(self, *args, **named)
        if not looked:
            looked.append(True)
            holds.lay("default", ["r"], "rule", "", longer, "longer", source="provider")
        return found

    monkeypatch.setattr(manager, "get_or_create", and_then_another)
    holds.lay(
        "default", ["r"], "rule", "", now + timedelta(seconds=5), "shorter", source="provider"
    )
    hold = Hold.objects.get()
    assert (hold.until, hold.reason) == (longer, "longer")


def test_holds_laid_at_once_are_the_longest_of_them(rules: Rules) -> None:
    rules(r=Rule())
    for _ in range(ROUNDS):
        now = database.clock("default")
        ends = [now + timedelta(seconds=seconds) for seconds in (5, 60, 20, 40)]
        together(
            *[
                lambda end=end: holds.lay("default", ["r"], "rule", "", end, "", source="provider")
                for end in ends
            ]
        )
        assert Hold.objects.get().until == max(ends)
        holds.lift("default", "r")


def test_nobody_moves_the_ledger_while_an_instant_is_being_written(
    rules: Rules, row_locks: None
) -> None:
    """And many may write at once. Who waited for the ledger to be moved reads the clock, and how
    far it was, after that.
    """
    rules(r=Rule())
    both, tried, moved = threading.Barrier(3), threading.Event(), threading.Event()
    frame = RuleState.objects.filter(rule=rule_rows.FRAME)
    shown: list[Any] = []
    found: list[clocks.Reading] = []

    def write() -> None:
        with database.writing("default"):
            clock_jumps.held("default")
            both.wait(PATIENCE)
            assert tried.wait(PATIENCE)

    def move() -> None:
        both.wait(PATIENCE)
        with pytest.raises(DatabaseError), database.writing("default"):
            frame.select_for_update(nowait=True).get()
        tried.set()
        with database.writing("default"):
            frame.select_for_update().get()
            moved.set()
            until_one_waits_for_a_lock()
            frame.update(served=7)
            shown.append(database.clock("default"))

    def write_after() -> None:
        assert moved.wait(PATIENCE)
        with database.writing("default"):
            found.append(clock_jumps.held("default"))

    together(write, write, move, write_after)
    assert found[0].moved == 7
    assert found[0].at >= database.to_us(shown[0])
