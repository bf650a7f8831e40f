"""A backend of Django's Tasks API, for Django 6.0 and later: `TASKS = {"default": {"BACKEND":
"callqueue.backends.CallQueueBackend"}}`. A task is a call; results are read from its rows.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from traceback import format_exception
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.tasks import TaskContext, TaskResultStatus
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.base import Task, TaskError, TaskResult
from django.tasks.exceptions import TaskResultDoesNotExist
from django.tasks.signals import task_enqueued, task_finished, task_started
from django.utils.json import normalize_json
from django.utils.module_loading import autodiscover_modules, import_string

from callqueue import conf, database, states, tables, texts
from callqueue.exceptions import InvalidCall
from callqueue.ledger import ledger_time
from callqueue.outcome import OUTCOMES, GiveUp, Outcome, RetryLater, Succeeded
from callqueue.security.withholding import clean_of_call_in_hand

if TYPE_CHECKING:
    from callqueue.handlers import Context
    from callqueue.models import CallQueue

METHOD = "django_task"
HEAD, TAIL = 400, 1400  # characters of an error's own words, and of its traceback's end
# how a text by `_error_text` begins: the path of the error's class
_RAISED = re.compile(r"([A-Za-z_][\w.]*\.[A-Za-z_]\w*)(?:: |\n|$)")
_UNRAISED = "callqueue.exceptions.CallQueueError"  # the class of what begins otherwise


class CallQueueBackend(BaseTaskBackend):
    """Tasks wait in the table under the limits of a rule: the one that OPTIONS["rules"] gives for
    the task's queue_name, else the rule that is named as the queue, else OPTIONS["rule"], else
    "default".

    OPTIONS["key"] and OPTIONS["cost"] may be callables or dotted paths `(task, args, kwargs) ->`
    the call's key, its cost; OPTIONS["using"] is a database's alias. An exception is a failed
    attempt, retried as the rule's Retry says.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def enqueue(self, task: Task[..., Any], args: Any, kwargs: Any) -> Any:
        """Send in the caller's transaction. TypeError: not JSON. InvalidCall: also if discarded."""
        self.validate_task(task)
        args, kwargs = normalize_json(list(args)), normalize_json(dict(kwargs))
        params = {
            "args": args, "path": task.module_path, "kwargs": kwargs, "backend": self.alias,
            "queue_name": task.queue_name,
        }  # fmt: skip
        call = self._calls.send(
            {"method": METHOD, "params": params},
            rule=self._rule_of_queue(task.queue_name),
            key=self._option_for("key", task, args, kwargs) or "",
            cost=self._option_for("cost", task, args, kwargs),
            priority=int(task.priority),
            not_before=task.run_after,
        )
        if call is None:
            raise InvalidCall("task", f"{task.module_path} was discarded by CALLQUEUE['ROUTER']")
        result = self._read_result(call, task)
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult[..., Any]:
        """By its call's id. TaskResultDoesNotExist: not of this backend, or its task not loaded."""
        text = str(result_id)
        is_key = text.isascii() and text.isdigit() and len(text) <= 18
        call = self._calls.filter(pk=int(text), method=METHOD).first() if is_key else None
        if call is None or call.call_data.get("params", {}).get("backend") != self.alias:
            raise TaskResultDoesNotExist(result_id)
        params = call.call_data["params"]
        try:
            registered = _registered_task(str(params["path"]))
        except LookupError as error:
            raise TaskResultDoesNotExist(result_id) from error
        task = registered.using(  # as it was enqueued
            priority=call.priority,
            queue_name=params["queue_name"],
            backend=self.alias,
            run_after=call.due_at_dt if call.due_at_dt > call.created_dt else None,
        )
        return self._read_result(call, task)

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """callqueue.E005: not installed, or an unknown rule in OPTIONS. [] if CALLQUEUE is bad."""
        place = f"TASKS[{self.alias!r}]"
        if not apps.is_installed("callqueue"):
            return [Error(f"{place}: 'callqueue' is not in INSTALLED_APPS", id="callqueue.E005")]
        if conf.problems():
            return []
        rules, known = self.options.get("rules", {}), conf.current().rules
        named = {"OPTIONS['rule']": self.options.get("rule")}
        named |= {f"OPTIONS['rules'][{queue!r}]": rule for queue, rule in rules.items()}
        return [
            Error(
                f"{place}: {where}: there is no rule {rule!r}{texts.suggest(str(rule), known)}",
                id="callqueue.E005",
            )
            for where, rule in named.items()
            if rule is not None and rule not in known
        ]

    def run(self, result: TaskResult[..., Any], context: Context) -> Outcome:
        """Run the task of a call in this worker: signals, context and result as the API says."""
        task_started.send(sender=type(self), task_result=result)
        before = [TaskContext(task_result=result)] if result.task.takes_context else []
        has_returned = False
        try:
            value = result.task.call(*before, *result.args, **result.kwargs)
            has_returned = True
            outcome = value if isinstance(value, OUTCOMES) else Succeeded(_as_json(value, context))
        except BaseException as error:
            # work that is done is not done again because its value cannot be kept
            failure = GiveUp if has_returned else RetryLater
            # within the handler of the exception: Django's own listener logs its traceback
            return self._announce_if_last(context, result, failure(_error_text(error)))
        return self._announce_if_last(context, result, outcome)

    def _announce_if_last(
        self, context: Context, result: TaskResult[..., Any], outcome: Outcome
    ) -> Outcome:
        """This outcome. If no more attempts follow, task_finished says what will be recorded."""
        is_last = isinstance(outcome, RetryLater) and context.is_last
        if is_last or isinstance(outcome, Succeeded | GiveUp):
            _set_fields(result, finished_at=database.clock(self.options.get("using") or "default"))
            if isinstance(outcome, Succeeded):
                _set_fields(
                    result, status=TaskResultStatus.SUCCESSFUL, _return_value=outcome.result
                )
            else:
                result.errors.append(_task_error(outcome.why))
                _set_fields(result, status=TaskResultStatus.FAILED)
            task_finished.send(sender=type(self), task_result=result)
        return outcome

    @property
    def _calls(self) -> Any:
        return tables.CallQueue.objects.db_manager(self.options.get("using"))

    def _rule_of_queue(self, queue: str) -> str | None:
        own = queue if queue in conf.current().rules and queue != "default" else None
        rule: str | None = self.options.get("rules", {}).get(queue) or own
        return rule or self.options.get("rule")

    def _option_for(self, name: str, task: Task[..., Any], args: Any, kwargs: Any) -> Any:
        """What OPTIONS say of this call; None where they do not."""
        option = self.options.get(name)
        option = import_string(option) if isinstance(option, str) else option
        return option(task, args, kwargs) if callable(option) else option

    def _read_result(self, call: CallQueue, task: Task[..., Any]) -> TaskResult[..., Any]:
        """The result by its call's row and those attempts that were begun, in wall time."""
        using = call._state.db or "default"
        begun = tables.attempts(using).charged().filter(call_id=call.pk)
        attempts = list(begun.filter(started_at__isnull=False).order_by("number"))
        last = attempts[-1] if attempts else None
        moved = (ledger_time.moved(using) if attempts else 0) * database.MICROSECOND
        began = [one.started_at + moved for one in attempts if one.started_at is not None]
        is_running = last is not None and last.finished_at is None
        params = call.call_data["params"]
        result: TaskResult[..., Any] = TaskResult(
            task=task,
            id=str(call.pk),
            status=_result_status(call.status, is_running),
            enqueued_at=call.created_dt,
            started_at=began[0] if began else None,
            finished_at=call.finished_at_dt,
            last_attempted_at=began[-1] if began else None,
            args=params["args"],
            kwargs=params["kwargs"],
            backend=self.alias,
            errors=_task_errors(call, attempts),
            worker_ids=[attempt.worker for attempt in attempts],
        )
        if call.status == states.DONE and last is not None and last.response_body:
            _set_fields(result, _return_value=json.loads(last.response_body))
        return result


