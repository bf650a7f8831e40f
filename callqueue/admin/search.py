"""The search of the list of calls: what a word may stand for, each looked up by its index.

A word is a call's number, its unique key, its idempotency key, the beginning of its key, a host, or
the beginning of a path with or without its host. A URL is read as host and path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

from django.db.models import F, Max, Q, QuerySet

from callqueue import database
from callqueue.admin.changelist import Stretches
from callqueue.models import CallQueue

TABLE = CallQueue._meta.db_table
NEWEST = 20_000
HAS_HOST = "NOT (host = '')"


@dataclass(frozen=True)
class Found:
    """The places where calls were found, a condition each. `by_number`: newest first by number;
    no index has these in order, so that the newest of all calls are looked through before the rest
    of them is sorted.
    """

    places: tuple[Q, ...]
    by_number: bool = False

    def filtered(self, rows: QuerySet[CallQueue]) -> QuerySet[CallQueue]:
        """Those of the calls that were found."""
        if not self.places:
            return rows.none()
        every = Q()
        for place in self.places:
            every |= place
        return rows.filter(every)

    def stretches(self, rows: QuerySet[CallQueue], order: tuple[str, ...]) -> Stretches:
        """The same among these rows, as a list shows them."""
        unordered, overlap = rows.order_by(), len(self.places) > 1
        if not self.by_number:
            return Stretches([unordered.filter(place) for place in self.places], order, overlap)
        # as a sum, so that no database looks for old calls by going through all that are newer
        numbered = unordered.annotate(order=F("pk") + 0)
        each = [numbered.filter(place) for place in self.places]
        last = CallQueue.objects.using(rows.db).aggregate(last=Max("pk"))["last"] or 0
        newest = [found.filter(pk__gt=last - NEWEST) for found in each]
        return Stretches(each, ("-order",), overlap, newest)


def search(using: str, term: str) -> Found | None:
    """Where calls are that a word may stand for; None for no word."""
    term = term.strip()
    if not term:
        return None
    if "\x00" in term:
        return Found(())
    every = CallQueue.objects.using(using).order_by()
    points = [place for place in _points(term) if every.filter(place).exists()]
    targets = tuple(_targets(using, term))
    keys = _keys(using, term, database.MOST - len(targets))
    return Found((*points, *keys, *targets), by_number=bool(targets))


def _points(term: str) -> Iterator[Q]:
    """Where a word is a number or a key in full."""
    yield Q(unique_key=term)
    if term.isdecimal() and len(term) <= 18:
        yield Q(pk=int(term))
    try:
        yield Q(idempotency_key=UUID(term))
    except ValueError:
        return


def _keys(using: str, term: str, most: int) -> Iterator[Q]:
    """Where keys begin with a word: each key that does, or all of them where they are more than
    `most`.
    """
    found = database.values_that_begin(using, TABLE, "key", term, most)
    if len(found) > most:
        yield database.begins_with(using, "key", term) & ~Q(key="")
    else:
        yield from (Q(key=key) for key in found)


def _targets(using: str, term: str) -> Iterator[Q]:
    """Where a word is a host, or part of its name between dots, or the beginning of a path."""
    host, slash, path = term.split("?")[0].rpartition("://")[2].partition("/")
    there = database.combinations(using, TABLE, ("host",), {}, HAS_HOST)
    begins = database.begins_with(using, "path", f"/{path}") if slash else Q()
    if there is None:  # too many hosts to look through
        hosts = [host.lower()] if host else []
    else:
        hosts = [name for (name,) in there if f".{host.lower()}" in f".{name}"]
    if host or there is not None:
        yield from (Q(host=name) & begins & ~Q(host="") for name in hosts)
    else:
        yield begins & ~Q(host="")
