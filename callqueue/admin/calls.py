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

from callqueue.admin import dashboard, simulate_page
from callqueue.admin.base import for_viewers
from callqueue.admin.call_actions import CallActions
from callqueue.admin.call_columns import CallColumns
from callqueue.admin.call_views import CallViews
from callqueue.admin.changelist import BoundedPaginator, CallList
from callqueue.admin.filters import MethodFilter, RuleFilter, StatusFilter, search
from callqueue.models import CallQueue


class CallQueueAdmin(CallColumns, CallActions, CallViews):
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
    search_fields = ("=id", "=unique_key", "=key")
    search_help_text = gettext_lazy("A call's number, its unique key or its key, in full.")
    ordering = ("-id",)
    sortable_by = ("id", "age")
    paginator = BoundedPaginator
    list_per_page = 50
    actions = ("delete_selected", "requeue_calls", "cancel_calls")

    class Media:
        css = {"all": ("callqueue/admin.css",)}

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[CallList]:
        return CallList

    def get_paginator(self, request: HttpRequest, *args: Any, **kwargs: Any) -> BoundedPaginator:
        """Kept with the request, so that the page can say how it counted without counting again."""
        made = request.callqueue_paginator = self.paginator(*args, **kwargs)  # type: ignore[attr-defined]
        return made

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        """By the time they were made where dates are chosen: the index of the dates then has them
        in order.
        """
        has_dates = any(name.startswith("created_dt__") for name in request.GET)
        return ("-created_dt", "-id") if has_dates else ("-id",)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[CallQueue], search_term: str
    ) -> Any:
        return search(queryset, search_term), False

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
