"""run_callqueue: releases and makes calls in this process; travel: what time it is for the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from celery import current_app, shared_task
from celery.signals import import_modules
from django.db import transaction
from django.test import TestCase, override_settings
from django.utils import timezone

from callqueue import Retry, Rule, SlidingWindow, broker, control, database, handlers
from callqueue.models import CallQueue
from callqueue.testing import (
    CallbackFailed,
    FakeTransport,
    answer,
    calls_sent,
    fake_transport,
    run_callqueue,
    travel,
)
from tests.db.testing.calls import URL, send, status_of

Rules = Callable[..., None]
Status = CallQueue.Status
NO_WAIT = Retry(base=0.0, jitter=False)


def test_what_was_sent_is_made_in_this_process(
    rules: Rules, callqueue_transport: FakeTransport
) -> None:
    rules(default=Rule())
    callqueue_transport.add(f"{URL}/pay", answer(201, json={"id": 7}))
    call = send(json={"amount": 5})
    assert run_callqueue() == 1
    assert status_of(call) == Status.DONE
    (made,) = callqueue_transport.requests
    assert (made.method, made.url, made.json) == ("POST", f"{URL}/pay", {"amount": 5})
    assert made.idempotency_key == str(call.idempotency_key)
    (attempt,) = call.attempts.all()
    assert (attempt.response_status, attempt.response_body) == (201, '{"id": 7}')


def test_what_an_operator_paused_without_end_is_not_waited_for(
    rules: Rules, callqueue_transport: FakeTransport
) -> None:
    rules(default=Rule(), other=Rule())
    callqueue_transport.add(f"{URL}/pay", answer(200))
    control.pause("default", "default")
    paused = send()
    going = CallQueue.objects.send(paused.call_data, rule="other")
    assert run_callqueue(max_passes=5) == 1
    assert (status_of(paused), status_of(going)) == (Status.NEW, Status.DONE)


def test_it_goes_on_until_nothing_is_due_any_more_or_makes_one_pass(
    rules: Rules, callqueue_transport: FakeTransport
) -> None:
    rules(default=Rule(retry=NO_WAIT))
    callqueue_transport.add(f"{URL}/pay", [500, 500, 200])
    call = send()
    assert run_callqueue(until_idle=False) == 1
    assert status_of(call) == Status.ERROR
    assert run_callqueue() == 2
    assert status_of(call) == Status.DONE


def test_calls_that_send_calls_without_end_are_noticed(
    rules: Rules, callqueue_transport: FakeTransport
) -> None:
    rules(default=Rule())

    def once_more(request: Any) -> int:
        send()
        return 200

    callqueue_transport.default = once_more
    send()
    with pytest.raises(AssertionError, match="not idle after 5 passes"):
        run_callqueue(max_passes=5)


def test_a_handler_that_breaks_the_tests_transaction_fails_it_at_once(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(params: Any, context: Any) -> None:
        transaction.set_rollback(True)

    monkeypatch.setitem(handlers._registered, "breaks", breaks)
    rules(default=Rule())
    with transaction.atomic():
        CallQueue.objects.send({"method": "breaks", "params": {}})
        with pytest.raises(transaction.TransactionManagementError):
            run_callqueue()


def test_waits_can_be_skipped(rules: Rules, callqueue_transport: FakeTransport) -> None:
    rules(default=Rule(limits=[SlidingWindow("2/h")], retry=Retry(base=60.0, jitter=False)))
    callqueue_transport.add(f"{URL}/pay", [500, 200])
    calls = [send(), *(send("/other") for _ in range(4))]
    callqueue_transport.add(f"{URL}/other", 500)
    callqueue_transport.add(f"{URL}/other", [answer(429, headers={"Retry-After": "120"}), 200])
    with pytest.raises(RuntimeError, match="inside"):
        run_callqueue(skip_waits=True)
    with travel():
        assert run_callqueue(skip_waits=True) == 7
    assert {status_of(call) for call in calls} == {Status.DONE}


@override_settings(CALLQUEUE={"RULES": {"default": Rule(limits=[SlidingWindow("1/h")])}})
class DjangosOwnTestCase(TestCase):
    def test_everything_works_inside_its_transaction(self) -> None:
        with calls_sent() as sent, fake_transport({f"{URL}/*": 200}), travel() as clock:
            send("/a")
            send("/b")
            assert run_callqueue() == 1
            clock.forward(hours=1, seconds=1)
            assert run_callqueue() == 1
        assert [call.status for call in sent] == [Status.DONE, Status.DONE]


LATE = """
from celery import shared_task

