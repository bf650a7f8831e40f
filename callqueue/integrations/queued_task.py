"""QueuedTask: a Celery task whose `.delay()` and `.apply_async()` queue a call, publishing nothing.
Whoever makes the call, once its limits admit it, runs the task (handlers/celery_task.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from celery import Celery, Task, signals
from celery.app.amqp import AMQP
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Retry
from celery.result import AsyncResult
from celery.utils.functional import maybe_list
from django.utils import timezone
from kombu.messaging import Producer
from kombu.utils.uuid import uuid

from callqueue import tables, texts
from callqueue.exceptions import InvalidCall
from callqueue.handlers.celery_task import params_of
from callqueue.integrations.queued_result import QueuedResult

if TYPE_CHECKING:
    from callqueue.models import CallQueue

OF_THE_RULE = "belongs to the rule: set Rule(queues=...)"
TIMEOUT = "belongs to the rule: set Rule(total_timeout=...), after which the attempt counts as lost"
REFUSED = {
    "queue": OF_THE_RULE,
    "routing_key": OF_THE_RULE,
    "exchange": OF_THE_RULE,
    "time_limit": TIMEOUT,
    "soft_time_limit": TIMEOUT,
    "not_before": "is Celery's own here: countdown=... or eta=...",
    "expires_at": "is Celery's own here: expires=...",
    "rate_limit": "is Celery's own, per worker process: set Rule(limits=[...])",
}
OF_SEND = ("rule", "key", "cost", "unique_key", "callback")
# a message's properties, which the task may read
OF_THE_MESSAGE = ("app_id", "correlation_id", "message_id", "priority", "user_id")


class QueuedTask(DjangoTask):
    """A task under a rule's limits: `@shared_task(base=callqueue.QueuedTask, rule="github")`.

    `rule`, `key`, `cost`, `unique_key`, `priority`, `callback` and `using` are as in
    `CallQueue.objects.send`, on the decorator or at `apply_async`. On the decorator, `key`, `cost`
    and `unique_key` may be callables that take the task's arguments that they name. Calling the
    task directly, and `.apply()`, run it at once, under no limit.
    """

    abstract = True
    rule: str | None = None
    key: Any = ""
    cost: Any = None
    unique_key: Any = None
    callback: str | Task | None = None
    using: str | None = None
    call_priority: int | None = None
    is_queued = True  # a retry within a call is the table's: see handlers/celery_task.py

    @classmethod
    def bind(cls, app: Any) -> Any:
        """The decorator's `priority` is the call's: Celery's is a message's, and deprecated."""
        if cls.priority is not None and not cls.__bound__:
            cls.call_priority = cls.priority
            if "priority" in cls.__dict__:
                del cls.priority
        return super().bind(app)

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> AsyncResult:
        """Queue a call that runs the task, in this transaction; its result, the row as `.call`.

        `countdown` and `eta` become the call's not_before, `expires` its expires_at. Raises what
        `send` raises: InvalidCall names the argument that is no JSON, or the option that has no
        meaning here and where to set it. Under `task_always_eager` the task runs at once, under no
        limit. `.call` is None where the ROUTER discards it.
        """
        args, kwargs = self._checked_arguments(tuple(args or ()), dict(kwargs or {}))
        refuse_options(self, options)
        task_id = task_id or uuid()
        if self._get_app().conf.task_always_eager:
            options |= {"link": link, "link_error": link_error}
            done: AsyncResult = self.apply(args, kwargs, task_id=task_id, **options)
            return done
        of_send = self._arguments_of_send(args, kwargs, options)
        options["shadow"] = shadow or self.shadow_name(args, kwargs, options)
        options |= {"callbacks": maybe_list(link), "errbacks": maybe_list(link_error)}
        if options.get("ignore_result") is None:
            options["ignore_result"] = self.ignore_result
        message = self._as_message(task_id, args, kwargs, options, of_send)
        call = self._send_as_call(message, of_send, options)
        app = self._get_app()
        result = QueuedResult(_task_id_of(call, task_id), app=app, task_name=self.name, call=call)
        result.ignored = options["ignore_result"]
        parent = app.current_worker_task
        if parent and options.get("add_to_parent", True):
            parent.add_trail(result)
        return result

    def retry(self, args: Any = None, kwargs: Any = None, **options: Any) -> Retry:
        """Have the call go again: `countdown` or `eta` say when, else the rule's backoff, or
        `default_retry_delay` where set.

        Counts as a failed attempt. Raises Retry, as Celery's does (with `throw=False` when the task
        returns); MaxRetriesExceededError (or `exc`) past `max_retries`: the call has failed.
        """
        request = self.request
        if not hasattr(request, "callqueue_run"):
            return super().retry(args, kwargs, **options)
        throw, run = options.pop("throw", True), request.callqueue_run
        is_unstated = options.get("eta") is None and options.get("countdown") is None
        request.is_eager, was_eager = True, request.is_eager  # the table sends it, not Celery
        try:
            retry = super().retry(args, kwargs, throw=False, **options)
        except BaseException:
            run.is_exhausted = True
            raise
        finally:
            request.is_eager = was_eager
        if is_unstated and self.default_retry_delay == DjangoTask.default_retry_delay:
            retry.when = None
        if throw:
            raise retry
        run.retry = retry
        return retry

    def _refuse_many(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: Celery runs all the items in one task of its own, under no limit."""
        raise InvalidCall(
            self.name, "map, starmap and chunks run under no limit: use group(task.s(...) for ...)"
        )

    map = starmap = chunks = _refuse_many

    def _checked_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.typing and (header := getattr(self, "__header__", None)) is not None:
            header(*args, **kwargs)  # TypeError where they do not fit the task
        dump = getattr(self, "_dump_pydantic_arguments", None)
        return dump(args, kwargs) if dump is not None else (args, kwargs)

    def _arguments_of_send(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        stated: dict[str, Any] = {"rule": self.rule, "callback": self.callback}
        for name in ("key", "cost", "unique_key"):
            if name not in options:
                option = inspect.getattr_static(type(self), name)
                stated[name] = computed_option(option, self, args, kwargs)
        return {
            **stated,
            "priority": self._stated_priority(options),
            "not_before": not_before_of(self, options),
            "expires_at": expires_at_of(self, options.get("expires", self.expires)),
            **{name: options[name] for name in OF_SEND if name in options},
        }

    def _stated_priority(self, options: Mapping[str, Any]) -> int | None:
        """The priority given here, the decorator's, or its sender's if so set; None: the rule's."""
        for stated in (options.get("priority"), self.call_priority):
            if stated is not None:
                return int(stated)
        app = self._get_app()
        parent = app.current_worker_task if app.conf.task_inherit_parent_priority else None
        return None if parent is None else (parent.request.delivery_info or {}).get("priority")

    def _as_message(
        self,
        task_id: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: dict[str, Any],
        of_send: Mapping[str, Any],
    ) -> Any:
        # as Celery would publish it, from the task that runs now, if any
        app = self._get_app()
        stated = {"eta": of_send["not_before"], "expires": of_send["expires_at"]}
        given = {**options, **stated, "countdown": None}
        if parent := app.current_worker_task:
            given["root_id"] = given.get("root_id") or parent.request.root_id or parent.request.id
            given["parent_id"] = given.get("parent_id") or parent.request.id
        message = app.amqp.as_task_v2(task_id, self.name, args, kwargs, **given)
        message.headers.update(options.get("headers") or {})
        properties = {**options, "priority": of_send["priority"]}
        message.properties.update(
            {n: properties[n] for n in OF_THE_MESSAGE if properties.get(n) is not None}
        )
        return message

    def _send_as_call(
        self, message: Any, of_send: Mapping[str, Any], options: Mapping[str, Any]
    ) -> CallQueue | None:
        """Keep the message as a call, between a published task's signals. None: discarded."""
        told = {"sender": self.name, "body": message.body, "headers": message.headers}
        told |= {"exchange": "", "routing_key": str(of_send["rule"] or "default")}
        signals.before_task_publish.send(
            **told, declare=[], properties=message.properties, retry_policy={}
        )
        calls = tables.CallQueue.objects.db_manager(options.get("using", self.using))
        params = params_of(self.name, message, options)
        try:
            call = calls.send({"method": "celery_task", "params": params}, **of_send)
        except InvalidCall as error:
            raise error_of_argument(error, self) from None
        signals.after_task_publish.send(**told)
        return call


def _task_id_of(call: CallQueue | None, task_id: str) -> str:
    """The id of the task that the call runs: an older one's, where a unique key found it."""
    data = None if call is None else call.call_data
    if not isinstance(data, Mapping):
        return task_id
    return str(data.get("params", {}).get("headers", {}).get("id") or task_id)


# --- Celery's options of a task, as a call takes them


@cache
def known_options() -> frozenset[str]:
    takes = (Task.apply_async, Task.apply, Celery.send_task, AMQP.as_task_v2, Producer.publish)
    celerys = {name for one in takes for name in inspect.signature(one).parameters}
    # the last: canvas leaves them among a signature's options
    also = {*OF_SEND, "using", *OF_THE_MESSAGE, "stamps", "immutable"}
    return frozenset((celerys | also) - {"self", "name", "body", "options", "properties"})


def refuse_options(task: QueuedTask, options: Mapping[str, Any]) -> None:
    """InvalidCall for an option that cannot be honoured or is unknown: none is dropped silently."""
    stamps = set(options.get("stamped_headers") or ())
    for name, value in options.items():
        if value is None or name in stamps:
            continue
        if name == "serializer" and value != "json":
            raise InvalidCall(name, "is 'json' for every call: arguments are stored as JSON")
        if name in REFUSED:
            raise InvalidCall(name, REFUSED[name])
        if name not in known_options():
            why = f"is no option of a QueuedTask{texts.suggest(name, sorted(known_options()))}"
            raise InvalidCall(name, why)
    everywhere = task._get_app().conf
    for name, why in REFUSED.items():
        stated = getattr(task, name, None)
        if stated is not None and stated != getattr(everywhere, f"task_{name}", None):
            raise InvalidCall(name, f"{why} (the task {task.name} states it)")


def error_of_argument(error: InvalidCall, task: QueuedTask) -> InvalidCall:
    """The error, with the argument's own name in place of its place in the call's params."""
    field = error.field
    if field.startswith("params.kwargs."):
        field = field.removeprefix("params.kwargs.")
    elif field.startswith("params.args["):
        place, _, inner = field.removeprefix("params.args[").partition("]")
        names = list(inspect.signature(task.run).parameters)
        named = names[int(place)] if int(place) < len(names) else f"args[{place}]"
        field = f"{named}{inner}"
    else:
        return error
    return InvalidCall(field, f"{error.why} (an argument of the task {task.name})")


def computed_option(
    option: Any, task: QueuedTask, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The option's value; a callable is asked with the task's arguments that it names, or all."""
    option = option.__func__ if isinstance(option, staticmethod) else option
    if not callable(option):
        return option
    bound = inspect.signature(task.run).bind(*args, **kwargs)
    bound.apply_defaults()
    named = {**bound.arguments, **bound.kwargs}
    wanted = inspect.signature(option).parameters.values()
    by_place = any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in wanted)
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in wanted)
    needed = {p.name for p in wanted if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    if by_place or not needed <= named.keys():
        return option(*args, **kwargs)
    names = {p.name for p in wanted}
    return option(**{name: value for name, value in named.items() if takes_rest or name in names})


def not_before_of(task: QueuedTask, options: Mapping[str, Any]) -> datetime | None:
    if options.get("eta") is not None:
        return _aware_instant(task, options["eta"])
    countdown = options.get("countdown")
    return None if not countdown else timezone.now() + timedelta(seconds=float(countdown))


def expires_at_of(task: QueuedTask, expires: Any) -> datetime | None:
    if expires is None:
        return None
    if isinstance(expires, int | float):
        return timezone.now() + timedelta(seconds=expires)
    return _aware_instant(task, expires)


def _aware_instant(task: QueuedTask, instant: datetime | str) -> datetime:
    """The instant, aware: a naive one is in the Celery app's time zone, as in Celery."""
    when = datetime.fromisoformat(instant) if isinstance(instant, str) else instant
    return when if when.tzinfo else when.replace(tzinfo=task._get_app().timezone)
