"""UNKNOWN calls: the rule's hook is asked what became of them, at its pace, and believed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import connection
from django.db.models import F

from callqueue import (
    GiveUp,
    HoldUntil,
    RetryLater,
    Rule,
    Secret,
    SecretFor,
    Succeeded,
    broker,
    database,
    events,
    states,
    tasks,
)
from callqueue.conf import NAMES_OF_STATUS
from callqueue.database import server_clock
from callqueue.dispatch.dispenser import Dispenser
from callqueue.ledger import ledger_time
from callqueue.limits.kinds import SECOND
from callqueue.maintenance import reconcile
from callqueue.models import CallQueue, RuleState
from callqueue.testing import travel
from tests.support.behaviour import move_ledger, send
from tests.support.locking import status_of

Rules = Callable[..., None]


provider = Mock()  # a hook that answers what a test wants, or raises it


@pytest.fixture(autouse=True)
def _provider(rules: Rules) -> None:
    provider.reset_mock(return_value=True, side_effect=True)
    provider.return_value = None
    rules(r=Rule(reconcile="tests.db.maintenance.test_reconcile.provider"), plain=Rule())


def unknown(rule: str = "r", **options: Any) -> CallQueue:
    call = send(rule, **options)
    become_unknown(call)
    return call


def become_unknown(call: CallQueue) -> None:
    CallQueue.objects.filter(pk=call.pk).update(
        status=states.UNKNOWN, finished_at_dt=database.clock("default"), ready=False
    )
    call.refresh_from_db()


@pytest.mark.parametrize(
    ("answer", "status", "why", "due_in"),
    [
        (Succeeded(), states.DONE, "", None),
        (GiveUp("declined"), states.FAILED, "declined", None),
        (GiveUp("no such pet: \ud83d\0"), states.FAILED, "no such pet: \ufffd", None),
        (GiveUp(5), states.FAILED, "5", None),  # type: ignore[arg-type]
        (RetryLater("never seen"), states.NEW, "", 0),
        (RetryLater("not yet", after=300), states.NEW, "", 300),
        (RetryLater("not yet", after=timedelta(seconds=300)), states.NEW, "", 300),
    ],
    ids=repr,
)
def test_a_call_becomes_what_the_hook_says_and_its_end_is_announced_once_more(
    told: Any, answer: Any, status: int, why: str, due_in: int | None
) -> None:
    heard = told(events.call_finished)
    provider.return_value = answer
    call = unknown()
    assert reconcile.ask_hooks("default") == 1
    again = CallQueue.objects.get(pk=call.pk)
    (asked,) = (one.args[0] for one in provider.call_args_list)
    assert (asked.pk, asked.idempotency_key) == (call.pk, call.idempotency_key)
    assert (again.status, again.error_message) == (status, why)
    assert again.idempotency_key == call.idempotency_key
    if due_in is None:
        ends = [(facts["call_id"], facts["status"]) for facts in heard]
        assert ends == [(call.pk, NAMES_OF_STATUS[status])]
        return
    assert (heard, again.finished_at_dt, again.ready) == ([], None, not due_in)
    left = (again.due_at_dt - database.clock("default")).total_seconds()
    assert due_in - 10 < left <= due_in


@pytest.mark.parametrize("moved", [0, 3600, -3600])
def test_a_hook_that_cannot_tell_is_asked_again_after_a_minute_then_less_and_less_often(
    moved: int,
) -> None:
    """By ledger time, whose backoff it is, however far the clock was set."""
    move_ledger(moved)
    unknown()
    instants = [0, 59, 61, 100, 179, 190, 420, 440]
    asked = []
    for instant in instants:
        with travel(seconds=instant):
            reconcile.ask_hooks("default")
        asked.append(provider.call_count)
    assert asked == [1, 1, 2, 2, 2, 3, 3, 4]


def test_a_hook_is_asked_so_many_times_of_a_call_until_a_person_requeues_it() -> None:
    call = unknown()
    for _ in range(reconcile.MOST + 3):
        reconcile.ask_hooks("default")
        CallQueue.objects.update(reconcile_at=None)
    assert provider.call_count == reconcile.MOST
    call.refresh_from_db()
    assert (call.status, call.reconcile_count) == (states.UNKNOWN, reconcile.MOST)
    call.requeue()
    assert (call.reconcile_count, call.reconcile_at) == (0, None)


def test_a_hook_that_has_a_call_made_again_begins_no_new_count() -> None:
    provider.return_value = RetryLater("never seen")
    call = unknown()
    reconcile.ask_hooks("default")
    call.refresh_from_db()
    assert (call.status, call.reconcile_count) == (states.NEW, 1)


@pytest.mark.parametrize(
    "answer",
    [
        ValueError("no such id \ud83d"),
        SystemExit(1),
        KeyboardInterrupt(),
        HoldUntil(60, "busy"),
        "done",
    ],
    ids=repr,
)
def test_a_hook_that_fails_or_answers_nonsense_changes_nothing_and_is_told_of(
    answer: Any, caplog: Any
) -> None:
    fails = isinstance(answer, BaseException)
    provider.configure_mock(**{"side_effect" if fails else "return_value": answer})
    calls = [unknown(), unknown()]
    assert reconcile.ask_hooks("default") == 0
    assert [CallQueue.objects.get(pk=call.pk).status for call in calls] == [states.UNKNOWN] * 2
    assert caplog.text.count("reconcile_failed") == 2


def test_only_unknown_calls_of_rules_with_a_hook_are_asked_of() -> None:
    unknown("plain"), send("r")
    CallQueue.objects.filter(pk=unknown().pk).update(method="permit")
    assert reconcile.ask_hooks("default") == 0
    assert not provider.called


@pytest.mark.parametrize(
    "ends", ["another has no value", "its host is allowed no more", "its method is in capitals"]
)
def test_a_secret_is_withheld_though_the_call_could_not_be_made_any_more(
    rules: Rules, settings: Any, ends: str
) -> None:
    def value_of_other() -> str:
        if calls and ends == "another has no value":
            raise OSError("the vault is away")
        return "0ther"

    def ask(call: CallQueue) -> GiveUp:
        return GiveUp("declined for s3cret")

    calls: list[CallQueue] = []
    own = SecretFor(lambda use: {"vendor.example": "s3cret"}[use.host], hosts=["vendor.example"])
    rules({"SECRETS": {"OTHER": value_of_other, "OWN": own}}, r=Rule(reconcile=ask))
    headers = {"X-One": Secret("OTHER"), "X-Two": Secret("OWN")}
    params = {"url": "http://vendor.example/", "headers": headers}
    call = CallQueue.objects.send({"method": "post", "params": params}, rule="r")
    assert call is not None
    calls.append(call)
    become_unknown(call)
    if ends == "its host is allowed no more":
        settings.CALLQUEUE = {**settings.CALLQUEUE, "ALLOWED_HOSTS": ["other.example"]}
    if ends == "its method is in capitals":
        CallQueue.objects.filter(pk=call.pk).update(call_data={**call.call_data, "method": "POST"})
    assert reconcile.ask_hooks("default") == 1
    call.refresh_from_db()
    assert call.error_message.startswith("declined") and "s3cret" not in call.error_message


@pytest.mark.usefixtures("transactional_db")
def test_while_one_worker_asks_no_other_asks_of_the_rule_and_of_others_as_ever(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a hook that hangs takes all slots. Nor is it asked inside a transaction."""
    asked: list[str] = []

    def ask(call: CallQueue) -> Succeeded:
        asked.append(call.rule)
        assert not connection.in_atomic_block
        if asked == ["hangs"]:
            assert not reconcile._claim_call("default", call)
            assert reconcile.queues_wanted("default") == ["two"]
            assert reconcile.ask_hooks("default") == 1
            with monkeypatch.context() as patched:  # it looked just before
                patched.setattr(reconcile, "_free_rules", lambda using: ["hangs"])
                assert reconcile.ask_hooks("default") == 0
        return Succeeded()

    rules(hangs=Rule(reconcile=ask, queues="one"), other=Rule(reconcile=ask, queues="two"))
    for rule in ("hangs", "hangs", "other"):
        unknown(rule)
    assert tasks.recover_lost_calls() == 2
    assert asked == ["hangs", "other", "hangs"]


