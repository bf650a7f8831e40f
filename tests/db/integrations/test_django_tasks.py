"""Django's Tasks API on the queue: what Django documents of a backend.

It begins with Django 6.0; where an older one is installed, `make suites` runs these on a newer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import django
import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.utils import timezone

from callqueue import GiveUp, Retry, Rule, SlidingWindow
from callqueue.models import CallAttempt, CallQueue
from callqueue.testing import Clock, Sent, run_callqueue
from tests.support.behaviour import move_ledger

if django.VERSION < (6, 0):
    pytest.skip("Django's Tasks API begins with Django 6.0", allow_module_level=True)

from django import tasks as api
from django.tasks import TaskResultStatus as Status
from django.tasks import exceptions, signals

Rules = Callable[..., None]
BACKEND = "callqueue.backends.CallQueueBackend"
TASKS = {
    "default": {
        "BACKEND": BACKEND,
        "QUEUES": ["default", "mail", "github"],
        "OPTIONS": {
            "rules": {"mail": "sendgrid"},
            "key": "tests.db.integrations.test_django_tasks.key_of",
        },
    },
    "other": {"BACKEND": BACKEND},
}
ran: list[Any] = []


def key_of(task: Any, args: Any, kwargs: Any) -> str:
    return str(kwargs.get("customer", ""))


@api.task
def add(a: int, b: int = 1, customer: int | None = None) -> int:
    ran.append((a, b))
    return a + b


@api.task(takes_context=True, priority=5)
def with_context(context: Any, word: str) -> list[Any]:
    ran.append(context.task_result)
    return [word, context.attempt, context.task_result.status]


@api.task
async def later(word: str) -> str:
    await asyncio.sleep(0)
    return word.upper()


@api.task
def broken(times: int) -> str:
    ran.append("broken")
    if len(ran) <= times:
        raise ValueError("it broke")
    return "at last"


@api.task
def returns(what: str) -> Any:
    return {
        "set": {1, 2},
        "long": "x" * 70_000,
        "none": None,
        "nested": {"a": [1, {"b": None}]},
        "give up": GiveUp("no"),
    }[what]


@pytest.fixture(autouse=True)
def project(rules: Rules, settings: Any) -> Iterator[None]:
    settings.TASKS = TASKS
    ran.clear()
    retry = Retry(base=60.0, jitter=False)
    rules(
        default=Rule(retry=retry),
        sendgrid=Rule(),
        github=Rule(limits=[SlidingWindow("1/h", per="key")]),
    )
    yield
    ran.clear()


@pytest.mark.parametrize("set_by", [0, 3600, -3600])
def test_a_task_is_enqueued_runs_and_has_a_result(callqueue_sent: Sent, set_by: int) -> None:
    supports = ("defer", "async_task", "get_result", "priority")
    assert all(getattr(api.default_task_backend, f"supports_{what}") for what in supports)
    move_ledger(set_by)
    result = add.enqueue(2, b=3)
    assert (result.status, result.args, result.kwargs) == (Status.READY, [2], {"b": 3})
    assert (result.started_at, result.finished_at, result.attempts) == (None, None, 0)
    assert result.errors == []
    assert result.enqueued_at is not None
    call = callqueue_sent.assert_call_sent(method="django_task", rule="default", count=1)
    assert result.id == str(call.pk)
    with pytest.raises(ValueError, match="not finished"):
        _ = result.return_value
    run_callqueue()
    assert result.status == Status.READY
    result.refresh()
    assert (result.status, result.return_value, result.attempts) == (Status.SUCCESSFUL, 5, 1)
    assert result.is_finished
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.last_attempted_at == result.started_at
    assert add.get_result(result.id).return_value == 5
    assert result.worker_ids[0]


def test_queue_priority_and_run_after_are_the_calls(callqueue_clock: Clock) -> None:
    at = timezone.now() + timedelta(hours=1)
    mail = add.using(queue_name="mail", priority=7).enqueue(1)
    github = add.using(queue_name="github").enqueue(1, customer=12)
    deferred = add.using(run_after=at).enqueue(9)
    calls = {call.pk: call for call in CallQueue.objects.all()}
    assert (calls[int(mail.id)].rule, calls[int(mail.id)].priority) == ("sendgrid", 7)
    assert (calls[int(github.id)].rule, calls[int(github.id)].key) == ("github", "12")
    assert calls[int(deferred.id)].due_at_dt == at
    run_callqueue()
    assert (9, 1) not in ran
    callqueue_clock.forward(hours=1, minutes=1)
    run_callqueue()
    assert (9, 1) in ran
    found = add.get_result(mail.id)
    assert (found.task.queue_name, found.task.priority) == ("mail", 7)
    assert add.get_result(deferred.id).is_finished


def test_a_task_may_take_its_context_or_be_async() -> None:
    result, word = with_context.enqueue("hello"), later.enqueue("word")
    run_callqueue()
    result.refresh()
    assert result.return_value == ["hello", 1, "RUNNING"]
    assert ran[0].id == result.id
    assert later.get_result(word.id).return_value == "WORD"


@pytest.mark.django_db(transaction=True)
def test_aenqueue_and_aget_result() -> None:
    async def both() -> tuple[Any, Any]:
        result = await add.aenqueue(1, b=2)
        found = await add.aget_result(result.id)
        await found.arefresh()
        await sync_to_async(connections.close_all)()
        return result, found

    result, found = asyncio.run(both())
    assert (result.id, found.status) == (found.id, Status.READY)


def test_a_failure_is_retried_as_the_rule_says_and_is_among_the_errors(
    callqueue_clock: Clock,
) -> None:
    result = broken.enqueue(times=1)
    run_callqueue()
    result.refresh()
    assert (result.status, result.attempts, result.is_finished) == (Status.READY, 1, False)
    run_callqueue(skip_waits=True)
    result.refresh()
    assert (result.status, result.attempts, result.return_value) == (
        Status.SUCCESSFUL,
        2,
        "at last",
    )
    (error,) = result.errors
    assert error.exception_class is ValueError
    assert 'raise ValueError("it broke")' in error.traceback
    assert result.last_attempted_at > result.started_at


def test_after_the_last_attempt_or_a_cancel_it_has_failed(callqueue_clock: Clock) -> None:
    result, cancelled = broken.enqueue(times=9), add.enqueue(1)
    CallQueue.objects.get(pk=cancelled.id).cancel()
    run_callqueue(skip_waits=True)
    result.refresh(), cancelled.refresh()
    assert (result.status, result.attempts, len(result.errors)) == (Status.FAILED, 3, 3)
    with pytest.raises(ValueError, match="failed"):
        _ = result.return_value
    assert cancelled.status == Status.FAILED
    assert "cancelled" in cancelled.errors[0].traceback
    assert issubclass(cancelled.errors[0].exception_class, Exception)


def test_return_values_come_back_as_they_were_or_are_a_failure_at_once() -> None:
    sent = {what: returns.enqueue(what) for what in ("none", "nested", "set", "long", "give up")}
    run_callqueue()
    for result in sent.values():
        result.refresh()
    assert sent["none"].return_value is None
    assert sent["nested"].return_value == {"a": [1, {"b": None}]}
    for what, why in (("set", "TypeError"), ("long", "KEEP_RESPONSE_BYTES"), ("give up", "no")):
        assert (sent[what].status, sent[what].attempts) == (Status.FAILED, 1)
        assert why in CallQueue.objects.get(pk=sent[what].id).error_message


def test_results_that_there_are_not() -> None:
    call = CallQueue.objects.send({"method": "get", "params": {"url": "https://example.com"}})
    assert call is not None
    for unknown in ("123456", "no number", "9" * 40, str(call.pk)):
        with pytest.raises(exceptions.TaskResultDoesNotExist):
            add.get_result(unknown)
    result = add.using(backend="other").enqueue(1)
    assert add.using(backend="other").get_result(result.id).id == result.id
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        add.get_result(result.id)
    mine = add.enqueue(1)
    with pytest.raises(exceptions.TaskResultMismatch):
        broken.get_result(mine.id)


def test_invalid_tasks_and_rules_are_refused(settings: Any) -> None:
    for changes in (
        {"queue_name": "unknown"},
        {"priority": 101},
        {"run_after": timezone.now().replace(tzinfo=None)},
    ):
        with pytest.raises(exceptions.InvalidTask):
            add.using(**changes)
    options = {"rules": {"x": "sendgird"}, "rule": "sendgrid"}
    settings.TASKS = {"default": {"BACKEND": BACKEND, "OPTIONS": options}}
    (error,) = api.default_task_backend.check()
    assert error.id == "callqueue.E005"
    assert "did you mean 'sendgrid'" in error.msg


def test_signals_are_sent(callqueue_clock: Clock) -> None:
    heard: list[tuple[str, Any]] = []
    kept = []
    for name in ("task_enqueued", "task_started", "task_finished"):

        def hear(sender: Any, task_result: Any, name: str = name, **_: Any) -> None:
            heard.append((name, task_result.status))

        kept.append(hear)
        getattr(signals, name).connect(hear)
    add.enqueue(1)
    run_callqueue()
    assert heard == [
        ("task_enqueued", Status.READY),
        ("task_started", Status.RUNNING),
        ("task_finished", Status.SUCCESSFUL),
    ]
    heard.clear()
    broken.enqueue(times=9)
    run_callqueue(skip_waits=True)
    assert heard[1:] == [("task_started", Status.RUNNING)] * 3 + [("task_finished", Status.FAILED)]


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        "antigravity.x",
        "callqueue.testing.run_callqueue",
        "tests.db.nowhere.task",
        "tests.db.integrations.test_django_tasks.add.func",
    ],
)
def test_a_row_names_a_registered_task_or_fails_and_nothing_is_imported(path: str) -> None:
    add.enqueue(1)
    call = CallQueue.objects.get()
    call.call_data["params"]["path"] = path
    call.save()
    run_callqueue()
    call.refresh_from_db()
    assert call.status == CallQueue.Status.FAILED
    assert f"has no task '{path}'" in call.error_message
    assert "antigravity" not in sys.modules
    assert "tests.db.nowhere" not in sys.modules
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        api.default_task_backend.get_result(str(call.pk))


@pytest.mark.parametrize(
    "said",
    ["antigravity.Error: x", "os.system: x", "json.JSONDecodeError: x", "builtins.ValueError: x"],
)
def test_the_class_of_an_error_is_one_that_is_there(said: str) -> None:
    result = broken.enqueue(times=9)
    run_callqueue()
    CallAttempt.objects.update(error_message=said)
    result.refresh()
    assert result.errors[0].exception_class_path == (
        "callqueue.exceptions.CallQueueError" if said[0] in "ao" else said.partition(":")[0]
    )
