"""The dashboard: whether all is well, and where every rule stands. Nothing here counts anything."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path, reverse
from django.utils.http import urlencode
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.generic import RedirectView

from callqueue import conf
from callqueue.admin import rule_actions
from callqueue.admin.base import OwnAdmin, db_alias, has_permission
from callqueue.admin.readonly import may_see_holds
from callqueue.admin.rule_actions import rule_url
from callqueue.look import LimitLook, Look, Note, RuleLook, look, notes, words
from callqueue.look.notes import ODD, WELL

DASHBOARD = "admin:callqueue_dashboard"
LONGEST_FROM = 0.8  # used of the longest window, from which on it is shown, too
BAR = 60  # user units that a bar is wide
# what each state is called, and its hue; full speed is nothing wrong
STATES = {
    "no_dispenser": (gettext_lazy("no dispenser"), "failed"),
    "no_workers": (gettext_lazy("no workers"), "failed"),
    "held": (gettext_lazy("held"), "unknown"),
    "failing": (gettext_lazy("failing"), "failed"),
    "stuck": (gettext_lazy("nothing is sent"), "error"),
    "at_limit": (gettext_lazy("at its limit"), "new"),
    "draining": (gettext_lazy("draining"), "done"),
    "ok": (gettext_lazy("ok"), "quiet"),
}
COLUMNS = (
    gettext_lazy("Rule"),
    gettext_lazy("State"),
    gettext_lazy("Waiting"),
    gettext_lazy("Done by"),
    gettext_lazy("Oldest"),
    gettext_lazy("In → out"),
    gettext_lazy("Limit"),
    gettext_lazy("429s 1 h"),
    gettext_lazy("Failed 1 h"),
)


class DashboardAdmin(OwnAdmin):
    """The dashboard's entry in the admin's menu, for whoever may view calls."""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return has_permission(request, "view_callqueue")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(RedirectView.as_view(pattern_name=DASHBOARD))
        return [path("", view, name="callqueue_rulestate_changelist")]


def page(request: HttpRequest, admin: OwnAdmin) -> HttpResponse:
    """The dashboard; of a POST, the answer to a form of a rule's page."""
    admin.check_may_view(request)
    if request.method == "POST":
        return rule_actions.perform_posted_action(request, admin)
    seen, sees_holds = look(db_alias()), may_see_holds(request)
    now = seen.wall_time
    told = [(one, note_url(one)) for one in notes(seen, tells_who=sees_holds)]
    context = {
        "troubles": [one for one in told if one[0].kind != WELL],
        "said": [one for one in told if one[0].kind == WELL],
        "columns": COLUMNS,
        "rows": [_rule_row(seen, rule, sees_holds) for rule in seen.worst_first],
        "waiting": words.count(sum(rule.waits.calls for rule in seen.rules)),
        "sent": words.count(sum(rule.recent.hour.sent for rule in seen.rules)),
        "as_of": words.clock_time(now, now),
        "now": now,
        "differences": seen.differences,
    }
    response = admin.render_page(request, "dashboard.html", _("Dashboard"), context)
    response["Cache-Control"] = "no-store"
    return response


def note_url(note: Note) -> str:
    if note.what == "differ":
        return "#cq-differ"
    if note.what == "failures" and note.kind == ODD:
        return attempts_url(ended="1h")
    return rule_url(note.rule) if note.rule else ""


def attempts_url(**query: str) -> str:
    return f"{reverse('admin:callqueue_callattempt_changelist')}?{urlencode(query)}"


def _rule_row(seen: Look, rule: RuleLook, sees_holds: bool) -> dict[str, Any]:
    later = f" + {words.count(rule.waits.later)}" if rule.waits.later else ""
    hour = rule.recent.hour
    return {
        "name": rule.name,
        "url": f"rule/?{urlencode({'name': rule.name})}",  # from here: rows are many
        "states": state_labels_and_hues(rule),
        "why": rule.hold.reason if rule.hold and sees_holds else "",
        "waiting": words.count(rule.waits.ready) + later,
        "is_growing": rule.is_growing,
        "oldest": "" if rule.oldest_due_s is None else words.short_duration(rule.oldest_due_s),
        "flow": flow_in_words(rule),
        "limits": [
            (short_name(one), usage_bar(one), rate_changed_from(one))
            for one in _limits_to_show(rule)
        ],
        "throttled": words.count(hour.throttled) if hour.throttled else "",
        "throttled_url": attempts_url(outcome__exact="throttled", rule__exact=rule.name, ended="1h")
        if hour.throttled
        else "",
        "failed": words.count(hour.failed) if hour.failed else "",
        "done": when_done(rule),
    }


def state_labels_and_hues(rule: RuleLook) -> list[tuple[Any, str]]:
    return [STATES[one] for one in rule.troubles or (rule.state,)]


def flow_in_words(rule: RuleLook) -> str:
    if not rule.incoming and not rule.pace.per_second:
        return ""
    return f"{words.rate(rule.incoming)} → {words.rate(rule.pace.per_second)}"


def when_done(rule: RuleLook) -> str:
    """When all that is ready is done, or that it grows; "–": nobody knows; "": nothing is."""
    if not rule.waits.ready:
        return ""
    if (seconds := rule.drain_s()) is None:
        return "–"
    return _("grows") if rule.is_growing else words.clock_time_in(rule.to_wall(rule.now), seconds)


def _limits_to_show(rule: RuleLook) -> list[LimitLook]:
    """The limit that keeps calls back, or is nearest to its end; and the longest if it is near."""
    if not rule.limits:
        return []
    first = rule.binding or max(rule.limits, key=lambda one: (_share_used(one), _window_us(one)))
    longest = max(rule.limits, key=_window_us)
    is_near = longest is not first and _share_used(longest) >= LONGEST_FROM
    return [first, longest] if is_near else [first]


def _window_us(limit: LimitLook) -> int:
    return limit.budget.limit.window_us


def _share_used(limit: LimitLook) -> float:
    return 1.0 if not limit.free else limit.used / limit.allowed if limit.allowed else 0.0


def short_name(limit: LimitLook) -> str:
    kind = limit.budget.limit
    if kind.counts_in_flight:
        return kind.label
    rate = kind.rate_text if kind.unit == "calls" else f"{kind.rate_text} {kind.unit}"
    return f"{kind.name} {rate}" if kind.name else rate


def rate_changed_from(limit: LimitLook) -> str:
    """The rate in the settings, if an operator has given the limit another; else empty."""
    budget, known = limit.budget, conf.current().book.budgets
    rates = {one.id: one.limit.rate_text for rule in budget.rules for one in known.get(rule, ())}
    configured = rates.get(budget.known_as, budget.limit.rate_text)
    return configured if configured != budget.limit.rate_text else ""


def usage_bar(limit: LimitLook) -> SafeString:
    """What of a limit is used now; the paler part is of calls that are not answered yet."""
    part, is_over = BAR / (limit.allowed or 1), limit.used > limit.allowed
    used = min(BAR, round(part * limit.used))
    sure = used if is_over else max(0, used - round(part * limit.in_flight))
    kind = "x" if is_over else "u"
    dark = f'<path class="{kind}" d="M0 0H{sure}v8H0z"/>' if sure else ""
    pale = f'<path class="w" d="M{sure} 0H{used}v8H{sure}z"/>' if used > sure else ""
    values = {"used": words.count(limit.used), "allowed": words.count(limit.allowed)}
    return mark_safe(
        f'<svg viewBox="0 0 {BAR} 8" aria-hidden="true">{dark}{pale}</svg> '
        + _("%(used)s of %(allowed)s") % values
    )
