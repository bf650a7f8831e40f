"""A backend of Django's Tasks API: `TASKS = {"default": {"BACKEND":
"callqueue.backends.CallQueueBackend"}}`.

For `django.tasks` of Django 6.0, or the `django-tasks` backport. Enters a task; a CallQueue row
leaves, which waits for the limits of a rule; results are read from the row and its attempts.
Importing this module needs neither of the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.utils.module_loading import import_string

from callqueue import conf, database, tables, texts
from callqueue.exceptions import InvalidCall
from callqueue.integrations.registered_tasks import registered
from callqueue.integrations.task_results import error_of, put, result_of, told_of
from callqueue.outcome import OUTCOMES, GiveUp, Outcome, RetryLater, Succeeded

if TYPE_CHECKING:
    from callqueue.handlers import Context
    from callqueue.models import CallQueue

METHOD = "django_task"
APIS = ("django.tasks", "django_tasks")


def __getattr__(name: str) -> Any:
    if name != "CallQueueBackend":
        raise AttributeError(f"module 'callqueue.backends' has no attribute {name!r}")
    for api in APIS:
        try:
            import_module(api)
        except ImportError:
            continue
        return backend_of(api)
    raise ImportError("CallQueueBackend needs Django 6.0, or the package django-tasks")


@cache
def backend_of(api: str) -> type:
    """The backend's class for one of the two APIs: "django.tasks", or "django_tasks", the
    backport.
    """
    base = import_module(f"{api}.backends.base").BaseTaskBackend
    attributes = {
        "api": api,
        "__module__": __name__,
        "__qualname__": "CallQueueBackend",
        "__doc__": QueuedBackend.__doc__,
    }
    return type("CallQueueBackend", (QueuedBackend, base), attributes)


def run_django_task(params: Mapping[str, Any], context: Context) -> Outcome:
    """The handler of the method "django_task": run the task here and now."""
    api = params.get("api")
    if api not in APIS:
        return GiveUp(f"{api!r} is no Tasks API")
    try:
        backend = import_module(api).task_backends[params["backend"]]
    except Exception as error:
        return GiveUp(f"its backend {params['backend']!r} is not in TASKS any more: {error}")
    outcome: Outcome = backend.run(context)
    return outcome


class QueuedBackend:
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

    api: str
    alias: str
    options: dict[str, Any]
    queues: set[str]
    validate_task: Callable[[Any], None]

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Queue a call that runs the task, in the caller's transaction. TypeError for arguments
        that are no JSON.
        """
        self.validate_task(task)
        args, kwargs = self._normalized(list(args)), self._normalized(dict(kwargs))
        params = {
            "api": self.api, "args": args, "path": task.module_path, "kwargs": kwargs,
            "backend": self.alias, "queue_name": task.queue_name,
            "takes_context": task.takes_context,
        }  # fmt: skip
        call = tables.CallQueue.objects.db_manager(self._using).send(
            {"method": METHOD, "params": params},
            rule=self._rule(task),
            key=self._asked("key", task, args, kwargs) or "",
            cost=self._asked("cost", task, args, kwargs),
            priority=int(task.priority),
            not_before=task.run_after,
        )
        if call is None:
            raise InvalidCall("task", f"{task.module_path} was discarded by CALLQUEUE['ROUTER']")
        result = self._result(call, task)
        import_module(f"{self.api}.signals").task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """What is known of a task, by the id of its result: the call's. TaskResultDoesNotExist
        where there is none.
        """
        call = self._find(result_id)
        if call is None:
            raise self._unknown(result_id)
        try:
            return self._result(call, self._task_of(call))
        except LookupError as error:
            raise self._unknown(result_id) from error

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """callqueue.E005: the app is not installed, or OPTIONS names a rule that there is not."""
        place = f"TASKS[{self.alias!r}]"
        if not apps.is_installed("callqueue"):
            return [Error(f"{place}: 'callqueue' is not in INSTALLED_APPS", id="callqueue.E005")]
        if conf.problems():
            return []
        named = {"OPTIONS['rule']": self.options.get("rule")}
        named |= {
            f"OPTIONS['rules'][{queue!r}]": rule
            for queue, rule in self.options.get("rules", {}).items()
        }
        known = conf.current().rules
        return [
            Error(
                f"{place}: {where}: there is no rule {rule!r}{texts.suggest(str(rule), known)}",
                id="callqueue.E005",
            )
            for where, rule in named.items()
            if rule is not None and rule not in known
        ]

    def run(self, context: Context) -> Outcome:
        """Run the task of a call in this worker: signals, context and result as the API
        documents.
        """
        signals = import_module(f"{self.api}.signals")
        try:
            result = self.get_result(str(context.call_id))
        except Exception as error:
            return GiveUp(f"its task is not there any more: {error.__cause__ or error}")
        signals.task_started.send(sender=type(self), task_result=result)
        outcome, raised = self._call(result)
        finished = isinstance(outcome, Succeeded | GiveUp) or (
            isinstance(outcome, RetryLater) and context.is_last
        )
        if finished:
            self._finish(result, outcome)
            self._tell_finished(signals, result, raised)
        return outcome

    def _tell_finished(self, signals: Any, result: Any, error: BaseException | None) -> None:
        """Send the signal while the error is being handled: Django's own listener logs its
        traceback.
        """
        if error is None:
            signals.task_finished.send(sender=type(self), task_result=result)
            return
        try:
            raise error
        except type(error):
            signals.task_finished.send(sender=type(self), task_result=result)

    def _call(self, result: Any) -> tuple[Outcome, BaseException | None]:
        """What comes of calling the task's function, and what it raised."""
        before = (
            [import_module(self.api).TaskContext(task_result=result)]
            if result.task.takes_context
            else []
        )
        try:
            value = result.task.call(*before, *result.args, **result.kwargs)
        except BaseException as error:
            return RetryLater(told_of(error)), error
        if isinstance(value, OUTCOMES):
            return value, None
        try:
            value = self._normalized(value)
        except TypeError as error:
            return GiveUp(told_of(error)), error
        size, most = len(json.dumps(value)), conf.current().keep_response_bytes
        if size > most:
            long = ValueError(
                f"the return value has {size} bytes, KEEP_RESPONSE_BYTES keeps {most}"
            )
            return GiveUp(told_of(long)), long
        return Succeeded(value), None

    def _finish(self, result: Any, outcome: Outcome) -> None:
        """Bring the result up to what will be recorded, for the listeners of task_finished."""
        status, now = self._base.TaskResultStatus, database.clock(self._using or "default")
        if isinstance(outcome, Succeeded):
            put(result, status=status.SUCCESSFUL, _return_value=outcome.result, finished_at=now)
        else:
            result.errors.append(error_of(self._base, getattr(outcome, "why", "")))
            put(result, status=status.FAILED, finished_at=now)

    @property
    def _using(self) -> str | None:
        return self.options.get("using")

    @property
    def _base(self) -> Any:
        return import_module(f"{self.api}.base")

    def _normalized(self, value: Any) -> Any:
        return self._base.normalize_json(value)

    def _rule(self, task: Any) -> str | None:
        rules: Mapping[str, str] = self.options.get("rules", {})
        if task.queue_name in rules:
            return rules[task.queue_name]
        if task.queue_name in conf.current().rules and task.queue_name != "default":
            return str(task.queue_name)
        return self.options.get("rule")

    def _asked(self, name: str, task: Any, args: Any, kwargs: Any) -> Any:
        option = self.options.get(name)
        option = import_string(option) if isinstance(option, str) else option
        return option(task, args, kwargs) if callable(option) else option

    def _find(self, result_id: str) -> tables.CallQueue | None:
        if not str(result_id).isascii() or not str(result_id).isdigit() or len(str(result_id)) > 18:
            return None
        found = (
            tables.CallQueue.objects.db_manager(self._using)
            .filter(pk=int(result_id), method=METHOD)
            .first()
        )
        is_ours = (
            found is not None and found.call_data.get("params", {}).get("backend") == self.alias
        )
        return found if is_ours else None

    def _unknown(self, result_id: str) -> Exception:
        exceptions = import_module(f"{self.api}.exceptions")
        error: Exception = exceptions.TaskResultDoesNotExist(result_id)
        return error

    def _task_of(self, call: CallQueue) -> Any:
        """The task, as it was enqueued: `using(...)` included. LookupError where this process knows
        none of that name.
        """
        params = call.call_data["params"]
        found = registered(str(params["path"]), self._base.Task)
        later = call.due_at_dt if call.due_at_dt > call.created_dt else None
        return found.using(
            priority=call.priority,
            queue_name=params["queue_name"],
            backend=self.alias,
            run_after=later,
        )

    def _result(self, call: CallQueue, task: Any) -> Any:
        return result_of(self._base, call, task, self.alias)
