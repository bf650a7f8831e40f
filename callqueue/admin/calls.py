"""Calls in the admin: the list, the page of one call, and what may be done there. Doors only; the
work is next door.

Staff who may only view see everything, redacted, and can do nothing. Every change goes by POST and
into the log.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.actions import delete_selected
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db import router
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.decorators import method_decorator
from django.utils.html import format_html
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from django.views.decorators.csrf import csrf_protect

from callqueue import states
from callqueue.admin import actions as acting
from callqueue.admin import call_page, dashboard, edit_call, simulate_page
from callqueue.admin.changelist import (
    BoundedPaginator,
    CallList,
    MethodFilter,
    OwnAdmin,
    RuleFilter,
    StatusFilter,
    search,
)
from callqueue.admin.readonly import may_see_holds
from callqueue.exceptions import CallQueueError, IllegalTransition
from callqueue.models import CallQueue
from callqueue.operations import formatting
from callqueue.security.redaction import redact_text

ASKED = (
    states.UNKNOWN,
    states.DONE,
)  # may have been made already: requeueing them is asked about first
DELETED = 1000  # calls that can be deleted at once; more is callqueue_cleanup's work


class CallQueueAdmin(OwnAdmin):
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

    # --- who may

    def has_requeue_call_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("callqueue.requeue_call"))

    def has_edit_call_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("callqueue.edit_call"))

    def has_cancel_call_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("callqueue.cancel_call"))

    # --- the list

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
        return (
            ("-created_dt", "-id")
            if any(name.startswith("created_dt__") for name in request.GET)
            else ("-id",)
        )

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

    @admin.display(description=gettext_lazy("status"))
    def shown_status(self, call: CallQueue) -> str:
        return format_html(
            '<span class="cq-status cq-{}">{}</span>',
            call_page.kind_of(call.status),
            call.get_status_display(),
        )

    @admin.display(description=gettext_lazy("key"))
    def shown_key(self, call: CallQueue) -> str:
        return Truncator(call.key).chars(40)

    @admin.display(description=gettext_lazy("request"))
    def request_line(self, call: CallQueue) -> str:
        return f"{call.method} {call.host}"

    @admin.display(description=gettext_lazy("due"))
    def due(self, call: CallQueue) -> str:
        if call.status not in states.WAITING:
            return ""
        seconds = (call.due_at_dt - timezone.now()).total_seconds()
        return format_html('<span class="cq-time">{}</span>', formatting.from_now(seconds))

    @admin.display(description=gettext_lazy("age"), ordering="created_dt")
    def age(self, call: CallQueue) -> str:
        made = (
            timezone.localtime(call.created_dt)
            if timezone.is_aware(call.created_dt)
            else call.created_dt
        )
        age = formatting.duration(max(0.0, (timezone.now() - call.created_dt).total_seconds()))
        return format_html(
            '<time class="cq-time" datetime="{0}" title="{0}">{1}</time>',
            made.isoformat(" ", "seconds"),
            age,
        )

    @admin.display(description=gettext_lazy("last error"))
    def last_error(self, call: CallQueue) -> str:
        return Truncator(redact_text(call.error_message[:2000])).chars(80)

    # --- actions

    @admin.action(description=gettext_lazy("Requeue selected calls"), permissions=["requeue_call"])
    def requeue_calls(
        self, request: HttpRequest, queryset: QuerySet[CallQueue]
    ) -> HttpResponse | None:
        calls = self._to_write(queryset)
        choice = request.POST.get("confirm") or ("all" if "post" in request.POST else None)
        if choice is None and (
            risky := [status for status in ASKED if calls.filter(status=status)[:1].exists()]
        ):
            return self._ask(request, calls, risky)
        if choice == "safe":
            calls = calls.exclude(status__in=ASKED)
        acted = acting.requeue(_user_id(request), calls, again=choice == "all")
        changed = ngettext("%d call requeued.", "%d calls requeued.", acted.changed)
        left = ngettext(
            "%d call was left as it is: in its state it cannot be requeued.",
            "%d calls were left as they are: in their state they cannot be requeued.",
            acted.left,
        )
        self._say(request, acted, changed, left)
        return None

    @admin.action(description=gettext_lazy("Cancel selected calls"), permissions=["cancel_call"])
    def cancel_calls(self, request: HttpRequest, queryset: QuerySet[CallQueue]) -> None:
        acted = acting.cancel(_user_id(request), self._to_write(queryset))
        changed = ngettext("%d call cancelled.", "%d calls cancelled.", acted.changed)
        left = ngettext(
            "%d call was left as it is: in its state it cannot be cancelled.",
            "%d calls were left as they are: in their state they cannot be cancelled.",
            acted.left,
        )
        self._say(request, acted, changed, left)

    def _to_write(self, queryset: QuerySet[CallQueue]) -> QuerySet[CallQueue]:
        return queryset.using(router.db_for_write(CallQueue))

    def _ask(
        self, request: HttpRequest, calls: QuerySet[CallQueue], risky: list[int]
    ) -> HttpResponse:
        cap = 10_000
        counts = [
            (
                CallQueue.Status(status).label,
                calls.filter(status=status).order_by()[: cap + 1].count(),
            )
            for status in (*states.REQUEUABLE, states.DONE)
        ]
        context = {
            **self.admin_site.each_context(request),
            "title": _("Requeue calls that may have been made already?"),
            "opts": self.opts,
            "counts": [
                (label, f"{formatting.count(cap)}+" if count > cap else formatting.count(count))
                for label, count in counts
                if count
            ],
            "has_unknown": states.UNKNOWN in risky,
            "has_done": states.DONE in risky,
            "has_safe": calls.filter(status__in=set(states.REQUEUABLE) - set(ASKED))[:1].exists(),
            "selected": request.POST.getlist(ACTION_CHECKBOX_NAME),
            "select_across": request.POST.get("select_across", "0"),
            "action": "requeue_calls",
            "media": self.media,
        }
        return TemplateResponse(request, "admin/callqueue/callqueue/confirm_requeue.html", context)

    def _say(self, request: HttpRequest, acted: acting.Acted, changed: str, left: str) -> None:
        if acted.changed or not acted.left:
            level = messages.SUCCESS if acted.changed else messages.WARNING
            self.message_user(request, changed % acted.changed, level)
        if acted.left:
            self.message_user(request, left % acted.left, messages.WARNING)
        if acted.is_unfinished:
            self.message_user(
                request,
                _("There are more than one request can do: run the action again for the rest."),
                messages.WARNING,
            )

    # --- deleting

    @admin.action(
        description=gettext_lazy("Delete selected %(verbose_name_plural)s"), permissions=["delete"]
    )
    def delete_selected(
        self, request: HttpRequest, queryset: QuerySet[CallQueue]
    ) -> HttpResponse | None:
        """Django's own, but it asks about no more calls than fit on a page."""
        if queryset.order_by()[: DELETED + 1].count() > DELETED:
            why = _(
                "These are more than %(count)s calls: delete them with callqueue_cleanup, in short batches."
            )
            self.message_user(request, why % {"count": formatting.count(DELETED)}, messages.ERROR)
            return None
        return delete_selected(self, request, queryset)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Only the calls themselves are deleted; their attempts stay for as long as a limit counts
        them.
        """
        listed = list(objs[:DELETED]) if isinstance(objs, QuerySet) else list(objs)
        lacking = set() if self.has_delete_permission(request) else {self.opts.verbose_name}
        return (
            [str(call) for call in listed],
            {self.opts.verbose_name_plural: len(listed)},
            lacking,
            [],
        )

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[CallQueue]) -> None:
        calls = self._to_write(queryset)
        pks = list(calls.order_by("pk").values_list("pk", flat=True)[:DELETED])
        CallQueue.objects.using(calls.db).filter(pk__in=pks).delete()

    # --- one call

    def get_urls(self) -> list[URLPattern]:
        def wrapped(view: Any) -> Any:
            return self.admin_site.admin_view(view)

        return [
            path("dashboard/", wrapped(self.dashboard_view), name="callqueue_dashboard"),
            path("dashboard/live/", wrapped(self.live_view), name="callqueue_dashboard_live"),
            path("dashboard/simulate/", wrapped(self.simulate_view), name="callqueue_simulate"),
            path(
                "<path:object_id>/requeue/",
                wrapped(self.requeue_view),
                name="callqueue_callqueue_requeue",
            ),
            path(
                "<path:object_id>/cancel/",
                wrapped(self.cancel_view),
                name="callqueue_callqueue_cancel",
            ),
            path(
                "<path:object_id>/forecast/",
                wrapped(self.forecast_view),
                name="callqueue_callqueue_forecast",
            ),
            path(
                "<path:object_id>/edit/", wrapped(self.edit_view), name="callqueue_callqueue_edit"
            ),
            *super().get_urls(),
        ]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        call = self._call(request, object_id)
        if call is None:
            return self._gone(request, object_id)
        if request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        context = {
            **self.admin_site.each_context(request),
            **call_page.context_of(call, may_see_holds=may_see_holds(request)),
            "title": _("Call %d") % call.pk,
            "opts": self.opts,
            "original": call,
            "media": self.media,
            "has_view_permission": True,
            "can_requeue": self.has_requeue_call_permission(request)
            and call.status in (*states.REQUEUABLE, states.DONE),
            "is_asked": call.status in ASKED,
            "can_edit": self.has_edit_call_permission(request)
            and call.status in edit_call.EDITABLE,
            "can_cancel": self.has_cancel_call_permission(request)
            and call.status in (*states.CANCELLABLE, states.DISPATCHED),
            "can_delete": self.has_delete_permission(request, call),
            **(extra_context or {}),
        }
        return TemplateResponse(request, "admin/callqueue/callqueue/call.html", context)

    def forecast_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Why a call waits, for its page to put in place."""
        call = self._call(request, object_id)
        if call is None:
            return self._gone(request, object_id)
        if call.status not in states.UNFINISHED:
            return HttpResponseRedirect(_page_of(call))
        forecast = call_page.forecast_of(call, may_see_holds=may_see_holds(request))
        return TemplateResponse(request, "admin/callqueue/callqueue/forecast.html", forecast)

    @method_decorator(csrf_protect)
    def requeue_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """POST: requeue one call; one that may have been made already needs "again"."""
        return self._act(
            request, object_id, self.has_requeue_call_permission(request), self._requeue
        )

    @method_decorator(csrf_protect)
    def cancel_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """POST: cancel one call."""
        return self._act(request, object_id, self.has_cancel_call_permission(request), self._cancel)

    @method_decorator(csrf_protect)
    def edit_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Change a call's request and requeue it."""
        call = self._call(request, object_id)
        if call is None:
            return self._gone(request, object_id)
        if not self.has_edit_call_permission(request):
            raise PermissionDenied
        if call.status not in edit_call.EDITABLE:
            why = _("Call %(number)d is %(status)s and cannot be edited.")
            self.message_user(
                request,
                why % {"number": call.pk, "status": call.get_status_display()},
                messages.ERROR,
            )
            return HttpResponseRedirect(_page_of(call))
        text, problem = edit_call.as_text(edit_call.shown(call.call_data)), ""
        if request.method == "POST":
            text = request.POST.get("call_data", "")
            problem = self._edit(request, call, text)
            if not problem:
                return HttpResponseRedirect(_page_of(call))
        context = {
            **self.admin_site.each_context(request),
            "title": _("Edit and requeue call %d") % call.pk,
            "opts": self.opts,
            "call": call,
            "original": call,
            "text": text,
            "problem": problem,
            "is_asked": call.status in ASKED,
            "has_view_permission": True,
            "media": self.media,
        }
        return TemplateResponse(
            request, "admin/callqueue/callqueue/edit.html", context, status=400 if problem else 200
        )

    def _edit(self, request: HttpRequest, call: CallQueue, text: str) -> str:
        """What is wrong; empty once it is saved."""
        is_asked = call.status in ASKED
        if is_asked and "again" not in request.POST:
            return _("This call may have been made already: say that it may be made again.")
        was = call.get_status_display()
        try:
            changed = edit_call.save(call, edit_call.read(text, call.call_data), again=is_asked)
        except CallQueueError as error:
            call.refresh_from_db()
            return str(error)
        said = _("Edited and requeued; it was %(status)s. Changed: %(paths)s.")
        acting.log_call(
            _user_id(request), call, said % {"status": was, "paths": changed or _("nothing")}
        )
        self.message_user(request, _("Call %d edited and requeued.") % call.pk, messages.SUCCESS)
        return ""

    def _requeue(self, request: HttpRequest, call: CallQueue) -> str:
        if call.status in ASKED and "again" not in request.POST:
            raise IllegalTransition(
                _("this call may have been made already: say that it may be made again")
            )
        was = call.get_status_display()
        call.requeue(again=call.status == states.DONE)
        return _("Requeued; it was %s.") % was

    def _cancel(self, request: HttpRequest, call: CallQueue) -> str:
        was = call.get_status_display()
        call.cancel()
        return _("Cancelled; it was %s.") % was

    def _act(self, request: HttpRequest, object_id: str, may: bool, act: Any) -> HttpResponse:
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        call = self._call(request, object_id)
        if call is None:
            return self._gone(request, object_id)
        if not may:
            raise PermissionDenied
        try:
            what = act(request, call)
        except CallQueueError as error:
            self.message_user(request, f"{str(error)[:1].upper()}{str(error)[1:]}.", messages.ERROR)
        else:
            acting.log_call(_user_id(request), call, what)
            self.message_user(
                request,
                _("Call %(number)d: %(what)s") % {"number": call.pk, "what": what},
                messages.SUCCESS,
            )
        return HttpResponseRedirect(_page_of(call))

    def _call(self, request: HttpRequest, object_id: str) -> CallQueue | None:
        """The call, for someone who may view it; PermissionDenied for others."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        text = unquote(object_id)
        if not text.isdecimal() or len(text) > 18:
            return None
        found: CallQueue | None = (
            CallQueue.objects.using(router.db_for_write(CallQueue)).filter(pk=int(text)).first()
        )
        return found

    def _gone(self, request: HttpRequest, object_id: str) -> HttpResponse:
        return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)  # type: ignore[attr-defined,no-any-return]

    # --- the dashboard

    @method_decorator(csrf_protect)
    def dashboard_view(self, request: HttpRequest) -> HttpResponse:
        """Where every rule stands, and what may be done about it."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return dashboard.page(request, self)

    def simulate_view(self, request: HttpRequest) -> HttpResponse:
        """What draining so many calls under a rule would take."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return simulate_page.page(request, self)

    def live_view(self, request: HttpRequest) -> HttpResponse:
        """The parts of the dashboard that change."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return dashboard.live(request, self)


def _user_id(request: HttpRequest) -> int:
    pk: int = request.user.pk  # type: ignore[assignment]
    return pk


def _page_of(call: CallQueue) -> str:
    return reverse("admin:callqueue_callqueue_change", args=[call.pk])
