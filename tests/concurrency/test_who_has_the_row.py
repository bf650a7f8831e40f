"""Two at the same rows at the same time: who wins, what is left of either, and who waits."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connection, transaction
from django.utils import timezone

from callqueue import (
    Retry,
    Rule,
    SlidingWindow,
    callbacks,
    clocks,
    conf,
    control,
    database,
    events,
    states,
    tasks,
    transitions,
)
from callqueue import broker as messages
from callqueue.dispatch.release_pass import release
from callqueue.exceptions import IllegalTransition
from callqueue.execution import claim, executor, recorder
from callqueue.ledger import holds, ledger_time
from callqueue.maintenance import cleanup, recovery
from callqueue.managers import CallAttemptQuerySet
from callqueue.models import BelatedEnding, CallAttempt, CallQueue, Hold, LedgerState
from callqueue.transitions import Job
from tests.support.behaviour import Vendor, send
from tests.support.locking import (
    PATIENCE,
    answered,
    beside_a_frozen,
    end_leases,
    fresh,
    halted,
    held_by_a_host,
    released_by,
    together,
    until_one_waits_for_a_lock,
    waiting_for_nobody,
)

Rules = Callable[..., None]
Status = CallQueue.Status
ROUNDS = 15
PAST = timedelta(seconds=60)
DATA = {"method": "get", "params": {"url": "http://vendor.example/"}}


@contextmanager
def told_of_ends() -> Iterator[list[int]]:
    """The calls that `call_finished` names."""
    told: list[int] = []
    events.call_finished.connect(
        lambda call_id, **_: told.append(call_id), weak=False, dispatch_uid="told"
    )
    try:
        yield told
    finally:
        events.call_finished.disconnect(dispatch_uid="told")


def statuses(*calls: CallQueue) -> list[int]:
    return [fresh(call).status for call in calls]


def outcomes(call: CallQueue) -> list[str]:
    return list(call.attempts.order_by("number").values_list("outcome", flat=True))


# --- Who wins, and what is left of either


@dataclass
class Duel:
    """Two works on one released call, by what each returns: its state and its attempts' outcomes."""

    one: Callable[[CallQueue, list[int], list[Job]], Any]
    other: Callable[[CallQueue, list[int], list[Job]], Any]
    ends: dict[tuple[int, int], tuple[int, list[str]]]
    is_begun: bool = False
    first: Callable[[], Any] = lambda: None
    then: Callable[[], Any] = lambda: None


def cancels(call: CallQueue, ids: list[int], jobs: list[Job]) -> int:
    return CallQueue.objects.filter(pk=call.pk).cancel()


def begins(call: CallQueue, ids: list[int], jobs: list[Job]) -> int:
    return len(claim.begin("default", ids))


def records(status: int) -> Callable[[CallQueue, list[int], list[Job]], int]:
    return lambda call, ids, jobs: recorder.record_once("default", [answered(jobs[0], status)])


def requeues(call: CallQueue, ids: list[int], jobs: list[Job]) -> int:
    try:
        fresh(call).requeue()
    except IllegalTransition:
        return 0
    return 1


def lost() -> None:
    end_leases()
    assert recovery.recover("default") == 1


OPEN, VOIDED, LOST = states.OPEN, states.VOIDED, states.LOST
DUELS = {
    "cancel, begin": Duel(cancels, begins, {
        (1, 0): (Status.CANCELLED, [VOIDED]), (0, 1): (Status.DISPATCHED, [OPEN]),
    }),
    "begin, recovery of the unbegun": Duel(begins, lambda *_: recovery.void_unbegun("default"), {
        (1, 0): (Status.DISPATCHED, [OPEN]), (0, 1): (Status.NEW, [VOIDED]),
    }, first=end_leases),
    "record, recovery of the lost": Duel(records(200), lambda *_: recovery.end_lost("default"), {
        (1, 0): (Status.DONE, [states.SUCCEEDED]), (0, 1): (Status.UNKNOWN, [LOST]),
    }, is_begun=True, first=end_leases),
    "recovery of the lost, twice": Duel(*[lambda *_: recovery.end_lost("default")] * 2, {
        won: (Status.UNKNOWN, [LOST]) for won in ((1, 0), (0, 1))
    }, is_begun=True, first=end_leases),
    "record that fails it, requeue": Duel(records(500), requeues, {
        (1, 0): (Status.FAILED, [states.ERRORED]), (1, 1): (Status.NEW, [states.ERRORED]),
    }, is_begun=True),
    "late record, requeue": Duel(records(200), requeues, {
        (0, 1): (Status.DISPATCHED, [LOST, OPEN]),
    }, is_begun=True, first=lost, then=lambda: released_by("r")),
}  # fmt: skip


