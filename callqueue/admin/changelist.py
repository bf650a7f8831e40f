"""The lists of the admin, with a million calls: bounded counts, bounded pages, filters that never
read the whole table.

What an index answers is looked up in all calls. Any other filter looks through the newest WINDOW
calls (of the chosen dates, where dates are chosen), and the page says so. An address asks for what
a list offers, and for nothing else.
"""

from __future__ import annotations

import calendar
from collections.abc import Sequence
from datetime import date, datetime
from functools import cached_property
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import build_q_object_from_lookup_parameters, get_fields_from_path
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import Max, Min, Q, QuerySet
from django.http import HttpRequest
from django.utils import formats, timezone
from django.utils.translation import gettext_lazy as _

from callqueue import conf, database, states
from callqueue.handlers import methods
from callqueue.models import CallQueue

COUNTED = 10_000  # calls that match are counted up to here
WINDOW = 50_000  # calls that a filter without an index looks through
PAGES = 1000  # pages that can be turned; further back, by date
UNUSUAL = (
    states.DISPATCHED,
    states.ERROR,
    states.FAILED,
    states.CANCELLED,
    states.EXPIRED,
    states.UNKNOWN,
)
STATUS, RULE, METHOD = "status__exact", "rule__exact", "method__exact"
CREATED = "created_dt__"
DATES = (
    "year",
    "month",
    "day",
    "gte",
    "lt",
)  # of a date hierarchy: what its links say, and the two ends of a range


class OwnList(ChangeList):
    """A change list that is sorted by the columns that it offers. Django's heeds any column that an
    address names.
    """

    def get_ordering_field(self, field_name: Any) -> Any:
        return (
            super().get_ordering_field(field_name)
            if field_name in (self.sortable_by or ())
            else None
        )


class OwnAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """What every admin class of the app is: nothing is added or changed by Django's forms, and an
    address filters by the list's own filters alone. With any other lookup, staff could read letter
    by letter what is redacted, or keep a process busy.
    """

    list_max_show_all = 0
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return OwnList

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        if "\x00" in str(value):  # which no database takes in a text
            return False
        dates = {f"{self.date_hierarchy}__{part}" for part in DATES if self.date_hierarchy}
        return lookup in dates or any(
            lookup in self._parameters(item, request) for item in self.list_filter
        )

    def _parameters(self, item: Any, request: HttpRequest | None) -> Sequence[str | None]:
        """What a filter reads of an address."""
        if isinstance(item, type) and issubclass(item, admin.SimpleListFilter):
            return [item.parameter_name]
        field, kind = (
            item if isinstance(item, tuple | list) else (item, admin.FieldListFilter.create)
        )
        made = kind(
            get_fields_from_path(self.model, field)[-1], request, {}, self.model, self, field
        )
        return [] if made is None else made.expected_parameters()


class StatusFilter(admin.SimpleListFilter):
    """By status. What is new is found by the two halves of the waiting set, which have an index
    each.
    """

    title = _("status")
    parameter_name = STATUS

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(str(status.value), status.label) for status in CallQueue.Status]

    def queryset(self, request: HttpRequest, queryset: QuerySet[CallQueue]) -> QuerySet[CallQueue]:
        value = self.value()
        if value is None:
            return queryset
        if not value.isdecimal():
            return queryset.none()
        if int(value) == states.NEW:
            return queryset.filter(
                Q(status=states.NEW, ready=True) | Q(status=states.NEW, ready=False)
            )
        return queryset.filter(status=int(value))


class RuleFilter(admin.SimpleListFilter):
    """By the rules of the settings."""

    title = _("rule")
    parameter_name = RULE

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in conf.current().rules]

    def queryset(self, request: HttpRequest, queryset: QuerySet[CallQueue]) -> QuerySet[CallQueue]:
        return queryset if self.value() is None else queryset.filter(rule=self.value())


class MethodFilter(admin.SimpleListFilter):
    """By method."""

    title = _("method")
    parameter_name = METHOD

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in sorted(methods())]

    def queryset(self, request: HttpRequest, queryset: QuerySet[CallQueue]) -> QuerySet[CallQueue]:
        return queryset if self.value() is None else queryset.filter(method=self.value())


def search(queryset: QuerySet[CallQueue], term: str) -> QuerySet[CallQueue]:
    """The calls whose number, unique key or key is `term`, each found by its index."""
    term = term.strip()
    if not term:
        return queryset
    if "\x00" in term:
        return queryset.none()
    places = [Q(unique_key=term), Q(key=term)]
    if term.isdecimal() and len(term) <= 18:
        places.append(Q(pk=int(term)))
    every = CallQueue.objects.using(queryset.db).order_by()
    found = Q()
    for place in places:
        if every.filter(place).exists():
            found |= place
    return queryset.filter(found) if found else queryset.none()


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


