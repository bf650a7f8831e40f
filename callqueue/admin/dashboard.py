"""The dashboard: whether all is well, and where every rule stands, a row each, the worst first.

In: a request. Out: a page, or the parts of it that change. Nothing here counts anything itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from callqueue.admin import health, rule_actions
from callqueue.admin.base import OwnAdmin
from callqueue.admin.readonly import may_see_holds
from callqueue.admin.rule_actions import using
from callqueue.database import from_us
from callqueue.limits.budgets import Budget
from callqueue.limits.kinds import SECOND
from callqueue.operations import board as boards
from callqueue.operations import formatting
from callqueue.operations.board import Board
from callqueue.operations.history import PeakUse
from callqueue.operations.standing import STATES as ORDER
from callqueue.operations.standing import Standing

STATES = {
    "held": gettext_lazy("held"),
    "no_dispenser": gettext_lazy("no dispenser"),
    "no_workers": gettext_lazy("no workers"),
    "failing": gettext_lazy("failing"),
    "stuck": gettext_lazy("nothing is sent"),
    "at_limit": gettext_lazy("at its limit"),
    "draining": gettext_lazy("draining"),
    "idle": gettext_lazy("idle"),
}
# The classes of what is wrong; full speed is not.
KINDS = {
    "held": "unknown", "no_dispenser": "failed", "no_workers": "failed", "failing": "failed",
    "stuck": "error", "at_limit": "new", "draining": "done", "idle": "quiet",
}  # fmt: skip


class Column(NamedTuple):
    """A column of the table: by what it is sorted, its title, what the title means, and by what
    value its rows are.
    """

    name: str
    title: Any
    meaning: Any
    of: Callable[[Standing], Any]


COLUMNS = (
    Column("rule", gettext_lazy("Rule"), "", lambda r: r.name.lower()),
    Column("state", gettext_lazy("State"), "", lambda r: -ORDER.index(r.state)),
    Column("waiting", gettext_lazy("Waiting"), "", lambda r: r.backlog.waiting),
    Column("oldest", gettext_lazy("Oldest"), gettext_lazy("how long the oldest call has been due"),
           lambda r: -(r.backlog.oldest_due or 2**63)),
    Column("p95", gettext_lazy("p95 wait"),
           gettext_lazy("19 of 20 calls waited no longer, from due to sent; last 15 minutes"),
           lambda r: r.p95 or 0),
    Column("rate", gettext_lazy("Sent/s"),
           gettext_lazy("attempts answered a second, over the last minute"), lambda r: r.rate),
    Column("limit", gettext_lazy("Limit"),
           gettext_lazy("the highest use of any of its windows in the last hour"),
           lambda r: share_of(tightest(r))),
    Column("flight", gettext_lazy("In flight"), gettext_lazy("charged, and not answered yet"),
           lambda r: r.in_flight.count),
    Column("throttled", gettext_lazy("429s 1 h"), gettext_lazy("throttled in the last hour"),
           lambda r: r.lately.hour.throttled),
    Column("throttled_day", gettext_lazy("24 h"), gettext_lazy("throttled in the last 24 hours"),
           lambda r: r.lately.day.throttled),
    Column("failed", gettext_lazy("Failed 1 h"),
           gettext_lazy("attempts that failed in the last hour"),
           lambda r: r.lately.hour.failed),
    Column("done", gettext_lazy("Done by"), "",
           lambda r: float("inf") if r.drained_s is None else r.drained_s),
)  # fmt: skip
NUMBERS = {"waiting", "oldest", "p95", "rate", "flight", "throttled", "throttled_day", "failed"}


def page(request: HttpRequest, admin: OwnAdmin) -> HttpResponse:
    """The whole page; a POST acts first."""
    if request.method == "POST":
        return rule_actions.act(request, admin)
    return admin.page(request, "dashboard.html", _("Dashboard"), context(request))


def live(request: HttpRequest, admin: OwnAdmin) -> HttpResponse:
    """The parts that change, for the script to put in their places."""
    response = TemplateResponse(request, "admin/callqueue/dashboard_live.html", context(request))
    response["Cache-Control"] = "no-store"
    return response


def context(request: HttpRequest) -> dict[str, Any]:
    """What the templates show."""
    found = boards.read(using())
    order = request.GET.get("o", "")
    return {
        "said": health.said(found),
        "columns": _columns(order),
        "order": order,
        "rows": [_row(found, rule, request) for rule in _sorted(found.rules, order)],
        "rules": found.rules,
        "waiting": formatting.count(sum(rule.backlog.waiting for rule in found.rules)),
        "as_of": health.clock_time(from_us(found.now), from_us(found.now)),
        "now": from_us(found.now),
        "disagreements": found.disagreements,
    }


def _columns(order: str) -> list[tuple[Column, str, str, bool]]:
    """Each column, how it is sorted now, by what its title sorts, and whether it holds numbers."""
    listed = []
    for column in COLUMNS:
        first = column.name if column.name == "rule" else f"-{column.name}"
        other = column.name if first.startswith("-") else f"-{column.name}"
        now = {column.name: "ascending", f"-{column.name}": "descending"}.get(order, "")
        listed.append((column, now, other if order == first else first, column.name in NUMBERS))
    return listed


def _sorted(rules: Sequence[Standing], order: str) -> Sequence[Standing]:
    for column in COLUMNS:
        if column.name == order.removeprefix("-"):
            return sorted(rules, key=column.of, reverse=order.startswith("-"))
    return rules


def _row(board: Board, rule: Standing, request: HttpRequest) -> dict[str, Any]:
    """One rule, as the table shows it."""
    budget = tightest(rule)
    oldest = rule.backlog.oldest_due
    return {
        "name": rule.name,
        "url": health.rule_url(rule.name),
        "state": STATES[rule.state],
        "kind": KINDS[rule.state],
        "why": _why(rule, may_see_holds(request)),
        "waiting": formatting.count(rule.backlog.waiting),
        "oldest": ""
        if oldest is None
        else formatting.short(max(0.0, (board.now - oldest) / SECOND)),
        "p95": "" if rule.p95 is None else formatting.short(rule.p95),
        "rate": health.number(rule.rate) if rule.rate else "",
        "limit": "" if budget is None else budget[0].limit.rate_text,
        "use": "" if budget is None else use_of(budget[1], rule.in_flight.count),
        "flight": formatting.count(rule.in_flight.count) if rule.in_flight.count else "",
        "throttled": _count(rule.lately.hour.throttled),
        "throttled_day": _count(rule.lately.day.throttled),
        "failed": _count(rule.lately.hour.failed),
        "done": done_of(board, rule),
    }


def done_of(board: Board, rule: Standing) -> str:
    """When the backlog is done: a clock time, "–" where nobody can say, nothing where there is
    none.
    """
    if not rule.backlog.ready:
        return ""
    return "–" if rule.drained_s is None else health.done_by(board.now, rule.drained_s)


def _why(rule: Standing, tells: bool) -> str:
    """What the state's title says besides."""
    if rule.hold is None:
        return ""
    return rule.hold.reason if tells else ""


