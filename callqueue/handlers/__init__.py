"""Handlers: what makes a call of some method. Every requests verb, send_email and celery_task are
built in.

A handler is called `handler(params, context)` and returns JSON, for success, or an outcome; an
exception is a failure that is retried. `@handler("name")` registers one beside those of
CALLQUEUE["HANDLERS"].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from django.utils.module_loading import import_string

from callqueue import conf

SAFE = frozenset({"get", "options", "head"})  # RFC 9110 section 9.2.1
# as HTTP defines it, RFC 9110 section 9.2.2; the methods of handlers are not
IDEMPOTENT = SAFE | {"put", "delete"}
HTTP_METHODS = IDEMPOTENT | {"post", "patch"}
BUILT_IN = {
    "send_email": "callqueue.handlers.email.send_email",
    "celery_task": "callqueue.handlers.celery_task.run_task",
    "django_task": "callqueue.backends.run_django_task",
}

Handler = Callable[[Mapping[str, Any], "Context"], Any]
F = TypeVar("F", bound=Handler)
_registered: dict[str, Handler] = {}


@dataclass(frozen=True)
class Context:
    """What a handler is told of its call. `attempt` counts from 1; `deadline` is when the lease
    ends, on this host's clock.

    `is_last`: should this attempt fail, there will be no other.
    """

    call_id: int
    rule: str
    key: str
    attempt: int
    idempotency_key: str
    deadline: datetime
    is_last: bool = False


def handler(name: str) -> Callable[[F], F]:
    """Register the function below as the handler of calls whose method is `name`."""

    def register(function: F) -> F:
        _registered[name] = function
        return function

    return register


def methods() -> frozenset[str]:
    """Every method that a call may have now."""
    return HTTP_METHODS | BUILT_IN.keys() | conf.current().handlers.keys() | _registered.keys()


def find(method: str) -> Handler:
    """The handler of a method that is no HTTP verb. LookupError where there is none."""
    path = conf.current().handlers.get(method)
    if path is None and method in _registered:
        return _registered[method]
    path = path or BUILT_IN.get(method)
    if path is None:
        raise LookupError(
            f"there is no handler for the method {method!r}; see CALLQUEUE['HANDLERS']"
        )
    found: Handler = import_string(path)
    return found
