"""Record: writes what came of attempts, for those that are still this worker's own, and tells whoever listens.

Attempts and calls are written in one transaction, a statement each for any number of them. Nothing is stored that was a
secret: values are scrubbed and headers redacted before they arrive here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from callqueue import callbacks, clockwork, conf, database, events, states
from callqueue.beginning import Job
from callqueue.budgets import cost_of
from callqueue.endings import Ending, columns_of_call
from callqueue.handlers import HTTP_METHODS
from callqueue.redaction import redact_headers, redact_text
from callqueue.secrets import scrub, scrub_json

PAYLOAD = "[payload]"
TELLING = 6  # characters from which on a string of a payload tells something
TOLERANCE = timedelta(seconds=0.5)  # a database clock that moved otherwise than ours by more than this has jumped


@dataclass(frozen=True)
class HoldOrder:
    """A hold to be laid before the attempt's charge ages."""

    rules: tuple[str, ...]
    per: str
    value: str
    until: datetime
    reason: str
    extend: bool


@dataclass
class Report:
    """What came of an attempt: what its call becomes, and what is kept of the answer."""

    job: Job
    ending: Ending
    outcome: str
    error: str = ""
    response: Any = None
    result: Any = None
    sent_at: datetime | None = None
    ended_at: datetime | None = None
    ended_mono: float = 0.0
    cost: Any = None
    hold: HoldOrder | None = None
    secret_values: tuple[str, ...] = ()


def scrubbed(report: Report, values: tuple[str, ...]) -> Report:
    """The report with nothing secret in its texts: these values, and whatever looks like a credential.

    What a handler said may repeat what it was given, so its texts lose the call's own strings too: they are logged, and are
    not encrypted.
    """
    report.secret_values = values
    ending, payload = report.ending, [] if report.job.method in HTTP_METHODS else _strings(report.job.params)
    report.error = _clean(report.error, values, payload)
    report.ending = replace(ending, error_message=_clean(ending.error_message, values, payload))
    if report.hold is not None:
        report.hold = replace(report.hold, reason=_clean(report.hold.reason, values, payload))
    return report


def _clean(text: str, values: tuple[str, ...], payload: Sequence[str]) -> str:
    if not text:
        return text
    text = scrub(text, values)
    for string in payload:
        text = text.replace(string, PAYLOAD)
    return redact_text(text).replace("\x00", "")


def _strings(params: Any) -> list[str]:
    """The strings in a call's params that tell something, longest first."""
    found, pending = set[str](), [params]
    while pending:
        value = pending.pop()
        if isinstance(value, str) and len(value) >= TELLING:
            found.add(value)
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
    return sorted(found, key=len, reverse=True)


def record(using: str, reports: Sequence[Report]) -> int:
    """Write these reports; the count of those that were still this worker's to write. Two updates for any number."""
    kept = _write(using, reports) or _write_own(using, reports)
    if len(kept) < len(reports):
        events.tell("attempt_refused", attempts=len(reports) - len(kept), reason="the lease had ended before the record")
    _tell(using, kept)
    return len(kept)


def _write(using: str, reports: Sequence[Report]) -> Sequence[Report]:
    """Write all of them, or none where one is not this worker's own any more: the fence is in the update."""
    try:
        with database.writing(using):
            if _update(using, reports) < len(reports):
                raise _NotOurs
    except _NotOurs:
        return []
    return reports


def _write_own(using: str, reports: Sequence[Report]) -> Sequence[Report]:
    """Write those that are still this worker's own."""
    from callqueue.models import CallAttempt

    with database.writing(using):
        ids = [report.job.attempt_id for report in reports]
        own = CallAttempt.objects.using(using).open().filter(pk__in=ids, worker=reports[0].job.worker)
        mine = set(database.locked(own, wait=True).values_list("pk", flat=True))
        kept = [report for report in reports if report.job.attempt_id in mine]
        _update(using, kept)
    return kept


class _NotOurs(Exception):
    """An attempt has ended, or is another worker's."""