@pytest.mark.parametrize("what", DUELS)
def test_of_two_one_wins_and_neither_is_lost(rules: Rules, what: str) -> None:
    duel = DUELS[what]
    rules(r=Rule(retry=Retry(max_attempts=1)))
    for _ in range(ROUNDS):
        call = send("r")
        ids = released_by("r")
        jobs = claim.begin("default", ids) if duel.is_begun else []
        duel.first()
        works = [partial(work, call, ids, jobs) for work in (duel.one, duel.other)]
        won = together(*works)
        duel.then()
        assert tuple(won) in duel.ends, won
        assert (fresh(call).status, outcomes(call)) == duel.ends[tuple(won)]  # type: ignore[index]
        call.attempts.all().delete()
        fresh(call).delete()


def test_of_workers_with_the_same_message_one_makes_the_call(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule())
    for _ in range(ROUNDS):
        send("r")
    ids = released_by("r")
    made = together(*[lambda: executor.execute("default", ids)] * 5)
    assert sum(made) == len(remote.requests) == ROUNDS
    assert CallQueue.objects.done().count() == ROUNDS


def test_dispensers_that_share_a_budget_release_it_once(rules: Rules) -> None:
    account = SlidingWindow("40/h", name="account")
    rules(
        a=Rule(limits=[account]),
        b=Rule(limits=[account, SlidingWindow("2/h", per="key")]),
        q=Rule(queues=["e1", "e2"], limits=[SlidingWindow("7/h", per="queue")]),
    )
    CallQueue.objects.send_many([DATA] * 60, rule="a")
    CallQueue.objects.send_many(
        [{"call_data": DATA, "key": f"k{i % 9}"} for i in range(60)], rule="b"
    )
    CallQueue.objects.send_many([DATA] * 30, rule="q")
    group = conf.current().book.groups["a"]

    def dispenser() -> int:
        release("default", ["q"], batch=2)
        return sum(len(release("default", group, batch=3).released) for _ in range(40))

    count = sum(together(*[dispenser] * 6)) + len(released_by("a"))
    released_by("q")
    assert count == 40
    assert CallAttempt.objects.count() == CallQueue.objects.dispatched().count() == 40 + 14
    assert set(CallAttempt.objects.values_list("number", flat=True)) == {1}
    of_keys = Counter(CallAttempt.objects.filter(rule="b").values_list("key", flat=True))
    assert max(of_keys.values()) <= 2
    of_queues = Counter(CallAttempt.objects.filter(rule="q").values_list("queue", flat=True))
    assert of_queues == {"e1": 7, "e2": 7}


@pytest.mark.parametrize("end", ["undo", "void", "lost", "record"])
def test_an_attempt_that_its_call_went_on_without_ends_alone(rules: Rules, end: str) -> None:
    """The second attempt is on the wire: the first one's end is no reason for a third."""
    rules(r=Rule())
    call = send("r")
    first = released_by("r")
    jobs = claim.begin("default", first) if end in ("lost", "record") else []
    CallQueue.objects.update(status=Status.NEW, ready=True)
    (second,) = claim.begin("default", released_by("r"))
    if end == "undo":
        assert transitions.void_and_log("default", first) == 0
    elif end == "record":
        assert recorder.record_once("default", [answered(jobs[0], 500)]) == 1
    else:
        CallAttempt.objects.filter(pk__in=first).update(
            lease_until=ledger_time.now("default") - PAST
        )
        assert recovery.recover("default") == 0
    ended = {"undo": VOIDED, "void": VOIDED, "lost": LOST, "record": states.ERRORED}[end]
    assert (outcomes(call), statuses(call)) == ([ended, OPEN], [Status.DISPATCHED])
    assert recorder.record_once("default", [answered(second)]) == 1
    assert statuses(call) == [Status.DONE]