@pytest.mark.parametrize("answer", [Succeeded(), RetryLater("never seen")], ids=repr)
@pytest.mark.parametrize("status", [states.NEW, states.UNKNOWN])
def test_an_answer_that_comes_too_late_changes_nothing(
    rules: Rules, status: int, answer: Any
) -> None:
    """It is about an attempt before, though what became of the next one is not known either."""

    def meanwhile(asked: CallQueue) -> Any:
        CallQueue.objects.get(pk=asked.pk).requeue()
        CallQueue.objects.update(status=status, last_attempt=F("last_attempt") + 1)
        return answer

    rules(r=Rule(reconcile=meanwhile))
    call = unknown()
    assert reconcile.ask_hooks("default") == 0
    assert status_of(call) == status


def test_a_dispenser_has_workers_of_the_rules_queues_ask_and_who_makes_all_calls_one_thread(
    monkeypatch: pytest.MonkeyPatch, rules: Rules
) -> None:
    """Hooks that hang would take all that its callbacks run in."""
    rules(**{name: Rule(queues=name, reconcile=provider) for name in "abc"})
    sent: list[Any] = []
    monkeypatch.setattr(broker, "send_beside", lambda *given, queue: sent.append((*given, queue)))
    Dispenser(publish=lambda *_: True).run_once()
    assert sent == []
    for name in "abc":
        unknown(name)
    Dispenser(publish=lambda *_: True).run_once()
    assert sent == [(broker.RECOVER, ("default",), name) for name in "abc"]
    with broker.in_this_process():
        Dispenser(publish=lambda *_: True).run_once()
    assert [queue for _, _, queue in sent[3:]] == ["a"]
    assert not provider.called