@cache
def _discover_tasks() -> None:
    autodiscover_modules("tasks")


def _registered_task(path: str) -> Task[..., Any]:
    """The task of this path. LookupError: not loaded, and what a row names is not imported."""
    _discover_tasks()
    found = _loaded_attribute(path)
    if not isinstance(found, Task) or found.module_path != path:
        raise LookupError(
            f"this process has no task {path!r}; is its module imported, "
            "or named `tasks` in an installed app?"
        )
    return found


def _loaded_attribute(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return vars(sys.modules[module]).get(name) if module in sys.modules else None


def _as_json(value: Any, context: Context) -> Any:
    """The value as JSON. TypeError where it is none, ValueError where it is too long."""
    config = conf.current()
    value, most = normalize_json(value), config.kept_response_bytes(config.rules.get(context.rule))
    if (size := len(json.dumps(value))) > most:
        raise ValueError(f"the return value has {size} bytes, KEEP_RESPONSE_BYTES keeps {most}")
    return value


def _set_fields(result: TaskResult[..., Any], **values: Any) -> None:
    """Write a result's fields: results are frozen, but for their backend."""
    for name, value in values.items():
        object.__setattr__(result, name, value)


def _result_status(status: int, is_running: bool) -> TaskResultStatus:
    if status == states.DONE:
        return TaskResultStatus.SUCCESSFUL
    if status in states.FINAL:
        return TaskResultStatus.FAILED
    is_running = is_running and status == states.DISPATCHED
    return TaskResultStatus.RUNNING if is_running else TaskResultStatus.READY


def _task_errors(call: CallQueue, attempts: list[Any]) -> list[TaskError]:
    told = [a.error_message for a in attempts if a.error_message and a.outcome != states.SUCCEEDED]
    if not told and call.status in states.FINAL and call.status != states.DONE:
        told = [call.error_message or f"the call is {call.get_status_display()}"]
    return [_task_error(message) for message in told]


def _task_error(message: str) -> TaskError:
    """An error by its recorded text, of a class that is loaded: the API imports what it names."""
    raised = _RAISED.match(message)
    kind = _loaded_attribute(raised[1]) if raised else None
    is_error = isinstance(kind, type) and issubclass(kind, BaseException)
    path = raised[1] if raised and is_error else _UNRAISED
    return TaskError(exception_class_path=path, traceback=message.partition("\n")[2] or message)


def _error_text(error: BaseException) -> str:
    kind = type(error)
    words = f"{kind.__module__}.{kind.__qualname__}: {error}".rstrip(": ")
    head = clean_of_call_in_hand(words).replace("\n", " ")[:HEAD]
    return f"{head}\n{clean_of_call_in_hand(''.join(format_exception(error)))[-TAIL:]}"