# --- A row that somebody has locked delays its own call only


@dataclass
class Beside:
    """A work on two calls, of which a host has one; what becomes of both, and of it later."""

    prepare: Callable[[], Any]
    work: Callable[[Any], int]
    meanwhile: tuple[int, int]
    then: int


def _due(**columns: Any) -> Callable[[], Any]:
    return lambda: CallQueue.objects.update(**{k: v() if callable(v) else v for k, v in columns.items()})  # fmt: skip


def _released() -> list[int]:
    ids = released_by("r")
    end_leases()
    return ids


def _begun() -> None:
    assert len(claim.begin("default", released_by("r"))) == 2
    end_leases()


def _past() -> Any:
    return timezone.now() - PAST


BESIDE = {
    "a pass": Beside(lambda: None, lambda _: len(released_by("r")), (Status.NEW, Status.DISPATCHED), Status.DISPATCHED),
    "what expires": Beside(_due(expires_at_dt=_past), lambda _: recovery.expire("default"), (Status.NEW, Status.EXPIRED), Status.EXPIRED),
    "a rule that is gone": Beside(_due(rule="gone", due_at_dt=_past, ready=True), lambda _: recovery.fail_orphans("default"), (Status.NEW, Status.FAILED), Status.FAILED),
    "what nobody began": Beside(_released, lambda _: recovery.void_unbegun("default"), (Status.DISPATCHED, Status.NEW), Status.NEW),
    "what fell silent": Beside(_begun, lambda _: recovery.end_lost("default"), (Status.DISPATCHED, Status.UNKNOWN), Status.UNKNOWN),
    "a refused publish": Beside(_released, lambda ids: transitions.void_and_log("default", ids), (Status.DISPATCHED, Status.NEW), Status.NEW),
}  # fmt: skip


@pytest.mark.parametrize("what", BESIDE)
def test_a_work_goes_on_beside_a_call_that_is_locked_and_takes_it_later(
    rules: Rules, row_locks: None, what: str
) -> None:
    beside = BESIDE[what]
    rules(r=Rule())
    locked, free = send("r"), send("r")
    given = beside.prepare()
    with held_by_a_host(locked.pk), waiting_for_nobody():
        assert beside.work(given) == 1
        assert statuses(locked, free) == list(beside.meanwhile)
        assert outcomes(locked) in ([], [OPEN]), "its call could not follow"
    assert beside.work(given) == 1
    assert statuses(locked) == [beside.then]


def test_the_others_of_a_message_are_made_beside_a_call_that_is_locked(
    rules: Rules, remote: Vendor, row_locks: None
) -> None:
    """It is made and recorded as well; what it becomes is written afterwards."""
    rules(r=Rule())
    calls = [send("r", method="post") for _ in range(32)]
    ids = released_by("r")
    with told_of_ends() as told:
        with held_by_a_host(calls[3].pk), waiting_for_nobody():
            assert executor.execute("default", ids) == 32
            assert recovery.recover("default") == 0
            assert CallQueue.objects.done().count() == 31
            assert (statuses(calls[3]), outcomes(calls[3])) == ([Status.DISPATCHED], ["succeeded"])
            end_leases()
        assert recovery.recover("default") == 1
    assert len(remote.requests) == CallQueue.objects.done().count() == 32
    assert not BelatedEnding.objects.exists()
    assert sorted(told) == sorted(call.pk for call in calls)


