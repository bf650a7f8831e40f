"""The dashboard: where every rule stands, and pause, resume and changed limits by form.

In: a request. Out: a page, the parts of it that change, or a redirect with a message. What is done
goes through callqueue.control and into the admin's log; nothing here counts anything itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import router
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from callqueue import conf
from callqueue.admin import plots
from callqueue.admin.readonly import may_see_holds
from callqueue.database import clock
from callqueue.exceptions import CallQueueError, InvalidCall
from callqueue.ledger import agreement
from callqueue.limits.durations import WrongDuration, parse_duration
from callqueue.limits.kinds import SECOND
from callqueue.models import CallQueue, RuleState
from callqueue.operations import control, formatting, status_report, throughput, usage_history
from callqueue.operations.limit_usage import KeyOverview, LimitOverview
from callqueue.operations.status_report import RuleOverview

PERMISSION = "callqueue.control_rule"
KEYS = 5
# seconds into a request after which it counts for half as long; the next look goes on from there
COUNTING = 0.12

Hour = Sequence[tuple[int, int] | None]


@dataclass(frozen=True)
class Row:
    """One rule as the page shows it."""

    rule: RuleOverview
    plot: plots.Plot
    limits: list[tuple[LimitOverview, plots.Gauge, plots.Trace]]
    keys: list[tuple[KeyOverview, plots.Plot, list[tuple[LimitOverview, plots.Gauge, plots.Trace]]]]

    @property
    def waiting(self) -> str:
        counted = formatting.count(self.rule.waiting)
        return _("about %s") % counted if self.rule.is_estimate else counted

    @property
    def in_flight(self) -> str:
        return formatting.count(self.rule.in_flight)

    @property
    def failing(self) -> str:
        share = self.rule.failing
        return "–" if share is None else f"{max(1, round(100 * share)) if share else 0} %"

    @property
    def oldest(self) -> str:
        return "" if self.rule.oldest_due_s is None else formatting.duration(self.rule.oldest_due_s)

    @property
    def drain(self) -> str:
        if not self.rule.waiting:
            return ""
        return _in_words(self.rule.drain_s)


def page(request: HttpRequest, admin: Any) -> HttpResponse:
    """The whole page; a POST acts first."""
    if request.method == "POST":
        return _act(request, admin)
    context = {
        **admin.admin_site.each_context(request),
        **_context(request),
        "title": _("Dashboard"),
        "opts": admin.opts,
        "media": admin.media,
    }
    return TemplateResponse(request, "admin/callqueue/dashboard.html", context)


def live(request: HttpRequest, admin: Any) -> HttpResponse:
    """The parts that change, for the script to put in their places."""
    response = TemplateResponse(request, "admin/callqueue/dashboard_live.html", _context(request))
    response["Cache-Control"] = "no-store"
    return response


def _context(request: HttpRequest) -> dict[str, Any]:
    using, late = _using(), time.monotonic() + COUNTING

    def soon(seconds: float) -> float:
        now = time.monotonic()
        return max(min(late, now + seconds), now + seconds / 2)

    hour = throughput.per_minute(using, until=soon(0.03))
    rules = status_report.look(using, keys=KEYS, until=late)
    traces = _traces(using, [limit for rule in rules for limit in rule.limits], soon(0.02))
    of_keys = [
        limit
        for rule in rules
        for key in rule.keys
        for limit in key.limits
        if _scope(limit) not in traces
    ]
    traces |= _traces(using, of_keys, soon(0.01))
    keys = [(rule.name, key.key) for rule in rules for key in rule.keys]
    hours = dict(zip(keys, throughput.of_keys(using, keys, until=soon(0.02)), strict=True))
    return {
        "rows": [
            _row(
                rule,
                [None if minute is None else minute.get(rule.name, (0, 0)) for minute in hour],
                hours,
                traces,
            )
            for rule in rules
        ],
        "now": timezone.localtime(clock(using)),
        "may_control": request.user.has_perm(PERMISSION),
        "disagreements": agreement.disagreements(using),
        "may_see_holds": may_see_holds(request),
        "totals": {
            "waiting": formatting.count(sum(rule.waiting for rule in rules)),
            "is_estimate": any(rule.is_estimate for rule in rules),
            "in_flight": formatting.count(sum(rule.in_flight for rule in rules)),
            "held": sum(1 for rule in rules if rule.holds),
        },
    }


def _row(
    rule: RuleOverview,
    hour: Hour,
    hours: Mapping[tuple[str, str], Hour],
    traces: Mapping[usage_history.Scope, plots.Trace],
) -> Row:
    def drawn(
        limits: Sequence[LimitOverview],
    ) -> list[tuple[LimitOverview, plots.Gauge, plots.Trace]]:
        return [
            (limit, plots.gauge(limit.used, limit.free, limit.capacity), traces[_scope(limit)])
            for limit in limits
        ]

    keys = [
        (key, plots.plot(hours[rule.name, key.key], of_attempts=True), drawn(key.limits))
        for key in rule.keys
    ]
    return Row(rule, plots.plot(hour), drawn(rule.limits), keys)


def _traces(
    using: str, limits: Sequence[LimitOverview], until: float
) -> dict[usage_history.Scope, plots.Trace]:
    """The last windows of these limits; those that rules share are counted once."""
    scopes = list(dict.fromkeys(map(_scope, limits)))
    return {
        scope: plots.trace(
            use.levels, use.capacity, formatting.duration(use.step * (len(use.levels) - 1) / SECOND)
        )
        for scope, use in zip(scopes, usage_history.look(using, scopes, until=until), strict=True)
    }


def _scope(limit: LimitOverview) -> usage_history.Scope:
    return usage_history.Scope(limit.budget, limit.value, limit.capacity, limit.used)


# --- acting


def _act(request: HttpRequest, admin: Any) -> HttpResponse:
    if not request.user.has_perm(PERMISSION):
        raise PermissionDenied
    act = _ACTS.get(request.POST.get("do", ""))
    if act is None:
        messages.error(request, _("Nothing was done: there is no such action."))
        return _back()
    try:
        answer = act(request, admin, request.POST.get("rule", ""))
    except (CallQueueError, ImproperlyConfigured, WrongDuration, ValueError) as error:
        messages.error(request, _("Nothing was changed: %s") % error)
        return _back()
    if isinstance(answer, HttpResponse):
        return answer
    _log(request, request.POST.get("rule", ""), answer)
    messages.success(request, f"{request.POST.get('rule', '')}: {answer}")
    return _back()


def _pause(request: HttpRequest, admin: Any, rule: str) -> str:
    key, reason = request.POST.get("key", "").strip(), request.POST.get("reason", "").strip()[:500]
    until = _until(request)
    control.pause(
        _using(),
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


def _resume(request: HttpRequest, admin: Any, rule: str) -> str:
    key = request.POST.get("key", "").strip()
    count = control.resume(_using(), rule, key=_key(key))
    ended = ngettext("%d hold ended", "%d holds ended", count) % count
    said = _("Resumed key %(key)s; %(ended)s.") if key else _("Resumed; %(ended)s.")
    return said % {"key": repr(key), "ended": ended}


def _change(request: HttpRequest, admin: Any, rule: str) -> HttpResponse | str:
    """Says first what it would do to the drain time; does it once that was confirmed."""
    budget_id, text = request.POST.get("limit", ""), request.POST.get("rate", "").strip()
    rate = text or None
    if "confirm" in request.POST:
        control.change_limit(_using(), rule, budget_id, rate)
        said = (
            _("Limit %(limit)s changed to %(rate)s.")
            if rate
            else _("Limit %(limit)s is as the settings say.")
        )
        return said % {"limit": budget_id, "rate": rate}
    conf.current().rule(rule)
    (before,) = status_report.look(_using(), only=rule)
    found = {limit.id: limit for limit in before.limits}
    if budget_id not in found:
        why = _("rule %(rule)r has no limit %(limit)r") % {"rule": rule, "limit": budget_id}
        raise InvalidCall("limit", f"{why}{conf.suggest(budget_id, found)}")
    limit = found[budget_id]
    wanted = rate or limit.configured
    _check_rate(rule, budget_id, wanted)
    after = status_report.drain_with(_using(), rule, {budget_id: wanted})
    context = {
        **admin.admin_site.each_context(request),
        "title": _("Change a limit of %s?") % rule,
        "opts": admin.opts,
        "media": admin.media,
        "rule": before,
        "limit": limit,
        "rate": text,
        "wanted": wanted,
        "others": [name for name in limit.rules if name != rule],
        "drain_before": _in_words(before.drain_s),
        "drain_after": _in_words(after),
        "is_longer": None not in (after, before.drain_s) and (after or 0) > (before.drain_s or 0),
    }
    return TemplateResponse(request, "admin/callqueue/confirm_limit.html", context)


_ACTS: dict[str, Callable[[HttpRequest, Any, str], HttpResponse | str]] = {
    "pause": _pause,
    "resume": _resume,
    "limit": _change,
}


def _in_words(seconds: float | None) -> str:
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
        return clock(_using()) + parse_duration(for_)
    if not at:
        return None
    until = parse_datetime(at)
    if until is None:
        raise InvalidCall("until", _("%r is not a date and time") % at)
    if timezone.is_naive(until):
        until = timezone.make_aware(until)
    if until <= clock(_using()):
        raise InvalidCall("until", _("is in the past"))
    return until


def _key(text: str) -> Any:
    """A key as `send` takes it: a mapping is written as JSON."""
    from callqueue.limits.budgets import key_parts

    return dict(key_parts(text)) or text


def _log(request: HttpRequest, rule: str, what: str) -> None:
    user_id: Any = request.user.pk
    LogEntry.objects.log_actions(user_id, [RuleState(rule=rule)], CHANGE, what, single_object=True)


def _back() -> HttpResponse:
    return HttpResponseRedirect(reverse("admin:callqueue_dashboard"))


def _using() -> str:
    return router.db_for_write(CallQueue)
