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

from celery import Task
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Ignore, Retry
from celery.result import AsyncResult
from kombu.utils.uuid import uuid

from callqueue import tables
from callqueue.exceptions import InvalidCall
from callqueue.handlers import celery_json
from callqueue.integrations.published import Published
from callqueue.integrations.queued_result import QueuedResult
from callqueue.integrations.task_options import (
    KEPT,
    OF_SEND,
    PROPERTIES,
    SIGNATURES,
    computed,
    expires_at,
    listed,
    not_before,
    plain,
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
    callback: str | Task | None = None
    using: str | None = None
    call_priority: int | None = None
    is_queued = True  # a retry within a call is the table's: see handlers/task_run.py

    @classmethod
    def bind(cls, app: Any) -> Any:
        """Take the decorator's `priority` for the call's: Celery's is a message's, and
        deprecated.
        """
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
        """Queue a call that runs the task, in the caller's transaction; its result, with the row as
        `.call`.

        `countdown` and `eta` become the call's not_before, `expires` its expires_at. Raises what
        `send` raises: InvalidCall names the argument that is no JSON, or the option that has no
        meaning here and where to set it. Under `task_always_eager` the task runs at once, as in
        Celery, under no limit.
        """
        args, kwargs = self._checked(tuple(args or ()), dict(kwargs or {}))
        refuse(self, options)
        task_id = task_id or uuid()
        if self._get_app().conf.task_always_eager:
            options = {**options, "link": link, "link_error": link_error}
            done: AsyncResult = self.apply(args, kwargs, task_id=task_id, **options)
            return done
        shadow = shadow or self.shadow_name(args, kwargs, options)
        kept = {**options, "link": link, "link_error": link_error, "shadow": shadow}
        given = {name: options[name] for name in OF_SEND if name in options}
        using = given.pop("using", self.using)
        of_send = self._arguments(args, kwargs, options, given)
        published = Published(self, task_id, args, kwargs, kept, of_send)
        options = published.tell_before()
        params = self._params(args, kwargs, self._kept(task_id, options, of_send))
        try:
            call = tables.CallQueue.objects.db_manager(using).send(
                {"method": "celery_task", "params": params}, **of_send
            )
        except InvalidCall as error:
            raise renamed(error, self, args) from None
        published.tell_after()
        result = QueuedResult(
            _task_id_of(call, task_id), app=self._get_app(), task_name=self.name, call=call
        )
        result.ignored = params["options"]["ignore_result"]
        self._tell_parent(result, options)
        return result

    def retry(self, args: Any = None, kwargs: Any = None, **options: Any) -> Retry:
        """Have the call go again: `countdown` or `eta` say when, else the rule's backoff, or
        `default_retry_delay` where set.

        Counts as a failed attempt. Raises Retry, as Celery's does (with `throw=False` when the task
        returns); MaxRetriesExceededError (or
        `exc`) past `max_retries`, and then the call has failed.
        """
        request = self.request
        if not hasattr(request, "callqueue"):
            return super().retry(args, kwargs, **options)
        unstated = options.get("eta") is None and options.get("countdown") is None
        request.callqueue_backoff = (
            unstated and self.default_retry_delay == DjangoTask.default_retry_delay
        )
        request.is_eager = True  # raised, and not published: the table sends it
        try:
            request.callqueue_retry = super().retry(args, kwargs, **options)
            return request.callqueue_retry
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

    def _many(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: Celery runs all of them in one task of its own, under no limit."""
        raise InvalidCall(
            self.name, "map, starmap and chunks run under no limit: use group(task.s(...) for ...)"
        )

    map = starmap = chunks = _many

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
        stated["priority"] = self._priority(options)
        stated["not_before"] = not_before(self, options)
        stated["expires_at"] = expires_at(self, options.get("expires", self.expires))
        return {**stated, **given}

    def _priority(self, options: Mapping[str, Any]) -> int | None:
        """What was given at this call, then what the decorator says, then what the task has that
        sends it, where Celery's settings say so.
        """
        for stated in (options.get("priority"), self.call_priority):
            if stated is not None:
                return int(stated)
        app = self._get_app()
        parent = app.current_worker_task if app.conf.task_inherit_parent_priority else None
        return None if parent is None else (parent.request.delivery_info or {}).get("priority")

    def _params(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
    ) -> dict[str, Any]:
        """The call's params: arguments and options, in the form in which Celery's messages carry
        them. Names are in the order that every database keeps by itself.
        """
        params = {
            "args": celery_json.encoded(list(args)),
            "name": self.name,
            "kwargs": celery_json.encoded(kwargs),
            "options": options,
        }
        if celery_json.has_typed(params):
            options["typed"] = True
            try:
                celery_json.decoded(params)
            except (TypeError, ValueError):
                why = "has a dict of '__type__' and '__value__' that Celery cannot read back"
                raise InvalidCall("args", why) from None
        return params

    def _kept(
        self, task_id: str, options: Mapping[str, Any], of_send: Mapping[str, Any]
    ) -> dict[str, Any]:
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
        if properties := {n: options[n] for n in PROPERTIES if options.get(n) is not None}:
            kept["properties"] = properties
        for name, instant in (("eta", "not_before"), ("expires", "expires_at")):
            if (when := of_send.get(instant)) is not None:
                kept[name] = when.isoformat()
        if of_send["priority"] is not None:
            kept["priority"] = of_send["priority"]
        return {name: plain(name, kept[name]) for name in sorted(kept, key=lambda n: (len(n), n))}

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
