"""Calls in the admin: the list, the pages of one call, and what may be done there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db import router
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.html import format_html
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from callqueue import database, states
from callqueue.admin import call_page, dashboard, edit_call, rule_page
from callqueue.admin.base import log_change, user_id
from callqueue.admin.call_actions import CallActions, call_url
from callqueue.admin.lists import LongAdmin, RuleFilter, StatusFilter, parse_pk
from callqueue.admin.readonly import may_see_holds
from callqueue.exceptions import CallQueueError
from callqueue.look import words
from callqueue.models import CallQueue
from callqueue.security.redaction import redact_call_data, redact_text


class CallQueueAdmin(LongAdmin, CallActions):
    list_display = (
        "id",
        "shown_status",
        "rule",
        "key",
        "request_line",
        "last_error",
        "due",
        "age",
        "last_attempt",
    )
    list_display_links = ("id",)
    list_filter = (StatusFilter, RuleFilter)
    search_fields = ("=id",)  # what is searched is in `search_meanings`
    search_help_text = gettext_lazy(
        "A number, a unique key, an idempotency key, or how a key begins."
    )
    not_listed = ("call_data",)
    actions = ("requeue_calls", "cancel_calls")

    class Media:
        css = {"all": ("callqueue/admin.css", "callqueue/lists.css")}

    def search_meanings(self, using: str, term: str) -> Iterator[Q]:
        if (number := parse_pk(term)) is not None:
            yield Q(pk=number)
        yield Q(unique_key=term)
        with suppress(ValueError):
            yield Q(idempotency_key=UUID(term))
        yield database.begins_with(using, "key", term) & ~Q(key="")

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        more = {"selection_note_all": _("All that match are selected"), **(extra_context or {})}
        return super().changelist_view(request, more)

    def get_urls(self) -> list[URLPattern]:
        pages: list[tuple[str, Any, str]] = [
            ("dashboard/", partial(dashboard.page, admin=self), "dashboard"),
            ("dashboard/rule/", partial(rule_page.page, admin=self), "rule"),
            ("<path:object_id>/edit/", self.edit_view, "callqueue_edit"),
        ]
        own = [
            path(route, self.admin_site.admin_view(view), name=f"callqueue_{name}")
            for route, view, name in pages
        ]
        return [*own, *super().get_urls()]

    # --- columns of the list

    @admin.display(description=gettext_lazy("status"))
    def shown_status(self, call: CallQueue) -> str:
        return format_html(
            '<span class="cq-status cq-{}">{}</span>',
            call_page.css_class_of(call.status),
            call.get_status_display(),
        )

    @admin.display(description=gettext_lazy("request"))
    def request_line(self, call: CallQueue) -> str:
        path, target = call.path or call.host, f"{call.host}{call.path}"
        shown = Truncator(path).chars(80), Truncator(target).chars(200)
        return format_html('<span title="{2}">{0} {1}</span>', call.method, *shown)

    @admin.display(description=gettext_lazy("due"))
    def due(self, call: CallQueue) -> str:
        if call.status not in states.WAITING:
            return ""
        seconds = (call.due_at_dt - timezone.now()).total_seconds()
        return (_("in %s") if seconds > 0 else _("%s ago")) % words.short_duration(abs(seconds))

    @admin.display(description=gettext_lazy("age"))
    def age(self, call: CallQueue) -> str:
        return words.short_duration(max(0.0, (timezone.now() - call.created_dt).total_seconds()))

    @admin.display(description=gettext_lazy("last error"))
    def last_error(self, call: CallQueue) -> str:
        shown = Truncator(redact_text(call.error_message[:2000])).chars(80)
        return format_html("<span>{}</span>", shown) if shown else ""

    # --- the pages of one call

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        call = self._find_call(request, object_id)
        if call is None:
            return self._redirect_not_found(request, object_id)
        if request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        context = {
            **call_page.template_context(call, may_see_holds=may_see_holds(request)),
            **self._context_of_actions(request, call),
            **(extra_context or {}),
        }
        return self.render_page(request, "callqueue/call.html", _("Call %d") % call.pk, context)

    def _find_call(self, request: HttpRequest, object_id: str) -> CallQueue | None:
        """The call, or None. PermissionDenied for those who may not view calls."""
        self.check_may_view(request)
        number = parse_pk(unquote(object_id))
        calls = CallQueue.objects.using(router.db_for_write(CallQueue))
        return None if number is None else calls.filter(pk=number).first()

    def _redirect_not_found(self: Any, request: HttpRequest, object_id: str) -> HttpResponse:
        gone: HttpResponse = self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        return gone

    def _context_of_actions(self, request: HttpRequest, call: CallQueue) -> dict[str, Any]:
        is_permit = call.method == states.PERMIT  # made again by nobody
        requeuable = () if is_permit else states.Move.REQUEUE_AGAIN.sources
        editable = () if is_permit else (states.FAILED,)
        cancellable = states.Move.CANCEL.sources
        return {
            "original": call,
            "has_view_permission": True,
            "is_live": call.status in states.UNFINISHED,
            "can_requeue": self.has_requeue_call_permission(request) and call.status in requeuable,
            "can_edit": self.has_edit_call_permission(request) and call.status in editable,
            "can_cancel": self.has_cancel_call_permission(request) and call.status in cancellable,
            "can_delete": self.has_delete_permission(request, call) and call.status in states.FINAL,
        }

    def edit_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        call = self._find_call(request, object_id)
        if call is None:
            return self._redirect_not_found(request, object_id)
        if not self.has_edit_call_permission(request):
            raise PermissionDenied
        if call.status != states.FAILED:
            why = _("Call %(number)d is %(status)s and cannot be edited.")
            said = why % {"number": call.pk, "status": call.get_status_display()}
            self.message_user(request, said, messages.ERROR)
            return HttpResponseRedirect(call_url(call.pk))
        text, problem = edit_call.as_json(redact_call_data(call.call_data)), ""
        if request.method == "POST":
            text = request.POST.get("call_data", "")
            problem = self._save_edit(request, call, text)
            if not problem:
                return HttpResponseRedirect(call_url(call.pk))
        title = _("Edit and requeue call %d") % call.pk
        context = {
            "call": call,
            "original": call,
            "text": text,
            "problem": problem,
            "has_view_permission": True,
        }
        status = 400 if problem else 200
        return self.render_page(request, "callqueue/edit.html", title, context, status=status)

    def _save_edit(self, request: HttpRequest, call: CallQueue, text: str) -> str:
        """Save the edit, requeue the call, log it. Returns why that is not done; "" if it is."""
        was = call.get_status_display()
        try:
            changed = edit_call.save_and_requeue(call, edit_call.read_edited(text, call.call_data))
        except CallQueueError as error:
            call.refresh_from_db()
            return str(error)
        said = _("Edited and requeued. Status before: %(status)s. Changed: %(paths)s.")
        log_change(user_id(request), call, said % {"status": was, "paths": changed or _("nothing")})
        self.message_user(request, _("Call %d edited and requeued.") % call.pk, messages.SUCCESS)
        return ""
