"""What every class of the app's admin shares: permissions, lists, pages, the log, the database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.contrib import admin
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db import router
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.text import capfirst

from callqueue.models import CallQueue


class OwnList(ChangeList):
    """A change list that is sorted by the columns that it offers, and not by others."""

    def get_ordering_field(self, field_name: Any) -> Any:
        is_offered = field_name in (self.sortable_by or ())
        return super().get_ordering_field(field_name) if is_offered else None


class OwnAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """What every admin class of the app is: nothing is added or changed by Django's forms, and an
    address filters by the list's own filters alone. With any other lookup, staff could read letter
    by letter what is redacted, or keep a process busy.
    """

    list_max_show_all = 0
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        more = {"title": capfirst(self.opts.verbose_name_plural), **(extra_context or {})}
        return super().changelist_view(request, more)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return OwnList

    def check_may_view(self, request: HttpRequest) -> None:
        if not self.has_view_permission(request):
            raise PermissionDenied

    def render_page(
        self,
        request: HttpRequest,
        template: str,
        title: Any,
        context: Mapping[str, Any],
        *,
        status: int = 200,
    ) -> TemplateResponse:
        """A page of the admin's own; `template` is below "admin/callqueue/"."""
        common = {
            **self.admin_site.each_context(request),
            "title": title,
            "app_name": self.opts.app_config.verbose_name,
            "media": self.media,
        }
        # Themes head a page by its model, if it has one, else by its title.
        is_of_calls = template.startswith("callqueue/")
        common |= {"opts": self.opts} if is_of_calls else {"content_title": title}
        path = f"admin/callqueue/{template}"
        return TemplateResponse(request, path, {**common, **context}, status=status)

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        if "\x00" in str(value):  # which no database takes in a text
            return False
        filters: Any = self.list_filter
        return lookup in {one.parameter_name for one in filters}


def has_permission(request: HttpRequest, permission: str) -> bool:
    return bool(request.user.has_perm(f"callqueue.{permission}"))


def db_alias() -> str:
    return router.db_for_write(CallQueue)


def user_id(request: HttpRequest) -> int:
    pk: int = request.user.pk  # type: ignore[assignment]
    return pk


def log_change(user_id: int, row: Model, message: str) -> None:
    LogEntry.objects.log_actions(user_id, [row], CHANGE, message, single_object=True)
