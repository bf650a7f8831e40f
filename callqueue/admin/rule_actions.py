"""What is done to rules on the dashboard: pause, resume, and changed limits, by form.

In: a request. Out: a redirect with a message, or a page that asks. What is done goes through
operations.control and into the admin's log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

from callqueue import conf, states, texts
from callqueue.admin import actions, health
from callqueue.admin.base import OwnAdmin, log_change, may, user_id
from callqueue.database import clock
from callqueue.exceptions import CallQueueError, InvalidCall
from callqueue.ledger import agreement
from callqueue.limits.budgets import Budget, key_parts
from callqueue.limits.durations import WrongDuration, parse_duration
from callqueue.models import CallQueue, RuleState
from callqueue.operations import board as boards
from callqueue.operations import control, errors, formatting
from callqueue.operations.draining import Drain
from callqueue.operations.standing import Standing
from callqueue.security.redaction import redact_text

PERMISSION = "control_rule"


def act(request: HttpRequest, admin: OwnAdmin) -> HttpResponse:
    """Do to a rule what the form says; PermissionDenied for those who may not."""
    asked = request.POST.get("do", "")
    if not may(request, "requeue_call" if asked == "requeue" else PERMISSION):
        raise PermissionDenied
    rule, do = request.POST.get("rule", ""), _ACTS.get(asked)
    if do is None:
        messages.error(request, _("Nothing was done: there is no such action."))
        return _back(rule)
    try:
        answer = do(request, admin, rule)
    except (CallQueueError, ImproperlyConfigured, WrongDuration, ValueError) as error:
        messages.error(request, _("Nothing was changed: %s") % error)
        return _back(rule)
    if isinstance(answer, HttpResponse):
        return answer
    log_change(user_id(request), RuleState(rule=rule), answer)
    messages.success(request, f"{rule}: {answer}")
    return _back(rule)


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
    """The page that says what another rate would do to every rule concerned."""
    budget = _budget_of(rule, budget_id)
    wanted = rate or _settings_of(rule, budget_id).limit.rate_text
    _settings_of(rule, budget_id).limit.with_rate(wanted)
    before, after = boards.read(using()), boards.read(using(), rates={budget_id: wanted})
    drains = {one.name: one.drain for one in after.rules}
    context = {
        "rule": rule,
        "back": health.rule_url(rule),
        "said": health.dispenser_trouble(before),
        "limit": budget.limit,
        "limit_id": budget_id,
        "rate": rate,
        "wanted": wanted,
        "concerned": [
            _concerned(one, drains[one.name])
            for one in sorted(before.rules, key=lambda one: one.name != rule)
            if one.name in budget.rules
        ],
    }
    return admin.page(request, "confirm_limit.html", _("Change a limit of %s?") % rule, context)


def _concerned(before: Standing, drain: Drain | None) -> dict[str, Any]:
    """What a change does to one rule: until when its backlog is drained, now and then."""
    old, new = drained(before.drain), drained(drain)
    return {
        "name": before.name,
        "waiting": formatting.count(before.backlog.ready),
        "before": in_words(old),
        "after": in_words(new),
        "is_longer": old is not None and new is not None and new > old,
    }


def drained(drain: Drain | None) -> float | None:
    """Seconds until a backlog is drained; None where nobody can say."""
    return 0.0 if drain is None else drain.seconds()


def _requeue(request: HttpRequest, admin: OwnAdmin, rule: str) -> HttpResponse | str:
    """Requeue the calls that failed alike, once that was confirmed."""
    conf.current().rule(rule)
    listed, _is_partial = errors.groups(using(), rule)
    group = errors.group_named(listed, request.POST.get("group", ""))
    if group is None:
        raise InvalidCall("group", _("no calls failed so any more"))
    if "confirm" not in request.POST:
        return _ask_requeue(request, admin, rule, group)
    calls = CallQueue.objects.using(using()).filter(pk__in=group.pks, status=group.status)
    changed = actions.requeue_all(user_id(request), calls)
    return ngettext("%d call requeued.", "%d calls requeued.", changed) % changed


def _ask_requeue(
    request: HttpRequest, admin: OwnAdmin, rule: str, group: errors.ErrorGroup
) -> HttpResponse:
    board = boards.read(using())
    (standing,) = (one for one in board.rules if one.name == rule)
    context = {
        "rule": rule,
        "back": health.rule_url(rule),
        "said": health.dispenser_trouble(board),
        "group": group.name,
        "text": redact_text(group.text),
        "count": formatting.count(len(group.pks)),
        "is_unknown": group.status == states.UNKNOWN,
        "takes": in_words(boards.drained_with(board, standing, len(group.pks))),
    }
    title = _("Requeue calls of %s?") % rule
    return admin.page(request, "confirm_group.html", title, context)


def _budget_of(rule: str, budget_id: str) -> Budget:
    """The rule's limit of this id, as it is in force; InvalidCall where it has none."""
    conf.current().rule(rule)
    return _found(rule, budget_id, agreement.book_in_force(using()).budgets[rule])


def _settings_of(rule: str, budget_id: str) -> Budget:
    """The same as the settings have it."""
    return _found(rule, budget_id, conf.current().book.budgets[rule])


def _found(rule: str, budget_id: str, budgets: Sequence[Budget]) -> Budget:
    found = {budget.known_as: budget for budget in budgets}
    if budget_id not in found:
        why = _("rule %(rule)r has no limit %(limit)r") % {"rule": rule, "limit": budget_id}
        raise InvalidCall("limit", f"{why}{texts.suggest(budget_id, found)}")
    return found[budget_id]


_ACTS: dict[str, Callable[[HttpRequest, OwnAdmin, str], HttpResponse | str]] = {
    "pause": _pause,
    "resume": _resume,
    "limit": _change,
    "requeue": _requeue,
}


def in_words(seconds: float | None) -> str:
    """A drain time in words; None: nobody can say."""
    return _("no estimate") if seconds is None else formatting.duration(seconds)


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


def _back(rule: str) -> HttpResponse:
    """To the page of the rule; to the dashboard where there is no such rule."""
    if rule in conf.current().rules:
        return HttpResponseRedirect(health.rule_url(rule))
    return HttpResponseRedirect(reverse("admin:callqueue_dashboard"))


def using() -> str:
    """The database that the dashboard shows, and acts on."""
    return router.db_for_write(CallQueue)
