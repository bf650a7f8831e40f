"""The list of calls, with a million of them: bounded counts, bounded pages, filters that never read
the whole table.

What an index answers is looked up in all calls. Any other filter looks through the newest WINDOW
calls (of the chosen dates, where dates are chosen), and the page says so.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from django.contrib.admin.utils import build_q_object_from_lookup_parameters
from django.core.paginator import Paginator
from django.db.models import Max, Min, Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from callqueue import database, states
from callqueue.admin.date_choices import CREATED, DatedList
from callqueue.admin.filters import STATUS
from callqueue.models import CallQueue
from callqueue.operations.formatting import count

COUNTED = 10_000  # calls that match are counted up to here
WINDOW = 50_000  # calls that a filter without an index looks through
PAGES = 1000  # pages that can be turned; further back, by date


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts what is filtered up to COUNTED, takes the database's estimate of the whole, and turns
    PAGES pages at most.
    """

    is_estimate = is_more = False

    @cached_property
    def count(self) -> int:
        rows: Any = self.object_list
        if not rows.query.where:
            estimate = database.estimated_rows(rows.db, rows.model._meta.db_table)
            if estimate is not None and estimate > COUNTED:
                self.is_estimate = True
                return estimate
        counted = int(rows.order_by()[: COUNTED + 1].count())
        self.is_more = counted > COUNTED
        return min(counted, COUNTED)

    @cached_property
    def num_pages(self) -> int:
        return min(super().num_pages, PAGES)


class CallList(DatedList):
    """The change list of calls. `looked_through`: how many calls a filter was applied to, None
    where it was all.
    """

    looked_through: int | None = None
    paginator: BoundedPaginator | None = None

    def __init__(self, request: HttpRequest, *args: Any) -> None:
        self._request = request
        self.count_text = ""
        super().__init__(request, *args)

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: Any = None
    ) -> QuerySet[CallQueue]:
        rows: QuerySet[CallQueue] = super().get_queryset(request, exclude_parameters)
        if not self._is_indexed():
            rows = self._within_window(rows)
        return rows.defer("call_data")

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        counted = self.paginator = request.callqueue_paginator  # type: ignore[attr-defined]
        if counted.is_estimate:
            self.count_text = _("about %s") % count(counted.count)
        else:
            self.count_text = count(self.result_count) + ("+" if counted.is_more else "")

    def _active(self) -> set[str]:
        return {name for name in self.get_filters_params() if not name.startswith(CREATED)}

    def _has_dates(self) -> bool:
        return any(name.startswith(CREATED) for name in self.get_filters_params())

    def _is_indexed(self) -> bool:
        active = self._active()
        if not active:
            return True
        status = self.params.get(STATUS, "")
        return (
            active == {STATUS}
            and not self._has_dates()
            and status.isdecimal()
            and int(status) in (states.NEW, *states.UNUSUAL)
        )

    def _within_window(self, rows: QuerySet[CallQueue]) -> QuerySet[CallQueue]:
        every = CallQueue.objects.using(rows.db).order_by()
        ends = every.aggregate(first=Min("pk"), last=Max("pk"))
        if ends["last"] is None or ends["last"] - ends["first"] < WINDOW:
            return rows
        estimate = database.estimated_rows(rows.db, CallQueue._meta.db_table)
        if estimate is not None and estimate <= WINDOW:
            return rows
        if not self._has_dates():
            self.looked_through = WINDOW
            return rows.filter(pk__gt=ends["last"] - WINDOW)
        chosen = (
            every.filter(self._chosen_dates())
            .order_by("-created_dt")
            .values_list("created_dt", flat=True)
        )
        last_two = list(chosen[WINDOW - 1 : WINDOW + 1])
        if len(last_two) < 2:
            return rows
        self.looked_through = WINDOW
        # with those of the same instant: rather more than fewer
        return rows.filter(created_dt__gte=last_two[0])

    def _chosen_dates(self) -> Q:
        """The date part of the filters, as Django's own date hierarchy reads it."""
        chosen: dict[str, Any] = self.get_filters(self._request)[2]
        return build_q_object_from_lookup_parameters(
            {name: values for name, values in chosen.items() if name.startswith(CREATED)}
        )
