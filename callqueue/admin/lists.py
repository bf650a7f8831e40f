"""Lists of many rows, newest first, page after page, counted up to COUNTED; and their filters.

What matches fewer rows is read whole, by the index of its filter. Of what matches more, a page is
looked for among the next rows first, and only then among all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.db.models import F, Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from callqueue import conf, database, states
from callqueue.admin.base import OwnAdmin, OwnList
from callqueue.ledger import ledger_time
from callqueue.look import words
from callqueue.models import CallAttempt, CallQueue

COUNTED = 1000
NEAR = (5_000, 50_000)  # numbers next to a page's begin, among which it is looked for first
BEFORE = "before"  # in an address: the number that a page goes on from
RULES = 1000  # that are looked up one by one
NOTHING = Q(pk=None)


class LongList(OwnList):
    model_admin: LongAdmin
    older = newest = ""  # addresses of the next page (empty: none) and of the first (empty: this)

    def __init__(self, request: HttpRequest, *args: Any) -> None:
        self.before = parse_pk(request.GET.get(BEFORE))
        super().__init__(request, *args)

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        # no filter, and no link of one begins at a later page
        self.params.pop(BEFORE, None)
        self.filter_params.pop(BEFORE, None)
        query, self.query = self.query, ""
        rows: QuerySet[Any] = super().get_queryset(request, exclude_parameters)
        self.query = query
        # the rows that each condition matches, by themselves: each has an index of its own
        conditions = self.model_admin.search_conditions(rows.db, query) or [Q()]
        self.rows_by_condition = [rows.filter(one).order_by() for one in conditions]
        every = Q()
        for one in conditions:
            every |= one
        return rows.filter(every)

    def get_results(self, request: HttpRequest) -> None:
        matching, size = set[int](), self.list_per_page
        with database.index_scans(self.queryset.db):
            for rows in self.rows_by_condition:
                if len(matching) <= COUNTED:
                    matching.update(rows.values_list("pk", flat=True)[: COUNTED + 1])
            is_more = len(matching) > COUNTED
            pks = self._next_pks(None if is_more else matching)
        if len(pks) > size:
            self.older = self.get_query_string({BEFORE: pks[size - 1]})
        self.newest = "" if self.before is None else self.get_query_string({})
        by_pk = self.root_queryset.defer(*self.model_admin.not_listed).in_bulk(pks[:size])
        self.result_list = [by_pk[pk] for pk in pks[:size] if pk in by_pk]
        # what Django's templates ask a list for
        shown = words.count(min(len(matching), COUNTED))
        self.count_text = _("more than %s") % shown if is_more else shown
        self.result_count = min(len(matching), COUNTED + 1)
        # Beside the search, Django says how many there are as if that were all.
        self.full_result_count = self.result_count if is_more or not self.query else None
        self.show_full_result_count = self.can_show_all = self.multi_page = False
        self.show_admin_actions = True
        self.paginator = self.model_admin.get_paginator(request, self.queryset, size)

    def _next_pks(self, matching: set[int] | None) -> list[int]:
        """The page's numbers, newest first, and one more. `matching`: all there are; None: many."""
        start, most = self.before, self.list_per_page + 1
        if start is None:
            pks = self.root_queryset.order_by("-pk").values_list("pk", flat=True)
            start = (pks.first() or 0) + 1
        if matching is not None:
            return sorted((pk for pk in matching if pk < start), reverse=True)[:most]
        for width in NEAR:
            found = self._newest_pks(Q(pk__lt=start, pk__gte=start - width), F("pk"), most)
            if len(found) == most:
                return found
        # As a sum: else databases go through all the rows there are until enough match.
        return self._newest_pks(Q(pk__lt=start), F("pk") + 0, most)

    def _newest_pks(self, where: Q, order: Any, most: int) -> list[int]:
        found = set[int]()
        for rows in self.rows_by_condition:
            ordered = rows.filter(where).order_by(order.desc())
            found.update(ordered.values_list("pk", flat=True)[:most])
        return sorted(found, reverse=True)[:most]


class LongAdmin(OwnAdmin):
    ordering = ("-id",)
    sortable_by = ()
    list_per_page = 50
    not_listed: tuple[str, ...] = ()  # columns that the list has no use for

    def search_conditions(self, using: str, term: str) -> list[Q]:
        """What a searched word may stand for: a condition for each index; [] for no word."""
        term = term.strip()
        if "\x00" in term:
            return [NOTHING]
        return list(self.search_meanings(using, term)) if term else []

    def search_meanings(self, using: str, term: str) -> Iterator[Q]:
        raise NotImplementedError

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[LongList]:
        return LongList


def parse_pk(text: str | None) -> int | None:
    """The number of a row that a text is; None where it is none."""
    return int(text) if text and text.isdecimal() and len(text) <= 18 else None


# --- filters


class _Filter(admin.SimpleListFilter):
    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        return queryset if value is None else queryset.filter(self.condition(value, queryset.db))

    def condition(self, value: str, using: str) -> Q:
        raise NotImplementedError


class StatusFilter(_Filter):
    title = gettext_lazy("status")
    parameter_name = "status__exact"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(str(status.value), status.label) for status in CallQueue.Status]

    def condition(self, value: str, using: str) -> Q:
        if value not in map(str, CallQueue.Status.values):
            return NOTHING
        status = Q(status=int(value))
        # New calls are in two indexes: those that wait for their turn only, and those due later.
        return status & (Q(ready=True) | Q(ready=False)) if int(value) == states.NEW else status


class RuleFilter(_Filter):
    title = gettext_lazy("rule")
    parameter_name = "rule__exact"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in conf.current().rules]

    def condition(self, value: str, using: str) -> Q:
        return Q(rule=value)


class AttemptRuleFilter(RuleFilter):
    def condition(self, value: str, using: str) -> Q:
        # What is open and what has ended is in an index each.
        return Q(rule=value) & (Q(finished_at__isnull=True) | Q(finished_at__isnull=False))


class OutcomeFilter(_Filter):
    title = gettext_lazy("outcome")
    parameter_name = "outcome__exact"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(one.value or "open", one.label) for one in CallAttempt.Outcome]

    def condition(self, value: str, using: str) -> Q:
        return Q(finished_at__isnull=True) if value == "open" else Q(outcome=value)


class EndedFilter(_Filter):
    title = gettext_lazy("ended")
    parameter_name = "ended"
    hours = {"1h": 1, "24h": 24, "7d": 7 * 24}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        said = (_("within an hour"), _("within 24 hours"), _("within 7 days"))
        return list(zip(self.hours, said, strict=True))

    def condition(self, value: str, using: str) -> Q:
        if value not in self.hours:
            return NOTHING
        since = ledger_time.now(using) - timedelta(hours=self.hours[value])
        ended = Q(finished_at__isnull=False, finished_at__gte=since)
        return rules_for_index(using, "finished_at IS NOT NULL") & ended


def rules_for_index(using: str, where: str) -> Q:
    """Q of the rules of attempts `where` (SQL), read here: indexes begin by rule. Q() if many."""
    table = CallAttempt._meta.db_table
    rules = database.next_distinct(
        using, table, "rule", where, [], after="", down=False, count=RULES
    )
    return Q(rule__in=rules) if len(rules) < RULES else Q()
