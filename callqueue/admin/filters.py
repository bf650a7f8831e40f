"""The filters of the list of calls."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from callqueue import conf
from callqueue.handlers import methods
from callqueue.models import CallQueue

STATUS, RULE, METHOD = "status__exact", "rule__exact", "method__exact"
# by name in an address, the column that an index has
FILTERED = {STATUS: "status", RULE: "rule", METHOD: "method"}


class StatusFilter(admin.SimpleListFilter):
    """By status."""

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
        return queryset.filter(status=int(value) if len(value) < 5 else -1)


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
