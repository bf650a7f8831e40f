"""What the doctor says of one thing that it examined."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One thing examined. `todo` is empty where it is well."""

    name: str
    ok: bool
    detail: str
    todo: str = ""


def well(name: str, detail: str) -> Check:
    """What was examined is as it should be."""
    return Check(name, True, detail)


def wrong(name: str, detail: str, todo: str) -> Check:
    """What was examined is wrong, and `todo` says what to do about it."""
    return Check(name, False, detail, todo)
