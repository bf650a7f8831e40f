"""The filters of the list of attempts: by outcome, answer, rule and time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from callqueue import conf, database, states
from callqueue.models import CallAttempt

OUTCOME, ANSWER, RULE, TIME = "outcome__exact", "answer", "rule__exact", "ended"
NONE, OPEN = "none", "open"
CLASSES = {"2xx": 200, "3xx": 300, "4xx": 400, "5xx": 500}
CODES = ("401", "402", "403", "404", "409", "422", "429", "500", "502", "503", "504")
TIMES = {"10m": timedelta(minutes=10), "1h": timedelta(hours=1), "24h": timedelta(days=1)}
TIMES["7d"] = timedelta(days=7)


class _Filter(admin.SimpleListFilter):
    """A filter that narrows the rows by the condition that its value means."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        return queryset if value is None else queryset.filter(self.condition(value, queryset.db))

    def condition(self, value: str, using: str) -> Q:
        """What a row is that the value picks."""
        raise NotImplementedError


class OutcomeFilter(_Filter):
    """By how attempts ended."""

    title = _("outcome")
    parameter_name = OUTCOME

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(one.value or OPEN, one.label) for one in CallAttempt.Outcome]

    def condition(self, value: str, using: str) -> Q:
        return Q(finished_at__isnull=True) if value == OPEN else Q(outcome=value)


class AnswerFilter(_Filter):
    """By the status of the answer: one, or all of a hundred."""

    title = _("answer")
    parameter_name = ANSWER

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        given = request.GET.get(ANSWER, "")
        more = [given] if given.isdecimal() and len(given) == 3 and given not in CODES else []
        codes = [(code, code) for code in sorted([*CODES, *more])]
        return [
            (NONE, pgettext_lazy("an answer", "none")),
            *((name, name) for name in CLASSES),
            *codes,
        ]

    def condition(self, value: str, using: str) -> Q:
        if value == NONE:
            return Q(response_status__isnull=True) & ~Q(outcome=states.SUCCEEDED)
        if value in CLASSES:
            first = CLASSES[value]
            return Q(response_status__gte=first, response_status__lt=first + 100)
        return Q(response_status=int(value) if value.isdecimal() and len(value) == 3 else -1)


class RuleFilter(_Filter):
    """By the rules of the settings."""

    title = _("rule")
    parameter_name = RULE

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, name) for name in conf.current().rules]

    def condition(self, value: str, using: str) -> Q:
        return Q(rule=value)


class TimeFilter(_Filter):
    """By how long ago attempts ended; what is open has not."""

    title = _("ended")
    parameter_name = TIME

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [
            ("10m", _("within 10 minutes")),
            ("1h", _("within an hour")),
            ("24h", _("within 24 hours")),
            ("7d", _("within 7 days")),
        ]

    def condition(self, value: str, using: str) -> Q:
        ago = TIMES.get(value)
        return Q(pk=None) if ago is None else Q(finished_at__gte=database.clock(using) - ago)
