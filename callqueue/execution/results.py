"""Record: writes what came of attempts, for those that are still this worker's own, and tells
whoever listens.

Attempts and calls are written in one transaction, a statement each for any number of them. A call
that somebody has locked is not waited for: what it becomes is kept for it. Nothing is stored that
was a secret: values are scrubbed and headers redacted before they arrive here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from django.db import DatabaseError, InterfaceError, OperationalError

from callqueue import callbacks, clocks, conf, database, events, states, tables
from callqueue.clocks import Reading
from callqueue.database import from_us
from callqueue.execution.claim import Job
from callqueue.handlers import HTTP_METHODS
from callqueue.ledger import clock_jumps, holds, row_locks
from callqueue.ledger.tallies import tallied_rules
from callqueue.limits.budgets import cost_of
from callqueue.maintenance import deferred_endings
from callqueue.security.redaction import redact_headers
from callqueue.security.scrubbing import clean, payload_of, room_for, scrub, scrub_json
from callqueue.texts import decoded
from callqueue.transitions import Ending, columns_of_call

LOOKS = 20  # at a clock that jumps again and again, before a record is put off
TOLERANCE = timedelta(microseconds=clocks.TOLERANCE)


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
    is_bare: bool = False


def scrubbed(report: Report, values: tuple[str, ...]) -> Report:
    """The report with nothing secret in its texts: these values, and whatever looks like a
    credential.

    What a handler said may repeat what it was given, so its texts lose the call's own strings too:
    they are logged, and are not encrypted.
    """
    report.secret_values = values
    ending, payload = (
        report.ending,
        []
        if report.job.method in HTTP_METHODS
        else payload_of(report.job.method, report.job.params),
    )
    report.error = clean(report.error, values, payload)
    report.ending = replace(ending, error_message=clean(ending.error_message, values, payload))
    if report.hold is not None:
        report.hold = replace(report.hold, reason=clean(report.hold.reason, values, payload))
    return report


def without_texts(report: Report, error: Exception) -> Report:
    """The report of an attempt whose texts could not be stored, by this error: how it ended, and
    that.
    """
    why = f"what it said could not be stored ({type(error).__name__})"
    status = getattr(report.response, "status_code", None)
    report.response = _Bare(status) if isinstance(status, int) and 100 <= status < 1000 else None
    report.result, report.error, report.cost, report.is_bare = None, why, None, True
    report.ending = replace(report.ending, error_message=why if report.ending.error_message else "")
    if report.hold is not None:
        report.hold = replace(report.hold, reason=why)
    return report


@dataclass(frozen=True)
class _Bare:
    """An answer of which only the status is kept."""

    status_code: int
    content: bytes = b""
    encoding: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def record(using: str, reports: Sequence[Report]) -> int:
    """Write these reports; the count of those that were still this worker's to write. Two updates
    for any number.
    """
    kept: Sequence[Report] | None = None
    for _ in range(LOOKS):
        try:
            kept = _write(using, reports) or _write_own(using, reports)
            break
        except clock_jumps.Jumped:
            clock_jumps.watch(using).settle()
    if kept is None:
        raise OperationalError(
            "the database's clock cannot be followed"
        )  # waited for as one that is away
    if len(kept) < len(reports):
        events.tell(
            "attempt_refused",
            attempts=len(reports) - len(kept),
            reason="the lease had ended before the record",
        )
    try:
        _tell(using, kept)
    except (
        DatabaseError,
        InterfaceError,
    ) as error:  # the ends are recorded: what is still owed of them is for a dispenser
        events.tell("database_away", during="announce", error=type(error).__name__, calls=len(kept))
    return len(kept)


def lay(using: str, report: Report, order: HoldOrder) -> None:
    """Lay the hold that an answer asked for, as long as it asked for, whatever the clock has done
    since.
    """
    if not database.in_transaction(using):
        clock_jumps.watch(
            using
        ).settle()  # what follows a jump is not to be moved along with what was before it
    until = order.until + astray(report, clock_jumps.read(using))
    holds.lay(
        using,
        order.rules,
        order.per,
        order.value,
        until,
        order.reason,
        source="provider",
        extend=order.extend,
    )


def _write(using: str, reports: Sequence[Report]) -> Sequence[Report]:
    """Write all of them, or none where one is not this worker's own any more: the fence is in the
    update.
    """
    try:
        with database.writing(using):
            if _update(using, reports) < len(reports):
                raise _NotOurs
    except _NotOurs:
        return []
    return reports


def _write_own(using: str, reports: Sequence[Report]) -> Sequence[Report]:
    """Write those that are still this worker's own; those written, and those that an earlier try
    wrote, unknown to it.
    """
    with database.writing(using):
        ids = [report.job.attempt_id for report in reports]
        rows = database.locked(tables.attempts(using).filter(pk__in=ids).order_by("pk"), wait=True)
        found = rows.values_list("pk", "worker", "finished_at", "outcome", "error_message")
        stored = {pk: said for pk, owner, *said in found if owner == reports[0].job.worker}
        still = [r for r in reports if stored.get(r.job.attempt_id, [0])[0] is None]
        _update(using, still)
    return [
        r
        for r in reports
        if r in still or stored.get(r.job.attempt_id, [])[1:] == [r.outcome, _error(r)]
    ]


class _NotOurs(Exception):
    """An attempt has ended, or is another worker's."""


