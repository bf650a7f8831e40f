"""The dashboard: where every rule stands.

In: a request. Out: a page, or the parts of it that change. Nothing here counts anything itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.translation import gettext as _

from callqueue.admin import plots, rule_actions
from callqueue.admin.base import OwnAdmin, may
from callqueue.admin.readonly import may_see_holds
from callqueue.admin.rule_actions import using
from callqueue.database import clock
from callqueue.ledger import agreement
from callqueue.limits.kinds import SECOND
from callqueue.operations import formatting, status_report, throughput, usage_history
from callqueue.operations.limit_usage import KeyOverview, LimitOverview
from callqueue.operations.status_report import RuleOverview

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
        return rule_actions.in_words(self.rule.drain_s)


def page(request: HttpRequest, admin: OwnAdmin) -> HttpResponse:
    """The whole page; a POST acts first."""
    if request.method == "POST":
        return rule_actions.act(request, admin)
    return admin.page(request, "dashboard.html", _("Dashboard"), _context(request))


def live(request: HttpRequest, admin: OwnAdmin) -> HttpResponse:
    """The parts that change, for the script to put in their places."""
    response = TemplateResponse(request, "admin/callqueue/dashboard_live.html", _context(request))
    response["Cache-Control"] = "no-store"
    return response


def _context(request: HttpRequest) -> dict[str, Any]:
    alias, late = using(), time.monotonic() + COUNTING

    def soon(seconds: float) -> float:
        now = time.monotonic()
        return max(min(late, now + seconds), now + seconds / 2)

    hour = throughput.per_minute(alias, until=soon(0.03))
    rules = status_report.look(alias, keys=KEYS, until=late)
    traces = _traces(alias, [limit for rule in rules for limit in rule.limits], soon(0.02))
    of_keys = [
        limit
        for rule in rules
        for key in rule.keys
        for limit in key.limits
        if _scope(limit) not in traces
    ]
    traces |= _traces(alias, of_keys, soon(0.01))
    keys = [(rule.name, key.key) for rule in rules for key in rule.keys]
    hours = dict(zip(keys, throughput.of_keys(alias, keys, until=soon(0.02)), strict=True))
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
        "now": timezone.localtime(clock(alias)),
        "may_control": may(request, rule_actions.PERMISSION),
        "disagreements": agreement.disagreements(alias),
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