def _update(using: str, reports: Sequence[Report]) -> int:
    """Write attempts, then calls; the count of attempts that were written."""
    from callqueue.models import CallAttempt, CallQueue

    if not reports:
        return 0
    now = database.clock(using)
    fence, worker = "t.finished_at IS NULL AND t.worker = %s", reports[0].job.worker
    count = database.update_each(CallAttempt, using, [_columns_of_attempt(r, now) for r in reports], fence, [worker])
    calls = [columns_of_call(r.ending, now) for r in reports]
    database.update_each(CallQueue, using, calls, f"t.status = {states.DISPATCHED}")
    return count


def _columns_of_attempt(report: Report, now: datetime) -> dict[str, Any]:
    sent_at, finished_at = _instants(report, now)
    response = report.response
    cost = report.job.cost if report.cost is None else report.cost
    return {
        "pk": report.job.attempt_id,
        "sent_at": sent_at,
        "finished_at": finished_at,
        "outcome": report.outcome,
        "response_status": None if response is None else response.status_code,
        "response_headers": None if response is None else _headers(report),
        "response_body": _body(report),
        "error_message": report.error[:2000].replace("\x00", ""),
        "cost": cost,
        "calls": cost_of(cost, "calls"),
    }


def _instants(report: Report, now: datetime) -> tuple[datetime | None, datetime]:
    """When it was sent and answered, on the database's clock as it is now: where that jumped since begin, counted back."""
    if report.ended_at is None:
        return report.sent_at, now
    elapsed = timedelta(seconds=max(0.0, clockwork.monotonic() - report.ended_mono)) if report.ended_mono else timedelta(0)
    moved = now - elapsed - report.ended_at
    if report.ended_mono and abs(moved) > TOLERANCE:
        return (report.sent_at + moved if report.sent_at else None), report.ended_at + moved
    return report.sent_at, report.ended_at


def _headers(report: Report) -> dict[str, str]:
    """The answer's headers: scrubbed, redacted, and only then cut, so that no half of a secret is left."""
    headers = list(report.response.headers.items())[:100]
    clean = redact_headers(scrub_json({str(name): str(value) for name, value in headers}, report.secret_values))
    return {name[:200].replace("\x00", ""): str(value)[:2000].replace("\x00", "") for name, value in clean.items()}


def _body(report: Report) -> str:
    """The beginning of the response's body, or of what a handler returned, as text."""
    most = conf.current().keep_response_bytes
    if report.response is None:
        if report.result is None:
            return ""
        return scrub(_as_text(report.result), report.secret_values)[:most]
    longest = max((len(v) for v in report.secret_values), default=0) * 16
    raw = (report.response.content or b"")[: most + longest]
    text = raw.decode(_encoding(report.response), "replace").replace("\x00", "")
    return scrub(text, report.secret_values).encode()[:most].decode("utf-8", "ignore")


def _as_text(result: Any) -> str:
    """What a handler returned, as JSON; where it has no such form (a tuple for a key, a loop), its repr. Never raises."""
    try:
        return json.dumps(result, default=str)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(repr(result))


def _encoding(response: Any) -> str:
    encoding = response.encoding or "utf-8"
    try:
        "".encode(encoding)
    except LookupError:
        return "utf-8"
    return "utf-8" if encoding.lower() == "iso-8859-1" else str(encoding)


def _tell(using: str, reports: Sequence[Report]) -> None:
    ended: dict[int, list[int]] = {}
    for report in reports:
        job, status = report.job, report.ending.status
        if status == states.DONE:
            events.tell("call_done", call_id=job.pk, rule=job.rule_name, attempt=job.number)
        if status in states.FINAL:
            ended.setdefault(status, []).append(job.pk)
        else:
            events.tell("attempt_failed", call_id=job.pk, rule=job.rule_name, attempt=job.number, reason=report.error)
    for status, ids in ended.items():
        if callbacks.has_listeners(status) or any(r.ending.callback for r in reports):
            callbacks.announce(using, ids, status)
