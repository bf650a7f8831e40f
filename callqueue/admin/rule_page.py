"""The page of one rule: where it stands and why, its limits, errors, keys, and what it sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib.admin.models import LogEntry
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils import timezone
from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from callqueue import conf
from callqueue.admin import dashboard, rule_actions
from callqueue.admin.base import OwnAdmin, db_alias, has_permission
from callqueue.admin.readonly import may_see_holds
from callqueue.history import errors, sums
from callqueue.history.audit import audit
from callqueue.history.sums import Sums
from callqueue.limits.kinds import SECOND
from callqueue.look import LimitLook, Look, RuleLook, look, notes, words
from callqueue.look.notes import WELL
from callqueue.look.read import read_largest_keys
from callqueue.models import CallQueue

KEYS = 20  # that the table of keys shows
SHOWN = 20  # calls of a group of errors that are linked
LOGGED = 8  # of what was done to the rule, the newest
NEARLY_ALL = 0.95  # the share of attempts of which it is said how long they took
SHOWN_BELOW = ("held", "keys", "failing", "failures", "done")  # of what is said of all rules
WIDTH, HEIGHT = 620, 130  # of a chart
LEFT, TOP, BOTTOM = 56, 10, 22  # room for its axes
EVERY = 16  # stretches from one time on its axis to the next
COUNTS = ("sent", "done", "failed", "throttled")
WHY_NO_ESTIMATE = {
    "no_dispenser": gettext_lazy("no estimate: no dispenser runs"),
    "no_workers": gettext_lazy("no estimate: no worker takes its calls"),
    "held": gettext_lazy("no estimate: held until someone resumes it"),
    "stuck": gettext_lazy("no estimate: nothing is sent"),
    "no_pace": gettext_lazy("no estimate: how fast calls are answered is not known yet"),
}


def page(request: HttpRequest, admin: OwnAdmin) -> HttpResponse:
    """The page, or what a change of a limit would do; the dashboard where no rule is named."""
    admin.check_may_view(request)
    name = request.GET.get("name", "")
    if not name:
        return redirect("admin:callqueue_dashboard")
    if name not in conf.current().rules:
        raise Http404(_("There is no rule %s in the settings.") % name)
    if "limit" in request.GET:
        return rule_actions.preview_limit(request, admin, name)
    seen = look(db_alias(), rules=[name])
    rule, now, sees_holds = seen.rule(name), seen.wall_time, may_see_holds(request)
    context = {
        "rule": rule,
        "states": dashboard.state_labels_and_hues(rule),
        "notes": [one for one in notes(seen) if one.kind != WELL and one.what not in SHOWN_BELOW],
        "figures": _figures_in_words(rule),
        "ends": done_in_words(rule, rule.drain_s()) if rule.waits.ready else _("nothing waits"),
        # Which keys are held is for those who may see holds.
        "holds": [one for one in rule.holds if one.per == "rule" or sees_holds],
        "more_holds": max(0, rule.keys_held - sum(one.is_on_keys for one in rule.holds)),
        "is_restored": any(one.source == "restored" for one in rule.holds),
        "may_see_holds": sees_holds,
        "may_control": has_permission(request, rule_actions.PERMISSION),
        "may_requeue": has_permission(request, "requeue_call"),
        "limits": [_limit_row(seen, rule, one) for one in rule.limits],
        "audited": _audit_rows(name) if "audit" in request.GET else None,
        "logged": _log_rows(name) if sees_holds else (),
        "as_of": words.clock_time(now, now),
        "now": now,
        **_context_of_errors(name, now),
        **_context_of_keys(rule),
        **_context_of_sums(seen, rule),
    }
    response = admin.render_page(request, "rule.html", name, context)
    response["Cache-Control"] = "no-store"
    return response


def _figures_in_words(rule: RuleLook) -> list[tuple[str, str]]:
    flight, oldest = words.count(rule.flight.count), rule.oldest_due_s
    if rule.flight.unbegun:
        flight += " " + _("(%s not begun by a worker)") % words.count(rule.flight.unbegun)
    return [
        (_("Waiting"), words.count(rule.waits.ready)),
        (_("Due later"), words.count(rule.waits.later)),
        (_("Oldest waiting"), "–" if oldest is None else words.duration(oldest)),
        (_("In flight"), flight),
        (_("In → out a second"), dashboard.flow_in_words(rule) or "–"),
        (_("Done by"), dashboard.when_done(rule) or "–"),
    ]


def done_in_words(rule: RuleLook, seconds: float | None) -> str:
    """When a backlog is done, in words; or why nobody can say."""
    if seconds is None:
        return str(WHY_NO_ESTIMATE.get(rule.why_unknown, _("no estimate")))
    at = words.clock_time_in(rule.to_wall(rule.now), seconds)
    return _("done by %(at)s, in %(in)s") % {"at": at, "in": words.duration(seconds)}


def _limit_row(seen: Look, rule: RuleLook, limit: LimitLook) -> dict[str, Any]:
    opens, at = "", limit.opens_at
    if not limit.free:
        soonest = seen.now + SECOND
        opens = (
            _("with an answer") if at is None
            else words.clock_time(seen.to_wall(max(at, soonest)), seen.wall_time)
        )  # fmt: skip
    return {
        "id": limit.budget.known_as,
        "limit": limit.budget.limit,
        "changed": dashboard.rate_changed_from(limit),
        "others": [other for other in limit.budget.rules if other != rule.name],
        "use": dashboard.usage_bar(limit),
        "value": limit.value,
        "opens": opens,
        "note": limit.in_flight_note(rule.pace.latency),
    }


def _audit_rows(rule: str) -> list[dict[str, Any]]:
    """The highest use of the rule's limits in any window of the last hour, from the attempts."""
    found = audit(db_alias(), since=timedelta(hours=1), rules=[rule], tell=False)
    return [
        {
            "name": one.name,
            "highest": words.count(one.highest),
            "allowed": words.count(one.allowed),
            "value": one.value,
            "is_over": one.exceeded,
        }
        for one in found.findings
        if one.rule == rule
    ]


