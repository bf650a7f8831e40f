"""Checks of single values, which the checks of call_data and of send's other arguments share."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NoReturn

from callqueue.exceptions import InvalidCall
from callqueue.security.secrets import Secret
from callqueue.sending.validation.refusals import kind_of, path_of
from callqueue.texts import suggest

MAX_TEXT = 255  # the width of the columns for key, unique_key and callback
TASK_NAME = re.compile(r"[^\s\x00-\x1f\x7f-\x9f]+")
# What moves a terminal's cursor, or begins another line.
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def is_secret(value: Any) -> bool:
    """Whether a secret stands in the value's place: what it stands for is checked in the worker."""
    return isinstance(value, Secret)


def listed(field: str, value: Any) -> list[Any]:
    """The value, a list."""
    if not isinstance(value, list):
        raise InvalidCall(field, f"must be a list, not {kind_of(value)}")
    return value


def named(field: str, value: Any) -> dict[str, Any]:
    """The value, a dict."""
    if not isinstance(value, dict):
        raise InvalidCall(field, f"must be a dict of names, not {kind_of(value)}")
    return value


def refuse_unknown(params: dict[str, Any], known: Collection[str]) -> None:
    """InvalidCall for the first param that the method does not know, with the nearest it knows."""
    for name in params:
        if name not in known:
            raise InvalidCall(path_of("params", name), f"is unknown{suggest(name, known)}")


def text_flaw(text: str) -> str:
    """Why a database could not store the text; "" where it could."""
    if "\0" in text:
        return "contains a NUL character, which databases cannot store"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "contains half of a surrogate pair, which is not text"
    return ""


def storable(field: str, text: str) -> str:
    """A text that every database can store."""
    if flaw := text_flaw(text):
        raise InvalidCall(field, flaw)
    return str(text)


def showable(field: str, text: str) -> str:
    """A name that may be shown anywhere: in a log, a table, a terminal."""
    if _UNSEEN.search(text):
        raise InvalidCall(field, "contains a control character or a line break")
    return storable(field, text)


def fitting(field: str, text: str) -> str:
    """A text that fits its column."""
    if len(text) > MAX_TEXT:
        refuse_length(field)
    return text


def refuse_length(field: str) -> NoReturn:
    """InvalidCall for a text that its column has no room for."""
    raise InvalidCall(field, f"is longer than {MAX_TEXT} characters")
