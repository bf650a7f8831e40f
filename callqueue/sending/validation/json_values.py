"""Plain JSON: what a call's data must be, and the copy of it that is checked further and stored."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from math import isfinite
from typing import Any

from callqueue.exceptions import InvalidCall
from callqueue.security.secrets import Secret, marked, unmarked
from callqueue.sending.validation.refusals import kind_of, shown, trail_of
from callqueue.sending.validation.value_checks import text_flaw

MAX_DEPTH = 64  # lists and mappings inside each other, call_data itself being the first
MAX_DIGITS = 4300  # Python's own bound on reading an integer back
_HUGE = 10**MAX_DIGITS
_WIDE = 2**63
_ADVICE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((bytes, bytearray, memoryview), "decode it to text, or send it as base64"),
    ((datetime, date, time), "send .isoformat()"),
    (timedelta, "send .total_seconds()"),
    ((set, frozenset), "send a sorted list"),
    (Mapping, "send dict(...)"),
    (complex, "send its parts"),
)
encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode
_decode = json.JSONDecoder().decode


def plain_copy(
    call_data: dict[Any, Any], max_bytes: int, secret_names: Collection[str]
) -> dict[str, Any]:
    """The data after a round trip through JSON, so that what is checked next is what will be read
    back. InvalidCall names the place of what is not JSON.
    """
    has_secrets = _walk(call_data, max_bytes, secret_names)
    try:
        text = encode(marked(call_data) if has_secrets else call_data)
        size = len(text) if text.isascii() else len(text.encode())
    except (ValueError, TypeError, RecursionError, OverflowError):
        raise InvalidCall("call_data", "cannot be written as JSON") from None
    if size > max_bytes:
        raise InvalidCall("call_data", f"is {size} bytes of JSON; MAX_CALL_BYTES is {max_bytes}")
    copy: dict[str, Any] = unmarked(_decode(text)) if has_secrets else _decode(text)
    return copy


def _walk(root: dict[Any, Any], max_bytes: int, secret_names: Collection[str]) -> bool:
    """Refuse, with its path, whatever is not JSON, too deep, too large or an unknown secret; True
    where there is a secret. Never recurses, and is one loop for speed: it sees every value sent.

    A path is kept as (path of the parent, key) and becomes text only in a refusal. `spent` never
    exceeds the size of the JSON and is bounded, so that a structure that shares its parts, or
    contains itself, ends the walk in time.
    """
    pending: list[tuple[Any, Any, int]] = [(root, None, 1)]
    spent, most, has_secrets = 0, 4 * max_bytes, False
    while pending:
        value, path, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise InvalidCall(trail_of(path), f"is nested deeper than {MAX_DEPTH}")
        spent += 2 * len(value) + 1
        items: Iterable[tuple[Any, Any]]
        if isinstance(value, dict):
            items = value.items()
            spent += _checked_names(value, path)
        else:
            items = enumerate(value)
        if spent > most:
            break
        for key, item in items:
            kind = type(item)
            if kind is str:
                spent += len(item)
                if not item.isascii() or "\0" in item:
                    _check_text(item, (path, key))
            elif kind is dict or kind is list or isinstance(item, (dict, list, tuple)):
                pending.append((item, (path, key), depth + 1))
            elif kind is Secret:
                _check_secret(item, (path, key), secret_names)
                has_secrets = True
            elif item is not None and kind is not bool:
                spent += _checked_scalar(item, (path, key))
    if spent > most:
        raise InvalidCall(
            "call_data", f"is more than {most} bytes of JSON; MAX_CALL_BYTES is {max_bytes}"
        )
    return has_secrets


def _checked_names(value: dict[Any, Any], path: Any) -> int:
    spent = 0
    for key in value:
        if not isinstance(key, str):
            raise InvalidCall(
                trail_of(path),
                f"has a key that is not a string but {kind_of(key)}; JSON would change it",
            )
        spent += len(key)
        if not key.isascii() or "\0" in key:
            _check_text(key, path, "has a key that ")
    return spent


def _check_secret(secret: Secret, path: Any, secret_names: Collection[str]) -> None:
    """The refusal suggests no name: whoever reads it may not be who wrote the settings."""
    if path[0] is None:
        raise InvalidCall(
            trail_of(path), "must not be a secret, which may stand for any string inside params"
        )
    _check_text(secret.name, path, "is a secret whose name ")
    if secret.name not in secret_names:
        raise InvalidCall(
            trail_of(path), f"names a secret that is not in SECRETS: {shown(secret.name)}"
        )


def _check_text(text: str, path: Any, what: str = "") -> None:
    if flaw := text_flaw(text):
        raise InvalidCall(trail_of(path), what + flaw)


def _checked_scalar(item: Any, path: Any) -> int:
    """How many bytes of JSON the value takes beyond one. Refuses what JSON has no word for."""
    if isinstance(item, str):
        _check_text(item, path)
        return len(item)
    if isinstance(item, float):
        if not isfinite(item):
            raise InvalidCall(trail_of(path), "is not a finite number; JSON has no NaN or Infinity")
        return 0
    if not isinstance(item, int):
        raise InvalidCall(trail_of(path), f"is not JSON but {kind_of(item)}; {_advice(item)}")
    if -_WIDE <= item < _WIDE:
        return 0
    if not -_HUGE < item < _HUGE:
        raise InvalidCall(trail_of(path), f"is a number of more than {MAX_DIGITS} digits")
    return item.bit_length() * 3 // 10


def _advice(item: Any) -> str:
    found = (advice for kinds, advice in _ADVICE if isinstance(item, kinds))
    return next(found, "send a string or a number")
