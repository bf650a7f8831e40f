"""Calls in the admin: the list, the page of one call, the dashboard, and what may be done there.

Staff who may only view see everything, redacted, and can do nothing. Every change goes by POST and
into the log.
"""

from __future__ import annotations

from typing import Any

from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.decorators import method_decorator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.csrf import csrf_protect

from callqueue.admin import dashboard, rule_page
from callqueue.admin.base import for_viewers
from callqueue.admin.call_actions import CallActions
from callqueue.admin.call_columns import CallColumns
from callqueue.admin.call_views import CallViews
from callqueue.admin.changelist import LongAdmin
from callqueue.admin.filters import CreatedFilter, RuleFilter, StatusFilter
from callqueue.admin.search import places


class CallQueueAdmin(LongAdmin, CallColumns, CallActions, CallViews):
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
    list_filter = (StatusFilter, RuleFilter, CreatedFilter)
    search_fields = ("=id",)  # what is searched is in the module `search`
    search_help_text = gettext_lazy(
        "A number, a unique or idempotency key, how a key begins, a host, a path or a URL."
    )
    not_listed = ("call_data",)
    actions = ("requeue_calls", "cancel_calls")

    class Media:
        css = {"all": ("callqueue/admin.css", "callqueue/lists.css")}

    def places(self, using: str, term: str) -> list[Q]:
        return places(using, term)

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
            ("dashboard/rule/", self.rule_view, "rule"),
            ("<path:object_id>/requeue/", self.requeue_view, "callqueue_requeue"),
            ("<path:object_id>/cancel/", self.cancel_view, "callqueue_cancel"),
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

    @method_decorator(csrf_protect)
    @for_viewers
    def rule_view(self, request: HttpRequest) -> HttpResponse:
        """One rule: its limits, its history, its keys, what failed."""
        return rule_page.page(request, self)
