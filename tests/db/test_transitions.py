"""The moves of calls: from every state, by every verb, just as `states.Move` says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.utils import timezone

from callqueue import Retry, Rule, callbacks, states, transitions
from callqueue.dispatch.dispenser import Dispenser
from callqueue.exceptions import IllegalTransition
from callqueue.execution import claim, recorder
from callqueue.ledger import ledger_time
from callqueue.maintenance import recovery
from callqueue.models import CallAttempt, CallQueue
from callqueue.states import Move
from callqueue.transitions import Job, Result
from callqueue.transitions.verbs import columns_of_end
from tests.support.behaviour import release, send
from tests.support.locking import fresh

Rules = Callable[..., None]
Status = CallQueue.Status
Way = Callable[[CallQueue, Rules], Any]  # tries to move a call
LATE = timedelta(minutes=1)
TRIED = {"failed_count": 1}


def put(call: CallQueue, status: int, **more: Any) -> None:
    """Put a call in a state, as if it had come there, with all else that a move might look at."""
    is_ready, is_final = status in states.WAITING, status in states.FINAL
    finished = timezone.now() if is_final else None
    rows = CallQueue.objects.filter(pk=call.pk)
    rows.update(status=status, ready=is_ready, finished_at_dt=finished, **more)


def begun(call: CallQueue) -> Job:
    """The job of a worker that began the call's attempt before the call came into its state."""
    status = call.status
    put(call, states.DISPATCHED)
    (job,) = claim.begin("default", [call.attempts.get().pk])
    put(call, status)
    return job


def recorded(end: Callable[[Job], Result], call: CallQueue, rules: Rules) -> None:
    recorder.record_once("default", [end(begun(call))])


def failing(job: Job) -> Result:
    return transitions.after_failure(job, "500", job.ledger_time_now())


def lost(job: Job) -> Result:
    return transitions.after_loss(job, "no answer", job.ledger_time_now())


def giving_up(job: Job) -> Result:
    return transitions.after_giving_up(job, "404")


def voided(call: CallQueue, rules: Rules) -> None:
    transitions.void_and_log("default", [call.attempts.get().pk])


def voided_again(call: CallQueue, rules: Rules) -> None:
    put(call, call.status, **TRIED)
    voided(call, rules)


def unsent_again(call: CallQueue, rules: Rules) -> None:
    put(call, call.status, **TRIED)
    recorded(unsent, call, rules)


def unsent(job: Job) -> Result:
    return transitions.after_void(job, "the worker was stopped")


def silent(rule: Rule, call: CallQueue, rules: Rules) -> None:
    begun(call)
    CallAttempt.objects.update(lease_until=ledger_time.now("default") - LATE)
    rules(r=rule)
    recovery.end_lost("default")


def expired(call: CallQueue, rules: Rules) -> None:
    put(call, call.status, expires_at_dt=timezone.now() - LATE)
    recovery.expire("default")


def orphaned(call: CallQueue, rules: Rules) -> None:
    put(call, call.status, due_at_dt=timezone.now() - LATE)
    rules(other=Rule())
    Dispenser("default").run_once()  # agrees with these settings, so that nobody knows the rule
    recovery.fail_orphans("default")


def too_dear(call: CallQueue, rules: Rules) -> None:
    transitions.fail("default", {call.pk: "cost: more than any limit admits"})


WAYS: list[tuple[Move, int, Way]] = [
    (Move.RELEASE, states.DISPATCHED, lambda call, rules: release()),
    (Move.RECORD, states.NEW, partial(recorded, unsent)),
    (Move.RECORD, states.ERROR, unsent_again),
    (Move.RECORD, states.ERROR, partial(recorded, failing)),
    (Move.RECORD, states.DONE, partial(recorded, transitions.after_success)),
    (Move.RECORD, states.FAILED, partial(recorded, giving_up)),
    (Move.RECORD, states.EXPIRED, partial(recorded, transitions.after_expiry)),
    (Move.RECORD, states.UNKNOWN, partial(recorded, lost)),
    (Move.VOID, states.NEW, voided),
    (Move.VOID, states.ERROR, voided_again),
    (Move.LOSE, states.ERROR, partial(silent, Rule(on_lost="retry"))),
    (Move.LOSE, states.FAILED, partial(silent, Rule(on_lost="retry", retry=Retry(max_attempts=1)))),
    (Move.LOSE, states.UNKNOWN, partial(silent, Rule())),
    (Move.EXPIRE, states.EXPIRED, expired),
    (Move.FAIL, states.FAILED, orphaned),
    (Move.FAIL, states.FAILED, too_dear),
    (Move.CANCEL, states.CANCELLED, lambda call, rules: call.cancel()),
    (Move.REQUEUE, states.NEW, lambda call, rules: call.requeue()),
    (Move.REQUEUE_AGAIN, states.NEW, lambda call, rules: call.requeue(again=True)),
    (
        Move.RECONCILE,
        states.DONE,
        lambda c, _: transitions.end_unknown("default", c, states.DONE, ""),
    ),
    (
        Move.RECONCILE,
        states.FAILED,
        lambda c, _: transitions.end_unknown("default", c, states.FAILED, ""),
    ),
    (Move.RECONCILE, states.NEW, lambda c, _: transitions.requeue_unknown("default", c, 0.0)),
]


def test_there_is_a_way_to_make_every_move_of_the_table() -> None:
    made = {(move, target) for move, target, _ in WAYS}
    assert made == {(move, target) for move in Move for target in move.targets}


