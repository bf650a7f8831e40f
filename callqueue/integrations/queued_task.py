"""QueuedTask: a Celery task whose `.delay()` and `.apply_async()` queue a call, and which runs when
its limits admit it.

Enters what Celery's users write; a CallQueue row leaves, with the task's name, arguments, id,
callbacks and place in its chain, group or chord. The worker that is handed the call runs the task
itself (handlers/task.py). Publishes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery.contrib.django.task import DjangoTask
from celery.exceptions import Retry
from celery.result import AsyncResult
from celery.utils.abstract import CallableSignature
from django.utils import timezone
from kombu.utils.json import dumps, loads
from kombu.utils.uuid import uuid

from callqueue import conf, states, tables
from callqueue.exceptions import InvalidCall

if TYPE_CHECKING:
    from callqueue.models import CallQueue

ELSEWHERE = {
    "queue": "belongs to the rule: set Rule(queues=...)",
    "routing_key": "belongs to the rule: set Rule(queues=...)",
    "exchange": "belongs to the rule: set Rule(queues=...)",
    "time_limit": "belongs to the rule: set Rule(total_timeout=...), after which the attempt counts as lost",
    "soft_time_limit": "belongs to the rule: set Rule(total_timeout=...), after which the attempt counts as lost",
    "rate_limit": "is Celery's own, per worker process: set Rule(limits=[...])",
}
KEPT = (
    "root_id",
    "parent_id",
    "group_id",
    "group_index",
    "shadow",
    "replaced_task_nesting",
    "ignore_result",
    "headers",
)
SIGNATURES = ("link", "link_error", "chain", "chord")
OF_THE_BROKER = frozenset(
    {
        "producer",
        "connection",
        "publisher",
        "router",
        "route_name",
        "retry",
        "retry_policy",
        "compression",
        "mandatory",
        "immediate",
        "delivery_mode",
        "correlation_id",
        "reply_to",
        "argsrepr",
        "kwargsrepr",
        "add_to_parent",
        "result_cls",
        "task_type",
        "origin",
        "expiration",
        "retries",
    }
)  # fmt: skip  they say how a message travels, and there is none
OF_SEND = ("rule", "key", "cost", "unique_key", "callback", "using")

_STATES = {
    states.NEW: "PENDING",
    states.DISPATCHED: "STARTED",
    states.ERROR: "RETRY",
    states.DONE: "SUCCESS",
    states.FAILED: "FAILURE",
    states.UNKNOWN: "FAILURE",
    states.CANCELLED: "REVOKED",
    states.EXPIRED: "REVOKED",
}


class QueuedResult(AsyncResult):
    """A Celery result that carries its call. Without a result backend, `state` and `result` are
    read from the call.
    """

    def __init__(self, *args: Any, call: CallQueue | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.call = call

    def revoke(self, *args: Any, **kwargs: Any) -> None:
        """Cancel the call; one that a worker has begun goes on. `terminate` is not offered."""
        if self.call is not None:
            type(self.call).objects.using(self.call._state.db).filter(pk=self.call.pk).cancel()

    def _get_task_meta(self) -> Any:
        from celery.backends.base import DisabledBackend

        if self.call is None:
            return super()._get_task_meta()
        if not isinstance(self.backend, DisabledBackend):
            meta = super()._get_task_meta()
            if meta.get("status") != "PENDING":
                return meta
        return _meta_of(self.call)


class QueuedTask(DjangoTask):
    """A task under a rule's limits: `@shared_task(base=callqueue.QueuedTask, rule="github")`.

    `rule`, `key`, `cost`, `unique_key`, `priority`, `callback` and `using` are as in
    `CallQueue.objects.send`, and may be stated on the decorator or at `apply_async`. On the
    decorator, `key`, `cost` and `unique_key` may be callables that take the task's arguments, those
    that they name. Calling the task directly, and `.apply()`, run it at once, under no limit.
    """

    abstract = True
    rule: str | None = None
    key: Any = ""
    cost: Any = None
    unique_key: Any = None
    callback: str | None = None
    using: str | None = None
    call_priority: int | None = None

    @classmethod
    def bind(cls, app: Any) -> Any:
        """Take the decorator's `priority` for the call's: Celery's is a message's, and
        deprecated.
        """
        if "priority" in cls.__dict__ and not cls.__bound__:
            cls.call_priority = cls.priority
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
    ) -> QueuedResult:
        """Queue a call that runs the task, in the caller's transaction; its result, with the row as
        `.call`.

        `countdown` and `eta` become the call's not_before, `expires` its expires_at. Raises what
        `send` raises: InvalidCall names the argument that is no JSON, or the option that has no
        meaning here and where to set it.
        """
        args, kwargs = self._checked(tuple(args or ()), dict(kwargs or {}))
        _refuse(self, options)
        task_id = task_id or uuid()
        given = {name: options[name] for name in OF_SEND if name in options}
        kept = {
            **options,
            "link": link,
            "link_error": link_error,
            "shadow": shadow or self.shadow_name(args, kwargs, options),
        }
        params = {
            "name": self.name,
            "args": list(args),
            "kwargs": kwargs,
            "options": self._kept(task_id, kept),
        }
        using = given.pop("using", self.using)
        try:
            call = tables.CallQueue.objects.db_manager(using).send(
                {"method": "celery_task", "params": params},
                **self._arguments(args, kwargs, options, given),
            )
        except InvalidCall as error:
            raise _renamed(error, self, args) from None
        result = QueuedResult(
            _task_id_of(call, task_id), app=self._get_app(), task_name=self.name, call=call
        )
        self._tell_parent(result, options)
        return result

    def retry(self, args: Any = None, kwargs: Any = None, **options: Any) -> Retry:
        """Have the call go again: `countdown` or `eta` say when, else the rule's backoff, or
        `default_retry_delay` where set.

        Counts as a failed attempt. Raises Retry, as Celery's does; MaxRetriesExceededError (or
        `exc`) past `max_retries`, and then the call has failed.
        """
        request = self.request
        if not hasattr(request, "callqueue"):
            return super().retry(args, kwargs, **options)
        unstated = options.get("eta") is None and options.get("countdown") is None
        request.callqueue_backoff = (
            unstated and self.default_retry_delay == DjangoTask.default_retry_delay
        )
        try:
            return super().retry(args, kwargs, **options)
        except Retry:
            raise
        except BaseException:
            request.callqueue_exhausted = True
            raise

    def on_replace(self, sig: Any) -> Any:
        """Queue or send the replacement; this call is done."""
        if not hasattr(self.request, "callqueue"):
            return super().on_replace(sig)
        from celery.exceptions import Ignore

        sig.delay()
        raise Ignore("Replaced by new task")

    def _checked(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, if the task takes them (TypeError if not)."""
        if self.typing and (header := getattr(self, "__header__", None)) is not None:
            header(*args, **kwargs)
        dump = getattr(self, "_dump_pydantic_arguments", None)
        return dump(args, kwargs) if dump is not None else (args, kwargs)

    def _arguments(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Mapping[str, Any],
        given: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The arguments of `send`: what was given at this call, then what the decorator says."""
        stated: dict[str, Any] = {"rule": self.rule, "callback": self.callback}
        for name in ("key", "cost", "unique_key"):
            if name not in given:
                stated[name] = _computed(
                    inspect.getattr_static(type(self), name), self, args, kwargs
                )
        stated["priority"] = options.get("priority", self.call_priority)
        stated["not_before"] = _not_before(self, options)
        stated["expires_at"] = _expires_at(self, options.get("expires", self.expires))
        return {**stated, **given}

    def _kept(self, task_id: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """What the run will need of Celery's options, as JSON."""
        parent = self._get_app().current_worker_task
        kept: dict[str, Any] = {"task_id": task_id, "ignore_result": self.ignore_result}
        if parent:
            kept["root_id"] = parent.request.root_id or parent.request.id
            kept["parent_id"] = parent.request.id
        kept |= {
            name: options[name] for name in (*KEPT, *SIGNATURES) if options.get(name) is not None
        }
        for name in ("link", "link_error"):
            if name in kept:
                kept[name] = _listed(kept[name])
        if stamped := options.get("stamped_headers"):
            kept["stamped_headers"] = list(stamped)
            kept["stamps"] = {name: _listed(options.get(name, [])) for name in stamped}
        plain: dict[str, Any] = loads(dumps(kept))  # type: ignore[no-untyped-call]
        return plain

    def _tell_parent(self, result: QueuedResult, options: Mapping[str, Any]) -> None:
        parent = self._get_app().current_worker_task
        if parent and options.get("add_to_parent", True):
            parent.add_trail(result)


def _refuse(task: QueuedTask, options: Mapping[str, Any]) -> None:
    """Options that cannot be honoured, by name; nothing is dropped in silence that would change
    what the caller meant.
    """
    stamps = set(options.get("stamped_headers") or ())
    known = {
        *KEPT,
        *SIGNATURES,
        *OF_SEND,
        *OF_THE_BROKER,
        "countdown",
        "eta",
        "expires",
        "priority",
        "stamped_headers",
        "stamps",
    }
    for name, value in options.items():
        if (
            value is None
            or name in known
            or name in stamps
            or (name == "serializer" and value == "json")
        ):
            continue
        if name == "serializer":
            raise InvalidCall(
                "serializer", "is 'json' for every call: arguments are stored as JSON"
            )
        why = (
            ELSEWHERE.get(name)
            or f"is no option of a QueuedTask{conf.suggest(name, sorted(known - OF_THE_BROKER))}"
        )
        raise InvalidCall(name, why)
    everywhere = task._get_app().conf
    for name in ("queue", "routing_key", "exchange", "time_limit", "soft_time_limit", "rate_limit"):
        stated = getattr(task, name, None)
        if stated is not None and stated != getattr(everywhere, f"task_{name}", None):
            raise InvalidCall(name, f"{ELSEWHERE[name]} (the task {task.name} states it)")


def _renamed(error: InvalidCall, task: QueuedTask, args: tuple[Any, ...]) -> InvalidCall:
    """The error, with the argument's own name in place of its place in the call's params."""
    for prefix in ("params.args[", "params.kwargs."):
        if not error.field.startswith(prefix):
            continue
        rest = error.field.removeprefix(prefix)
        if prefix == "params.kwargs.":
            return InvalidCall(rest, f"{error.why} (an argument of the task {task.name})")
        place, _, inner = rest.partition("]")
        names = list(inspect.signature(task.run).parameters)
        named = names[int(place)] if int(place) < len(names) else f"args[{place}]"
        return InvalidCall(f"{named}{inner}", f"{error.why} (an argument of the task {task.name})")
    return error


def _computed(
    option: Any, task: QueuedTask, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """An option's value; a callable is asked, with those of the task's arguments that it names."""
    option = option.__func__ if isinstance(option, staticmethod) else option
    if not callable(option):
        return option
    wanted = inspect.signature(option).parameters.values()
    named = _by_name(task.run, args, kwargs)
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    missing = [
        p
        for p in wanted
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD and p.name not in (named or {})
    ]
    if named is None or missing or any(p.kind in by_place for p in wanted):
        return option(*args, **kwargs)
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in wanted)
    names = {p.name for p in wanted}
    return option(**{name: value for name, value in named.items() if takes_rest or name in names})


def _by_name(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments under the names the task gives them; None where it takes some without a
    name.
    """
    signature = inspect.signature(run)
    nameless = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    if any(p.kind in nameless for p in signature.parameters.values()):
        return None
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    named = dict(bound.arguments)
    for p in signature.parameters.values():
        if p.kind is p.VAR_KEYWORD:
            named |= named.pop(p.name)
    return named


def _not_before(task: QueuedTask, options: Mapping[str, Any]) -> datetime | None:
    if options.get("eta") is not None:
        return _aware(task, options["eta"])
    countdown = options.get("countdown")
    return None if not countdown else timezone.now() + timedelta(seconds=float(countdown))


def _expires_at(task: QueuedTask, expires: Any) -> datetime | None:
    if expires is None:
        return None
    if isinstance(expires, int | float):
        return timezone.now() + timedelta(seconds=expires)
    return _aware(task, expires)


def _aware(task: QueuedTask, instant: datetime | str) -> datetime:
    """A naive datetime is in the Celery app's time zone, as in Celery."""
    when = datetime.fromisoformat(instant) if isinstance(instant, str) else instant
    return when if when.tzinfo else when.replace(tzinfo=task._get_app().timezone)


def _listed(value: Any) -> list[Any]:
    return (
        list(value)
        if isinstance(value, list | tuple) and not isinstance(value, CallableSignature)
        else [value]
    )


def _task_id_of(call: CallQueue | None, task_id: str) -> str:
    """The id of the task that the call runs: an older one's, where a unique key found it."""
    data = None if call is None else call.call_data
    if not isinstance(data, Mapping):
        return task_id
    return str(data.get("params", {}).get("options", {}).get("task_id") or task_id)


def _meta_of(call: CallQueue) -> dict[str, Any]:
    """What a result backend would say, from the call's row and its last attempt."""
    import json

    fresh = type(call).objects.using(call._state.db).filter(pk=call.pk).first()
    if fresh is None:
        return {"status": "PENDING", "result": None}
    meta: dict[str, Any] = {"status": _STATES[fresh.status], "result": None, "traceback": None}
    if fresh.status in (states.FAILED, states.UNKNOWN, states.ERROR):
        meta["result"] = RuntimeError(fresh.error_message.partition("\n")[0])
        meta["traceback"] = fresh.error_message
    attempt = fresh.attempts.order_by("-number").first() if fresh.status == states.DONE else None
    if attempt is not None and attempt.response_body:
        try:
            meta["result"] = json.loads(attempt.response_body)
        except ValueError:  # cut at KEEP_RESPONSE_BYTES
            meta["result"] = attempt.response_body
    return meta
