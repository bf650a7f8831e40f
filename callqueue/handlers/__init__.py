"""Handlers: what makes a call that is not HTTP. Each module here is one that is built in;
`@handler("name")` registers another beside those of CALLQUEUE["HANDLERS"].

A handler is called `handler(params, context)` and returns JSON, for success, or an outcome; an
exception is a failure that is retried.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from typing import Any, TypeVar

from django.utils.module_loading import import_string

from callqueue import conf
from callqueue.limits.rules import MAX_NAME

SAFE = frozenset({"get", "options", "head"})  # RFC 9110 section 9.2.1
# as HTTP defines it, RFC 9110 section 9.2.2; the methods of handlers are not
IDEMPOTENT = SAFE | {"put", "delete"}
HTTP_METHODS = IDEMPOTENT | {"post", "patch"}
# each is a module here, with its BuiltIn as BUILT_IN
BUILT_IN = frozenset(module.name for module in pkgutil.iter_modules(__path__))

Handler = Callable[[Mapping[str, Any], "Context"], Any]
F = TypeVar("F", bound=Handler)
_registered: dict[str, Handler] = {}


@dataclass(frozen=True)
class Context:
    """What a handler is told of its call."""

    call_id: int
    rule: str
    key: str
    attempt: int  # from 1
    idempotency_key: str
    deadline: datetime  # when the lease ends, on this host's clock
    is_last: bool = False  # should this attempt fail, there will be no other


@dataclass(frozen=True)
class BuiltIn:
    """A handler that comes with callqueue."""

    make: Handler
    free: Collection[str]  # params that a person may change in the admin
    # raises InvalidCall for params that it cannot have; here: for none
    check: Callable[[dict[str, Any]], None] = lambda params: None


def handler(name: str) -> Callable[[F], F]:
    """Register the function below as the handler of the method `name`, whatever its letter case."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        longest = f"at most {MAX_NAME} characters"
        raise TypeError(f'write @callqueue.handler("name"), with a method\'s name, {longest}')

    def register(function: F) -> F:
        _registered[name.lower()] = function
        return function

    return register


def method_of(call_data: Any, method_column: str) -> str:
    # Other code may have changed the data, which is what will be made, and not the column.
    if not isinstance(call_data, Mapping):
        return method_column
    return str(call_data.get("method", "")).lower()


def known_methods() -> frozenset[str]:
    return HTTP_METHODS | BUILT_IN | conf.current().handlers.keys() | _registered.keys()


def find_handler(method: str) -> Handler:
    """The handler of a method that is no HTTP verb. LookupError where there is none."""
    path = conf.current().handlers.get(method)
    if path is None and method in _registered:
        return _registered[method]
    if path is not None:
        found: Handler = import_string(path)
        return found
    if (own := find_built_in(method)) is not None:
        return own.make
    raise LookupError(f"there is no handler for the method {method!r}; see CALLQUEUE['HANDLERS']")


def find_built_in(method: str) -> BuiltIn | None:
    if method not in BUILT_IN:
        return None
    found: BuiltIn = import_module(f"{__name__}.{method}").BUILT_IN
    return found
