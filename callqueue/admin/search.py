"""The search of the list of calls: what a word may stand for.

A word is a call's number, its unique key, its idempotency key, the beginning of its key, a host, or
the beginning of a path with or without its host. A URL is read as host and path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from uuid import UUID

from django.db.models import Q

from callqueue import database
from callqueue.models import CallQueue

HOSTS = 200  # that a path is looked for under; of more hosts, it is looked for in all calls


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
    host, slash, path = term.split("?")[0].rpartition("://")[2].partition("/")
    target = database.begins_with(using, "path", f"/{path}") if slash else Q()
    if host:
        yield Q(host=host.lower()) & target & ~Q(host="")
    elif slash:
        hosts = _hosts(using)
        yield (Q(host__in=hosts) if len(hosts) < HOSTS else Q()) & target & ~Q(host="")


def _hosts(using: str) -> list[str]:
    """The hosts that have been called, one step of an index each."""
    table = CallQueue._meta.db_table
    where = "NOT (host = '')"
    hosts: list[str] = database.distinct_next(
        using, table, "host", where, [], after="", down=False, count=HOSTS
    )
    return hosts
