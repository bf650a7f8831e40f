"""What may be done to the calls that are selected in the list: requeue, cancel, delete."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.actions import delete_selected
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db import router
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from callqueue import states
from callqueue.admin import actions
from callqueue.admin.base import CallPermissions, user_id
from callqueue.models import CallQueue
from callqueue.operations import formatting

DELETED = 1000  # calls that can be deleted at once; more is callqueue_cleanup's work
COUNTED = 10_000  # calls of a status that are counted before they are asked about
LEGAL = states.Move.REQUEUE_AGAIN.sources


class CallActions(CallPermissions):
    """The actions of the list of calls."""

    @admin.action(description=gettext_lazy("Requeue selected calls"), permissions=["requeue_call"])
    def requeue_calls(
        self, request: HttpRequest, queryset: QuerySet[CallQueue]
    ) -> HttpResponse | None:
        calls = _to_write(queryset)
        choice = request.POST.get("confirm") or ("all" if "post" in request.POST else None)
        if choice is None and (risky := _asked_of(calls)):
            return self._ask(request, calls, risky)
        if choice == "safe":
            calls = calls.exclude(status__in=actions.ASKED)
        acted = actions.requeue(user_id(request), calls, again=choice == "all")
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
        acted = actions.cancel(user_id(request), _to_write(queryset))
        changed = ngettext("%d call cancelled.", "%d calls cancelled.", acted.changed)
        left = ngettext(
            "%d call was left as it is: in its state it cannot be cancelled.",
            "%d calls were left as they are: in their state they cannot be cancelled.",
            acted.left,
        )
        self._say(request, acted, changed, left)

    def _ask(
        self, request: HttpRequest, calls: QuerySet[CallQueue], risky: list[int]
    ) -> HttpResponse:
        counts = [_counted(calls, status) for status in LEGAL]
        safe = calls.filter(status__in=set(states.REQUEUABLE) - set(actions.ASKED))
        context = {
            "counts": [(label, count) for label, count in counts if count],
            "has_unknown": states.UNKNOWN in risky,
            "has_done": states.DONE in risky,
            "has_safe": safe[:1].exists(),
            "selected": request.POST.getlist(ACTION_CHECKBOX_NAME),
            "select_across": request.POST.get("select_across", "0"),
            "action": "requeue_calls",
        }
        title = _("Requeue calls that may have been made already?")
        return self.page(request, "callqueue/confirm_requeue.html", title, context)

    def _say(self, request: HttpRequest, acted: actions.Acted, changed: str, left: str) -> None:
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

    @admin.action(
        description=gettext_lazy("Delete selected %(verbose_name_plural)s"), permissions=["delete"]
    )
    def delete_selected(
        self, request: HttpRequest, queryset: QuerySet[CallQueue]
    ) -> HttpResponse | None:
        """Django's own, but it asks about no more calls than fit on a page."""
        if queryset.order_by()[: DELETED + 1].count() > DELETED:
            why = _(
                "These are more than %(count)s calls: "
                "delete them with callqueue_cleanup, in short batches."
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
        calls = _to_write(queryset)
        pks = list(calls.order_by("pk").values_list("pk", flat=True)[:DELETED])
        CallQueue.objects.using(calls.db).filter(pk__in=pks).delete()


def _to_write(queryset: QuerySet[CallQueue]) -> QuerySet[CallQueue]:
    return queryset.using(router.db_for_write(CallQueue))


def _counted(calls: QuerySet[CallQueue], status: int) -> tuple[str, str]:
    """The name of a status, and how many of the calls have it; empty where none has."""
    count = calls.filter(status=status).order_by()[: COUNTED + 1].count()
    shown = formatting.count(min(count, COUNTED)) + ("+" if count > COUNTED else "")
    return str(CallQueue.Status(status).label), shown if count else ""


def _asked_of(calls: QuerySet[CallQueue]) -> list[int]:
    """The statuses of these calls that are asked about."""
    return [status for status in actions.ASKED if calls.filter(status=status)[:1].exists()]
