"""Checks of send's arguments beside call_data: key, cost, priority, times, unique_key, callback."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from celery import Task

from callqueue.exceptions import InvalidCall
from callqueue.sending.validation.values import TASK_NAME, encode, kind_of, path_of, text_flaw

MAX_TEXT = 255  # the width of the columns for key, unique_key and callback
MAX_COST = 2**31 - 1
A_DAY = timedelta(days=1)
# What moves a terminal's cursor, or begins another line.
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def check_key(key: object) -> str:
    """The key as it is stored: a string, or a mapping as compact JSON with sorted names."""
    if key is None or key == "":
        return ""
    if isinstance(key, Mapping):
        named = dict(_part(name, value) for name, value in key.items())
        return _name("key", encode(dict(sorted(named.items()))), "") if named else ""
    text = _name("key", key, "must be a string or a dict of names, not")
    if text.lstrip().startswith("{") and _is_json_object(text):
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
            _name("cost", unit, "has a unit that is not a name but"): _whole(
                path_of("cost", unit), amount, 0, MAX_COST
            )
            for unit, amount in cost.items()
        } or 1
    return _whole("cost", cost, 0, MAX_COST)


def check_priority(priority: object) -> int:
    """A priority that fits its column; higher goes first."""
    return _whole("priority", priority, -32768, 32767)


def check_times(now: datetime, not_before: object, expires_at: object) -> None:
    """Both are aware or None; the call does not expire before it may begin, nor before now."""
    begin, end = check_instant("not_before", not_before), check_instant("expires_at", expires_at)
    if end is not None and end <= now:
        raise InvalidCall("expires_at", "is in the past")
    if end is not None and begin is not None and end < begin:
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
    if unique_key == "":
        raise InvalidCall(
            "unique_key", "is empty: every such call would be the same; give None for no unique key"
        )
    return None if unique_key is None else _name("unique_key", unique_key, "must be a string, not")


def check_callback(callback: object) -> str | None:
    """The name of a Celery task, or None."""
    if callback is None:
        return None
    given = callback.name if isinstance(callback, Task) else callback
    name = _name("callback", given, "must be a Celery task or the name of one, not")
    if not TASK_NAME.fullmatch(name):
        raise InvalidCall("callback", "is not the name of a Celery task, such as 'shop.tasks.paid'")
    return name


def _part(name: object, value: object) -> tuple[str, str]:
    """A name of a key, and its value as text."""
    named = _name("key", name, "has a name that is not a string but")
    field = path_of("key", named)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidCall(field, f"must be a string or a whole number, not {kind_of(value)}")
    if isinstance(value, int):
        return named, int.__repr__(value) if abs(value) < 10**MAX_TEXT else "9" * (MAX_TEXT + 1)
    return named, _name(field, value, "") if value else ""


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _whole(field: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidCall(field, f"must be a whole number, not {kind_of(value)}")
    if not least <= value <= most:
        raise InvalidCall(field, f"must be from {least} to {most}")
    return int(value)


def _name(field: str, value: object, but: str) -> str:
    """A text that fits its column, and may be shown anywhere: in a log, a table, a terminal."""
    if not isinstance(value, str) or not value:
        raise InvalidCall(field, f"{but} {kind_of(value)}")
    is_unseen = _UNSEEN.search(value)
    if flaw := "contains a control character or a line break" if is_unseen else text_flaw(value):
        raise InvalidCall(field, flaw)
    if len(value) > MAX_TEXT:
        raise InvalidCall(field, f"is longer than {MAX_TEXT} characters")
    return str(value)
