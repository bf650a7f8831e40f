"""What may be done to the calls that are selected in the list: requeue, cancel, delete."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from django.contrib import admin, messages
from django.contrib.admin.actions import delete_selected
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import ImproperlyConfigured
from django.db import router
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from callqueue import states
from callqueue.admin import actions, bulk_forecast
from callqueue.admin.actions import Job
from callqueue.admin.base import CallPermissions, user_id
from callqueue.limits.durations import WrongDuration
from callqueue.models import CallQueue
from callqueue.operations import formatting
from callqueue.operations.spread import Spread, spread_of

DELETED = 1000  # calls that can be deleted at once; more is callqueue_cleanup's work
COUNTED = 100_000  # calls of a status that are counted before they are asked about
JOBS = "callqueue_jobs"  # in the session: what is under way, by number
KEPT = 5  # jobs, the newest


class CallActions(CallPermissions):
    """The actions of the list of calls. Each says on one page what it would do. What takes long is
    done in steps of a few seconds, each a request: its page says how far it is, and goes on by
    itself, or by a button where there are no scripts.
    """

    @admin.action(description=gettext_lazy("Requeue selected calls"), permissions=["requeue_call"])
    def requeue_calls(
        self, request: HttpRequest, queryset: QuerySet[CallQueue]
    ) -> HttpResponse | None:
        calls, choice = to_write(queryset), _choice(request)
        if choice is None:
            return self._ask_to_requeue(request, calls)
        if choice == "safe":
            calls = calls.exclude(status__in=actions.ASKED)
        try:
            spread = _spread(request, calls)
        except (ImproperlyConfigured, WrongDuration) as error:
            return self._ask_to_requeue(request, to_write(queryset), str(error))
        job = Job.spread_by(spread, actions.newest(calls.db))
        return self._work(request, calls, job, "requeue_calls", again=choice == "all")

    @admin.action(description=gettext_lazy("Cancel selected calls"), permissions=["cancel_call"])
    def cancel_calls(
        self, request: HttpRequest, queryset: QuerySet[CallQueue]
    ) -> HttpResponse | None:
        calls = to_write(queryset)
        if _choice(request) is None:
            return self._ask_to_cancel(request, calls)
        return self._work(request, calls, Job(actions.newest(calls.db)), "cancel_calls")

    def _work(
        self,
        request: HttpRequest,
        calls: QuerySet[CallQueue],
        job: Job,
        action: str,
        **how: Any,
    ) -> HttpResponse | None:
        """One step of a job: of that which the request names, else of a new one."""
        jobs = request.session.get(JOBS, {})
        number = request.POST.get("job", "")
        job = Job.of(jobs.get(number)) or job
        number = number if number in jobs else uuid4().hex

        def keep(job: Job) -> None:
            kept = {**request.session.get(JOBS, {}), number: job.as_json()}
            request.session[JOBS] = dict(list(kept.items())[-KEPT:])
            request.session.save()

        if not job.is_over:
            work = actions.requeue if action == "requeue_calls" else actions.cancel
            work(user_id(request), calls, job, keep, **how)
        if job.is_over:
            self._say(request, job, action)
            return None
        seen, most = job.changed + job.left, request.POST.get("total", "")[:18]
        context = {
            "job": job,
            "number": number,
            "action": action,
            "confirm": _choice(request),
            "select_across": request.POST.get("select_across", "0"),
            "selected": request.POST.getlist(ACTION_CHECKBOX_NAME),
            "total": most,
            "changed": formatting.count(job.changed),
            "seen": min(seen, int(most)) if most.isdecimal() else None,
        }
        title = _("Requeueing calls") if action == "requeue_calls" else _("Cancelling calls")
        return self.page(request, "callqueue/acting.html", title, context)

    def _ask_to_requeue(
        self, request: HttpRequest, calls: QuerySet[CallQueue], problem: str = ""
    ) -> HttpResponse:
        legal = states.Move.REQUEUE_AGAIN.sources
        risky = [status for status in actions.ASKED if calls.filter(status=status)[:1].exists()]
        safe = set(legal) - set(actions.ASKED)
        context = {
            "has_unknown": states.UNKNOWN in risky,
            "has_done": states.DONE in risky,
            "has_safe": bool(risky) and calls.filter(status__in=safe)[:1].exists(),
            "pace": request.POST.get("pace", ""),
            "delay": request.POST.get("delay", ""),
            "problem": problem,
        }
        title = (
            _("Requeue calls that may have been made already?") if risky else _("Requeue calls?")
        )
        return self._ask(request, (calls, legal), "requeue_calls", title, context)

    def _ask_to_cancel(self, request: HttpRequest, calls: QuerySet[CallQueue]) -> HttpResponse:
        legal = states.Move.CANCEL.sources
        return self._ask(request, (calls, legal), "cancel_calls", _("Cancel calls?"), {})

    def _ask(
        self,
        request: HttpRequest,
        chosen: tuple[QuerySet[CallQueue], tuple[int, ...]],
        action: str,
        title: str,
        context: dict[str, Any],
    ) -> HttpResponse:
        """The page that says how many calls there are, and asks."""
        calls, legal = chosen
        by_status = {status: _counted(calls, status) for status in CallQueue.Status.values}
        able = sum(by_status[status] for status in legal)
        is_more = any(by_status[status] > COUNTED for status in legal)
        if action == "requeue_calls":
            picked = calls.filter(status__in=legal)
            context = {**context, "forecast": bulk_forecast.in_words(picked, able)}
        common = {
            "counts": [
                (CallQueue.Status(status).label, _shown(count, count > COUNTED), status in legal)
                for status, count in by_status.items()
                if count
            ],
            "able": able,
            "shown": _shown(able, is_more),
            "total": sum(by_status.values()),
            "selected": request.POST.getlist(ACTION_CHECKBOX_NAME),
            "select_across": request.POST.get("select_across", "0"),
            "action": action,
            "back": request.get_full_path(),
        }
        return self.page(request, "callqueue/confirm.html", title, {**common, **context})

    def _say(self, request: HttpRequest, job: Job, action: str) -> None:
        """What came of a job."""
        if action == "requeue_calls":
            changed = ngettext("%d call requeued.", "%d calls requeued.", job.changed)
            left = ngettext(
                "%d call was left as it is: in its state it cannot be requeued.",
                "%d calls were left as they are: in their state they cannot be requeued.",
                job.left,
            )
        else:
            changed = ngettext("%d call cancelled.", "%d calls cancelled.", job.changed)
            left = ngettext(
                "%d call was left as it is: in its state it cannot be cancelled.",
                "%d calls were left as they are: in their state they cannot be cancelled.",
                job.left,
            )
        if job.changed or not job.left:
            level = messages.SUCCESS if job.changed else messages.WARNING
            self.message_user(request, changed % job.changed, level)
        if job.left:
            self.message_user(request, left % job.left, messages.WARNING)

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
        calls = to_write(queryset)
        pks = list(calls.order_by("pk").values_list("pk", flat=True)[:DELETED])
        CallQueue.objects.using(calls.db).filter(pk__in=pks).delete()


def to_write(queryset: QuerySet[CallQueue]) -> QuerySet[CallQueue]:
    """The same calls, where they are written."""
    return queryset.using(router.db_for_write(CallQueue))


def _spread(request: HttpRequest, calls: QuerySet[CallQueue]) -> Spread | None:
    """How the form says that requeued calls come due."""
    pace, delay = (request.POST.get(name, "").strip() for name in ("pace", "delay"))
    return spread_of(pace, delay, calls)


def _choice(request: HttpRequest) -> str | None:
    """What was confirmed; None where nothing was yet."""
    return request.POST.get("confirm") or ("all" if "post" in request.POST else None)


def _counted(calls: QuerySet[CallQueue], status: int) -> int:
    """How many of the calls have a status, counted up to COUNTED + 1."""
    return int(calls.filter(status=status).order_by()[: COUNTED + 1].count())


def _shown(count: int, is_more: bool) -> str:
    return formatting.count(count - is_more) + ("+" if is_more else "")
