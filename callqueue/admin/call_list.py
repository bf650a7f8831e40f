"""The list of calls: what is filtered by status, rule, method and date, and what is searched for,
as indexes have it.
"""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest

from callqueue import database
from callqueue.admin.changelist import MergedList, Stretches
from callqueue.admin.date_choices import CREATED, DatedList
from callqueue.admin.filters import FILTERED
from callqueue.admin.search import Found
from callqueue.models import CallQueue

BY_CREATION = ("-created_dt", "-pk")
COLUMNS = ("rule", "status", "method")  # what the index callqueue_listed begins with


class CallList(DatedList, MergedList):
    """The change list of calls."""

    def __init__(self, request: HttpRequest, *args: Any) -> None:
        self._request = request
        super().__init__(request, *args)

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: Any = None
    ) -> QuerySet[CallQueue]:
        rows: QuerySet[CallQueue] = super().get_queryset(request, exclude_parameters)
        return rows.defer("call_data")

    def is_backwards(self) -> bool:
        return self._first_column() == "created_dt"

    def _first_column(self) -> str:
        return str(self.get_ordering(self._request, self.root_queryset)[0])

    def stretches(self, rows: QuerySet[CallQueue]) -> Stretches | None:
        searched: tuple[Found | None, QuerySet[CallQueue]]
        searched = getattr(self._request, "callqueue_found", (None, rows))
        found, among = searched
        if found is not None:
            return found.stretches(among, BY_CREATION)
        given, is_sorted = self._given(), self._first_column().endswith("created_dt")
        if not given and not is_sorted and not self._has_dates():
            return None
        table = CallQueue._meta.db_table
        each = database.combinations(rows.db, table, COLUMNS, given)
        if each is None:
            return None
        return Stretches([database.Alike(rows.order_by(), COLUMNS, each)], BY_CREATION)

    def _has_dates(self) -> bool:
        return any(name.startswith(CREATED) for name in self.get_filters_params())

    def _given(self) -> dict[str, Any]:
        """What the filters at the side say, by column."""
        given: dict[str, Any] = {
            column: self.params[name] for name, column in FILTERED.items() if name in self.params
        }
        if "status" in given:
            text = str(given["status"])
            given["status"] = int(text) if text.isdecimal() and len(text) < 5 else -1
        return given
