"""The filters of the lists: of calls, of attempts, of holds."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.contrib import admin
from django.db.models import Max, Min, Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from callqueue import conf, database, states
from callqueue.models import CallAttempt, CallQueue, Hold

STATUS, RULE, CREATED = "status__exact", "rule__exact", "created"
OUTCOME, ANSWER, ENDED = "outcome__exact", "answer", "ended"
NONE, OPEN = "none", "open"
CLASSES = {"2xx": 200, "3xx": 300, "4xx": 400, "5xx": 500}
CODES = ("401", "402", "403", "404", "409", "422", "429", "500", "502", "503", "504")
TIMES = {"10m": timedelta(minutes=10), "1h": timedelta(hours=1), "24h": timedelta(days=1)}
TIMES |= {"7d": timedelta(days=7), "30d": timedelta(days=30)}
SLACK = timedelta(minutes=10)  # by which clocks may have been set while calls were created
RULES = 1000  # that are looked up one by one
FINE = 1000  # how many calls a day's begin is found among
NOTHING = Q(pk=None)


class _Filter(admin.SimpleListFilter):
    """A filter that narrows the rows by the condition that its value means."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        return queryset if value is None else queryset.filter(self.condition(value, queryset.db))

    def condition(self, value: str, using: str) -> Q:
        """What a row is that the value picks."""
        raise NotImplementedError


class StatusFilter(_Filter):
    """By status."""

    title = _("status")
    parameter_name = STATUS

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(str(status.value), status.label) for status in CallQueue.Status]

    def condition(self, value: str, using: str) -> Q:
        if value not in map(str, CallQueue.Status.values):
            return NOTHING
        status = Q(status=int(value))
        # New calls are in two indexes: those that wait for their turn only, and those due later.
        return status & (Q(ready=True) | Q(ready=False)) if int(value) == states.NEW else status


class RuleFilter(_Filter):
    """By the rules of the settings."""

    title = _("rule")
    parameter_name = RULE

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in conf.current().rules]

    def condition(self, value: str, using: str) -> Q:
        return Q(rule=value)


class CreatedFilter(_Filter):
    """By the day on which calls were created. `end`: a number beyond those of that day."""

    end: int | None = None
    title = _("created")
    parameter_name = CREATED

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [
            ("today", _("today")),
            ("yesterday", _("yesterday")),
            ("7d", _("within 7 days")),
            ("30d", _("within 30 days")),
        ]

    def condition(self, value: str, using: str) -> Q:
        now = timezone.now()
        today = timezone.localtime(now) if timezone.is_aware(now) else now
        today = today.replace(hour=0, minute=0, second=0, microsecond=0)
        if value == "yesterday":
            self.end = _numbers_at(using, today + SLACK)[1]
            yesterday = _created_from(using, today - timedelta(days=1))
            return yesterday & Q(created_dt__lt=today, pk__lt=self.end)
        if value != "today" and value not in TIMES:
            return NOTHING
        return _created_from(using, today if value == "today" else now - TIMES[value])


def _created_from(using: str, instant: datetime) -> Q:
    return Q(pk__gte=_numbers_at(using, instant - SLACK)[0], created_dt__gte=instant)


def _numbers_at(using: str, instant: datetime) -> tuple[int, int]:
    """Two numbers between which the first call is that was created at this instant or later. No
    index has the calls by instant; but they are numbered as they come, so halving finds it.
    """
    calls = CallQueue.objects.using(using).order_by("pk")
    ends = calls.aggregate(first=Min("pk"), last=Max("pk"))
    first, last = ends["first"] or 0, (ends["last"] or 0) + 1
    while last - first > FINE:
        middle = (first + last) // 2
        at = calls.filter(pk__gte=middle).values_list("created_dt", flat=True).first()
        if at is not None and at < instant:
            first = middle
        else:
            last = middle
    return first, last


class AttemptRuleFilter(RuleFilter):
    """By the rules of the settings. What is open and what has ended is in an index each."""

    def condition(self, value: str, using: str) -> Q:
        return Q(rule=value) & (Q(finished_at__isnull=True) | Q(finished_at__isnull=False))


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
        none = (NONE, pgettext_lazy("an answer", "none"))
        return [none, *((name, name) for name in CLASSES), *codes]

    def condition(self, value: str, using: str) -> Q:
        if value == NONE:
            faulty = Q(response_status__isnull=True, outcome__in=states.FAULTY)
            return faulty | Q(finished_at__isnull=True, response_status__isnull=True)
        if value in CLASSES:
            first = CLASSES[value]
            return Q(response_status__gte=first, response_status__lt=first + 100)
        return Q(response_status=int(value)) if value.isdecimal() and len(value) == 3 else NOTHING


class EndedFilter(_Filter):
    """By how long ago attempts ended; what is open has not."""

    title = _("ended")
    parameter_name = ENDED

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [
            ("10m", _("within 10 minutes")),
            ("1h", _("within an hour")),
            ("24h", _("within 24 hours")),
            ("7d", _("within 7 days")),
        ]

    def condition(self, value: str, using: str) -> Q:
        if value not in TIMES:
            return NOTHING
        ended = Q(finished_at__isnull=False, finished_at__gte=database.clock(using) - TIMES[value])
        return of_any_rule(using, "finished_at IS NOT NULL") & ended


def of_any_rule(using: str, where: str) -> Q:
    """The rules that such attempts have, each: indexes begin by the rule. `where`: SQL."""
    table = CallAttempt._meta.db_table
    rules = database.distinct_next(
        using, table, "rule", where, [], after="", down=False, count=RULES
    )
    return Q(rule__in=rules) if len(rules) < RULES else Q()


class SourceFilter(_Filter):
    """By who laid a hold."""

    title = _("source")
    parameter_name = "source__exact"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(source.value, source.label) for source in Hold.Source]

    def condition(self, value: str, using: str) -> Q:
        return Q(source=value)