def _update(using: str, reports: Sequence[Report]) -> int:
    """Write attempts, then the calls that are free, and for the others what they become; the count
    of attempts written.
    """
    if not reports:
        return 0
    free, reading = row_locks.calls_to_end(using, [report.job.pk for report in reports])
    clock_jumps.check(using, reading)
    now = from_us(reading.at)
    fence, worker = "t.finished_at IS NULL AND t.worker = %s", reports[0].job.worker
    attempts = _with_corrections(
        reports, [_columns_of_attempt(report, reading) for report in reports]
    )
    count = database.update_each(tables.CallAttempt, using, attempts, fence, [worker])
    ours = {
        report.job.pk
        for report in reports
        if free.get(report.job.pk) == (states.DISPATCHED, report.job.number)
    }
    calls = [
        columns_of_call(_ending(report, reading), now)
        for report in reports
        if report.job.pk in ours
    ]
    database.update_each(tables.CallQueue, using, calls)
    if len(free) < len(reports):
        deferred_endings.keep(
            using,
            [
                (r.job.attempt_id, r.job.number, _ending(r, reading))
                for r in reports
                if r.job.pk not in free
            ],
            now,
        )
    return count


def _ending(report: Report, reading: Reading) -> Ending:
    """What the call becomes; a retry waits as long as it was to, whatever the clock has done
    since.
    """
    ending = report.ending
    if report.ended_at is None or ending.due_at <= report.ended_at:
        return ending
    return replace(ending, due_at=ending.due_at + astray(report, reading))


def _with_corrections(
    reports: Sequence[Report], attempts: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The columns of attempts, and where one costs something else than it was charged, what the
    tallies are to be told.
    """
    tallied = tallied_rules(conf.current().book)
    wrong = [
        report.job.rule_name in tallied
        and (report.outcome == states.VOIDED or report.job.charged != columns["cost"])
        for report, columns in zip(reports, attempts, strict=True)
    ]
    if any(wrong):
        for report, columns, is_wrong in zip(reports, attempts, wrong, strict=True):
            columns |= {
                "charged": report.job.charged if is_wrong else None,
                "correction_pending": is_wrong,
            }
    return attempts


def _columns_of_attempt(report: Report, reading: Reading) -> dict[str, Any]:
    sent_at, finished_at = _instants(report, reading)
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
        "error_message": _error(report),
        "cost": cost,
        "calls": cost_of(cost, "calls"),
    }


def _error(report: Report) -> str:
    return report.error[:2000]


def _instants(report: Report, reading: Reading) -> tuple[datetime | None, datetime]:
    """When it was sent and answered, on the database's clock as it is now."""
    if report.ended_at is None:
        return report.sent_at, from_us(reading.at)
    by = astray(report, reading)
    return (report.sent_at + by if report.sent_at else None), report.ended_at + by


def astray(report: Report, reading: Reading) -> timedelta:
    """By how much the report's instants, which are as of begin, lie before the latest that they can
    be by this reading.

    0 where that is within the tolerance: then the two clocks have gone on alike, and those of begin
    are closer. The time since is counted to just before the reading, so what is moved by this is
    never moved to before it was.
    """
    if report.ended_at is None or not report.ended_mono:
        return timedelta(0)
    by = (
        from_us(reading.at)
        - timedelta(seconds=max(0.0, reading.before - report.ended_mono))
        - report.ended_at
    )
    return timedelta(0) if timedelta(0) <= by <= TOLERANCE else by


def _headers(report: Report) -> dict[str, str]:
    """The answer's headers: scrubbed, redacted, and only then cut, so that no half of a secret is
    left.
    """
    headers = list(report.response.headers.items())[:100]
    clean = redact_headers(
        scrub_json({str(name): str(value) for name, value in headers}, report.secret_values)
    )
    return {name[:200]: str(value)[:2000] for name, value in clean.items()}


def _body(report: Report) -> str:
    """The beginning of the response's body, or of what a handler returned, as text."""
    most = conf.current().keep_response_bytes
    if report.response is None:
        if report.result is None:
            return ""
        return scrub(_as_text(report.result), report.secret_values)[:most]
    body, encoding = report.response.content or b"", report.response.encoding
    text = _scrubbed_start(lambda size: decoded(body[:size], encoding), len(body), most, report)
    return text.encode()[:most].decode("utf-8", "ignore")


def _scrubbed_start(read: Callable[[int], str], size: int, most: int, report: Report) -> str:
    """The beginning of a text of so many bytes, scrubbed, at least `most` characters of it where it
    has so many.

    What is taken out draws the end of what was read into what is kept, where half a secret may be:
    that end is left off, and more is read instead, if not without end.
    """
    room = room_for(report.secret_values)
    wanted, kept = most + room, ""
    for _ in range(4):
        text = read(wanted)
        kept = scrub(text, report.secret_values)
        if wanted >= size or kept == text:
            return kept
        kept = kept[:-room]
        if len(kept) >= most:
            return kept
        wanted *= 2
    return kept


def _as_text(result: Any) -> str:
    """What a handler returned, as JSON; where it has no such form (a tuple for a key, a loop), its
    repr.
    """
    try:
        return json.dumps(result, default=str)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(repr(result))


def _tell(using: str, reports: Sequence[Report]) -> None:
    ended: dict[int, list[int]] = {}
    for report in reports:
        job, status = report.job, report.ending.status
        if status == states.DONE:
            events.tell("call_done", call_id=job.pk, rule=job.rule_name, attempt=job.number)
        if status in states.FINAL:
            ended.setdefault(status, []).append(job.pk)
        else:
            events.tell(
                "attempt_failed",
                call_id=job.pk,
                rule=job.rule_name,
                attempt=job.number,
                reason=report.error,
            )
    for status, ids in ended.items():
        if callbacks.has_listeners(status) or any(r.ending.callback for r in reports):
            callbacks.announce(using, ids, status)
