"""The filters and the search of the list of calls."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from callqueue import conf, states
from callqueue.handlers import methods
from callqueue.models import CallQueue

STATUS, RULE, METHOD = "status__exact", "rule__exact", "method__exact"


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