class CallList(OwnList):
    """The change list of calls. `looked_through`: how many calls a filter was applied to, None
    where it was all.
    """

    looked_through: int | None = None
    paginator: BoundedPaginator | None = None

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
            self.count_text = _("about %s") % formats.number_format(
                counted.count, force_grouping=True
            )
        else:
            self.count_text = formats.number_format(self.result_count, force_grouping=True) + (
                "+" if counted.is_more else ""
            )

    def _active(self) -> set[str]:
        return {name for name in self.get_filters_params() if not name.startswith(CREATED)}

    def _has_dates(self) -> bool:
        return any(name.startswith(CREATED) for name in self.get_filters_params())

    def _is_indexed(self) -> bool:
        active = self._active()
        if not active or (self.query and not active):
            return True
        status = self.params.get(STATUS, "")
        return (
            active == {STATUS}
            and not self._has_dates()
            and status.isdecimal()
            and int(status) in (states.NEW, *UNUSUAL)
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
        if len(last_two) == 2:
            self.looked_through = WINDOW
            rows = rows.filter(
                created_dt__gte=last_two[0]
            )  # with those of the same instant: rather more than fewer
        return rows

    def _chosen_dates(self) -> Q:
        """The date part of the filters, as Django's own date hierarchy reads it."""
        chosen: dict[str, Any] = self.get_filters(self._request)[2]
        return build_q_object_from_lookup_parameters(
            {name: values for name, values in chosen.items() if name.startswith(CREATED)}
        )

    def __init__(self, request: HttpRequest, *args: Any) -> None:
        self._request = request
        self.count_text = ""
        super().__init__(request, *args)

    # --- the date hierarchy: Django's reads every row for the days there are; this one offers the days between the ends

    def date_choices(self) -> dict[str, Any]:
        """What the page offers: {"back": {...} | None, "choices": [{"link", "title"}]}."""
        ends = CallQueue.objects.using(self.root_queryset.db).aggregate(
            first=Min("created_dt"), last=Max("created_dt")
        )
        if ends["first"] is None:
            return {}
        first, last = (_local(ends[name]).date() for name in ("first", "last"))
        year, month, day = (
            _whole(self.params.get(f"{CREATED}{part}")) for part in ("year", "month", "day")
        )
        if year is None:
            if first.year != last.year:
                return {
                    "choices": [
                        self._choice(str(y), year=y) for y in range(first.year, last.year + 1)
                    ]
                }
            if first.month != last.month:
                return {"choices": self._months(first.year, first, last)}
            return {"choices": self._days(first.year, first.month, first, last)}
        if not 1 <= year <= 9999 or (month is not None and not 1 <= month <= 12):
            return {}
        if month is None:
            return {
                "back": self._choice(_("All dates")),
                "choices": self._months(year, first, last),
            }
        if day is None:
            return {
                "back": self._choice(str(year), year=year),
                "choices": self._days(year, month, first, last),
            }
        choices = [{"title": _day(year, month, day)}]
        return {
            "back": self._choice(_month(year, month), year=year, month=month),
            "choices": choices,
        }

    def _months(self, year: int, first: date, last: date) -> list[dict[str, Any]]:
        months = [
            m
            for m in range(1, 13)
            if (first.year, first.month) <= (year, m) <= (last.year, last.month)
        ]
        return [self._choice(_month(year, m), year=year, month=m) for m in months]

    def _days(self, year: int, month: int, first: date, last: date) -> list[dict[str, Any]]:
        days = range(1, calendar.monthrange(year, month)[1] + 1)
        between = [d for d in days if first <= date(year, month, d) <= last]
        return [self._choice(_day(year, month, d), year=year, month=month, day=d) for d in between]

    def _choice(self, title: Any, **chosen: int) -> dict[str, Any]:
        link = self.get_query_string(
            {f"{CREATED}{part}": value for part, value in chosen.items()}, remove=[CREATED]
        )
        return {"link": link, "title": title}


def _month(year: int, month: int) -> str:
    return formats.date_format(date(year, month, 1), "YEAR_MONTH_FORMAT")


def _day(year: int, month: int, day: int) -> str:
    """As the reader's language writes it; a day that there is not, as a number."""
    try:
        return formats.date_format(date(year, month, day), "MONTH_DAY_FORMAT")
    except ValueError:
        return str(day)


def _local(instant: datetime) -> datetime:
    return timezone.localtime(instant) if timezone.is_aware(instant) else instant


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) <= 4 else None