def _log_rows(rule: str) -> list[tuple[str, str, str]]:
    rows = LogEntry.objects.filter(
        content_type__app_label="callqueue", content_type__model="rulestate", object_id=rule
    )
    newest = rows.select_related("user").order_by("-pk")[:LOGGED]
    return [
        (words.instant(one.action_time), one.user.get_username(), one.get_change_message())
        for one in newest
    ]


def _context_of_keys(rule: RuleLook) -> dict[str, Any]:
    """The keys with most calls ready, and how many keys have any."""
    shown, count_of_keys = read_largest_keys(db_alias(), rule.name, KEYS, rule.now)
    ready = max(1, rule.waits.ready)
    return {
        "keys": [
            (key, words.count(count), f"{100 * count / ready:.0f} %", is_held)
            for key, count, is_held in shown
        ],
        "keys_count": words.count(count_of_keys),
    }


def _context_of_errors(rule: str, now: Any) -> dict[str, Any]:
    found, is_partial = errors.read_groups(db_alias(), rule)
    others = sum(len(one.pks) for one in found[errors.MOST :])
    return {
        "groups": [
            {
                "name": one.digest,
                "status": CallQueue.Status(one.status).label,
                "status_id": one.status,
                "text": errors.message_to_show(one.message) or _("(no reason)"),
                "count": words.count(len(one.pks)),
                "keys": words.count(len(one.keys)),
                "last": "" if one.last is None else words.ago(one.last, now),
                "calls": one.pks[:SHOWN],
            }
            for one in found[: errors.MOST]
        ],
        "others": max(0, len(found) - errors.MOST),
        "others_said": ngettext("%s call", "%s calls", others) % words.count(others),
        "is_partial": is_partial,
        "looked_at": words.count(errors.NEWEST),
    }  # fmt: skip


# --- what it sent


