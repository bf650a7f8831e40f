"""The order of names and the form of numbers, which PostgreSQL's jsonb does not keep.

jsonb sorts the names of an object, shorter ones first, and writes 1e16 as 10000000000000000 and
-0.0 as 0.0. A document whose form would change is stored with a note of it, under the name FORM
beside its own names: "0" for what stays as it is, "1" for an element whose note is the one before,
an object's names in their order with a note of each, a number's text. A note that does not fit the
document any more, since other code has changed it, does no harm: it applies where it fits.
"""

from __future__ import annotations

import json
from itertools import pairwise
from math import copysign
from typing import Any

FORM = "$form"
_AS_IT_IS, _AS_BEFORE = 0, 1
_PLAIN = frozenset({str, int, bool, type(None)})
_EXACT = 1e16  # Python writes floats from here on with an exponent


def forgets_form(connection: Any) -> bool:
    """Whether documents are stored without their form there."""
    return bool(connection.vendor == "postgresql")


def with_form(document: dict[str, Any]) -> dict[str, Any]:
    """The document, with a note of its form where jsonb would change it."""
    note = _note(document)
    return {**document, FORM: json.dumps(note, separators=(",", ":"))} if note else document


def in_form(stored: dict[str, Any]) -> dict[str, Any]:
    """The document that was stored, in the form that it had."""
    text = stored.pop(FORM)
    try:
        formed: dict[str, Any] = _formed(stored, json.loads(text))
    except (TypeError, ValueError, OverflowError, RecursionError):  # others have written this
        return stored
    return formed


def without_form_sql(connection: Any, sql: str) -> str:
    """The SQL of a document without the note."""
    return f"({sql} - '{FORM}')" if forgets_form(connection) else sql


def _note(value: Any) -> Any:
    """A note of one value. Every value sent comes by: plain ones are passed over by type."""
    if type(value) in _PLAIN:
        return _AS_IT_IS
    if isinstance(value, dict):
        return _note_of_names(value)
    if isinstance(value, list | tuple):
        return _note_of_list(value)
    if isinstance(value, float) and (
        abs(value) >= _EXACT or (not value and copysign(1, value) < 0)
    ):
        return repr(value)
    return _AS_IT_IS


def _note_of_names(value: dict[str, Any]) -> Any:
    inner = {}
    is_sorted, size_before, before = True, -1, ""
    for name, item in value.items():
        size = len(name) if name.isascii() else len(name.encode())
        if is_sorted and (size < size_before or (size == size_before and name < before)):
            is_sorted = False  # jsonb has shorter names first
        size_before, before = size, name
        if type(item) not in _PLAIN and (note := _note(item)):
            inner[name] = note
    if is_sorted and not inner:
        return _AS_IT_IS
    return {name: inner.get(name, _AS_IT_IS) for name in value}


def _note_of_list(values: list[Any] | tuple[Any, ...]) -> Any:
    every = [_AS_IT_IS if type(item) in _PLAIN else _note(item) for item in values]
    if not any(every):
        return _AS_IT_IS
    repeated = [bool(note) and _is_same(before, note) for before, note in pairwise(every)]
    return [
        every[0],
        *(_AS_BEFORE if again else n for again, n in zip(repeated, every[1:], strict=True)),
    ]


def _is_same(one: Any, other: Any) -> bool:
    """Whether two notes are equal, the order of their names included."""
    if one != other:
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_is_same(one[name], other[name]) for name in one)
    return not isinstance(one, list) or all(map(_is_same, one, other))


def _formed(value: Any, note: Any) -> Any:
    if isinstance(note, dict) and isinstance(value, dict):
        named = {name: _formed(value[name], note[name]) for name in note if name in value}
        return {**named, **{name: item for name, item in value.items() if name not in named}}
    if isinstance(note, list) and isinstance(value, list):
        return _formed_list(value, note)
    if isinstance(note, str) and isinstance(value, int | float):
        number = float(note)
        return number if number == float(value) else value
    return value


def _formed_list(values: list[Any], notes: list[Any]) -> list[Any]:
    formed, last = [], _AS_IT_IS
    for place, value in enumerate(values):
        note = notes[place] if place < len(notes) else _AS_IT_IS
        last = last if note == _AS_BEFORE else note
        formed.append(_formed(value, last))
    return formed
