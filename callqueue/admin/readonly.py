"""Holds and attempts in the admin: to look at. What is done about them is done on the dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib import admin
from django.db.models import F, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.text import Truncator
from django.utils.translation import gettext_lazy as _

from callqueue import database
from callqueue.admin import call_page
from callqueue.admin.base import OwnAdmin, has_permission
from callqueue.admin.lists import (
    AttemptRuleFilter,
    EndedFilter,
    LongAdmin,
    OutcomeFilter,
    RuleFilter,
    parse_pk,
    rules_for_index,
)
from callqueue.ledger.ledger_time import ROW, LedgerNow
from callqueue.look import words
from callqueue.models import CallAttempt, Hold, LedgerState
from callqueue.security.redaction import redact_headers, redact_text


def may_see_holds(request: HttpRequest) -> bool:
    """Whether to show why rules are held, and which keys are. That a rule is held, all may see."""
    return has_permission(request, "view_hold")


class _ViewOnly(OwnAdmin):
    actions = None

    class Media:
        css = {"all": ("callqueue/admin.css", "callqueue/lists.css")}

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class HoldAdmin(_ViewOnly):
    list_display = ("rule", "per", "value", "state", "since", "ends", "source", "reason")
    ordering = (F("until").desc(nulls_first=True), "rule", "per", "value")
    sortable_by = ()
    list_filter = (RuleFilter,)
    fields = ("rule", "per", "value", "state", "since", "ends", "source", "reason")
    readonly_fields = fields

    def get_queryset(self, request: HttpRequest) -> QuerySet[Hold]:
        rows = super().get_queryset(request)
        moved = LedgerState.objects.using(rows.db).filter(pk=ROW).values("moved")
        found: QuerySet[Hold] = rows.annotate(now=LedgerNow(), moved=Coalesce(Subquery(moved), 0))
        return found

    @admin.display(description=_("state"))
    def state(self, hold: Any) -> str:
        is_over = hold.until is not None and hold.until <= hold.now
        kind, said = ("done", _("over")) if is_over else ("unknown", _("in force"))
        return format_html('<span class="cq-status cq-{}">{}</span>', kind, said)

    @admin.display(description=_("since"))
    def since(self, hold: Any) -> str:
        return words.instant(hold.began_at + hold.moved * database.MICROSECOND)

    @admin.display(description=_("until"))
    def ends(self, hold: Any) -> str:
        if not hold.until:
            return str(_("until it is resumed"))
        return words.instant(hold.until + hold.moved * database.MICROSECOND)


class CallAttemptAdmin(LongAdmin, _ViewOnly):
    list_display = (
        "id",
        "call_link",
        "number",
        "rule",
        "key",
        "outcome",
        "response_status",
        "shown_error",
        "released",
        "took",
    )
    list_display_links = ("id",)
    list_filter = (OutcomeFilter, AttemptRuleFilter, EndedFilter)
    search_fields = ("=key",)  # what is searched is in `search_meanings`
    search_help_text = _("The number of a call, or a key in full.")
    not_listed = ("response_headers", "response_body")

    fields = (
        "call_link", "number", "rule", "key", "queue", "cost",
        "released_at", "send_at", "lease_until", "started_at", "sent_at", "finished_at",
        "outcome", "response_status", "headers", "response_size", "body", "error", "worker",
    )  # fmt: skip
    readonly_fields = fields

    def search_meanings(self, using: str, term: str) -> Iterator[Q]:
        if (number := parse_pk(term)) is not None:
            yield Q(call_id=number)
        has_key = f"NOT ({database.quoted(using, 'key')} = '')"
        yield rules_for_index(using, has_key) & Q(key=term) & ~Q(key="")

    @admin.display(description=_("error"))
    def shown_error(self, attempt: CallAttempt) -> str:
        return Truncator(redact_text(attempt.error_message[:2000])).chars(80)

    @admin.display(description=_("released"))
    def released(self, attempt: CallAttempt) -> str:
        return words.instant(attempt.released_at)

    @admin.display(description=_("took"))
    def took(self, attempt: CallAttempt) -> str:
        begin = attempt.sent_at or attempt.started_at
        if begin is None or attempt.finished_at is None:
            return ""
        return words.short_duration(max(0.0, (attempt.finished_at - begin).total_seconds()))

    @admin.display(description=_("call"))
    def call_link(self, attempt: CallAttempt) -> str:
        url = reverse("admin:callqueue_callqueue_change", args=[attempt.call_id])
        return format_html('<a href="{}">{}</a>', url, attempt.call_id)

    @admin.display(description=_("response headers"))
    def headers(self, attempt: CallAttempt) -> str:
        lines = "\n".join(
            f"{name}: {value}" for name, value in redact_headers(attempt.response_headers).items()
        )
        return format_html("<pre>{}</pre>", lines)

    @admin.display(description=_("response body"))
    def body(self, attempt: CallAttempt) -> str:
        body, note = call_page.body_and_note(attempt)
        return format_html("{}<pre>{}</pre>", note, body)

    @admin.display(description=_("error"))
    def error(self, attempt: CallAttempt) -> str:
        return redact_text(attempt.error_message)