@pytest.mark.usefixtures("transactional_db")
def test_a_hook_that_hangs_is_left_behind_before_its_rule_is_anothers_to_ask_of(
    monkeypatch: pytest.MonkeyPatch, rules: Rules, caplog: Any
) -> None:
    assert reconcile.TURN.total_seconds() > reconcile.ROUND + reconcile.PATIENCE
    monkeypatch.setattr(reconcile, "PATIENCE", 0.05)
    goes = threading.Event()
    rules(slow=Rule(reconcile=lambda call: goes.wait(30) and Succeeded()))
    call = unknown("slow")
    try:
        assert reconcile.ask_hooks("default") == 0
        assert "reconcile_failed" in caplog.text
        assert RuleState.objects.get(rule="slow").reconciling_until <= ledger_time.now("default")
    finally:
        goes.set()
    call.refresh_from_db()
    assert (call.status, call.reconcile_count) == (states.UNKNOWN, 1)


@pytest.mark.parametrize("set_by", [0, -3600])
@pytest.mark.parametrize("minutes", [1, 2])
def test_the_turn_of_a_worker_that_died_lapses(
    monkeypatch: pytest.MonkeyPatch, minutes: int, set_by: int
) -> None:
    """Though the clock be set back meanwhile."""
    provider.return_value = Succeeded()
    unknown()
    assert reconcile._take_turn("default", "r") is not None
    monkeypatch.setattr(server_clock, "ahead", timedelta(seconds=set_by))
    move_ledger(ledger_time.moved("default") / SECOND + set_by)
    with travel(minutes=minutes - 0.1):
        assert reconcile.ask_hooks("default") == (minutes > 1)


def test_a_round_asks_of_no_other_call_once_it_is_late_and_rules_take_turns(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot is not kept for twenty slow answers; the next round goes on with the others."""
    provider.return_value = Succeeded()
    rules(a=Rule(reconcile=provider), b=Rule(reconcile=provider))
    for rule in "aaabbb":
        unknown(rule)
    slow = lambda: reconcile.ROUND * provider.call_count  # noqa: E731
    monkeypatch.setattr(reconcile, "clocks", SimpleNamespace(monotonic=slow))
    assert [reconcile.ask_hooks("default") for _ in range(5)] == [1] * 5
    assert [one.args[0].rule for one in provider.call_args_list] == ["a", "b", "a", "b", "a"]


def test_a_time_limit_that_strikes_in_a_hook_ends_the_round() -> None:
    """Else the hard one would kill the process, with all that it has in flight."""
    provider.side_effect = SoftTimeLimitExceeded()
    unknown(), unknown()
    with pytest.raises(SoftTimeLimitExceeded):
        reconcile.ask_hooks("default")
    assert provider.call_count == 1
    assert reconcile.queues_wanted("default") == [""]
