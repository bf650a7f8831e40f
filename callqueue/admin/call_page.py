"""One call for a person to read: plain values for a template, redacted; the template escapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext as _

from callqueue import conf, states
from callqueue.admin.curl import as_curl
from callqueue.admin.edit_call import as_json
from callqueue.answers import answer_of
from callqueue.database import MICROSECOND
from callqueue.fields import UNREADABLE
from callqueue.forecast import forecast
from callqueue.handlers import method_of
from callqueue.ledger import ledger_time
from callqueue.look import words
from callqueue.models import CallAttempt, CallQueue
from callqueue.security.redaction import redact_call_data, redact_headers, redact_text

ATTEMPTS = 100  # the newest so many are shown
BODIES = 10  # the newest so many are shown with their answers' bodies
BODY = 65536  # characters of a body that are shown
BINARY = 0.1  # the share of characters that are none from which on a body is not shown as text


@dataclass(frozen=True)
class Event:
    at: datetime
    shown_at: str  # with its date where that is new
    after: str  # the time since the one before
    what: str
    kind: str  # its CSS class
    attempt: ShownAttempt | None  # None: something else happened


@dataclass(frozen=True)
class ShownAttempt:
    row: CallAttempt
    steps: list[tuple[str, str]]  # how it went, each with the time since the one before
    headers: dict[str, Any]
    body: str
    note: str  # on what `body` leaves out
    error: str


def template_context(call: CallQueue, *, may_see_holds: bool) -> dict[str, Any]:
    every = CallAttempt.objects.using(call._state.db or "default").filter(call_id=call.pk)
    newest = list(every.order_by("-id").defer("response_body")[: ATTEMPTS + 1])
    bodies = dict(every.order_by("-id").values_list("pk", "response_body")[:BODIES])
    attempts = newest[:ATTEMPTS][::-1]
    for attempt in attempts:
        attempt.response_body = bodies.get(attempt.pk, "")
    waits = call.status in states.UNFINISHED
    found = forecast(call, tells_why_held=may_see_holds) if waits else None
    data = call.call_data if isinstance(call.call_data, dict) else {}
    return {
        "call": call,
        "has_rule": call.rule in conf.current().rules,
        "request_text": as_json(redact_call_data(call.call_data)),
        "curl": as_curl(method_of(call.call_data, call.method), data.get("params")),
        "cost": cost_in_words(call.cost),
        "error": redact_text(call.error_message),
        "events": _events(call, attempts, bodies),
        "most": ATTEMPTS if len(newest) > ATTEMPTS else 0,  # 0: all are shown
        "forecast": found,
        "position": words.count(found.position) if found and found.position else "",
        "kind": css_class_of(call.status),
        "is_begun": any(one.started_at and not one.finished_at for one in attempts[-1:]),
    }


def cost_in_words(cost: Any) -> str:
    """ "1", or "calls: 1, tokens: 1,500"."""
    if not isinstance(cost, dict):
        return str(cost)
    return ", ".join(f"{unit}: {words.count(units)}" for unit, units in cost.items())


def css_class_of(status: int) -> str:
    return conf.NAMES_OF_STATUS.get(status, "other")


OUTCOMES = {
    states.OPEN: "dispatched",
    states.SUCCEEDED: "done",
    states.ERRORED: "error",
    states.GAVE_UP: "failed",
    states.THROTTLED: "new",
    states.LOST: "unknown",
    states.VOIDED: "cancelled",
}


def body_and_note(attempt: CallAttempt) -> tuple[str, str]:
    """The answer's body, redacted, up to BODY; a note on what was not kept, or is no text."""
    answer = answer_of(attempt, UNREADABLE)
    if answer is None:
        return redact_text(attempt.response_body)[:BODY], ""
    sizes = {"kept": words.count(len(answer.body)), "size": words.count(answer.size)}
    notes = []
    if answer.is_cut:
        notes.append(_("%(kept)s of %(size)s bytes are kept.") % sizes)
    if answer.is_scrubbed:
        notes.append(_("A secret of the call was taken out."))
    text = answer.text
    if text.count("\ufffd") > len(text) * BINARY:
        text = ""
        notes.append(_("%(size)s bytes that are no text.") % sizes)
    if len(text) > BODY:
        lengths = {"shown": words.count(BODY), "length": words.count(len(text))}
        notes.append(_("The first %(shown)s of %(length)s characters are shown.") % lengths)
    return redact_text(text[:BODY]), " ".join(notes)


def _events(call: CallQueue, attempts: list[CallAttempt], bodies: Mapping[int, str]) -> list[Event]:
    found: list[tuple[datetime, str, str, ShownAttempt | None]] = [
        (call.created_dt, _("created"), "new", None)
    ]
    if call.status in states.WAITING and call.due_at_dt > call.created_dt:
        found.append((call.due_at_dt, _("due"), "new", None))
    using = call._state.db or "default"
    moved = ledger_time.moved(using) * MICROSECOND if attempts else timedelta(0)
    for one in attempts:
        title, kind = _("Attempt %d") % one.number, OUTCOMES.get(one.outcome, "other")
        released_at = one.released_at + moved
        found.append((released_at, title, kind, _shown_attempt(one, has_body=one.pk in bodies)))
    if call.expires_at_dt and call.status in states.WAITING:
        found.append((call.expires_at_dt, _("expires"), "expired", None))
    if call.finished_at_dt:
        status = str(call.get_status_display())
        found.append((call.finished_at_dt, status, css_class_of(call.status), None))
    events: list[Event] = []
    before: datetime | None = None
    for at, what, kind, attempt in sorted(found, key=itemgetter(0)):
        here = timezone.localtime(at) if timezone.is_aware(at) else at
        text = f"{here:%H:%M:%S}.{here.microsecond // 1000:03}"
        if before is None or before.date() != here.date():
            text = f"{here:%Y-%m-%d} {text} {here:%Z}".rstrip()
        after = "" if before is None else _elapsed_in_words(before, here)
        events.append(Event(at, text, after, what, kind, attempt))
        before = here
    return events


def _shown_attempt(attempt: CallAttempt, *, has_body: bool) -> ShownAttempt:
    elsewhere = "", _("The body is on the attempt's own page.")
    body, note = body_and_note(attempt) if has_body else elsewhere
    released = _("released to %s") % attempt.queue if attempt.queue else _("released")
    begun = _("begun by %s") % attempt.worker if attempt.worker else _("begun")
    ended = _("answered") if attempt.response_status else _("ended")
    steps, before = [(released, "")], attempt.released_at
    for at, what in (
        (attempt.started_at, begun), (attempt.sent_at, _("sent")), (attempt.finished_at, ended),
    ):  # fmt: skip
        if at is not None:
            steps.append((what, _elapsed_in_words(before, at)))
            before = at
    return ShownAttempt(
        row=attempt,
        steps=steps,
        headers=redact_headers(attempt.response_headers),
        body=body,
        note=note,
        error=redact_text(attempt.error_message),
    )


def _elapsed_in_words(before: datetime, at: datetime) -> str:
    return f"+{words.short_duration(max(0.0, (at - before).total_seconds()))}"
