"""Checks of send's arguments beside call_data: key, cost, priority, times, unique_key, callback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from celery import Task

from callqueue.exceptions import InvalidCall
from callqueue.sending.validation.json_values import encode
from callqueue.sending.validation.refusals import kind_of, path_of
from callqueue.sending.validation.value_checks import (
    MAX_TEXT,
    TASK_NAME,
    fitting,
    refuse_length,
    showable,
    storable,
)

MAX_COST = 2**31 - 1
A_DAY = timedelta(days=1)


def check_key(key: object) -> str:
    """The key as it is stored: a string, or a mapping as compact JSON with sorted names."""
    if key is None:
        return ""
    if isinstance(key, Mapping):
        named = {
            _checked_key_name(name): _checked_key_value(name, value) for name, value in key.items()
        }
        return fitting("key", encode(dict(sorted(named.items())))) if named else ""
    if not isinstance(key, str):
        raise InvalidCall("key", f"must be a string or a dict of names, not {kind_of(key)}")
    text = fitting("key", showable("key", key))
    if _is_json_object(text):
        raise InvalidCall(
            "key", "is the text of a JSON object; give the dict itself for a key of several names"
        )
    return text


def check_cost(cost: object) -> int | dict[str, int]:
    """The cost: whole calls, or units by name. None is one call."""
    if cost is None:
        return 1
    if isinstance(cost, Mapping):
        return {
            _checked_unit(unit): _checked_amount(path_of("cost", unit), amount)
            for unit, amount in cost.items()
        } or 1
    return _checked_amount("cost", cost)


def check_priority(priority: object) -> int:
    """A priority that fits its column; higher goes first."""
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidCall("priority", f"must be a whole number, not {kind_of(priority)}")
    if not -32768 <= priority <= 32767:
        raise InvalidCall("priority", "must be from -32768 to 32767")
    return int(priority)


def check_times(now: datetime, not_before: object, expires_at: object) -> None:
    """Both are aware or None; the call does not expire before it may begin, nor before now."""
    begin, end = check_instant("not_before", not_before), check_instant("expires_at", expires_at)
    if end is None:
        return
    if end <= now:
        raise InvalidCall("expires_at", "is in the past")
    if begin is not None and end < begin:
        raise InvalidCall("expires_at", "is before not_before, so the call could never be made")


def check_instant(field: str, value: object) -> datetime | None:
    """An aware datetime in UTC, or None; one that every time zone can show."""
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise InvalidCall(field, f"must be a datetime, not {kind_of(value)}")
    if value.utcoffset() is None:
        raise InvalidCall(
            field, "is naive; give it a time zone, as django.utils.timezone.now() has"
        )
    try:
        at = value.astimezone(UTC)
        at - A_DAY, at + A_DAY  # no zone is further from UTC
    except OverflowError:
        raise InvalidCall(field, "is out of the range of dates in UTC") from None
    return at


def check_unique_key(unique_key: object) -> str | None:
    """A non-empty text of at most 255 characters, or None."""
    if unique_key is None:
        return None
    if not isinstance(unique_key, str):
        raise InvalidCall("unique_key", f"must be a string, not {kind_of(unique_key)}")
    if not unique_key:
        raise InvalidCall(
            "unique_key", "is empty: every such call would be the same; give None for no unique key"
        )
    return fitting("unique_key", showable("unique_key", unique_key))


def check_callback(callback: object) -> str | None:
    """The name of a Celery task, or None."""
    if callback is None:
        return None
    if isinstance(callback, Task):
        callback = callback.name
    if not isinstance(callback, str):
        raise InvalidCall(
            "callback", f"must be a Celery task or the name of one, not {kind_of(callback)}"
        )
    if not TASK_NAME.fullmatch(callback):
        raise InvalidCall(
            "callback", "must be the name of a Celery task, such as 'shop.tasks.paid'"
        )
    return fitting("callback", storable("callback", callback))


def _checked_key_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        kind = f"a name that is not a string but {kind_of(name)}" if name else "an empty name"
        raise InvalidCall("key", f"has {kind}")
    return showable("key", name)


def _checked_key_value(name: str, value: object) -> str:
    field = path_of("key", name)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidCall(field, f"must be a string or a whole number, not {kind_of(value)}")
    if isinstance(value, str):
        return showable(field, value)
    if abs(value) >= 10**MAX_TEXT:
        refuse_length("key")
    return int.__repr__(value)


def _is_json_object(text: str) -> bool:
    if not text.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _checked_unit(unit: object) -> str:
    if not isinstance(unit, str) or not unit:
        raise InvalidCall("cost", "has a unit that is not a name, such as 'tokens'")
    return fitting("cost", showable("cost", unit))


def _checked_amount(field: str, amount: object) -> int:
    if isinstance(amount, bool) or not isinstance(amount, int):
        raise InvalidCall(field, f"must be a whole number, not {kind_of(amount)}")
    if not 0 <= amount <= MAX_COST:
        raise InvalidCall(
            field, "must not be negative" if amount < 0 else f"must not be over {MAX_COST}"
        )
    return int(amount)
