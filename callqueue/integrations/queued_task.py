"""QueuedTask: a Celery task whose `.delay()` and `.apply_async()` queue a call, and which runs when
its limits admit it.

Enters what Celery's users write; a CallQueue row leaves, with the task's name, arguments, id,
callbacks and place in its chain, group or chord. The worker that is handed the call runs the task
itself (handlers/celery_task.py). Publishes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery.contrib.django.task import DjangoTask
from celery.exceptions import Ignore, Retry
from kombu.utils.json import dumps, loads
from kombu.utils.uuid import uuid

from callqueue import tables
from callqueue.exceptions import InvalidCall
from callqueue.integrations.queued_result import QueuedResult
from callqueue.integrations.task_options import (
    KEPT,
    OF_SEND,
    SIGNATURES,
    computed,
    expires_at,
    listed,
    not_before,
    refuse,
    renamed,
)

if TYPE_CHECKING:
    from callqueue.models import CallQueue


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
        refuse(self, options)
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
            raise renamed(error, self, args) from None
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
                stated[name] = computed(
                    inspect.getattr_static(type(self), name), self, args, kwargs
                )
        stated["priority"] = options.get("priority", self.call_priority)
        stated["not_before"] = not_before(self, options)
        stated["expires_at"] = expires_at(self, options.get("expires", self.expires))
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
                kept[name] = listed(kept[name])
        if stamped := options.get("stamped_headers"):
            kept["stamped_headers"] = list(stamped)
            kept["stamps"] = {name: listed(options.get(name, [])) for name in stamped}
        plain: dict[str, Any] = loads(dumps(kept))  # type: ignore[no-untyped-call]
        return plain

    def _tell_parent(self, result: QueuedResult, options: Mapping[str, Any]) -> None:
        parent = self._get_app().current_worker_task
        if parent and options.get("add_to_parent", True):
            parent.add_trail(result)


def _task_id_of(call: CallQueue | None, task_id: str) -> str:
    """The id of the task that the call runs: an older one's, where a unique key found it."""
    data = None if call is None else call.call_data
    if not isinstance(data, Mapping):
        return task_id
    return str(data.get("params", {}).get("options", {}).get("task_id") or task_id)
