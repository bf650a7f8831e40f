"""Holds, rules' states and attempts in the admin: to look at. What is done about them is done on the dashboard.

Nothing is added, changed or deleted here.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from callqueue.admin.listing import BoundedPaginator
from callqueue.models import CallAttempt, Hold, RuleState
from callqueue.redaction import redact_headers, redact_text


class _ViewOnly(admin.ModelAdmin):  # type: ignore[type-arg]
    actions = None
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class HoldAdmin(_ViewOnly):
    """Holds, in force and past."""

    list_display = ("rule", "per", "value", "source", "reason", "began_at", "until", "in_force")
    ordering = ("rule", "per", "value")
    list_filter = ("source",)

    @admin.display(description=_("in force"), boolean=True)
    def in_force(self, hold: Hold) -> bool:
        return hold.until is None or hold.until > timezone.now()


class RuleStateAdmin(_ViewOnly):
    """What the dispensers remember of each rule."""

    list_display = ("rule", "passes", "changed")
    fields = ("rule", "passes", "rates")
    ordering = ("rule",)

    @admin.display(description=_("changed limits"))
    def changed(self, state: RuleState) -> str:
        return ", ".join(f"{name}: {rate}" for name, rate in (state.rates or {}).items())


class CallAttemptAdmin(_ViewOnly):
    """Attempts, reached from their call. The list is the newest first, without filters: there are more of them than calls."""

    list_display = ("id", "call_link", "number", "rule", "queue", "released_at", "finished_at", "outcome", "response_status")
    list_display_links = ("id",)
    ordering = ("-id",)
    sortable_by = ("id",)
    paginator = BoundedPaginator
    fields = (
        "call_link", "number", "rule", "key", "queue", "cost", "released_at", "send_at", "lease_until", "started_at",
        "sent_at", "finished_at", "outcome", "response_status", "headers", "body", "error", "worker",
    )  # fmt: skip
    readonly_fields = fields

    def get_queryset(self, request: HttpRequest) -> Any:
        return super().get_queryset(request).defer("response_headers", "response_body")

    def get_model_perms(self, request: HttpRequest) -> dict[str, bool]:
        """Not among the tables of the index: attempts are shown with their call."""
        return {}

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        return super().changelist_view(request, {"title": _("Attempts"), **(extra_context or {})})

    @admin.display(description=_("call"))
    def call_link(self, attempt: CallAttempt) -> str:
        url = reverse("admin:callqueue_callqueue_change", args=[attempt.call_id])
        return format_html('<a href="{}">{}</a>', url, attempt.call_id)

    @admin.display(description=_("response headers"))
    def headers(self, attempt: CallAttempt) -> str:
        lines = "\n".join(f"{name}: {value}" for name, value in redact_headers(attempt.response_headers).items())
        return format_html("<pre>{}</pre>", lines)

    @admin.display(description=_("response body"))
    def body(self, attempt: CallAttempt) -> str:
        return format_html("<pre>{}</pre>", redact_text(attempt.response_body)[:65536])

    @admin.display(description=_("error"))
    def error(self, attempt: CallAttempt) -> str:
        return redact_text(attempt.error_message)
