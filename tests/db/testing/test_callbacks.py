"""A callback that goes wrong fails the test, once all calls have been made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import current_app, shared_task

from callqueue import Rule
from callqueue.models import CallQueue
from callqueue.testing import CallbackFailed, FakeTransport, run_callqueue
from tests.db.testing.calls import send

Rules = Callable[..., None]
Status = CallQueue.Status
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


@pytest.fixture(autouse=True)
def _set_up(rules: Rules, callqueue_transport: FakeTransport) -> None:
    rules(default=Rule())
    callqueue_transport.default = 200
    told.clear()


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_callback_that_raises_fails_the_test_after_all_calls_have_run(
    is_eager: bool, request: pytest.FixtureRequest
) -> None:
    current_app.conf.task_always_eager = is_eager
    request.addfinalizer(lambda: setattr(current_app.conf, "task_always_eager", False))
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
def test_a_callback_that_is_not_registered_fails_the_test(until_idle: bool) -> None:
    call = send(callback=f"{telling.name}x")
    with pytest.raises(CallbackFailed, match=f"call {call.pk}: no task is registered") as failed:
        run_callqueue(until_idle)
    assert f"did you mean '{telling.name}'?" in str(failed.value)


def test_a_callback_that_is_tried_again_has_not_failed() -> None:
    call = send(callback=retrying.name)
    run_callqueue()
    assert told == [call.pk]


def test_other_tasks_fail_by_themselves() -> None:
    send(callback=sending_another.name)
    assert run_callqueue() == 1
