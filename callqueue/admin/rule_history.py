"""What a rule sent and how far it used its limits, as its page shows it: tables and charts over the
last hour, day and week.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from callqueue import conf
from callqueue.admin import charts, dashboard
from callqueue.admin.charts import Series
from callqueue.admin.rule_actions import using
from callqueue.limits.budgets import Budget
from callqueue.operations import formatting, histograms, history
from callqueue.operations.board import Board
from callqueue.operations.history import RANGES, Counts, Range
from callqueue.operations.limit_usage import in_flight_note
from callqueue.operations.peaks import LARGE
from callqueue.operations.standing import Standing

WIDTHS = {
    "hour": gettext_lazy("minute"),
    "day": gettext_lazy("15 minutes"),
    "week": gettext_lazy("2 hours"),
}
SHOWN = ("sent", "done", "failed", "throttled")
NAMES = {
    "hour": gettext_lazy("last hour"),
    "day": gettext_lazy("last 24 hours"),
    "week": gettext_lazy("last week"),
}


def limits(board: Board, rule: Standing) -> list[dict[str, Any]]:
    """Each limit, with its highest use in each range."""
    budgets = board.book.budgets[rule.name]
    names = [budget.id for budget in budgets]
    found = [history.peaks(using(), one.width, one.starts(board.now)[0], names) for one in RANGES]
    return [
        {
            "budget": budget,
            "id": budget.known_as,
            "limit": budget.limit,
            "configured": configured(budget),
            "others": [other for other in budget.rules if other != rule.name],
            "uses": [_use(peaks.get(budget.id)) for peaks in found],
            "note": _note(board, rule, budget)
            or _unfollowed(rule, budget, any(budget.id in peaks for peaks in found)),
        }
        for budget in budgets
    ]


def _note(board: Board, rule: Standing, budget: Budget) -> str:
    """What uses a limit up that is full, where that is calls in flight; empty otherwise."""
    if rule.drain is None or not rule.drain.latency or budget.limit.unit != "calls":
        return ""
    if not any(gate.is_full and gate.limit is budget.limit for gate in rule.drain.gates):
        return ""
    flying = sum(one.in_flight.count for one in board.rules if one.name in budget.rules)
    is_cause = 2 * flying >= budget.limit.capacity
    return in_flight_note(flying, budget.limit.unit, rule.drain.latency) if is_cause else ""


def _unfollowed(rule: Standing, budget: Budget, is_followed: bool) -> str:
    """Why nothing is said of the use of a limit whose calls were sent; empty otherwise."""
    if is_followed or not rule.lately.day.sent or budget.limit.window_us <= LARGE:
        return ""
    return _("Its window holds too many calls to be followed here: callqueue_audit counts them.")


def _use(peak: history.PeakUse | None) -> dict[str, Any]:
    if peak is None:
        return {"bar": "–", "share": "–", "value": "", "is_over": False}
    return {
        "bar": dashboard.use_of(peak),
        "share": "–" if peak.share is None else f"{round(100 * peak.share)} %",
        "value": peak.value,
        "is_over": peak.highest > peak.allowed,
    }


def configured(budget: Budget) -> str:
    """The rate of this budget in the settings; that in force where the settings know it no more."""
    settings = conf.current().book.budgets
    rates = {b.id: b.limit.rate_text for rule in budget.rules for b in settings.get(rule, ())}
    return rates.get(budget.known_as, budget.limit.rate_text)


def sums(rule: Standing, now: int) -> list[tuple[str, list[str], str, str]]:
    """Each range's name, how much was sent, done, failed and throttled, and percentiles."""
    listed = []
    for one in RANGES:
        counts = Counts()
        for _start, part in history.of_rule(using(), rule.name, one, now):
            counts.add(part)
        waits, answers = counts.waits, counts.answers
        shown = [
            "–" if (taken := histograms.percentile(histogram, share)) is None
            else formatting.short(taken)
            for histogram in (waits, answers)
            for share in (histograms.P50, histograms.P95)
        ]  # fmt: skip
        numbers = [formatting.count(getattr(counts, name)) for name in SHOWN]
        listed.append((str(NAMES[one.name]), numbers, " / ".join(shown[:2]), " / ".join(shown[2:])))
    return listed


def charts_of(board: Board, rule: Standing, shown: Range) -> list[dict[str, Any]]:
    """What was sent, how long it waited and took, and the highest use of each limit that is not
    per key; each with its table.
    """
    stretches = history.of_rule(using(), rule.name, shown, board.now)
    starts = [start for start, _counts in stretches]
    counts = [one for _start, one in stretches]
    sent = [
        Series(_("done"), "done", [c.done for c in counts]),
        Series(_("failed"), "failed", [c.failed for c in counts]),
        Series(_("throttled"), "throttled", [c.throttled for c in counts]),
    ]
    waits = _percentiles([c.waits for c in counts])
    answers = _percentiles([c.answers for c in counts])
    values = {"width": WIDTHS[shown.name]}
    listed = [
        _chart(_("Attempts per %(width)s") % values, starts, sent, formatting.count, charts.bars),
        _chart(_("Wait, from due to sent"), starts, waits, formatting.short, charts.lines),
        _chart(_("Answer time, from sent to answered"), starts, answers, formatting.short,
               charts.lines),
    ]  # fmt: skip
    for budget in board.book.budgets[rule.name]:
        if budget.limit.is_keyed:
            continue
        uses = history.series(using(), budget.id, shown, board.now, board.peaks_until)
        use = [Series(_("highest"), "sent", [highest for _start, highest in uses])]
        title = _("Highest use in any window of %(limit)s, of %(allowed)s") % {
            "limit": budget.limit.label,
            "allowed": formatting.count(budget.limit.capacity),
        }
        listed.append(_chart(title, starts, use, formatting.count, _with_limit(budget)))
    return listed


def _with_limit(budget: Budget) -> Callable[..., Any]:
    def draw(*given: Any) -> Any:
        return charts.lines(*given, limit=budget.limit.capacity)

    return draw


def _chart(
    title: str,
    starts: Sequence[int],
    series: Sequence[Series],
    shown: Callable[[float], str],
    draw: Callable[..., Any],
) -> dict[str, Any]:
    length = starts[-1] - starts[0]
    rows = [
        (charts.clock_of(start, length), ["–" if v is None else shown(v) for v in values])
        for start, *values in zip(starts, *(one.values for one in series), strict=True)
        if any(values)
    ]
    says = f"{title}, {charts.clock_of(starts[0], length)} – {charts.zone()}"
    return {
        "title": title,
        "series": series,
        "svg": draw(starts, series, says, shown),
        "rows": rows[::-1],
        "zone": charts.zone(),
    }


def _percentiles(listed: Sequence[histograms.Histogram]) -> list[Series]:
    return [
        Series("p50", "p50", [histograms.percentile(one, histograms.P50) for one in listed]),
        Series("p95", "p95", [histograms.percentile(one, histograms.P95) for one in listed]),
    ]
