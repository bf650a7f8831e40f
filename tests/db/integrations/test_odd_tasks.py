"""Queued tasks at the edges of Celery's interface: secrets in arguments and chains, retries that are
not raised, what would run past the limits, priorities that are inherited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import chain, current_app, shared_task
from celery.exceptions import TaskRevokedError

import callqueue
from callqueue import Retry, Rule, Secret
from callqueue.database import with_form
from callqueue.exceptions import InvalidCall
from callqueue.handlers.celery_message import request_of
from callqueue.integrations import ended_tasks
from callqueue.models import CallQueue
from callqueue.testing import run_callqueue

pytestmark = pytest.mark.django_db
Status = CallQueue.Status
seen: list[Any] = []


@shared_task(base=callqueue.QueuedTask, rule="r", name="tests.odd.identity")
def identity(*args: Any) -> Any:
    seen.extend(args)
    return list(args)


@shared_task(base=callqueue.QueuedTask, rule="r", name="tests.odd.silent", bind=True)
def retries_in_silence(self: Any) -> str:
    seen.append(self.request.retries)
    if self.request.retries < 2:
        self.retry(throw=False, countdown=0)
    return "done"


@pytest.fixture(autouse=True)
def _rule(rules: Callable[..., None]) -> Iterator[None]:
    seen.clear()
    rules(
        {"SECRETS": {"KEY": "s3cret"}}, r=Rule(retry=Retry(max_attempts=3, base=0.0, jitter=False))
    )
    yield
    seen.clear()


def test_a_secret_beside_a_value_that_json_has_no_form_for() -> None:
    identity.delay(Secret("KEY"), datetime(2026, 1, 2, tzinfo=UTC))
    assert "s3cret" not in str(CallQueue.objects.get().call_data)
    run_callqueue()
    assert seen == ["s3cret", datetime(2026, 1, 2, tzinfo=UTC)]


def test_a_secret_in_a_later_task_of_a_chain_stays_a_reference() -> None:
    with pytest.raises(InvalidCall, match="Secret"):
        chain(identity.s(1), identity.s(Secret("KEY"))).apply_async()


@pytest.mark.usefixtures("results")
def test_the_end_of_a_task_with_a_secret_is_told() -> None:
    result = identity.delay(Secret("KEY"), datetime(2026, 1, 2, tzinfo=UTC))
    current_app.conf.result_extended = True
    try:
        CallQueue.objects.update(status=Status.CANCELLED)
        assert ended_tasks.tell("default", [result.call.pk]) == 1
    finally:
        current_app.conf.result_extended = False
    with pytest.raises(TaskRevokedError):
        current_app.AsyncResult(result.id).get(timeout=1)


@pytest.mark.usefixtures("results")
def test_a_worker_that_does_not_have_the_task_tells_its_end() -> None:
    result = identity.delay(1)
    CallQueue.objects.update(
        call_data={
            "method": "celery_task",
            "params": {**result.call.call_data["params"], "name": "gone"},
        }
    )
    CallQueue.objects.update(status=Status.CANCELLED)
    assert ended_tasks.tell("default", [result.call.pk]) == 1


def test_what_was_revoked_is_thrown_before_the_backend_knows_it(
    results: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("callqueue.broker.send_by_name", lambda *args: None)
    result = identity.delay(1)
    result.revoke()
    assert (result.state, results.backend.get_state(result.id)) == ("REVOKED", "PENDING")
    with pytest.raises(TaskRevokedError, match="revoked"):
        result.maybe_throw()


def test_an_ignored_result_is_none_though_the_row_has_one(results: Any) -> None:
    result = identity.apply_async((1,), ignore_result=True)
    run_callqueue()
    assert (result.get(), result.result, result.call.attempts.get().response_body) == (
        None,
        None,
        "[1]",
    )


def test_what_is_released_is_not_said_to_have_started(results: Any) -> None:
    result = identity.delay(1)
    CallQueue.objects.update(status=Status.DISPATCHED)
    assert result.state == "PENDING"


def test_a_tasks_call_needs_no_note_of_its_form() -> None:
    identity.apply_async((1, {"a": 2, "bb": 1.5}), priority=3, expires=600, headers={"x": "1"})
    data = CallQueue.objects.get().call_data
    assert with_form(data) is data


def test_what_stands_for_the_arguments_in_logs_is_what_the_caller_gave() -> None:
    identity.apply_async(("4711 0000",), argsrepr="(a card)", kwargsrepr="{...}", throw=True)
    request = request_of(identity, CallQueue.objects.get().call_data["params"], "id", 0)
    assert (request["argsrepr"], request["kwargsrepr"]) == ("(a card)", "{...}")


def test_a_retry_that_is_not_raised_is_a_retry() -> None:
    result = retries_in_silence.delay()
    run_callqueue()
    assert seen == [0, 1, 2]
    assert (result.state, result.result) == ("SUCCESS", "done")


@pytest.mark.parametrize("way", ["map", "starmap", "chunks"])
def test_what_would_run_under_no_limit_is_refused(way: str) -> None:
    many = [(1,), (2,)]
    with pytest.raises(InvalidCall, match="group"):
        identity.chunks(many, 1) if way == "chunks" else getattr(identity, way)(many)


def test_a_priority_of_a_base_class_is_the_calls() -> None:
    class Urgent(callqueue.QueuedTask):
        abstract = True
        priority = 7

    @shared_task(base=Urgent, rule="r", name="tests.odd.urgent")
    def urgent() -> None:
        pass

    @shared_task(base=Urgent, rule="r", name="tests.odd.less", priority=2)
    def less() -> None:
        pass

    assert [task.delay().call.priority for task in (urgent, less)] == [7, 2]