@pytest.mark.parametrize("status", [500, 429, 200])
def test_what_is_written_afterwards_is_what_would_have_been_written(
    rules: Rules, row_locks: None, status: int
) -> None:
    rules(r=Rule())
    first, second = (send("r", method="get", callback="shop.told") for _ in range(2))
    jobs = {job.call.pk: job for job in claim.begin("default", released_by("r"))}
    reports = [answered(jobs[call.pk], status) for call in (first, second)]
    reports[1].due_at = reports[0].due_at  # the backoff is drawn
    with held_by_a_host(second.pk), waiting_for_nobody():
        assert recorder.record_once("default", reports) == 2
    own = {"id", "idempotency_key", "created_dt", "finished_at_dt", "callback_pending", "due_at_dt"}
    own |= {"callback_at", "callback_ask_at"}  # of each, from when its callback may be sent
    CallQueue.objects.update(callback_pending=False)
    recovery.recover("default")
    row, other = (CallQueue.objects.filter(pk=call.pk).values().get() for call in (first, second))
    assert (row["finished_at_dt"] is None) == (other["finished_at_dt"] is None)
    # each counts back from its own answer
    assert abs(row["due_at_dt"] - other["due_at_dt"]) < timedelta(milliseconds=5)
    assert {**row, **dict.fromkeys(own)} == {**other, **dict.fromkeys(own)}


