"""What is done to rules on the dashboard: pause, resume, and changed limits, by form.

In: a request. Out: a redirect with a message, or a page that asks. What is done goes through
operations.control and into the admin's log.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.contrib import messages
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import router
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from callqueue import conf, texts
from callqueue.admin.base import OwnAdmin, log_change, may, user_id
from callqueue.database import clock
from callqueue.exceptions import CallQueueError, InvalidCall
from callqueue.limits.budgets import key_parts
from callqueue.limits.durations import WrongDuration, parse_duration
from callqueue.models import CallQueue, RuleState
from callqueue.operations import control, formatting, status_report
from callqueue.operations.limit_usage import LimitOverview
from callqueue.operations.status_report import RuleOverview

PERMISSION = "control_rule"


def act(request: HttpRequest, admin: OwnAdmin) -> HttpResponse:
    """Do to a rule what the form says; PermissionDenied for those who may not."""
    if not may(request, PERMISSION):
        raise PermissionDenied
    rule, do = request.POST.get("rule", ""), _ACTS.get(request.POST.get("do", ""))
    if do is None:
        messages.error(request, _("Nothing was done: there is no such action."))
        return _back()
    try:
        answer = do(request, admin, rule)
    except (CallQueueError, ImproperlyConfigured, WrongDuration, ValueError) as error:
        messages.error(request, _("Nothing was changed: %s") % error)
        return _back()
    if isinstance(answer, HttpResponse):
        return answer
    log_change(user_id(request), RuleState(rule=rule), answer)
    messages.success(request, f"{rule}: {answer}")
    return _back()


def _pause(request: HttpRequest, admin: OwnAdmin, rule: str) -> str:
    key, reason = request.POST.get("key", "").strip(), request.POST.get("reason", "").strip()[:500]
    until = _until(request)
    control.pause(
        using(),
        rule,
        key=_key(key),
        until=until,
        reason=reason or _("paused by %s") % request.user.get_username(),
    )
    end = (
        _("until %s") % f"{timezone.localtime(until):%Y-%m-%d %H:%M:%S %Z}"
        if until
        else _("until it is resumed")
    )
    said = _("Paused key %(key)s %(end)s") if key else _("Paused %(end)s")
    return said % {"key": repr(key), "end": end} + (f": {reason}" if reason else "") + "."


def _resume(request: HttpRequest, admin: OwnAdmin, rule: str) -> str:
    key = request.POST.get("key", "").strip()
    count = control.resume(using(), rule, key=_key(key))
    ended = ngettext("%d hold ended", "%d holds ended", count) % count
    said = _("Resumed key %(key)s; %(ended)s.") if key else _("Resumed; %(ended)s.")
    return said % {"key": repr(key), "ended": ended}


def _change(request: HttpRequest, admin: OwnAdmin, rule: str) -> HttpResponse | str:
    """Says first what it would do to the drain time; does it once that was confirmed."""
    budget_id, rate = request.POST.get("limit", ""), request.POST.get("rate", "").strip()
    if "confirm" not in request.POST:
        return _ask(request, admin, rule, budget_id, rate)
    control.change_limit(using(), rule, budget_id, rate or None)
    if not rate:
        return _("Limit %(limit)s is as the settings say.") % {"limit": budget_id}
    return _("Limit %(limit)s changed to %(rate)s.") % {"limit": budget_id, "rate": rate}


def _ask(
    request: HttpRequest, admin: OwnAdmin, rule: str, budget_id: str, rate: str
) -> HttpResponse:
    """The page that says what another rate would do to the drain time."""
    before, limit = _limit_of(rule, budget_id)
    wanted = rate or limit.configured
    _check_rate(rule, budget_id, wanted)
    after = status_report.drain_with(using(), rule, {budget_id: wanted})
    both = None not in (after, before.drain_s)
    context = {
        "rule": before,
        "limit": limit,
        "rate": rate,
        "wanted": wanted,
        "others": [name for name in limit.rules if name != rule],
        "drain_before": in_words(before.drain_s),
        "drain_after": in_words(after),
        "is_longer": both and (after or 0) > (before.drain_s or 0),
    }
    return admin.page(request, "confirm_limit.html", _("Change a limit of %s?") % rule, context)


def _limit_of(rule: str, budget_id: str) -> tuple[RuleOverview, LimitOverview]:
    """Where the rule stands, and its limit of this id; InvalidCall where it has none."""
    conf.current().rule(rule)
    (before,) = status_report.look(using(), only=rule)
    found = {limit.id: limit for limit in before.limits}
    if budget_id not in found:
        why = _("rule %(rule)r has no limit %(limit)r") % {"rule": rule, "limit": budget_id}
        raise InvalidCall("limit", f"{why}{texts.suggest(budget_id, found)}")
    return before, found[budget_id]


_ACTS: dict[str, Callable[[HttpRequest, OwnAdmin, str], HttpResponse | str]] = {
    "pause": _pause,
    "resume": _resume,
    "limit": _change,
}


def in_words(seconds: float | None) -> str:
    """A drain time in words; None: nobody can say."""
    return _("nobody can say") if seconds is None else formatting.duration(seconds)


def _check_rate(rule: str, budget_id: str, rate: str) -> None:
    """ImproperlyConfigured where the limit cannot have such a rate."""
    for budget in conf.current().book.budgets[rule]:
        if budget.id == budget_id:
            budget.limit.with_rate(rate)


def _until(request: HttpRequest) -> datetime | None:
    """When a pause is to end: after a duration, at an instant, or None."""
    for_, at = request.POST.get("for", "").strip(), request.POST.get("until", "").strip()
    if for_ and at:
        raise InvalidCall("until", _("give either how long or until when, not both"))
    if for_:
        return clock(using()) + parse_duration(for_)
    if not at:
        return None
    until = parse_datetime(at)
    if until is None:
        raise InvalidCall("until", _("%r is not a date and time") % at)
    if timezone.is_naive(until):
        until = timezone.make_aware(until)
    if until <= clock(using()):
        raise InvalidCall("until", _("is in the past"))
    return until


def _key(text: str) -> Any:
    """A key as `send` takes it: a mapping is written as JSON."""
    return dict(key_parts(text)) or text


def _back() -> HttpResponse:
    return HttpResponseRedirect(reverse("admin:callqueue_dashboard"))


def using() -> str:
    """The database that the dashboard shows, and acts on."""
    return router.db_for_write(CallQueue)