told = []


@shared_task(name="{name}.add")
def add(one, other):
    return one + other


@shared_task(name="{name}.ended")
def ended(call_id, status):
    told.append((call_id, status))
"""


@pytest.fixture(params=[False, True])
def is_eager(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether Celery runs tasks at once."""
    current_app.conf.task_always_eager = request.param
    yield request.param
    current_app.conf.task_always_eager = False


def test_tasks_that_nobody_but_a_worker_has_imported_run_here_too(
    is_eager: bool, rules: Rules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that the application's autodiscovery finds, in workers when they start."""
    rules(default=Rule())
    name = f"tasks_imported_late_{is_eager}".lower()
    (tmp_path / f"{name}.py").write_text(LATE.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    broker.import_tasks.cache_clear()
    data = {"method": "celery_task", "params": {"name": f"{name}.add", "args": [1, 2]}}
    call = CallQueue.objects.send(data, callback=f"{name}.ended")

    def discover(**_: object) -> None:
        import_module(name)

    import_modules.connect(discover)
    try:
        run_callqueue()
    finally:
        import_modules.disconnect(discover)
    assert call.attempts.get().response_body == "3"
    assert __import__(name).told == [(call.pk, "done")]


def test_rows_and_timezone_now_are_of_the_clocks_time(rules: Rules) -> None:
    rules(default=Rule())
    real = timezone.now()
    with travel(days=10):
        assert timezone.now() - real > timedelta(days=9)
        call = CallQueue.objects.get(pk=send().pk)
        assert abs(call.created_dt - database.clock("default")) < timedelta(minutes=1)
        (row,) = CallQueue.objects.due()
        assert row == call
    assert timezone.now() - real < timedelta(days=1)
    assert not CallQueue.objects.due()
    assert database.clock("default") - real < timedelta(days=1)


def test_travelling_to_an_instant_and_back(db: None) -> None:
    noon = timezone.now().replace(hour=12) + timedelta(days=3)
    with travel(to=noon) as clock:
        assert abs(clock.now() - noon) < timedelta(minutes=1)
        with travel(hours=-1):
            assert abs(clock.now() - noon) > timedelta(minutes=59)
        assert abs(clock.now() - noon) < timedelta(minutes=1)


# --- callbacks: one that goes wrong fails the test, once all calls have been made

told: list[int] = []


@shared_task
def breaking(call_id: int, status: str) -> None:
    raise LookupError("no such order")


@shared_task
def telling(call_id: int, status: str) -> None:
    told.append(call_id)


@shared_task
def retrying(call_id: int, status: str) -> None:
    if retrying.request.retries < 2:
        raise retrying.retry(countdown=0)
    told.append(call_id)


@shared_task
def sending_another(call_id: int, status: str) -> None:
    breaking.delay("not a callback", status)


@pytest.fixture
def with_callbacks(rules: Rules, callqueue_transport: FakeTransport) -> None:
    rules(default=Rule())
    callqueue_transport.default = 200
    told.clear()


def test_a_callback_that_raises_fails_the_test_after_all_calls_have_run(
    with_callbacks: None, is_eager: bool
) -> None:
    calls = [send(callback=task.name) for task in (breaking, telling, breaking)]
    with pytest.raises(CallbackFailed) as failed:
        run_callqueue()
    text = str(failed.value)
    for call in (calls[0], calls[2]):
        assert f"callback {breaking.name} of call {call.pk} (done) raised LookupError" in text
    assert 'raise LookupError("no such order")' in text
    assert isinstance(failed.value.__cause__, LookupError)
    assert told == [calls[1].pk]
    assert CallQueue.objects.done().count() == 3
    assert run_callqueue() == 0  # once is enough


@pytest.mark.parametrize("until_idle", [True, False])
def test_a_callback_that_is_not_registered_fails_the_test(
    with_callbacks: None, until_idle: bool
) -> None:
    call = send(callback=f"{telling.name}x")
    with pytest.raises(CallbackFailed, match=f"call {call.pk}: no task is registered") as failed:
        run_callqueue(until_idle)
    assert f"did you mean '{telling.name}'?" in str(failed.value)


def test_a_callback_that_is_tried_again_has_not_failed_and_other_tasks_fail_by_themselves(
    with_callbacks: None,
) -> None:
    call = send(callback=retrying.name)
    send(callback=sending_another.name)
    assert run_callqueue() == 2
    assert told == [call.pk]
