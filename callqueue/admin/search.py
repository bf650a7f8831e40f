"""The search of the list of calls: what a word may stand for.

A word is a call's number, its unique key, its idempotency key, or the beginning of its key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from uuid import UUID

from django.db.models import Q

from callqueue import database


def places(using: str, term: str) -> list[Q]:
    """What a word may stand for, a condition each, as an index has it."""
    term = term.strip()
    if "\x00" in term:
        return [Q(pk=None)]
    return list(_places(using, term)) if term else []


def _places(using: str, term: str) -> Iterator[Q]:
    if term.isdecimal() and len(term) <= 18:
        yield Q(pk=int(term))
    yield Q(unique_key=term)
    with suppress(ValueError):
        yield Q(idempotency_key=UUID(term))
    yield database.begins_with(using, "key", term) & ~Q(key="")
