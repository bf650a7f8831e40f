"""Holds, rules' states and attempts in the admin: to look at. What is done about them is done on
the dashboard.

Nothing is added, changed or deleted here.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Subquery
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.text import Truncator
from django.utils.translation import gettext_lazy as _

from callqueue import conf
from callqueue.admin import call_page
from callqueue.admin.attempt_filters import AnswerFilter, OutcomeFilter, RuleFilter, TimeFilter
from callqueue.admin.attempt_list import AttemptList, searched
from callqueue.admin.base import OwnAdmin, may
from callqueue.admin.changelist import KeepsPaginator
from callqueue.ledger import agreement, clock_jumps
from callqueue.models import CallAttempt, Hold, RuleState
from callqueue.operations import formatting
from callqueue.security.redaction import redact_headers, redact_text


def may_see_holds(request: HttpRequest) -> bool:
    """Whether to show why something is held, and which keys are. That a rule is held, whoever may
    view calls may see.
    """
    return may(request, "view_hold")


class _ViewOnly(OwnAdmin):
    actions = None

    class Media:
        css = {"all": ("callqueue/admin.css", "callqueue/lists.css")}

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class HoldAdmin(_ViewOnly):
    """Holds, in force and past."""

    list_display = ("rule", "per", "value", "placed_by", "reason", "began_at", "until", "in_force")
    ordering = ("rule", "per", "value")
    list_filter = ("source",)

    @admin.display(description=_("placed by"), ordering="source")
    def placed_by(self, hold: Hold) -> str:
        return hold.get_source_display()

    @admin.display(description=_("in force"), boolean=True)
    def in_force(self, hold: Hold) -> bool:
        return hold.until is None or hold.until > timezone.now()


class RuleStateAdmin(_ViewOnly):
    """What the dispensers remember of each rule."""

    list_display = ("rule", "passes", "changed")
    fields = ("rule", "passes", "changed")
    ordering = ("rule",)

    def get_queryset(self, request: HttpRequest) -> Any:
        """The rules, each with the changed limits of all of them."""
        of_all = RuleState.objects.filter(rule=agreement.ALL).values("rates")[:1]
        rules = super().get_queryset(request).exclude(rule__in=(agreement.ALL, clock_jumps.FRAME))
        return rules.annotate(changed_limits=Subquery(of_all))

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Who paused, resumed and changed what; with the reasons and the keys of holds in it."""
        if not may_see_holds(request):
            raise PermissionDenied
        return super().history_view(request, object_id, extra_context)

    @admin.display(description=_("changed limits"))
    def changed(self, state: Any) -> str:
        own = {budget.id for budget in conf.current().book.budgets.get(state.rule, ())}
        return ", ".join(
            f"{name}: {rate}" for name, rate in (state.changed_limits or {}).items() if name in own
        )


class CallAttemptAdmin(KeepsPaginator, _ViewOnly):
    """Attempts: what was sent and what was answered, newest first."""

    list_display = (
        "id",
        "call_link",
        "number",
        "rule",
        "shown_key",
        "shown_outcome",
        "response_status",
        "shown_error",
        "released",
        "took",
    )
    list_display_links = ("id",)
    list_filter = (OutcomeFilter, AnswerFilter, RuleFilter, TimeFilter)
    list_per_page = 50
    search_fields = ("=key",)  # what is searched is in the module `attempt_list`
    search_help_text = _("The number of a call, or a key in full.")
    ordering = ("-id",)
    sortable_by = ()

    fields = (
        "call_link", "label", "number", "rule", "key", "queue", "cost",
        "released_at", "send_at", "lease_until", "started_at", "sent_at", "finished_at",
        "outcome", "response_status", "headers", "body", "error", "worker",
    )  # fmt: skip
    readonly_fields = fields

    def get_queryset(self, request: HttpRequest) -> Any:
        return super().get_queryset(request).defer("response_headers", "response_body")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[AttemptList]:
        return AttemptList

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        return searched(queryset, search_term), False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        return super().changelist_view(request, {"title": _("Attempts"), **(extra_context or {})})

    @admin.display(description=_("key"))
    def shown_key(self, attempt: CallAttempt) -> str:
        return Truncator(attempt.key).chars(40)

    @admin.display(description=_("outcome"))
    def shown_outcome(self, attempt: CallAttempt) -> str:
        kind = call_page.OUTCOMES.get(attempt.outcome, "other")
        return format_html(
            '<span class="cq-status cq-{}">{}</span>', kind, attempt.get_outcome_display()
        )

    @admin.display(description=_("error"))
    def shown_error(self, attempt: CallAttempt) -> str:
        return Truncator(redact_text(attempt.error_message[:2000])).chars(80)

    @admin.display(description=_("released"))
    def released(self, attempt: CallAttempt) -> str:
        return formatting.instant(attempt.released_at)

    @admin.display(description=_("took"))
    def took(self, attempt: CallAttempt) -> str:
        begin = attempt.sent_at or attempt.started_at
        if begin is None or attempt.finished_at is None:
            return ""
        return formatting.short(max(0.0, (attempt.finished_at - begin).total_seconds()))

    @admin.display(description=_("call"))
    def call_link(self, attempt: CallAttempt) -> str:
        if attempt.call_id is None:
            return str(_("not queued"))
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
        return format_html("<pre>{}</pre>", redact_text(attempt.response_body)[:65536])

    @admin.display(description=_("error"))
    def error(self, attempt: CallAttempt) -> str:
        return redact_text(attempt.error_message)
