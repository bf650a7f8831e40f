"""Requeue and cancel, for the calls that are selected in the list or the one of a page."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.db import router
from django.db.models import Count, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from callqueue import conf, states
from callqueue.admin.base import OwnAdmin, has_permission, user_id
from callqueue.admin.lists import RuleFilter, StatusFilter, parse_pk
from callqueue.admin.rule_actions import rule_url
from callqueue.admin.rule_page import done_in_words
from callqueue.control import bulk
from callqueue.history import errors
from callqueue.look import look, words
from callqueue.models import CallQueue
from callqueue.states import MADE_PERHAPS, Move

LISTED = 30  # rules and statuses that the page names
LOOKED_AT = 1000  # calls whose reasons are looked at
NAMED = 5  # reasons that the page names
WORKS_S = 10.0  # seconds that one request works; servers give up a request after 30
REQUEUE, CANCEL = "requeue_calls", "cancel_calls"


class CallActions(OwnAdmin):
    def has_requeue_call_permission(self, request: HttpRequest) -> bool:
        return has_permission(request, "requeue_call")

    def has_edit_call_permission(self, request: HttpRequest) -> bool:
        return has_permission(request, "edit_call")

    def has_cancel_call_permission(self, request: HttpRequest) -> bool:
        return has_permission(request, "cancel_call")

    @admin.action(description=gettext_lazy("Requeue selected calls"), permissions=["requeue_call"])
    def requeue_calls(self, request: HttpRequest, queryset: QuerySet[CallQueue]) -> HttpResponse:
        return self._ask_or_move(request, queryset, REQUEUE)

    @admin.action(description=gettext_lazy("Cancel selected calls"), permissions=["cancel_call"])
    def cancel_calls(self, request: HttpRequest, queryset: QuerySet[CallQueue]) -> HttpResponse:
        return self._ask_or_move(request, queryset, CANCEL)

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        # Many calls are deleted by callqueue_cleanup, in short batches.
        found = super().get_actions(request)
        found.pop("delete_selected", None)
        return found

    def _ask_or_move(
        self, request: HttpRequest, queryset: QuerySet[CallQueue], action: str
    ) -> HttpResponse:
        """The page that asks; once that is confirmed, the move and a redirect."""
        calls = queryset.using(router.db_for_write(CallQueue))
        asked_at, page = request.get_full_path(), parse_pk(request.POST.get("page"))
        back = asked_at if page is None else call_url(page)
        only = request.POST.get("only", "")  # numbers of the calls that alone are meant; empty: all
        if group := request.POST.get("group"):  # what failed alike, of the list's rule
            rule = request.GET.get(RuleFilter.parameter_name, "")
            only, back = ",".join(map(str, errors.read_pks(calls.db, rule, group))), rule_url(rule)
        if only or group:
            calls = calls.filter(pk__in=filter(None, map(parse_pk, only.split(","))))
        form = {
            "to": asked_at,
            "back": back,
            "page": page,
            "selected": request.POST.getlist(ACTION_CHECKBOX_NAME),
            "select_across": request.POST.get("select_across", "0"),
            "only": only,
        }
        choice = request.POST.get("confirm")
        if choice is None:
            return self._ask_page(request, calls, action, form)
        self._move(request, calls, action, choice)
        return HttpResponseRedirect(back)

    def _move(
        self, request: HttpRequest, calls: QuerySet[CallQueue], action: str, choice: str
    ) -> None:
        """Move calls that were there when the page asked; after WORKS_S, say that some are left."""
        until, began = parse_pk(request.POST.get("until")), time.monotonic()
        move, word = Move.CANCEL, _("Cancelled")
        if action == REQUEUE:
            is_safe = choice == "safe"  # without those that may have been made already
            move, word = Move.REQUEUE if is_safe else Move.REQUEUE_AGAIN, _("Requeued")
            calls = calls.exclude(status__in=MADE_PERHAPS) if is_safe else calls
        rest = calls.filter(pk__lte=_newest_pk(calls.db) if until is None else until)
        changed = left = last = 0
        for done in bulk.move_in_batches(rest, move, partial(_log_move, user_id(request), word)):
            last, changed = done.last, changed + done.changed
            left += done.seen - done.changed
            if time.monotonic() - began > WORKS_S:
                break
        self._say_result(request, action, changed, left)
        if rest.filter(status__in=move.sources, pk__gt=last).exists():
            said = _("Some calls are left: choose the action again, or run callqueue_%s.")
            command = action.partition("_")[0]
            self.message_user(request, said % command, messages.WARNING)

    def _ask_page(
        self, request: HttpRequest, calls: QuerySet[CallQueue], action: str, form: dict[str, Any]
    ) -> HttpResponse:
        move = Move.REQUEUE_AGAIN if action == REQUEUE else Move.CANCEL
        until = _newest_pk(calls.db)
        picked = calls.filter(status__in=move.sources, pk__lte=until)
        counts = _counts_by_rule_and_status(picked)
        able, found = sum(counts.values()), {status for _, status in counts}
        risky = action == REQUEUE and found & {*MADE_PERHAPS}
        if action == CANCEL:
            title = _("Cancel calls?")
        elif risky:
            title = _("Requeue calls that may have been made already?")
        else:
            title = _("Requeue calls?")
        context = {
            **form,
            "action": action,
            "until": until,
            "able": able,
            "counts": [
                (rule, CallQueue.Status(status).label, words.count(count))
                for (rule, status), count in counts.most_common(LISTED)
            ],
            "others": max(0, len(counts) - LISTED),
            "shown": words.count(able),
            "chosen": self._filters_in_words(request, form),
            "about": _common_errors(picked),
            "looked_at": words.count(LOOKED_AT),
            "has_unknown": action == REQUEUE and states.UNKNOWN in found,
            "has_done": action == REQUEUE and states.DONE in found,
            "has_safe": risky and found - {*MADE_PERHAPS},
            "ends": _ends_in_words(calls.db, counts) if action == REQUEUE and able else [],
        }
        return self.render_page(request, "callqueue/confirm.html", title, context)

    def _filters_in_words(self, request: HttpRequest, form: Mapping[str, Any]) -> list[str]:
        if form["select_across"] == "0" or form["only"]:
            return []  # single calls were chosen, not all that the filters match
        labels = {str(status.value): str(status.label) for status in CallQueue.Status}
        status = StatusFilter.parameter_name
        titles = {"q": _("search"), RuleFilter.parameter_name: _("rule"), status: _("status")}
        return [
            f"{titles.get(name, name)} = {labels.get(text, text) if name == status else text}"
            for name, text in request.GET.dict().items()
            if name == "q" or self.lookup_allowed(name, text, request)
        ]

    def _say_result(self, request: HttpRequest, action: str, moved: int, left: int) -> None:
        if action == REQUEUE:
            said = ngettext("%d call requeued.", "%d calls requeued.", moved)
        else:
            said = ngettext("%d call cancelled.", "%d calls cancelled.", moved)
        self.message_user(request, said % moved, messages.SUCCESS if moved else messages.WARNING)
        if left:
            said = ngettext(
                "%d call was left as it is: it has gone on meanwhile, or a worker has begun it.",
                "%d calls were left as they are: they have gone on meanwhile, or workers have "
                "begun them.",
                left,
            )
            self.message_user(request, said % left, messages.WARNING)


def _log_move(user: int, word: str, calls: Sequence[CallQueue], before: Mapping[int, int]) -> None:
    for status in sorted({before[call.pk] for call in calls}):
        what = _("%(done)s. Status before: %(status)s.")
        what %= {"done": word, "status": CallQueue.Status(status).label}
        same = [call for call in calls if before[call.pk] == status]
        LogEntry.objects.log_actions(user, same, CHANGE, what)


def call_url(pk: int) -> str:
    return reverse("admin:callqueue_callqueue_change", args=[pk])


def _newest_pk(using: str) -> int:
    pks = CallQueue.objects.using(using).order_by("-pk").values_list("pk", flat=True)
    return pks.first() or 0


def _counts_by_rule_and_status(calls: QuerySet[CallQueue]) -> Counter[tuple[str, int]]:
    counted = calls.order_by().values_list("rule", "status").annotate(Count("pk"))
    return Counter({(rule, status): count for rule, status, count in counted})


def _common_errors(calls: QuerySet[CallQueue]) -> list[tuple[str, str, str]]:
    """Rule, message and count of the errors that most of the calls looked at have."""
    failed = calls.exclude(error_message="")
    some = failed.order_by().values_list("rule", "error_message")[:LOOKED_AT]
    pairs = Counter((rule, errors.message_to_show(why)) for rule, why in some)
    return [(rule, why, words.count(count)) for (rule, why), count in pairs.most_common(NAMED)]


def _ends_in_words(using: str, counts: Mapping[tuple[str, int], int]) -> list[str]:
    """When the last of these calls is done, behind what waits; and which rules are gone."""
    more: Counter[str] = Counter()
    for (rule, _status), count in counts.items():
        more[rule] += count
    known = [rule for rule in sorted(more) if rule in conf.current().rules]
    gone = _("%s: its rule is not in CALLQUEUE['RULES'] any more; they will fail.")
    said = [gone % rule for rule in sorted({*more} - {*known})]
    if known:
        seen = look(using, rules=known, more={name: more[name] for name in known})
        done = [(rule.drain_s(), rule) for rule in seen.rules]
        seconds, last = max(done, key=lambda one: float("inf") if one[0] is None else one[0])
        said.insert(0, f"{last.name}: {done_in_words(last, seconds)}")
    return said