def _context_of_sums(seen: Look, rule: RuleLook) -> dict[str, Any]:
    """What the rule sent: sums and a chart, in wall time, by quarters of an hour of ledger time."""
    now, here, moved = int(seen.wall_time.timestamp()), seen.wall_time, seen.moved // SECOND
    zone = _time_zone(rule)
    today = timezone.localtime(here, zone).replace(hour=0, minute=0, second=0, microsecond=0)
    yesterday = (today - timedelta(hours=12)).replace(hour=0)
    first = min(int(yesterday.timestamp()), now - sums.DAY_S)
    series = sums.read_quarters(db_alias(), rule.name, first - moved, now + 1 - moved)
    every = [(start + moved, one) for start, one in series]
    stretches = [(start, one) for start, one in every if start > now - sums.DAY_S - sums.QUARTER_S]
    drawn = {kind: [getattr(one, kind) for _, one in stretches] for kind in COUNTS[1:]}
    shown = [
        (_("Today"), _sum_between(every, today, here + timedelta(seconds=1))),
        (_("Yesterday"), _sum_between(every, yesterday, today)),
        (_("Last hour"), rule.recent.hour),
        (_("Last 24 hours"), sums.total(one for _, one in stretches)),
    ]
    lately = sums.total(one for _, one in stretches[-2:])
    return {
        "sums": [(said, _counts_in_words(one)) for said, one in shown],
        "zone": str(zone),
        "waits": _nearly_all_within(lately.waits),
        "answers": _nearly_all_within(lately.answers),
        "chart": _bar_chart([start for start, _ in stretches], drawn, _("Last 24 hours")),
        "chart_rows": [
            (_hour_and_minute(start), _counts_in_words(one))
            for start, one in stretches[::-1]
            if one.sent
        ],
        "summed": seen.summed_until and words.clock_time(seen.to_wall(seen.summed_until), here),
    }


def _time_zone(rule: RuleLook) -> Any:
    """The time zone of the rule's calendar: its first limit's that has one, else the reader's."""
    zones = (one.budget.limit.zone for one in rule.limits)
    return next((zone for zone in zones if zone), timezone.get_current_timezone())


def _sum_between(every: Sequence[tuple[int, Sums]], start: datetime, end: datetime) -> Sums:
    first, last = start.timestamp(), end.timestamp()
    return sums.total(one for at, one in every if first <= at < last)


def _counts_in_words(one: Sums) -> list[str]:
    return [words.count(getattr(one, name)) for name in COUNTS]


def _nearly_all_within(buckets: list[int]) -> str:
    """At most how long nearly all took that the buckets count; empty where they count nothing."""
    bound = sums.bound_of_share(buckets, NEARLY_ALL)
    if bound is None:
        return ""
    longest = sums.BOUNDS[-1]
    is_longer = bound > longest
    said = _("over %s") if is_longer else _("at most %s")
    return said % words.short_duration(min(bound, longest))


def _bar_chart(starts: Sequence[int], values: Mapping[str, Sequence[int]], says: str) -> SafeString:
    """A bar for each stretch, by its begin in seconds. `values`: by CSS class, from below."""
    most = max(map(sum, zip(*values.values(), strict=True))) or 1
    step, room = (WIDTH - LEFT) / len(starts), HEIGHT - TOP - BOTTOM
    drawn = []
    for y, label in ((TOP, words.count(most)), (TOP + room, "0")):
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
        drawn.append(f'<text x="{LEFT - 5}" y="{y + 4}" text-anchor="end">{label}</text>')
    for place in range(0, len(starts) - EVERY // 3, EVERY):
        x = LEFT + place * step
        drawn.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}">{_hour_and_minute(starts[place])}</text>')
    for place in range(len(starts)):
        low, x = float(TOP + room), LEFT + place * step
        for kind, counts in values.items():
            if counts[place]:
                height = max(1.0, room * counts[place] / most)
                low -= height
                drawn.append(
                    f'<rect class="cq-{kind}" x="{x:.1f}" width="{step - 1:.1f}" y="{low:.1f}" '
                    f'height="{height:.1f}"/>'
                )
    return mark_safe(
        f'<svg class="cq-chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(says)}">{"".join(drawn)}</svg>'
    )


def _hour_and_minute(unix_s: int) -> str:
    return f"{timezone.localtime(datetime.fromtimestamp(unix_s, UTC)):%H:%M}"
