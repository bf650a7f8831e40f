"""Lists with a million rows: every filter looks at all of them, and reads no more than it shows.

An index has the rows that match as stretches in the list's own order, which are merged: see
`database.merged_scans`. Where a list has no stretches for what is asked, the database chooses. What
matches is counted up to COUNTED.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from callqueue import database
from callqueue.admin.base import OwnAdmin, OwnList
from callqueue.operations.formatting import count

COUNTED = 10_000  # rows that match are counted up to here
PAGES = 1000  # pages that can be turned; further back, by date


@dataclass(frozen=True)
class Stretches:
    """What a list shows: rows of which an index has each stretch in `order`. Those that `overlap`
    may have rows in common. `newest`: the same among the newest rows, where these are looked at
    first.
    """

    rows: Sequence[database.Stretch]
    order: tuple[str, ...]
    overlap: bool = False
    newest: Sequence[QuerySet[Any]] = ()

    def count(self) -> int:
        """How many rows there are, up to COUNTED + 1."""
        return database.merged_count(self.rows, self.order, COUNTED, overlap=self.overlap)

    def pks(self, start: int, stop: int) -> list[int]:
        """The primary keys of these rows, in order."""
        if self.newest:
            found = database.merged_pks(self.newest, self.order, start, stop, overlap=self.overlap)
            if len(found) == stop - start:
                return found
        return database.merged_pks(self.rows, self.order, start, stop, overlap=self.overlap)

    def backwards(self) -> Stretches:
        """The same in the opposite order."""
        turned = (name[1:] if name.startswith("-") else f"-{name}" for name in self.order)
        return replace(self, order=tuple(turned), newest=())


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts what is filtered up to COUNTED, takes the database's estimate of the whole, and turns
    PAGES pages at most.
    """

    is_estimate = is_more = False
    stretches: Stretches | None = None

    @cached_property
    def count(self) -> int:
        rows: Any = self.object_list
        if not rows.query.where:
            estimate = database.estimated_rows(rows.db, rows.model._meta.db_table)
            if estimate is not None and estimate > COUNTED:
                self.is_estimate = True
                return estimate
        counted = self.stretches.count() if self.stretches else _counted(rows)
        self.is_more = counted > COUNTED
        return min(counted, COUNTED)

    @cached_property
    def num_pages(self) -> int:
        return min(super().num_pages, PAGES)


class MergedList(OwnList):
    """A change list of many rows, newest first. A class says in `stretches` where an index has what
    is asked for.
    """

    paginator: BoundedPaginator

    def __init__(self, request: HttpRequest, *args: Any) -> None:
        self.count_text = ""
        super().__init__(request, *args)

    def stretches(self, rows: QuerySet[Any]) -> Stretches | None:
        """The matching rows as an index has them; None: as the database finds them."""
        raise NotImplementedError

    def is_backwards(self) -> bool:
        """Whether the oldest are to come first: the list was sorted by a column, upwards."""
        return False

    def get_results(self, request: HttpRequest) -> None:
        found = self.stretches(self.queryset)
        request.callqueue_stretches = found  # type: ignore[attr-defined]
        super().get_results(request)
        self.paginator = request.callqueue_paginator  # type: ignore[attr-defined]
        if found is not None:
            self.result_list = self._in_order(found.backwards() if self.is_backwards() else found)
        if self.paginator.is_estimate:
            self.count_text = _("about %s") % count(self.paginator.count)
        else:
            self.count_text = count(self.result_count) + ("+" if self.paginator.is_more else "")
        if not self.query or self.paginator.is_more:
            # Beside the search, Django says how many there are as if that were all.
            self.full_result_count = self.result_count

    def _in_order(self, found: Stretches) -> list[Any]:
        """The rows of the page; all of them where they are no more than a page."""
        start = (self.page_num - 1) * self.list_per_page if self.multi_page else 0
        pks = found.pks(start, start + self.list_per_page)
        rows = self.queryset.order_by()
        rows.query.clear_where()  # beside the keys, what they were found by may mislead a database
        by_pk = rows.in_bulk(pks)
        return [by_pk[pk] for pk in pks if pk in by_pk]


class KeepsPaginator(OwnAdmin):
    """An admin class whose list can say how it counted without counting again."""

    def get_paginator(self, request: HttpRequest, *args: Any, **kwargs: Any) -> BoundedPaginator:
        """Kept with the request, for the list to ask."""
        made = request.callqueue_paginator = BoundedPaginator(*args, **kwargs)  # type: ignore[attr-defined]
        made.stretches = getattr(request, "callqueue_stretches", None)
        return made


def _counted(rows: Any) -> int:
    return int(rows.order_by()[: COUNTED + 1].count())
