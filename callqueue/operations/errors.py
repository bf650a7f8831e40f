"""What failed, grouped by what was answered: the newest calls of a rule that gave up, or whose
outcome is unknown. Reads, and changes nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from callqueue import states, tables

NEWEST = 5000  # calls of each status that are looked at
# What differs from call to call in a text that says the same: long numbers, ids, durations.
_OWN = re.compile(r"\b(?=[0-9a-f-]*\d)[0-9a-f-]{8,}\b|\b\d{4,}\b|\b\d+\.\d+\b")


@dataclass
class ErrorGroup:
    """Calls of one status that failed alike: how many, of how many keys, and when the last one
    did. `name` tells it from others.
    """

    status: int
    text: str
    name: str
    pks: list[int] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    last: datetime | None = None


def groups(using: str, rule: str) -> tuple[list[ErrorGroup], bool]:
    """The groups, the largest first; and whether there are more calls than were looked at. Two
    statements.
    """
    found: dict[tuple[int, str], ErrorGroup] = {}
    is_partial = False
    for status in (states.FAILED, states.UNKNOWN):
        rows = tables.calls(using).filter(rule=rule, status=status).order_by("-pk")
        columns = ("pk", "key", "error_message", "finished_at_dt")
        newest = list(rows.values_list(*columns)[: NEWEST + 1])
        is_partial |= len(newest) > NEWEST
        for pk, key, message, at in newest[:NEWEST]:
            text = alike(message)
            one = found.get((status, text))
            if one is None:
                one = found[status, text] = ErrorGroup(status, text, _name(status, text))
            one.pks.append(pk)
            one.keys.add(key)
            if at is not None and (one.last is None or at > one.last):
                one.last = at
    return sorted(found.values(), key=lambda one: -len(one.pks)), is_partial


def group_named(listed: Sequence[ErrorGroup], name: str) -> ErrorGroup | None:
    """The group of this name."""
    return next((one for one in listed if one.name == name), None)


def alike(message: str) -> str:
    """The text without what differs from call to call."""
    return _OWN.sub("…", message)


def _name(status: int, text: str) -> str:
    return hashlib.sha256(f"{status} {text}".encode()).hexdigest()[:16]
