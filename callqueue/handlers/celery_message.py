"""Celery's own message of a task, as a call keeps it: its headers, its properties, and its body in
the JSON that Celery would have sent.

A message enters, and a call's params leave; the params enter, and the request leaves that Celery's
worker makes of such a message. A call that was sent by hand has a name and arguments only: the
rest is what Celery would have said of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from celery.app import trace
from celery.app.task import Context
from celery.utils.nodenames import gethostname
from kombu.utils.json import dumps, loads

from callqueue.exceptions import InvalidCall
from callqueue.security.secrets import Secret, has_secret

DEEPEST = 64  # as anything that a call may hold
_TYPED = {"__type__", "__value__"}  # in Celery's JSON: a date, a Decimal and the like


def params_of(name: str, message: Any, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The params of the call that keeps this message; `stated` are the caller's own options. What
    JSON has no form for stays in the arguments as it is: `send` says where it is. InvalidCall for
    a Secret anywhere else, which would leave with the tasks that follow.
    """
    args, kwargs, embed = message.body
    # A repr would show what is redacted in the arguments, and tell of them when they are edited.
    unstated = {name for name in ("argsrepr", "kwargsrepr") if stated.get(name) is None}
    headers = {name: value for name, value in message.headers.items() if name not in unstated}
    params = {
        "args": _encoded(args),
        "name": name,
        "embed": _encoded(_told(embed)),
        "kwargs": _encoded(kwargs),
        "headers": _encoded(_told(headers)),
        "properties": _encoded(_told(message.properties)),
    }
    for place in ("embed", "headers", "properties"):
        for option, value in params[place].items():
            if has_secret(value):
                why = "holds a Secret: it may be an argument of this task, not of those that follow"
                raise InvalidCall(option, why)
    return params


def request_of(task: Any, params: Mapping[str, Any], own_id: str, retries: int) -> dict[str, Any]:
    """The request of the task, arguments included, as Celery's worker makes it; `own_id` is the id
    where nobody gave one. A secret that is not disclosed is its name.

    `is_eager` keeps Celery from publishing a retry, and from closing this worker's connections; it
    is False while a QueuedTask itself runs (celery_task.py).
    """
    decode = loads if "headers" in params else json.loads
    kept = decode(json.dumps(params, default=repr))
    args, kwargs = kept.get("args") or [], kept.get("kwargs") or {}
    message = task.app.amqp.as_task_v2(
        own_id, task.name, tuple(args), kwargs, ignore_result=task.ignore_result
    )
    headers = {**message.headers, **(kept.get("headers") or {})}
    properties = {**message.properties, **(kept.get("properties") or {})}
    return {
        **headers,
        **(kept.get("embed") or {}),
        "args": args,
        "kwargs": kwargs,
        "retries": retries,
        "is_eager": True,
        "hostname": _hostname(),
        "headers": Context(headers).headers or {},
        "properties": properties,
        "correlation_id": properties["correlation_id"],
        "reply_to": properties["reply_to"],
        "delivery_info": {
            "exchange": "",
            "routing_key": "",
            "priority": properties.get("priority"),
            "redelivered": False,
        },
    }


def _told(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that say something, in the order that every database keeps by itself."""
    names = sorted(options, key=lambda name: (len(name), name))
    return {name: options[name] for name in names if options[name] is not None}


def _encoded(value: Any, depth: int = 0) -> Any:
    """A copy in the form that Celery's JSON gives it."""
    if value is None or isinstance(value, str | int | float | Secret):
        return value
    if depth > DEEPEST:
        raise InvalidCall("args", f"is nested deeper than {DEEPEST}")
    if isinstance(value, dict):
        if value.keys() == _TYPED:
            why = "has a dict of '__type__' and '__value__' alone, which Celery reads as no dict"
            raise InvalidCall("args", why)
        return {name: _encoded(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item, depth + 1) for item in value]
    try:
        return json.loads(dumps(value))  # type: ignore[no-untyped-call]
    except (TypeError, ValueError):
        return value


def _hostname() -> str:
    """The worker's name, as Celery's own tracer knows it; the host's where there is no worker."""
    known = getattr(trace, "_localized", None)
    return str(known[2]) if known and len(known) > 2 else gethostname()
