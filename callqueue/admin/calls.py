"""Calls in the admin: the list, the page of one call, the dashboard, and what may be done there.

Staff who may only view see everything, redacted, and can do nothing. Every change goes by POST and
into the log.
"""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.decorators import method_decorator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.csrf import csrf_protect

from callqueue.admin import dashboard, rule_page, simulate_page
from callqueue.admin.base import for_viewers
from callqueue.admin.call_actions import CallActions
from callqueue.admin.call_columns import CallColumns
from callqueue.admin.call_list import CallList
from callqueue.admin.call_views import CallViews
from callqueue.admin.changelist import KeepsPaginator
from callqueue.admin.filters import MethodFilter, RuleFilter, StatusFilter
from callqueue.admin.search import search
from callqueue.models import CallQueue


class CallQueueAdmin(KeepsPaginator, CallColumns, CallActions, CallViews):
    """The admin of calls."""

    list_display = (
        "id",
        "shown_status",
        "rule",
        "shown_key",
        "request_line",
        "last_error",
        "due",
        "age",
        "last_attempt",
    )
    list_display_links = ("id",)
    list_filter = (StatusFilter, RuleFilter, MethodFilter)
    date_hierarchy = "created_dt"
    search_fields = ("=id",)  # what is searched is in the module `search`
    search_help_text = gettext_lazy(
        "A number, a unique or idempotency key, how a key begins, a host, a path or a URL."
    )
    ordering = ("-id",)
    sortable_by = ("age",)
    list_per_page = 50
    actions = ("delete_selected", "requeue_calls", "cancel_calls")

    class Media:
        css = {"all": ("callqueue/admin.css", "callqueue/lists.css")}

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[CallList]:
        return CallList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[CallQueue], search_term: str
    ) -> Any:
        found = search(queryset.db, search_term)
        # beside what else the list is filtered by, for the list to merge
        request.callqueue_found = (found, queryset)  # type: ignore[attr-defined]
        return (queryset if found is None else found.filtered(queryset)), False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        more = {
            "title": _("Calls"),
            "selection_note_all": _("All that match are selected"),
            **(extra_context or {}),
        }
        return super().changelist_view(request, more)

    def get_urls(self) -> list[URLPattern]:
        pages = [
            ("dashboard/", self.dashboard_view, "dashboard"),
            ("dashboard/live/", self.live_view, "dashboard_live"),
            ("dashboard/simulate/", self.simulate_view, "simulate"),
            ("dashboard/rules/<path:name>/", self.rule_view, "rule"),
            ("<path:object_id>/requeue/", self.requeue_view, "callqueue_requeue"),
            ("<path:object_id>/cancel/", self.cancel_view, "callqueue_cancel"),
            ("<path:object_id>/forecast/", self.forecast_view, "callqueue_forecast"),
            ("<path:object_id>/edit/", self.edit_view, "callqueue_edit"),
        ]
        own = [
            path(route, self.admin_site.admin_view(view), name=f"callqueue_{name}")
            for route, view, name in pages
        ]
        return [*own, *super().get_urls()]

    @method_decorator(csrf_protect)
    @for_viewers
    def dashboard_view(self, request: HttpRequest) -> HttpResponse:
        """Where every rule stands, and what may be done about it."""
        return dashboard.page(request, self)

    @for_viewers
    def simulate_view(self, request: HttpRequest) -> HttpResponse:
        """What draining so many calls under a rule would take."""
        return simulate_page.page(request, self)

    @for_viewers
    def live_view(self, request: HttpRequest) -> HttpResponse:
        """The parts of the dashboard that change."""
        return dashboard.live(request, self)

    @method_decorator(csrf_protect)
    @for_viewers
    def rule_view(self, request: HttpRequest, name: str) -> HttpResponse:
        """One rule: its limits, its history, its keys, what failed."""
        return rule_page.page(request, self, name)
