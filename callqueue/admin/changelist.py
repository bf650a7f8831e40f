"""Lists of many rows: Django's change list, newest first, page after page by number, counted up to
COUNTED.

What matches fewer rows than that is read whole, by the index of its filter. Of what matches more,
a page is looked for among the next rows first, and only then among all of them.
"""

from __future__ import annotations

from typing import Any

from django.db.models import F, Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext as _

from callqueue.admin.base import OwnAdmin, OwnList
from callqueue.look.words import count

COUNTED = 1000
NEAR = (5_000, 50_000)
BEFORE, AFTER = "before", "after"  # in an address: the number that a page goes on from


class LongList(OwnList):
    """A change list that turns its pages by number, however many rows there are.

    `older`, `newer`: the addresses of the pages beside this one, empty where there is none.
    """

    model_admin: LongAdmin
    older = newer = ""

    def __init__(self, request: HttpRequest, *args: Any) -> None:
        self.before, self.after = (_number(request.GET.get(name)) for name in (BEFORE, AFTER))
        super().__init__(request, *args)

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        for name in (BEFORE, AFTER):  # no filter, and no link of one begins at a later page
            self.params.pop(name, None)
            self.filter_params.pop(name, None)
        query, self.query = self.query, ""
        rows: QuerySet[Any] = super().get_queryset(request, exclude_parameters)
        self.query = query
        # each place by itself, since each has an index of its own
        places = self.model_admin.places(rows.db, query) or [Q()]
        self.places = [rows.filter(place).order_by() for place in places]
        every = Q()
        for place in places:
            every |= place
        return rows.filter(every)

    def get_results(self, request: HttpRequest) -> None:
        matching = set[int]()
        for rows in self.places:
            if len(matching) <= COUNTED:
                matching.update(rows.values_list("pk", flat=True)[: COUNTED + 1])
        is_more = len(matching) > COUNTED
        pks = self._page(None if is_more else matching)
        by_pk = self.root_queryset.defer(*self.model_admin.not_listed).in_bulk(pks)
        self.result_list = [by_pk[pk] for pk in pks if pk in by_pk]
        # what Django's templates ask a list for
        shown = count(min(len(matching), COUNTED))
        self.count_text = _("more than %s") % shown if is_more else shown
        self.result_count = min(len(matching), COUNTED + 1)
        # Beside the search, Django says how many there are as if that were all.
        self.full_result_count = self.result_count if is_more or not self.query else None
        self.show_full_result_count = self.can_show_all = self.multi_page = False
        self.show_admin_actions = True
        self.paginator = self.model_admin.get_paginator(request, self.queryset, self.list_per_page)

    def _page(self, matching: set[int] | None) -> list[int]:
        """The numbers of the page's rows, newest first. `matching`: all there are, if few."""
        size, is_newer = self.list_per_page, self.after is not None
        found = self._next(matching, self.after if is_newer else self.before, is_newer=is_newer)
        if is_newer and len(found) <= size:  # the first page is full, if there is more than one
            self.before, is_newer = None, False
            found = self._next(matching, None, is_newer=False)
        page = found[:size][::-1] if is_newer else found[:size]
        if page and (is_newer or len(found) > size):
            self.older = self.get_query_string({BEFORE: page[-1]})
        if is_newer or self.before is not None:
            self.newer = self.get_query_string({AFTER: page[0]} if page else {})
        return page

    def _next(self, matching: set[int] | None, start: int | None, *, is_newer: bool) -> list[int]:
        """The next numbers beyond `start`, the nearest first: a page of them, and one more."""
        most = self.list_per_page + 1
        if start is None:
            start = self._end()
        if matching is not None:
            beyond = (pk for pk in matching if (pk > start if is_newer else pk < start))
            return sorted(beyond, reverse=not is_newer)[:most]
        far = Q(pk__gt=start) if is_newer else Q(pk__lt=start)
        for width in NEAR:
            near = Q(pk__lte=start + width) if is_newer else Q(pk__gte=start - width)
            found = self._nearest(far & near, F("pk"), is_newer=is_newer)
            if len(found) == most:
                return found
        # As a sum: else databases go through all the rows there are until enough match.
        return self._nearest(far, F("pk") + 0, is_newer=is_newer)

    def _nearest(self, where: Q, number: Any, *, is_newer: bool) -> list[int]:
        most, found = self.list_per_page + 1, set[int]()
        for rows in self.places:
            ordered = rows.filter(where).order_by(number.asc() if is_newer else number.desc())
            found.update(ordered.values_list("pk", flat=True)[:most])
        return sorted(found, reverse=not is_newer)[:most]

    def _end(self) -> int:
        """A number beyond the newest row."""
        ends = [end for spec in self.filter_specs if (end := getattr(spec, "end", None))]
        newest: int = self.root_queryset.order_by("-pk").values_list("pk", flat=True).first() or 0
        return int(min([newest + 1, *ends]))


class LongAdmin(OwnAdmin):
    """An admin class with such a list. `not_listed`: columns that the list has no use for."""

    ordering = ("-id",)
    sortable_by = ()
    list_per_page = 50
    not_listed: tuple[str, ...] = ()

    def places(self, using: str, term: str) -> list[Q]:
        """What a word that is searched for may stand for; nothing where there is no word."""
        raise NotImplementedError

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[LongList]:
        return LongList


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) <= 18 else None
