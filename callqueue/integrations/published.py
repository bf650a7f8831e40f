"""Celery's signals of a task that is published, for a task that becomes a call: libraries put their
context into the headers of its message there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import signals

from callqueue.integrations.task_options import listed


class Published:
    """What receivers of `before_task_publish` make of a task's options, and what they are told
    after. Where nobody listens, nothing is done.

    `options` are those that were given, with the headers that receivers have added.
    """

    def __init__(
        self,
        task: Any,
        task_id: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
        of_send: Mapping[str, Any],
    ) -> None:
        self.options = dict(options)
        self._told: dict[str, Any] = {}
        if not (signals.before_task_publish.receivers or signals.after_task_publish.receivers):
            return
        message = _message(task, task_id, args, kwargs, options, of_send)
        own = dict(options.get("headers") or {})
        headers = {**message.headers, **own}
        place = {"exchange": "", "routing_key": str(of_send.get("rule") or "default")}
        self._told = {"sender": task.name, "body": message.body, "headers": headers, **place}
        signals.before_task_publish.send(
            **self._told, declare=[], properties=message.properties, retry_policy={}
        )
        added = {name: headers[name] for name in headers if name not in message.headers}
        if added:
            self.options["headers"] = added
        if headers.get("stamped_headers"):
            self._take_stamps(headers)

    def tell_after(self) -> None:
        """The call is written: `after_task_publish`."""
        if self._told:
            signals.after_task_publish.send(**self._told)

    def _take_stamps(self, headers: Mapping[str, Any]) -> None:
        self.options["stamped_headers"] = headers["stamped_headers"]
        self.options.update(headers.get("stamps") or {})


def _message(
    task: Any,
    task_id: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    of_send: Mapping[str, Any],
) -> Any:
    """The message that Celery would have sent, by its protocol 2."""
    stamped = list(options.get("stamped_headers") or ())
    given = {name: options[name] for name in stamped if name in options}
    names = ("group_id", "group_index", "root_id", "parent_id", "shadow", "chain", "chord")
    given |= {name: options.get(name) for name in names}
    parent = task._get_app().current_worker_task
    if parent:
        given["root_id"] = given["root_id"] or parent.request.root_id or parent.request.id
        given["parent_id"] = given["parent_id"] or parent.request.id
    return task._get_app().amqp.as_task_v2(
        task_id,
        task.name,
        args,
        kwargs,
        eta=of_send.get("not_before"),
        expires=of_send.get("expires_at"),
        callbacks=options.get("link") and listed(options["link"]),
        errbacks=options.get("link_error") and listed(options["link_error"]),
        ignore_result=options.get("ignore_result", task.ignore_result),
        replaced_task_nesting=options.get("replaced_task_nesting", 0),
        stamped_headers=stamped or None,
        **given,
    )
