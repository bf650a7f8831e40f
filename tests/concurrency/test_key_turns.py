"""A key whose call becomes ready beside a pass has its turn; and nobody waits for the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from callqueue import Rule, SlidingWindow, database, transitions
from callqueue.dispatch.release_pass import release
from callqueue.ledger import ready_calls
from callqueue.models import CallAttempt, CallQueue, KeyNews, KeyTurn
from tests.support.behaviour import send
from tests.support.locking import beside_a_frozen, together, waiting_for_nobody

Rules = Callable[..., None]
MOST = 100  # statements that a pass makes at most
A_CALL = {"method": "post", "params": {"url": "http://vendor.example/"}}


@pytest.fixture(autouse=True)
def _keyed(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1000/s", per="key")]))


@contextmanager
def sent_in_a_transaction(key: str, *, commits: bool) -> Iterator[Callable[[], None]]:
    """A host has sent a call of this key in a transaction that is still open; what ends that."""

    def host(freeze: Any) -> None:
        with transaction.atomic():
            send("r", key=key)
            freeze()
            transaction.set_rollback(not commits)

    with ExitStack() as stack:
        stack.enter_context(beside_a_frozen(host))
        yield stack.close


@contextmanager
def before_statement(place: int, work: Callable[[], None]) -> Iterator[list[str]]:
    """Do this before this thread's statement of that number; the statements."""
    seen: list[str] = []

    def before(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        seen.append(sql)
        if len(seen) == place:
            work()
        return execute(sql, *args)

    with connection.execute_wrapper(before):
        yield seen


def a_pass() -> None:
    release("default", ["r"])


def nothing(key: str) -> None:
    """Nobody knows of the key."""


def a_spent_turn(key: str) -> None:
    """Its only call is gone: the pass that sees that takes the key's turn away."""
    KeyTurn.objects.create(rule="r", priority=0, key=key)


def a_last_call(key: str) -> None:
    """The pass releases the last call that it sees of the key, and takes its turn away."""
    send("r", key=key)


def a_turn_and_a_call(key: str) -> None:
    """It has had its turn before."""
    send("r", key=key)
    a_pass()
    KeyTurn.objects.create(rule="r", priority=0, key=key)
    send("r", key=key)


BEFORE = [(before, True) for before in (nothing, a_spent_turn, a_last_call, a_turn_and_a_call)]


@pytest.mark.parametrize(("before", "commits"), [*BEFORE, (a_turn_and_a_call, False)])
def test_a_key_that_is_sent_at_any_statement_of_a_pass_has_its_turn(
    before: Callable[[str], None], commits: bool, row_locks: None
) -> None:
    a_pass()
    for place in range(1, MOST):
        before(key := f"k{place}")
        sent = sent_in_a_transaction(key, commits=commits)
        with waiting_for_nobody(), sent as end, before_statement(place, end) as seen:
            a_pass()
        a_pass()
        assert not CallQueue.objects.new().exists(), f"lost at {seen[place - 1 : place]}"
        a_pass()
        assert not KeyTurn.objects.exists() and not KeyNews.objects.exists()
        if len(seen) < place:
            assert place > 8
            return
    pytest.fail("the pass has no end")


@contextmanager
def between_statements(work: Callable[[], None]) -> Iterator[None]:
    """Do this before each statement of this thread and after each commit, wherever others can."""
    commit = connection.commit
    has_row_locks = connection.features.has_select_for_update

    def before(execute: Callable[..., Any], *args: Any) -> Any:
        if has_row_locks or not connection.in_atomic_block:
            work()
        return execute(*args)

    def and_work() -> None:
        commit()
        work()

    connection.commit = and_work
    try:
        with connection.execute_wrapper(before):
            yield
    finally:
        del connection.commit


def by_send(key: str) -> None:
    send("r", key=key)


def by_send_with_a_key_of_its_own(key: str) -> None:
    send("r", key=key, unique_key="own")


def by_send_many(key: str) -> None:
    CallQueue.objects.send_many([A_CALL, A_CALL], rule="r", key=key)


def by_promotion(key: str) -> None:
    with transaction.atomic():
        call = send("r", key=key, not_before=database.clock("default") + timedelta(days=1))
        CallQueue.objects.filter(pk=call.pk).update(due_at_dt=database.ClockNow())
    ready_calls.promote_due("default")


def by_requeue(key: str) -> None:
    send("r", key=key).cancel()
    CallQueue.objects.get().requeue()


def by_undo(key: str) -> None:
    send("r", key=key)
    a_pass()
    assert (
        transitions.void_and_log("default", list(CallAttempt.objects.values_list("pk", flat=True)))
        == 1
    )


@pytest.mark.parametrize(
    "makes_ready",
    [by_send, by_send_with_a_key_of_its_own, by_send_many, by_promotion, by_requeue, by_undo],
)
def test_passes_between_all_statements_of_who_makes_a_call_ready_lose_no_key(
    makes_ready: Callable[[str], None],
) -> None:
    a_pass()
    with between_statements(lambda: together(a_pass)[0]):
        makes_ready("k")
    for _ in range(2):
        a_pass()
    assert not CallQueue.objects.new().exists()
    assert CallQueue.objects.filter(status=CallQueue.Status.DISPATCHED).exists()


def test_senders_of_one_new_key_do_not_wait_for_each_other(row_locks: None) -> None:
    with sent_in_a_transaction("k", commits=True), waiting_for_nobody():
        send("r", key="k")
        many = [{"call_data": A_CALL, "key": key} for key in ("k", "other")]
        CallQueue.objects.send_many(many, rule="r")
    for _ in range(2):
        a_pass()
    assert CallAttempt.objects.count() == 4


def test_a_call_that_other_code_changes_at_any_statement_of_a_pass_does_not_go_as_it_was(
    rules: Rules, row_locks: None
) -> None:
    """Of another rule or key the pass has counted nothing: its limit may be used up."""
    rules(r=Rule(limits=[SlidingWindow("1/h", per="key")]), s=Rule(limits=[SlidingWindow("1/h")]))
    send("r", key="used"), send("s")
    a_pass(), release("default", ["s"])
    later = database.clock("default") + timedelta(hours=1)
    changes: list[dict[str, Any]] = [{"rule": "s"}, {"key": "used"}, {"due_at_dt": later}]
    for place in range(1, MOST):
        calls = [send("r", key=f"k{place}.{n}") for n in range(len(changes))]

        def other_code(calls: list[CallQueue] = calls) -> None:
            for call, change in zip(calls, changes, strict=True):
                with transaction.atomic():  # what the pass has locked is in time no more
                    rows = CallQueue.objects.filter(pk=call.pk)
                    if rows.select_for_update(skip_locked=True):
                        rows.update(**change)

        with before_statement(place, lambda: together(other_code)) as seen:
            a_pass()
        for attempt in CallAttempt.objects.filter(call__in=calls).select_related("call"):
            call = attempt.call
            assert (call.rule, call.key) == ("r", calls[calls.index(call)].key), seen[place - 1]
            assert call.due_at_dt < later, seen[place - 1]
        CallQueue.objects.filter(pk__in=[call.pk for call in calls]).delete()
        if len(seen) < place:
            return
    pytest.fail("the pass has no end")
