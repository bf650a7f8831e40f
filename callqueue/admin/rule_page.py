"""The page of one rule: its limits and their proof, what it sent and how long that took, its keys,
what failed, and how its backlog drains.

In: a request and the rule's name. Out: a page, or the parts of it that change.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from callqueue import conf
from callqueue.admin import charts, dashboard, health, rule_actions, rule_history
from callqueue.admin.base import OwnAdmin, may
from callqueue.admin.readonly import may_see_holds
from callqueue.admin.rule_actions import using
from callqueue.admin.rule_history import NAMES
from callqueue.database import from_us
from callqueue.limits.durations import WrongDuration, parse_duration
from callqueue.limits.kinds import SECOND
from callqueue.models import CallQueue
from callqueue.operations import backlog, errors, formatting, history
from callqueue.operations import board as boards
from callqueue.operations.board import Board
from callqueue.operations.draining import Drain
from callqueue.operations.history import RANGES
from callqueue.operations.standing import Standing
from callqueue.security.redaction import redact_text

KEYS = 20  # that a table of keys shows
SHOWN = 20  # calls of a group of errors that are linked


def page(request: HttpRequest, admin: OwnAdmin, name: str) -> HttpResponse:
    """The whole page, or with `?live` the parts that change."""
    name = health.rule_named(name)
    if name not in conf.current().rules:
        raise Http404(_("There is no rule %s in the settings.") % name)
    board = boards.read(using())
    (rule,) = (one for one in board.rules if one.name == name)
    context = _live(request, board, rule)
    if "live" in request.GET:
        response = TemplateResponse(request, "admin/callqueue/rule_live.html", context)
        response["Cache-Control"] = "no-store"
        return response
    more = {
        "may_control": may(request, rule_actions.PERMISSION),
        "may_requeue": may(request, "requeue_call"),
        **_keys(request, board, rule),
        **_errors(board, name),
        **_draining(request, board, rule),
    }
    return admin.page(request, "rule.html", name, {**context, **more})


def _live(request: HttpRequest, board: Board, rule: Standing) -> dict[str, Any]:
    shown = next((one for one in RANGES if one.name == request.GET.get("range")), RANGES[0])
    now = from_us(board.now)
    return {
        "rule": rule,
        "said": health.dispenser_trouble(board),
        "state": dashboard.STATES[rule.state],
        "kind": dashboard.KINDS[rule.state],
        "figures": _figures(board, rule),
        # Which keys are held is for those who may see holds.
        "holds": [one for one in rule.holds if one.per == "rule" or may_see_holds(request)],
        "may_see_holds": may_see_holds(request),
        "limits": rule_history.limits(board, rule),
        "sums": rule_history.sums(rule, board.now),
        "ranges": [(one.name, NAMES[one.name]) for one in RANGES],
        "shown": shown.name,
        "shown_name": NAMES[shown.name],
        "charts": rule_history.charts_of(board, rule, shown),
        "as_of": health.clock_time(now, now),
        "counted": health.clock_time(from_us(board.counted_until), now)
        if board.counted_until
        else _("nothing is counted yet: no dispenser has run"),
        "peaks": health.clock_time(from_us(board.peaks_until), now) if board.peaks_until else "",
        "now": now,
    }


def _figures(board: Board, rule: Standing) -> list[tuple[str, str]]:
    oldest, begun = rule.backlog.oldest_due, rule.in_flight.begun
    flight = formatting.count(rule.in_flight.count)
    if rule.in_flight.count > begun:
        waits = formatting.count(rule.in_flight.count - begun)
        flight += " " + _("(%s not begun by a worker)") % waits
    return [
        (_("Waiting"), formatting.count(rule.backlog.ready)),
        (_("Due later"), formatting.count(rule.backlog.later)),
        (_("In flight"), flight),
        (_("Oldest waiting"), "–" if oldest is None
         else formatting.duration(max(0.0, (board.now - oldest) / SECOND))),
        (_("Sent a second"), health.number(rule.rate)),
        (_("p95 of the wait, 15 min"), "–" if rule.p95 is None else formatting.short(rule.p95)),
        (_("Done by"), dashboard.done_of(board, rule) or "–"),
    ]  # fmt: skip


def _keys(request: HttpRequest, board: Board, rule: Standing) -> dict[str, Any]:
    """The keys with most calls waiting, and those that sent most."""
    waiting = [one for one in backlog.of_keys(using(), [rule.name])[rule.name] if one[0]]
    ready = rule.backlog.ready
    held = {one.value: one for one in rule.holds if one.per not in ("rule", "queue")}
    return {
        "keys_waiting": [
            (key, formatting.count(n), _share(n, ready), key in held) for key, n in waiting[:KEYS]
        ],
        "keys_count": formatting.count(len(waiting)),
        "sent_tables": [_keys_sent(board, rule.name, one) for one in (history.HOUR, history.DAY)],
    }


def _keys_sent(board: Board, name: str, seconds: int) -> tuple[str, list[Any]]:
    """The title and the rows of a table of the keys that sent most."""
    listed, whole = history.of_keys(using(), name, seconds, board.now, KEYS)
    rows = [
        (
            key,
            formatting.count(counts.sent),
            _share(counts.sent, whole),
            formatting.count(counts.failed),
            formatting.count(counts.throttled),
        )
        for key, counts in listed
    ]
    return _("Sent most since %s") % _since(board, seconds), rows


def _since(board: Board, seconds: int) -> str:
    start = history.quarter_before(board.now, seconds)
    return health.clock_time(from_us(start * SECOND), from_us(board.now))


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def _errors(board: Board, name: str) -> dict[str, Any]:
    listed, is_partial = errors.groups(using(), name)
    now = from_us(board.now)
    return {
        "groups": [
            {
                "name": one.name,
                "status": CallQueue.Status(one.status).label,
                "status_id": one.status,
                "text": redact_text(one.text) or _("(no reason)"),
                "count": formatting.count(len(one.pks)),
                "keys": formatting.count(len(one.keys)),
                "last": "" if one.last is None
                else formatting.from_now(-max(0.0, (now - one.last).total_seconds())),
                "calls": one.pks[:SHOWN],
            }
            for one in listed
        ],
        "is_partial": is_partial,
        "looked_at": formatting.count(errors.NEWEST),
    }  # fmt: skip


def _draining(request: HttpRequest, board: Board, rule: Standing) -> dict[str, Any]:
    """The curve of the backlog, and beside it that of what is asked for."""
    limit, rate = request.GET.get("limit", ""), request.GET.get("rate", "").strip()
    held = request.GET.get("held", "").strip()
    listed: list[tuple[str, Drain | None]] = [(_("as it is"), rule.drain)]
    wrong = ""
    try:
        other, words = _asked(board, rule, limit, rate, held)
        if words:
            listed.append((words, other))
    except (ImproperlyConfigured, WrongDuration) as error:
        wrong = str(error)
    drawn, rows = [], []
    for kind, (words, drain) in zip(("now", "then"), listed, strict=False):
        points = drain.curve() if drain else []
        drawn.append((kind, points))
        rows.append((kind, words, _ends(board, rule, drain)))
    has_any = any(points for _kind, points in drawn)
    return {
        "drain": charts.curves(drawn, board.now // SECOND, _("How the backlog drains"))
        if has_any
        else "",
        "drain_rows": rows,
        "drain_wrong": wrong,
        "asked": {"limit": limit, "rate": rate, "held": held},
    }


def _asked(
    board: Board, rule: Standing, limit: str, rate: str, held: str
) -> tuple[Drain | None, str]:
    """How the backlog would drain at another rate, or if the rule were held; and that in words."""
    drain, words = rule.drain, []
    if rate:
        for budget in board.book.budgets[rule.name]:
            if budget.known_as == limit:
                budget.limit.with_rate(rate)
                words.append(_("if %(limit)s were %(rate)s") % {
                    "limit": budget.limit.label, "rate": rate
                })  # fmt: skip
        if words:
            after = boards.read(using(), rates={limit: rate})
            (drain,) = (one.drain for one in after.rules if one.name == rule.name)
    if held:
        seconds = parse_duration(held).total_seconds()
        drain = replace(drain, held=max(drain.held, seconds)) if drain else None
        at = health.done_by(board.now, seconds)
        words.append(_("if held until %s") % at)
    return drain, ", ".join(words)


def _calls(count: int) -> str:
    return ngettext("%s call", "%s calls", count) % formatting.count(count)


def _ends(board: Board, rule: Standing, drain: Drain | None) -> str:
    if drain is None:
        return _("nothing waits")
    seconds, kept = drain.seconds(), drain.kept_back
    if 0 < kept < drain.calls and (rest := drain.seconds(drain.calls - kept)) is not None:
        return _("%(held)s are held until someone resumes them; the others take %(in)s.") % {
            "held": _calls(kept), "in": formatting.duration(rest)
        }  # fmt: skip
    if seconds is None and (math.isinf(drain.held) or drain.belated):
        return _("No estimate: held until someone resumes it.")
    if seconds is None:
        return _("No estimate: how fast calls are answered is not known yet.")
    if not board.is_dispensing:
        return _("in %s once a dispenser runs") % formatting.duration(seconds)
    if rule.drained_s is None:
        return _("in %s once workers take the calls") % formatting.duration(seconds)
    return _("done by %(at)s, in %(in)s") % {
        "at": health.done_by(board.now, seconds),
        "in": formatting.duration(seconds),
    }
