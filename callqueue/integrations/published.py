"""Celery's signals of a task that is published, for a task that becomes a call: libraries put their
context into the headers of its message there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from celery import signals

from callqueue.integrations.task_options import listed


@dataclass
class Published:
    """What receivers of `before_task_publish` make of a task's options, and what they are told
    after. Where nobody listens, nothing is done.

    `options` are those that were given; then, with the headers that receivers have added.
    """

    task: Any
    task_id: str
    args: tuple[Any, ...] = field(repr=False)
    kwargs: Mapping[str, Any] = field(repr=False)
    options: dict[str, Any] = field(repr=False)
    of_send: Mapping[str, Any] = field(repr=False)
    _told: dict[str, Any] = field(default_factory=dict, repr=False)

    def tell_before(self) -> dict[str, Any]:
        """`before_task_publish`; the options, with what its receivers have added."""
        if not (signals.before_task_publish.receivers or signals.after_task_publish.receivers):
            return self.options
        message = self._message()
        headers = {**message.headers, **(self.options.get("headers") or {})}
        place = {"exchange": "", "routing_key": str(self.of_send.get("rule") or "default")}
        self._told = {"sender": self.task.name, "body": message.body, "headers": headers, **place}
        signals.before_task_publish.send(
            **self._told, declare=[], properties=message.properties, retry_policy={}
        )
        added = {name: headers[name] for name in headers if name not in message.headers}
        if added:
            self.options["headers"] = added
        if headers.get("stamped_headers"):
            self.options["stamped_headers"] = headers["stamped_headers"]
            self.options.update(headers.get("stamps") or {})
        return self.options

    def tell_after(self) -> None:
        """The call is written: `after_task_publish`."""
        if self._told:
            signals.after_task_publish.send(**self._told)

    def _message(self) -> Any:
        """The message that Celery would have sent, by its protocol 2."""
        options, of_send = self.options, self.of_send
        stamped = list(options.get("stamped_headers") or ())
        given = {name: options[name] for name in stamped if name in options}
        names = ("group_id", "group_index", "root_id", "parent_id", "shadow", "chain", "chord")
        given |= {name: options.get(name) for name in names}
        app = self.task._get_app()
        if parent := app.current_worker_task:
            given["root_id"] = given["root_id"] or parent.request.root_id or parent.request.id
            given["parent_id"] = given["parent_id"] or parent.request.id
        return app.amqp.as_task_v2(
            self.task_id,
            self.task.name,
            self.args,
            self.kwargs,
            eta=of_send.get("not_before"),
            expires=of_send.get("expires_at"),
            callbacks=options.get("link") and listed(options["link"]),
            errbacks=options.get("link_error") and listed(options["link_error"]),
            ignore_result=options.get("ignore_result", self.task.ignore_result),
            replaced_task_nesting=options.get("replaced_task_nesting", 0),
            stamped_headers=stamped or None,
            **given,
        )
