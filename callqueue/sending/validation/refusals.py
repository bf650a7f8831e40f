"""The words of a refusal: where a value is, what it is called, and what kind of thing it is. They
never repeat the value, which may be secret.
"""

from __future__ import annotations

import re
from typing import Any

from callqueue.security.secrets import MARK

_PLAIN_NAME = re.compile(r"[A-Za-z_$][\w$-]{0,39}", re.ASCII)
_KINDS = {
    "Secret": "a secret",
    "dict": "a dict",
    "list": "a list",
    "int": "a number",
    "float": "a number",
    "bool": "a boolean",
}


def trail_of(path: Any) -> str:
    """The text of a path that was kept as (parent, key), shortened to 200 characters."""
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
        return f"{parent}[{shown(key)}]"
    return f"{parent}.{key}" if parent else key


def shown(name: object) -> str:
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
