"""What Celery's messages carry beyond JSON (bytes, dates and times, Decimal, UUID), in the form
that they give it: {"__type__": "uuid", "__value__": ...}.
"""

from __future__ import annotations

import json
from typing import Any

from kombu.utils.json import dumps, loads

from callqueue.security.secrets import walked

_TYPED = {"__type__", "__value__"}


def encoded(value: Any) -> Any:
    """A copy in which each such value has its form; what Celery has no form for stays as it is."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {name: encoded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(item) for item in value]
    try:
        return as_plain(value)
    except (TypeError, ValueError):
        return value


def as_plain(value: Any) -> Any:
    """The value as a message of Celery's would carry it. TypeError where it could not."""
    return json.loads(dumps(value))  # type: ignore[no-untyped-call]


def has_typed(value: Any) -> bool:
    """Whether anything inside is to be decoded."""
    return any(isinstance(one, dict) and one.keys() == _TYPED for one in walked(value))


def decoded(value: Any) -> Any:
    """The values themselves again; a secret that is not disclosed is its name. ValueError where one
    is of a type that nobody registered.
    """
    return loads(json.dumps(value, default=repr))  # type: ignore[no-untyped-call]
