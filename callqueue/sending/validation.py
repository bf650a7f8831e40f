"""Copies a call's data as JSON and Secrets; checks send's other arguments, and returns them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from datetime import UTC, date, datetime, time, timedelta
from math import isfinite
from typing import Any

from celery import Task

from callqueue.exceptions import InvalidCall
from callqueue.security.secrets import Secret, mark_secrets
from callqueue.values import TASK_NAME, kind_of, path_of, shown_name, storage_flaw, trail_of

MAX_DEPTH = 64  # lists and mappings inside each other, call_data itself being the first
MAX_DIGITS = 4300  # Python's own bound on reading an integer back
_HUGE = 10**MAX_DIGITS
_WIDE = 2**63
_PLAIN = frozenset({int, bool, type(None)})
_NESTS = (dict, list, tuple)
_ADVICE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((bytes, bytearray, memoryview), "decode it to text, or send it as base64"),
    ((datetime, date, time), "send .isoformat()"),
    (timedelta, "send .total_seconds()"),
    ((set, frozenset), "send a sorted list"),
    (Mapping, "send dict(...)"),
    (complex, "send its parts"),
    (object, "send a string or a number"),
)
compact_json = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode


def plain_copy(
    call_data: dict[Any, Any], max_bytes: int, secret_names: Collection[str]
) -> dict[str, Any]:
    """A copy as JSON reads it back, Secrets kept. InvalidCall: no JSON, no such Secret, too big."""
    copying = _Copying(max_bytes, secret_names)
    plain: dict[str, Any] = copying.copy(call_data, None, 1)
    if 16 * copying.least > max_bytes:  # no JSON is longer than 16 times what it is at least
        stored = mark_secrets(plain) if copying.has_secrets else plain
        size = len(compact_json(stored).encode())
        if size > max_bytes:
            why = f"is {size} bytes of JSON; MAX_CALL_BYTES is {max_bytes}"
            raise InvalidCall("call_data", why)
    return plain


class _Copying:
    """Copies what JSON can hold. InvalidCall, with the path, for other things; or for too much."""

    def __init__(self, max_bytes: int, secret_names: Collection[str]) -> None:
        self.max_bytes, self.secret_names = max_bytes, secret_names
        # `least`: bytes that its JSON has at least; bounded, else data that has one part in many
        # places would take for ever
        self.least, self.has_secrets = 0, False

    def copy(self, value: Any, path: Any, depth: int) -> Any:
        """A copy of a list or mapping. `path`: (its parent's, its key), text only in a refusal."""
        if depth > MAX_DEPTH:
            raise InvalidCall(trail_of(path), f"is nested deeper than {MAX_DEPTH}")
        names = self._string_keys(value, path) if isinstance(value, dict) else None
        self._count_bytes(2 * len(value) + 1)
        copies, size = [], 0
        for key, item in enumerate(value) if names is None else value.items():
            kind = type(item)  # what is plain is passed over, for speed
            if kind is str and item.isascii() and "\0" not in item:
                size += len(item)
            elif kind is dict or kind is list or isinstance(item, _NESTS):
                item = self.copy(item, (path, key), depth + 1)
            elif kind not in _PLAIN or (kind is int and not -_WIDE <= item < _WIDE):
                item = self._copy_leaf(item, (path, key))
            copies.append(item)
        self._count_bytes(size)
        return copies if names is None else dict(zip(names, copies, strict=True))

    def _count_bytes(self, size: int) -> None:
        self.least += size
        if self.least > 4 * self.max_bytes:
            why = f"is more than {4 * self.max_bytes} bytes of JSON; MAX_CALL_BYTES is"
            raise InvalidCall("call_data", f"{why} {self.max_bytes}")

    def _string_keys(self, value: dict[Any, Any], path: Any) -> list[str]:
        names = list(value)
        for i, name in enumerate(names):
            if not isinstance(name, str):
                why = f"has a key that is not a string but {kind_of(name)}; JSON would change it"
                raise InvalidCall(trail_of(path), why)
            if type(name) is not str or not name.isascii() or "\0" in name:
                names[i] = self._checked_text(name, path, "has a key that ")
        self._count_bytes(sum(map(len, names)))
        return names

    def _copy_leaf(self, value: Any, path: Any) -> Any:
        if isinstance(value, Secret):
            return self._checked_secret(value, path)
        if not isinstance(value, str):
            return self._checked_number(value, path)
        self._count_bytes(len(value))
        return self._checked_text(value, path)

    def _checked_text(self, text: str, path: Any, prefix: str = "") -> str:
        if flaw := storage_flaw(text):
            raise InvalidCall(trail_of(path), prefix + flaw)
        return str.__str__(text)

    def _checked_secret(self, secret: Secret, path: Any) -> Secret:
        # The refusal suggests no name: whoever reads it may not be who wrote the settings.
        if path[0] is None:
            why = "must not be a secret, which may stand for any string inside params"
            raise InvalidCall(trail_of(path), why)
        self._checked_text(secret.name, path, "is a secret whose name ")
        if secret.name not in self.secret_names:
            why = f"names a secret that is not in SECRETS: {shown_name(secret.name)}"
            raise InvalidCall(trail_of(path), why)
        self.has_secrets = True
        return secret

    def _checked_number(self, number: Any, path: Any) -> int | float:
        if isinstance(number, float):
            if isfinite(number):
                return float.__float__(number)
            why = "is not a finite number; JSON has no NaN or Infinity"
        elif not isinstance(number, int):
            advice = next(advice for kinds, advice in _ADVICE if isinstance(number, kinds))
            why = f"is not JSON but {kind_of(number)}; {advice}"
        elif -_HUGE < number < _HUGE:
            if not -_WIDE <= number < _WIDE:
                self._count_bytes(number.bit_length() * 3 // 10)
            return int.__int__(number)
        else:
            why = f"is a number of more than {MAX_DIGITS} digits"
        raise InvalidCall(trail_of(path), why)


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
        named = dict(_checked_key_part(name, value) for name, value in key.items())
        return _checked_name("key", compact_json(dict(sorted(named.items()))), "") if named else ""
    text = _checked_name("key", key, "must be a string or a dict of names, not")
    if text.lstrip().startswith("{") and _is_json_object(text):
        raise InvalidCall(
            "key", "is the text of a JSON object; give the dict itself for a key of several names"
        )
    return text


def check_cost(cost: object) -> int | dict[str, int]:
    """The cost: whole calls, or units by name. None and {} are one call."""
    if cost is None:
        return 1
    if isinstance(cost, Mapping):
        return {
            _checked_name("cost", unit, "has a unit that is not a name but"): _checked_int(
                path_of("cost", unit), amount, 0, MAX_COST
            )
            for unit, amount in cost.items()
        } or 1
    return _checked_int("cost", cost, 0, MAX_COST)


def check_priority(priority: object) -> int:
    return _checked_int("priority", priority, -32768, 32767)


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
    if unique_key == "":
        raise InvalidCall(
            "unique_key", "is empty: every such call would be the same; give None for no unique key"
        )
    if unique_key is None:
        return None
    return _checked_name("unique_key", unique_key, "must be a string, not")


def check_callback(callback: object) -> str | None:
    if callback is None:
        return None
    given = callback.name if isinstance(callback, Task) else callback
    name = _checked_name("callback", given, "must be a Celery task or the name of one, not")
    if not TASK_NAME.fullmatch(name):
        raise InvalidCall("callback", "is not the name of a Celery task, such as 'shop.tasks.paid'")
    return name


def _checked_key_part(name: object, value: object) -> tuple[str, str]:
    named = _checked_name("key", name, "has a name that is not a string but")
    field = path_of("key", named)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidCall(field, f"must be a string or a whole number, not {kind_of(value)}")
    if isinstance(value, int):  # what is too long anyway is not written out
        return named, int.__repr__(value) if abs(value) < 10**MAX_TEXT else "9" * (MAX_TEXT + 1)
    return named, _checked_name(field, value, "") if value else ""


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _checked_int(field: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidCall(field, f"must be a whole number, not {kind_of(value)}")
    if not least <= value <= most:
        raise InvalidCall(field, f"must be from {least} to {most}")
    return int(value)


def _checked_name(field: str, value: object, wanted: str) -> str:
    """A text that fits its column and may be shown anywhere. `wanted`: how a refusal begins."""
    if not isinstance(value, str) or not value:
        raise InvalidCall(field, f"{wanted} {kind_of(value)}")
    is_unseen = _UNSEEN.search(value)
    if flaw := "contains a control character or a line break" if is_unseen else storage_flaw(value):
        raise InvalidCall(field, flaw)
    if len(value) > MAX_TEXT:
        raise InvalidCall(field, f"is longer than {MAX_TEXT} characters")
    return str(value)
