"""Values that a call is sent with: how a refusal names where one is and what it is, and checks of
single values. No refusal repeats the value, which may be secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from callqueue.exceptions import InvalidCall
from callqueue.security.secrets import MARK, Secret
from callqueue.texts import suggest

TASK_NAME = re.compile(r"[^\s\x00-\x1f\x7f-\x9f]+")
_PLAIN_NAME = re.compile(r"[A-Za-z_$][\w$-]{0,39}", re.ASCII)
_KINDS = {
    "Secret": "a secret",
    "dict": "a dict",
    "list": "a list",
    "int": "a number",
    "float": "a float",
    "bool": "a boolean",
}


def trail_of(path: Any) -> str:
    """The text of a path that was kept as (parent, key), cut to 200 characters at most."""
    keys = []
    while path is not None:
        path, key = path
        keys.append(key)
    trail = ""
    for key in reversed(keys):
        trail = path_of(trail, key)
    trail = trail or "call_data"
    return trail if len(trail) <= 200 else f"{trail[:100]}...{trail[-80:]}"


def path_of(parent: str, key: object) -> str:
    """The text of a path to a key or an index within its parent: "params.json[0]"."""
    if isinstance(key, int):
        return f"{parent}[{key}]"
    if not isinstance(key, str) or not _PLAIN_NAME.fullmatch(key):
        return f"{parent}[{shown_name(key)}]"
    return f"{parent}.{key}" if parent else key


def shown_name(name: object) -> str:
    """A name, quoted and shortened, safe to show."""
    text = ascii(str(name))
    return text if len(text) <= 42 else f"{text[:38]}...'"


def kind_of(value: object) -> str:
    """What the value is: "a number", "a dict"."""
    if value is None:
        return "None"
    if isinstance(value, str):
        return "a string" if value else "an empty string"
    if isinstance(value, dict) and len(value) == 1 and MARK in value:
        return "a dict (if it was to name a secret: that is callqueue.Secret(NAME) now)"
    name = type(value).__name__
    return _KINDS.get(name, name)


def is_secret(value: Any) -> bool:
    return isinstance(value, Secret)


def check_list(field: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidCall(field, f"must be a list, not {kind_of(value)}")
    return value


def check_dict(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidCall(field, f"must be a dict of names, not {kind_of(value)}")
    return value


def refuse_unknown(
    params: Mapping[str, Any], known: Collection[str], elsewhere: Mapping[str, str] | None = None
) -> None:
    """InvalidCall for the first unknown param; `elsewhere`: by name, what to do instead."""
    for name in params:
        if name not in known:
            why = (elsewhere or {}).get(name) or f"is unknown{suggest(name, known)}"
            raise InvalidCall(path_of("params", name), why)


def storage_flaw(text: str) -> str:
    """Why a database could not store the text; "" where it could."""
    if "\0" in text:
        return "contains a NUL character, which databases cannot store"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "contains half of a surrogate pair, which is not text"
    return ""


Check = Callable[[str, Any], None]  # of a field and its value
Ban = tuple[re.Pattern[str], str]  # what a text must not contain, and why


def check_each(params: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    for name, value in params.items():
        if value is not None:
            checks[name](f"params.{name}", value)


def flaw_in(value: Any, bans: Iterable[Ban]) -> str:
    """Why a value is refused: no string, or one with what is banned; "" else, and for a secret."""
    if isinstance(value, str):
        for pattern, why in bans:
            if pattern.search(value):
                return why
        return ""
    return "" if is_secret(value) else f"must be a string, not {kind_of(value)}"


def text_check(*bans: Ban) -> Check:
    def check(field: str, value: Any) -> None:
        if why := flaw_in(value, bans):
            raise InvalidCall(field, why)

    return check
