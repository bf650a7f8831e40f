"""What is done to rules, by form: pause, resume, and changed limits. All goes into the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.contrib import messages
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from callqueue import conf, control, texts
from callqueue.admin.base import OwnAdmin, db_alias, has_permission, log_change, user_id
from callqueue.database import clock
from callqueue.exceptions import CallQueueError, InvalidCall
from callqueue.ledger import settings
from callqueue.limits.budgets import Budget, named_parts
from callqueue.limits.durations import WrongDuration, parse_duration
from callqueue.limits.kinds import Limit
from callqueue.look import RuleLook, look, notes, words
from callqueue.models import CallQueue, RuleState
from callqueue.sending.validation import MAX_TEXT, check_key

PERMISSION = "control_rule"
USUAL = "30m"  # how long a pause lasts, where nothing else is said
REFUSED = (CallQueueError, ImproperlyConfigured, WrongDuration, ValueError)


def perform_posted_action(request: HttpRequest, admin: OwnAdmin) -> HttpResponse:
    """Do and log what a form asks, and redirect; or the page that asks for confirmation."""
    asked = request.POST.get("do", "")
    if not has_permission(request, PERMISSION):
        raise PermissionDenied
    rule, do = request.POST.get("rule", ""), _ACTS.get(asked)
    if do is None:
        messages.error(request, _("Nothing was done: there is no such action."))
        return _redirect_to_rule(rule)
    try:
        answer = do(request, admin, rule)
    except REFUSED as error:
        return _redirect_refused(request, rule, error)
    if isinstance(answer, HttpResponse):
        return answer
    log_change(user_id(request), RuleState(rule=rule), answer)
    # Themes begin each message with a capital, which a name may not have.
    messages.success(request, _("Rule %(rule)s: %(done)s") % {"rule": rule, "done": answer})
    return _redirect_to_rule(rule)


def _redirect_refused(request: HttpRequest, rule: str, error: Exception) -> HttpResponse:
    messages.error(request, _refusal_in_words(error))
    return _redirect_to_rule(rule)


def _refusal_in_words(error: Exception) -> str:
    return _("Nothing was changed: %s") % error


def _ask_or_pause(request: HttpRequest, admin: OwnAdmin, rule: str) -> HttpResponse | str:
    conf.current().rule(rule)  # else UnknownRule
    names, is_confirmed, problem = ("how", "for", "key", "reason"), "confirm" in request.POST, ""
    asked = {name: request.POST.get(name, "").strip()[: MAX_TEXT + 1] for name in names}
    if not is_confirmed:
        asked["for"] = asked["for"] or USUAL
    waiting = CallQueue.objects.using(db_alias()).waiting().filter(rule=rule)
    try:
        key = _parse_key(asked["key"])
        if text := check_key(key):
            waiting = waiting.filter(control.condition_of_pause(text))
        is_endless = asked["how"] == "resumed"
        length = None if is_endless else parse_duration(asked["for"]).total_seconds()
        if is_confirmed:
            reason = asked["reason"][:500] or _("paused by %s") % request.user.get_username()
            control.pause(db_alias(), rule, key=key, seconds=length, reason=reason)
            until = None if length is None else clock(db_alias()) + timedelta(seconds=length)
            return _pause_in_words(asked, until)
    except REFUSED as error:
        problem = _refusal_in_words(error)
    count = waiting.count()
    context = {
        "rule": rule,
        "back": rule_url(rule),
        "asked": asked,
        "problem": problem,
        "waiting": count,
        "shown": words.count(count),
    }
    return admin.render_page(request, "confirm_pause.html", _("Pause %s?") % rule, context)


def _pause_in_words(asked: Mapping[str, str], until: datetime | None) -> str:
    end = _("until %s") % words.instant(until) if until else _("until it is resumed")
    said = _("Paused key %(key)s %(end)s") if asked["key"] else _("Paused %(end)s")
    why = f": {asked['reason'][:500]}" if asked["reason"] else ""
    return said % {"key": repr(asked["key"]), "end": end} + f"{why}."


def _ask_or_resume(request: HttpRequest, admin: OwnAdmin, rule: str) -> HttpResponse | str:
    key, restored = request.POST.get("key", "").strip(), "restored" in request.POST
    if "confirm" not in request.POST:
        count = control.count_holds_to_end(db_alias(), rule, key=_parse_key(key), restored=restored)
        asked = {"key": key, "restored": restored, "ending": count, "shown": words.count(count)}
        context = {"rule": rule, "back": rule_url(rule), **asked}
        return admin.render_page(request, "confirm_resume.html", _("Resume %s?") % rule, context)
    count = control.resume(db_alias(), rule, key=_parse_key(key), restored=restored)
    ended = ngettext("%d hold ended", "%d holds ended", count) % count
    said = _("Resumed key %(key)s; %(ended)s.") if key else _("Resumed; %(ended)s.")
    said = said % {"key": repr(key), "ended": ended}
    if kept := control.restore_hold_ends_at(db_alias(), rule):
        still = _("It is still held after a restored backup, until %s.") % words.instant(kept)
        said += " " + still
    return said


def _ask_or_change_limit(request: HttpRequest, admin: OwnAdmin, rule: str) -> HttpResponse | str:
    if "confirm" not in request.POST:
        return _limit_change_page(request, admin, rule, request.POST)
    budget_id, rate = request.POST.get("limit", ""), request.POST.get("rate", "").strip()
    conf.current().rule(rule)  # else UnknownRule
    before = _budget_of(rule, budget_id, settings.book_in_force(db_alias()).budgets.get(rule, ()))
    now = control.change_limit(db_alias(), rule, budget_id, rate or None)
    values = {"limit": budget_id, "before": before.limit.rate_text, "now": now}
    return _("Limit %(limit)s changed from %(before)s to %(now)s.") % values


def preview_limit(request: HttpRequest, admin: OwnAdmin, rule: str) -> HttpResponse:
    """The page of what another rate would do, for all who may look; a redirect if refused."""
    try:
        return _limit_change_page(request, admin, rule, request.GET)
    except REFUSED as error:
        return _redirect_refused(request, rule, error)


def _limit_change_page(
    request: HttpRequest, admin: OwnAdmin, rule: str, asked: Mapping[str, str]
) -> HttpResponse:
    """What the rate asked for would do, and a form to set it; raises one of REFUSED."""
    budget_id, rate = asked.get("limit", ""), asked.get("rate", "").strip()
    config = conf.current()
    config.rule(rule)  # else UnknownRule
    stated = _budget_of(rule, budget_id, config.book.budgets[rule]).limit
    wanted = rate or stated.rate_text
    limit = stated.with_rate(wanted)
    after = look(db_alias(), rates={budget_id: wanted})
    before = after.before or after
    budget = _budget_of(rule, budget_id, before.book.budgets[rule])
    rules = sorted(
        (name for name in budget.rules if name in config.rules), key=lambda name: name != rule
    )
    context = {
        "rule": rule,
        "back": rule_url(rule),
        "may_control": has_permission(request, PERMISSION),
        "limit_id": budget_id,
        "rate": rate,
        "wanted": wanted,
        "warnings": [one for one in notes(before) if one.what == "dispenser" and one.kind == "bad"],
        "limit": budget.limit,
        "rules": [_before_and_after(before.rule(name), after.rule(name)) for name in rules],
        "too_low": _warning_of_traffic([before.rule(name) for name in rules], limit),
    }
    title = _("Change a limit of %s?") % rule
    return admin.render_page(request, "confirm_limit.html", title, context)


def _before_and_after(before: RuleLook, after: RuleLook) -> dict[str, Any]:
    old, new = before.drain_s(), after.drain_s()
    return {
        "name": before.name,
        "waiting": words.count(before.waits.ready),
        "in": words.rate(before.incoming),
        "out": words.rate(before.pace.per_second),
        "before": _duration_in_words(old),
        "after": _duration_in_words(new),
        "is_longer": old is not None and (new is None or new > old),
    }


def _warning_of_traffic(rules: Sequence[RuleLook], limit: Limit) -> str:
    """That less gets through a limit than comes in now; empty where all does, or nobody can say."""
    incoming = sum(rule.incoming for rule in rules)
    allowed = limit.per_second
    if allowed is None or limit.unit != "calls" or limit.is_keyed or incoming <= allowed:
        return ""
    text = _(
        "%(in)s calls a second come in under this limit now, and it would let %(out)s through: "
        "the backlog would grow by %(more)s a second."
    )
    values = {"in": words.rate(incoming), "out": words.rate(allowed)}
    return text % {**values, "more": words.rate(incoming - allowed)}


def _budget_of(rule: str, budget_id: str, budgets: Sequence[Budget]) -> Budget:
    found = {budget.known_as: budget for budget in budgets}
    if budget_id not in found:
        why = _("rule %(rule)r has no limit %(limit)r") % {"rule": rule, "limit": budget_id}
        raise InvalidCall("limit", f"{why}{texts.suggest(budget_id, found)}")
    return found[budget_id]


# each returns the page that asks; once that is confirmed it acts, and returns what the log says
_ACTS: dict[str, Callable[[HttpRequest, OwnAdmin, str], HttpResponse | str]] = {
    "pause": _ask_or_pause,
    "resume": _ask_or_resume,
    "limit": _ask_or_change_limit,
}


def _duration_in_words(seconds: float | None) -> str:
    return _("no estimate") if seconds is None else words.duration(seconds)


def _parse_key(text: str) -> Any:
    # As `send` takes it: a mapping is JSON. What is too long for one is not read.
    return text if len(text) > MAX_TEXT else dict(named_parts(text)) or text


def _redirect_to_rule(rule: str) -> HttpResponse:
    if rule in conf.current().rules:
        return HttpResponseRedirect(rule_url(rule))
    return HttpResponseRedirect(reverse("admin:callqueue_dashboard"))


def rule_url(name: str) -> str:
    return f"{reverse('admin:callqueue_rule')}?{urlencode({'name': name})}"
