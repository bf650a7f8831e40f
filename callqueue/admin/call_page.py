"""One call for a person to read: the request, every attempt with its answer, what happened when,
why it waits.

In: a call. Out: plain values for a template, redacted; the template escapes them. Changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext as _

from callqueue import database, states
from callqueue.admin.curl import as_curl
from callqueue.admin.edit_call import as_text, shown
from callqueue.models import CallAttempt, CallQueue
from callqueue.operations import formatting
from callqueue.operations.forecast import forecast
from callqueue.security.redaction import redact_headers, redact_text

ATTEMPTS = 100  # the newest so many are shown
LARGE = 50_000  # attempts from which on the forecast comes after the page
BODY = 65536  # characters of a body that are shown


@dataclass(frozen=True)
class Moment:
    """Something that happened to a call; `after` is the time since the moment before. The date is
    shown where it is new.
    """

    at: datetime
    shown_at: str
    what: str
    kind: str
    after: str


@dataclass(frozen=True)
class ShownAttempt:
    """An attempt as it is shown."""

    row: CallAttempt
    seconds: float | None
    headers: dict[str, Any]
    body: str
    error: str
    kind: str


def context_of(call: CallQueue, *, may_see_holds: bool) -> dict[str, Any]:
    """What the page of a call shows."""
    every = CallAttempt.objects.using(call._state.db or "default").filter(call_id=call.pk)
    newest = list(every.order_by("-id")[: ATTEMPTS + 1])
    attempts = newest[:ATTEMPTS][::-1]
    data = call.call_data if isinstance(call.call_data, dict) else {}
    return {
        "call": call,
        "request_text": as_text(shown(call.call_data)),
        "curl": as_curl(call.method, data.get("params")),
        "cost": cost_in_words(call.cost),
        "error": redact_text(call.error_message),
        "attempts": [_shown(attempt) for attempt in attempts],
        "is_cut": len(newest) > ATTEMPTS,
        "moments": _timeline(call, attempts),
        **forecast_of(call, may_see_holds=may_see_holds, at_once=not _is_large(call)),
    }


def cost_in_words(cost: Any) -> str:
    """ "1", or "calls: 1, tokens: 1,500"."""
    if not isinstance(cost, dict):
        return str(cost)
    return ", ".join(f"{unit}: {formatting.count(units)}" for unit, units in cost.items())


def kind_of(status: int) -> str:
    """The name of a status as a CSS class has it."""
    return _KINDS.get(status, "other")


_KINDS = {
    states.NEW: "new",
    states.DISPATCHED: "dispatched",
    states.ERROR: "error",
    states.DONE: "done",
    states.FAILED: "failed",
    states.CANCELLED: "cancelled",
    states.EXPIRED: "expired",
    states.UNKNOWN: "unknown",
}
OUTCOMES = {
    states.OPEN: "dispatched",
    states.SUCCEEDED: "done",
    states.ERRORED: "error",
    states.GAVE_UP: "failed",
    states.THROTTLED: "new",
    states.LOST: "unknown",
    states.VOIDED: "cancelled",
}


def _shown(attempt: CallAttempt) -> ShownAttempt:
    begin = attempt.sent_at or attempt.started_at
    seconds = (
        (attempt.finished_at - begin).total_seconds() if attempt.finished_at and begin else None
    )
    return ShownAttempt(
        row=attempt,
        seconds=None if seconds is None else max(0.0, seconds),
        headers=redact_headers(attempt.response_headers),
        body=redact_text(attempt.response_body)[:BODY],
        error=redact_text(attempt.error_message),
        kind=OUTCOMES.get(attempt.outcome, "other"),
    )


def forecast_of(call: CallQueue, *, may_see_holds: bool, at_once: bool = True) -> dict[str, Any]:
    """Why the call waits. Where windows hold many attempts that takes a while, so the page may
    fetch it afterwards.
    """
    is_unfinished = call.status in states.UNFINISHED
    found = forecast(call, tells_why_held=may_see_holds) if is_unfinished and at_once else None
    return {
        "forecast": found,
        "is_forecast_later": is_unfinished and not at_once,
        "kind": kind_of(call.status),
    }


def _is_large(call: CallQueue) -> bool:
    estimate = database.estimated_rows(call._state.db or "default", CallAttempt._meta.db_table)
    return estimate is not None and estimate > LARGE


def _timeline(call: CallQueue, attempts: list[CallAttempt]) -> list[Moment]:
    found = [(call.created_dt, _("created"), "new")]
    if call.status in states.WAITING and call.due_at_dt > call.created_dt:
        found.append((call.due_at_dt, _("due"), "new"))
    for attempt in attempts:
        found += _moments_of(attempt)
    if call.expires_at_dt and call.status in states.WAITING:
        found.append((call.expires_at_dt, _("expires"), "expired"))
    if call.finished_at_dt:
        found.append((call.finished_at_dt, str(call.get_status_display()), kind_of(call.status)))
    found.sort(key=lambda moment: moment[0])
    moments = []
    before: datetime | None = None
    for at, what, kind in found:
        here = timezone.localtime(at) if timezone.is_aware(at) else at
        time = f"{here:%H:%M:%S}.{here.microsecond // 1000:03}"
        is_new_day = before is None or before.date() != here.date()
        after = "" if before is None else f"+{formatting.duration((here - before).total_seconds())}"
        moments.append(
            Moment(
                at,
                f"{here:%Y-%m-%d} {time} {here:%Z}".rstrip() if is_new_day else time,
                what,
                kind,
                after,
            )
        )
        before = here
    return moments


def _moments_of(attempt: CallAttempt) -> list[tuple[datetime, str, str]]:
    values = {
        "number": attempt.number,
        "queue": attempt.queue,
        "worker": attempt.worker,
        "outcome": attempt.get_outcome_display(),
        "code": attempt.response_status,
    }
    released = (
        _("attempt %(number)d released to %(queue)s")
        if attempt.queue
        else _("attempt %(number)d released")
    )
    found = [(attempt.released_at, released % values, "new")]
    if attempt.started_at:
        begun = (
            _("attempt %(number)d begun by %(worker)s")
            if attempt.worker
            else _("attempt %(number)d begun")
        )
        found.append((attempt.started_at, begun % values, "dispatched"))
    if attempt.sent_at:
        found.append((attempt.sent_at, _("attempt %(number)d sent") % values, "dispatched"))
    if attempt.finished_at:
        has_code = attempt.response_status is not None
        ended = (
            _("attempt %(number)d %(outcome)s, status %(code)d")
            if has_code
            else _("attempt %(number)d %(outcome)s")
        )
        found.append((attempt.finished_at, ended % values, OUTCOMES.get(attempt.outcome, "other")))
    return found