def test_a_call_that_went_on_or_is_gone_is_not_ended_afterwards(
    rules: Rules, row_locks: None
) -> None:
    rules(r=Rule())
    moved, gone = send("r"), send("r")
    reports = [answered(job) for job in claim.begin("default", released_by("r"))]
    with held_by_a_host(moved.pk, gone.pk), waiting_for_nobody():
        recorder.record_once("default", reports)
    CallQueue.objects.filter(pk=moved.pk).update(status=Status.NEW, ready=True)
    CallQueue.objects.filter(pk=gone.pk).delete()
    released_by("r")
    assert recovery.recover("default") == 0
    assert statuses(moved) == [Status.DISPATCHED]
    assert not BelatedEnding.objects.exists()


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_the_others_of_a_message_are_begun_beside_a_cancel_that_has_not_committed(
    rules: Rules, remote: Vendor, row_locks: None, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    calls = [send("r") for _ in range(32)]
    ids, cancelled = released_by("r"), calls[7]
    monkeypatch.setattr(executor, "LOCKED", (0.0,))
    with held_by_a_host(cancelled.pk, first=fresh(cancelled).cancel), waiting_for_nobody():
        assert executor.execute("default", ids) == 31
        assert CallQueue.objects.done().count() == 31
    if ends == "commit":
        fresh(cancelled).cancel()
    assert executor.give_back_once_free("default", ids) is None
    assert statuses(cancelled) == [Status.CANCELLED if ends == "commit" else Status.NEW]
    assert outcomes(cancelled) == [VOIDED]
    assert len(remote.requests) == 31


def test_a_worker_gives_back_what_becomes_free_while_it_looks(
    rules: Rules, row_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    call = send("r")
    ids = released_by("r")
    host = held_by_a_host(call.pk, first=fresh(call).cancel)
    host.__enter__()
    monkeypatch.setattr(executor.time, "sleep", lambda _: host.__exit__(None, None, None))
    assert executor.execute("default", ids) == 0
    assert statuses(call) == [Status.NEW]


def test_cleanup_goes_on_beside_a_batch_that_is_locked_whole(rules: Rules, row_locks: None) -> None:
    rules(r=Rule())
    calls = [send("r") for _ in range(6)]
    for days, call in enumerate(reversed(calls), start=10):
        ended = timezone.now() - timedelta(days=days)
        CallQueue.objects.filter(pk=call.pk).update(
            status=Status.DONE, ready=False, finished_at_dt=ended
        )
    oldest = [call.pk for call in calls[-2:]]
    with held_by_a_host(*oldest), waiting_for_nobody():
        assert cleanup.clean("default", batch_size=2).calls == 4
    assert set(CallQueue.objects.values_list("pk", flat=True)) == set(oldest)
    assert cleanup.clean("default", batch_size=2).calls == 2


def test_a_callback_that_is_being_sent_is_sent_by_nobody_else(
    rules: Rules, row_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    ids = [send("r", callback="shop.told").pk for _ in range(3)]
    long_ago = timezone.now() - callbacks.LEFT - PAST
    ended = {"status": states.DONE, "ready": False, "finished_at_dt": long_ago}
    CallQueue.objects.update(**ended, callback_pending=True)
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

    assert together(lambda: tasks.announce(ids[:1]), another) == [1, 2]
    assert sorted(told) == sorted(ids)
    assert not CallQueue.objects.filter(callback_pending=True).exists()


# --- A cancel, wherever it comes in


def test_a_cancel_between_a_workers_look_and_its_begin_wins(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    call = send("r")
    ids = released_by("r")
    looked, cancelled = halted(monkeypatch, claim.transitions, "begin")

    def cancel() -> None:
        assert looked.wait(PATIENCE)
        fresh(call).cancel()
        cancelled.set()

    assert together(lambda: claim.begin("default", ids), cancel)[0] == []
    assert (statuses(call), outcomes(call)) == ([Status.CANCELLED], [VOIDED])


def test_a_cancel_waits_for_a_begin_and_wins_where_that_is_undone(
    rules: Rules, row_locks: None
) -> None:
    rules(r=Rule())
    call = send("r")
    ids = released_by("r")
    has_begun = threading.Event()

    def begin() -> None:
        with transaction.atomic():
            claim.begin("default", ids)
            has_begun.set()
            until_one_waits_for_a_lock()
            transaction.set_rollback(True)

    def cancel() -> int:
        assert has_begun.wait(PATIENCE)
        return CallQueue.objects.filter(pk=call.pk).cancel()

    assert together(begin, cancel) == [None, 1]
    assert (statuses(call), outcomes(call)) == ([Status.CANCELLED], [VOIDED])


def test_a_cancel_that_met_a_release_is_no_victim_of_its_undo(
    rules: Rules, row_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for the pass that released the call, and has the row when the publish is undone."""
    rules(r=Rule())
    call = send("r")
    released, has_the_row, is_undone = threading.Event(), threading.Event(), threading.Event()
    ids: list[int] = []
    canceller: list[threading.Thread] = []
    real = CallAttemptQuerySet.unbegun

    def unbegun(self: CallAttemptQuerySet) -> CallAttemptQuerySet:
        if threading.current_thread() in canceller and not has_the_row.is_set():
            has_the_row.set()
            is_undone.wait(1)  # where the undo waits for this cancel, it cannot be done
        return real(self)

    def dispense() -> None:
        with transaction.atomic():
            ids.extend(r.attempt_id for r in release("default", ["r"]).released)
            released.set()
            until_one_waits_for_a_lock()

    def undo() -> int:
        assert has_the_row.wait(PATIENCE)
        undone = transitions.void_and_log("default", ids)
        is_undone.set()
        return undone

    def cancel() -> int:
        canceller.append(threading.current_thread())
        assert released.wait(PATIENCE)
        return CallQueue.objects.filter(pk=call.pk).cancel()

    monkeypatch.setattr(CallAttemptQuerySet, "unbegun", unbegun)
    assert together(dispense, cancel, undo) == [None, 1, 0]
    assert (statuses(call), outcomes(call)) == ([Status.CANCELLED], [VOIDED])


def test_hosts_that_select_a_call_for_update_and_cancel_it_do_not_deadlock(
    rules: Rules, row_locks: None
) -> None:
    rules(r=Rule())
    call = send("r")
    released_by("r")
    has_it = threading.Event()

    def careful() -> int:
        with transaction.atomic():
            CallQueue.objects.select_for_update().get(pk=call.pk)
            has_it.set()
            until_one_waits_for_a_lock()
            return CallQueue.objects.filter(pk=call.pk).cancel()

    def plain() -> int:
        assert has_it.wait(PATIENCE)
        return CallQueue.objects.filter(pk=call.pk).cancel()

    assert together(careful, plain) == [1, 0]
    assert statuses(call) == [Status.CANCELLED]


def test_an_end_that_several_find_is_announced_once_and_nothing_else_is(
    rules: Rules, row_locks: None
) -> None:
    rules(r=Rule())
    send("r").cancel()
    for _ in range(10):
        calls = [send("r") for _ in range(20)]
        CallQueue.objects.waiting().exclude(pk=calls[0].pk).update(expires_at_dt=_past())
        with told_of_ends() as told:
            together(*[lambda: recovery.expire("default")] * 4, CallQueue.objects.all().cancel)
            recovery.expire("default")
            # Who found them expired, too late, may have had them locked as they were announced.
            CallQueue.objects.update(finished_at_dt=_past())
            callbacks.ask_for_owed_ends("default")
        assert sorted(told) == sorted(call.pk for call in calls)


# --- Unique keys


def test_senders_of_a_unique_key_beside_its_end_make_at_most_one_more(rules: Rules) -> None:
    rules(r=Rule())
    for number in range(ROUNDS):
        key = f"order-{number}"
        sends = partial(send, "r", unique_key=key)
        assert len({call.pk for call in together(*[sends] * 6)}) == 1
        first = sends()
        sent = together(first.cancel, *[sends] * 6)
        assert len({call.pk for call in sent[1:] if call.pk != first.pk}) <= 1
        carriers = CallQueue.objects.filter(unique_key=key, status__in=states.UNFINISHED)
        assert carriers.count() <= 1


def test_sends_of_the_same_unique_keys_in_another_order_do_not_deadlock(
    rules: Rules, row_locks: None
) -> None:
    rules(r=Rule())
    for number in range(ROUNDS):
        keys = [f"{number}-{i}" for i in range(30)]
        one, other = together(
            lambda keys=keys: ids_by_key(keys), lambda keys=keys: ids_by_key(keys[::-1])
        )
        assert one == other


def ids_by_key(keys: list[str]) -> dict[str, int]:
    with transaction.atomic():
        calls = CallQueue.objects.send_many(
            [{"call_data": DATA, "unique_key": key} for key in keys], rule="r", batch_size=7
        )
    assert [call.unique_key for call in calls] == keys
    return {str(call.unique_key): call.pk for call in calls}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_under_every_isolation_a_unique_key_gives_its_call_or_the_databases_own_error(
    rules: Rules, row_locks: None, level: str, many: bool
) -> None:
    if (connection.vendor, level) == ("mysql", "SERIALIZABLE"):
        pytest.skip("another sender waits for a serializable transaction to end")
    rules(r=Rule())
    is_postgresql = connection.vendor == "postgresql"
    which = "CHARACTERISTICS AS TRANSACTION" if is_postgresql else "TRANSACTION"
    database.run("default", f"SET SESSION {which} ISOLATION LEVEL {level}")
    others: list[int] = []
    try:
        with transaction.atomic():
            # from here on the transaction sees what there is now
            assert CallQueue.objects.count() == 0
            together(lambda: others.append(send("r", unique_key="order-1").pk))
            if many:
                mine = ids_by_key(["order-0", "order-1"])["order-1"]
            else:
                mine = send("r", unique_key="order-1").pk
    except DatabaseError as error:
        cause = error.__cause__
        code = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or error.args[0]
        # PostgreSQL's; MariaDB's deadlock, and its record that changed
        assert code in ("40001", 1213, 1020) and level != "READ COMMITTED", error
    else:
        assert [mine] == others
    finally:
        connection.close()


# --- Holds, and the clock


@pytest.mark.parametrize("seconds", [60, None])
def test_a_hold_that_another_makes_longer_meanwhile_stays_as_long(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, seconds: int | None
) -> None:
    """The longer one, or one without an end, is written between the other's look and write."""
    rules(r=Rule())

    def lay(lasts: Any, why: str) -> None:
        holds.lay("default", ["r"], "rule", "", lasts, why, source="provider")

    longer = None if seconds is None else timedelta(seconds=seconds)
    lay(timedelta(seconds=3), "first")
    manager, looked = type(Hold.objects.all()), []
    get_or_create = manager.get_or_create

    def and_then_another(self: Any, *args: Any, **named: Any) -> Any:
        found = get_or_create(self, *args, **named)
        if not looked:
            looked.append(True)
            lay(longer, "longer")
        return found

    monkeypatch.setattr(manager, "get_or_create", and_then_another)
    lay(timedelta(seconds=5), "shorter")
    hold = Hold.objects.get()
    assert hold.reason == "longer"
    assert hold.until is None if longer is None else hold.until - hold.began_at >= longer


def test_nobody_moves_the_ledger_while_an_instant_is_being_written(
    rules: Rules, row_locks: None
) -> None:
    """Many may write at once. Who waited for the move reads the clock after that."""
    rules(r=Rule())
    both, tried, moved = threading.Barrier(3), threading.Event(), threading.Event()
    frame = LedgerState.objects.filter(pk=ledger_time.ROW)
    shown: list[Any] = []
    found: list[clocks.Reading] = []

    def write() -> None:
        with database.writing("default"):
            ledger_time.read_held("default")
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
            frame.update(moved=7)
            shown.append(database.clock("default"))

    def write_after() -> None:
        assert moved.wait(PATIENCE)
        with database.writing("default"):
            found.append(ledger_time.read_held("default"))

    together(write, write, move, write_after)
    assert found[0].moved == 7
    assert found[0].wall >= database.to_us(shown[0])


def test_a_first_reading_that_waits_while_others_move_the_ledger_shows_the_clock_of_after_that(
    rules: Rules,
) -> None:
    """Nothing is there to judge it by."""
    if connection.vendor != "mysql":
        pytest.skip("others show the clock of when they read it")
    rules(r=Rule())
    ledger_time.ensure_rows("default")
    table = LedgerState._meta.db_table
    is_locked, shown, found = threading.Event(), list[Any](), list[clocks.Reading]()

    def move() -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLES {table} WRITE")
            is_locked.set()
            time.sleep(0.5)
            cursor.execute(f"UPDATE {table} SET moved = moved - 3600000000")
            shown.append(database.clock("default"))
            cursor.execute("UNLOCK TABLES")

    def read() -> None:
        assert is_locked.wait(PATIENCE)
        watch = ledger_time.Watch("default")
        watch.look()
        found.append(watch.last)

    together(move, read)
    assert found[0].wall >= database.to_us(shown[0])


def test_who_comes_and_agrees_waits_for_nobody_who_writes_an_instant(
    rules: Rules, row_locks: None
) -> None:
    """He may be frozen. On MariaDB who waited for him would keep back all others who write one."""
    rules(r=Rule())
    ledger_time.ensure_rows("default")

    def writes(freeze: Any) -> None:
        with database.writing("default"):
            ledger_time.read_held("default")
            freeze()

    with beside_a_frozen(writes), waiting_for_nobody():
        watch = ledger_time.Watch("default")
        watch.look()
        watch.agree()
        assert watch.is_agreed


def test_a_hold_that_an_application_lays_in_its_transaction_keeps_nobody_from_the_clock(
    rules: Rules, row_locks: None
) -> None:
    """However long that lasts: dispensers would stand still once the clock is set."""
    rules(r=Rule())
    ledger_time.ensure_rows("default")
    with held_by_a_host(first=lambda: control.pause("default", "r")), waiting_for_nobody():
        ledger_time.watch("default").look()
        with database.writing("default"):
            assert list(database.locked(LedgerState.objects.order_by("pk"), wait=True))


@pytest.mark.usefixtures("row_locks")
def test_a_begin_that_is_committed_at_any_statement_of_the_next_try_is_made(
    rules: Rules, remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of them it was neither taken nor locked any more, and nobody made the call."""
    rules(r=Rule(limits=[SlidingWindow("1000/s")]))
    begin, seen = transitions.begin, list[str]()
    for place in range(1, 16):  # two tries and more
        call = send("r")
        (pk,), late = released_by("r"), list[Any]()
        seen.clear()

        def lose(*given: Any, late: list[Any] = late) -> None:
            monkeypatch.setattr(transitions, "begin", begin)
            connection.set_autocommit(False)
            begin(*given)
            late.append(connection.connection)
            connection.connection = None
            raise OperationalError("server closed the connection unexpectedly")

        def before(place: int, execute: Any, sql: str, *given: Any, late: list[Any] = late) -> Any:
            seen.extend([sql] if late else [])
            if len(seen) == place:
                late[0].commit()
            return execute(sql, *given)

        monkeypatch.setattr(transitions, "begin", lose)
        with connection.execute_wrapper(partial(before, place)):
            executor.execute("default", [pk])
        late[0].close()
        assert outcomes(call) == ["succeeded"], seen[place - 1 :]
    assert len(remote.requests) == place