def tightest(rule: Standing) -> tuple[Budget, PeakUse | None] | None:
    """The limit that is used most; of those that are not, the one with the lowest rate."""
    return max(rule.peaks, key=lambda one: (share_of(one), -_rate(one[0])), default=None)


def share_of(one: tuple[Budget, PeakUse | None] | None) -> float:
    """The highest use of a limit as a share of what it allows."""
    if one is None or one[1] is None or not one[1].allowed:
        return 0.0
    return one[1].highest / one[1].allowed


def _rate(budget: Budget) -> float:
    limit = budget.limit
    return limit.capacity / limit.period_us if limit.period_us else float("inf")


def use_of(peak: PeakUse | None, charged: int = 0) -> SafeString:
    """A bar: what was sent in the fullest window, and what is charged and not answered yet; over
    the limit is told apart.
    """
    if peak is None or not peak.allowed:
        return mark_safe("")
    sent = min(1.0, peak.highest / peak.allowed)
    kind = "x" if peak.highest > peak.allowed else "u"
    wide = round(60 * sent)
    waits = min(60 - wide, round(60 * charged / peak.allowed))
    charged_part = f'<path class="w" d="M{wide} 0h{waits}v8h-{waits}z"/>' if waits else ""
    says = _("%(highest)s of %(allowed)s") % {
        "highest": formatting.count(peak.highest),
        "allowed": formatting.count(peak.allowed),
    }
    return mark_safe(
        f'<svg viewBox="0 0 60 8"><path class="{kind}" d="M0 0h{wide}v8H0z"/>{charged_part}</svg>'
        f" {says}"
    )


def _count(number: int) -> str:
    return formatting.count(number) if number else ""