@pytest.mark.parametrize("start", Status, ids=lambda status: status.name)
@pytest.mark.parametrize(
    ("move", "target", "way"),
    WAYS,
    ids=[f"{n}-{move.name}-{Status(to).name}" for n, (move, to, _) in enumerate(WAYS)],
)
def test_a_move_is_made_from_the_states_that_the_table_names_and_from_no_other(
    rules: Rules, move: Move, target: int, way: Way, start: int
) -> None:
    rules(r=Rule())
    call = send("r")
    assert release() == [call]
    put(call, start)
    with suppress(IllegalTransition):
        way(fresh(call), rules)
    assert fresh(call).status == (target if start in move.sources else start)


@pytest.mark.parametrize("start", Status, ids=lambda status: status.name)
def test_what_cannot_be_requeued_says_so_and_a_query_counts_what_it_moved(
    rules: Rules, start: int
) -> None:
    rules(r=Rule())
    call, every = send("r"), CallQueue.objects.all()
    for again, move in ((False, Move.REQUEUE), (True, Move.REQUEUE_AGAIN)):
        put(call, start, failed_count=3)
        assert every.requeue(again=again) == (start in move.sources)
        put(call, start, failed_count=3)
        if start in move.sources:
            fresh(call).requeue(again=again)
            found = CallQueue.objects.get()
            assert (found.status, found.failed_count, found.finished_at_dt) == (Status.NEW, 0, None)
        else:
            with pytest.raises(IllegalTransition, match=str(call.pk)):
                fresh(call).requeue(again=again)
    other, key = send("r"), f"k{start}"
    put(other, Status.DONE)
    put(call, start, unique_key=key)
    assert every.filter(unique_key=key).requeue() == (start in Move.REQUEUE.sources)
    assert fresh(other).status == Status.DONE
    put(call, start)
    # There is no attempt that nobody has begun, so what is DISPATCHED stays so.
    assert every.cancel() == (start in states.CANCELLABLE)


@pytest.mark.parametrize("method", ["post", "celery_task", "permit"])
@pytest.mark.parametrize("callback", [None, "told"])
@pytest.mark.parametrize("is_heard", [False, True])
def test_an_end_is_owed_to_a_callback_to_a_receiver_and_to_who_waits_for_a_task(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, method: str, callback: str, is_heard: bool
) -> None:
    rules(r=Rule())
    monkeypatch.setattr(callbacks, "tells_results", lambda status: True)
    monkeypatch.setattr(callbacks, "has_receivers", lambda status: is_heard)
    call = send("r", callback=callback)
    call.method = method
    nothing: Any = None
    result = giving_up(Job(nothing, call, nothing, None))
    is_owed = is_heard or bool(callback) or method == "celery_task"
    assert transitions.owes_announcement(result) == is_owed
    call.save(update_fields=["method"])
    CallQueue.objects.update(**columns_of_end(states.FAILED))
    # what its data says it is, a statement for many cannot see
    assert fresh(call).callback_pending == (is_owed or method != "permit")


def kept(end: Callable[[Job], Result], job: Job) -> None:
    """Write an end as of a call that somebody had locked then: later."""
    columns = transitions.verbs.columns_of_call(end(job), timezone.now())
    transitions.verbs.defer_ends("default", [job], [columns])
    assert transitions.end_deferred("default") == 1


def test_of_what_was_kept_so_many_are_ended_in_a_round(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transitions.verbs, "MOST_DEFERRED", 1)
    rules(r=Rule())
    for _ in range(2):
        send("r")
    for call in release():
        job = begun(call)
        columns = transitions.verbs.columns_of_call(giving_up(job), timezone.now())
        transitions.verbs.defer_ends("default", [job], [columns])
    assert [transitions.end_deferred("default") for _ in range(3)] == [1, 1, 0]


@pytest.mark.parametrize(
    "way", ["recorded", "kept", "unsent", "unsent and kept", "silent", "undone"]
)
def test_what_other_code_postpones_meanwhile_is_not_retried_before(rules: Rules, way: str) -> None:
    rules(r=Rule(on_lost="retry"))
    call, later = send("r"), timezone.now() + timedelta(days=1)
    assert release() == [call]
    end, job = unsent if "unsent" in way else failing, None if way == "undone" else begun(call)
    put(call, states.DISPATCHED, due_at_dt=later)
    if job is None:
        voided(call, rules)
    elif way == "silent":
        CallAttempt.objects.update(lease_until=ledger_time.now("default") - LATE)
        recovery.end_lost("default")
    else:
        kept(end, job) if "kept" in way else recorder.record_once("default", [end(job)])
    after = fresh(call)
    status = Status.NEW if way.startswith("un") else Status.ERROR
    assert (after.status, after.ready, after.due_at_dt) == (status, False, later)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_callback_that_other_code_asks_for_while_a_call_is_made_is_owed(
    rules: Rules, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    monkeypatch.setattr(callbacks, "ask_to_announce", lambda using, ended: None)
    call = send("r")
    assert release() == [call]
    job = begun(call)
    put(call, states.DISPATCHED, callback="shop.told")
    kept(giving_up, job) if is_kept else recorder.record_once("default", [giving_up(job)])
    assert fresh(call).status == Status.FAILED
    assert fresh(call).callback_pending


def test_a_refusal_whose_hold_is_over_is_retried_at_once(rules: Rules) -> None:
    rules(r=Rule())
    call, now = send("r"), timezone.now()
    nothing: Any = None
    job = Job(nothing, call, nothing, Rule(retry=Retry(max_rate_limited=0)))
    assert transitions.after_throttle(job, "429", now, now - timedelta(seconds=9)).due_at == now
