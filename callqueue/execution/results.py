"""Record: writes what came of attempts, for those that are still this worker's own, and tells
whoever listens.

Attempts and calls are written in one transaction, a statement each for any number of them. A call
that somebody has locked is not waited for: what it becomes is kept for it. Nothing is stored that
was a secret: values are scrubbed and headers redacted before they arrive here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import DatabaseError, InterfaceError, OperationalError

from callqueue import callbacks, database, events, states, tables, transitions
from callqueue.clocks import Reading
from callqueue.database import from_us
from callqueue.execution import kept_answer, telling
from callqueue.ledger import agreement, clock_jumps, holds, row_locks
from callqueue.limits.budgets import cost_of
from callqueue.security.withholding import clean, payload_of
from callqueue.transitions import LONGEST_MESSAGE, Job, Result, astray

LOOKS = 20  # at a clock that jumps again and again, before a record is put off
# An end that is recorded later may have left a tallied window by then: those are a second or more.
LATE = timedelta(seconds=0.5)


def scrubbed(result: Result, values: tuple[str, ...]) -> Result:
    """The result with nothing secret in its texts, nor in what is kept of its answer: these values,
    and whatever looks like a credential.

    What a hook, a handler or a provider said may repeat what it was given, so its texts lose the
    call's own strings too: they are logged, and are not encrypted.
    """
    says = result.error or result.why or result.hold
    payload = payload_of(result.job.method, result.job.params) if says else []
    kept_answer.keep(result, values, lambda text: clean(text, values, payload))
    return result


def without_texts(result: Result, error: Exception) -> Result:
    """The result without its texts, which this error kept from being stored."""
    kept_answer.unstorable(result, error)
    result.cost, result.is_bare = None, True
    return result


def write(using: str, results: Sequence[Result], told: Sequence[Job] = ()) -> int:
    """Write these results; the count of those that were still this worker's to write. Two updates
    for any number. The ledger is told of `told`, which are under way, in one of them; calls that
    have ended, and that anybody wants to know of, are announced.
    """
    kept = _written(using, results, told)
    if len(kept) < len(results):
        count, why = len(results) - len(kept), "the lease had ended before the record"
        events.emit("attempt_refused", attempts=count, reason=why)
    try:
        _tell(using, kept)
    except (DatabaseError, InterfaceError) as error:
        # The ends are recorded: what is still owed of them is for a dispenser.
        why = type(error).__name__
        events.emit("database_away", during="announce", error=why, calls=len(kept))
    return len(kept)


def lay(using: str, result: Result, hold: Mapping[str, Any]) -> None:
    """Lay the hold that an answer asked for, as long as it asked, whatever the clock has done."""
    if not database.in_transaction(using):
        # What follows a jump is not to be moved along with what was before it.
        clock_jumps.watch(using).settle()
    until = hold["until"] + astray(result, clock_jumps.read(using))
    rules = _sharers(using, result.job.rule_name, hold["per"])
    holds.lay(using, rules, **{**hold, "until": until}, source="provider")


def _sharers(using: str, rule: str, per: str) -> list[str]:
    """The rules that a hold concerns: those that share a budget of that scope with this one, in
    force. One statement.
    """
    budgets = agreement.book_in_force(using).budgets.get(rule, ())
    sharing = {other for b in budgets if b.limit.per == per and b.limit.name for other in b.rules}
    return sorted(sharing | {rule})


def _written(using: str, results: Sequence[Result], told: Sequence[Job] = ()) -> Sequence[Result]:
    """Write results, and again where the clock has jumped; those that are written."""
    for _ in range(LOOKS):
        try:
            return _write(using, results, told) or _write_own(using, results)
        except clock_jumps.Jumped:
            clock_jumps.watch(using).settle()
    # Waited for as a database that is away.
    raise OperationalError("the database's clock cannot be followed")


def _write(using: str, results: Sequence[Result], told: Sequence[Job]) -> Sequence[Result]:
    """Write all of them, and tell of those that are under way; or nothing, where one is not this
    worker's own any more: the fence is in the update.
    """
    try:
        with database.writing(using):
            if _update(using, results, told) < len(results) + len(told):
                raise _NotOurs
    except _NotOurs:
        return []
    for job in told:
        job.is_told = True
    return results


def _write_own(using: str, results: Sequence[Result]) -> Sequence[Result]:
    """Write results that are still this worker's; those, and what an earlier try wrote."""
    with database.writing(using):
        ids = {result.job.attempt_id: result.job.worker for result in results}
        rows = database.locked(
            tables.attempts(using).filter(pk__in=list(ids)).order_by("pk"), wait=True
        )
        found = rows.values_list("pk", "worker", "finished_at", "outcome", "error_message")
        stored = {pk: said for pk, owner, *said in found if owner == ids[pk]}
        still = [one for one in results if stored.get(one.job.attempt_id, [0])[0] is None]
        _update(using, still)
    return [
        one
        for one in results
        if one in still or stored.get(one.job.attempt_id, [])[1:] == [one.outcome, _error(one)]
    ]


class _NotOurs(Exception):
    """An attempt has ended, or is another worker's."""


def _update(using: str, results: Sequence[Result], told: Sequence[Job] = ()) -> int:
    """Write attempts, then what their calls become; the count of attempts written."""
    if not results:
        return 0
    free, reading = row_locks.calls_to_end(using, [result.job.pk for result in results])
    clock_jumps.check(using, reading)
    columns = [_columns_of_attempt(result, reading) for result in results]
    rows = _with_corrections(results, columns, from_us(reading.at) - LATE)
    rows += [_columns_of_told(using, job, reading, rows[0]) for job in told]
    count = transitions.end_attempts(using, rows)
    transitions.end_calls(using, results, free, reading)
    return count


def correction(job: Job, cost: Any, outcome: str, *, is_late: bool = False) -> dict[str, Any]:
    """The columns of an attempt that costs something else than it was charged, or ended long ago:
    the mark for the next pass, which knows what is tallied, and what it was charged. Empty for
    others.
    """
    if job.charged == cost and outcome != states.VOIDED and not is_late:
        return {}
    return {"charged": job.charged, "correction_pending": True}


def _with_corrections(
    results: Sequence[Result], attempts: list[dict[str, Any]], late: datetime
) -> list[dict[str, Any]]:
    """The columns of attempts, and of all of them their corrections where one has any. What ended
    before `late` is recorded late.
    """
    found = [
        correction(one.job, own["cost"], one.outcome, is_late=own["finished_at"] < late)
        for one, own in zip(results, attempts, strict=True)
    ]
    if not any(found):
        return attempts
    none = {"charged": None, "correction_pending": False}
    return [{**own, **(more or none)} for own, more in zip(attempts, found, strict=True)]


def _columns_of_attempt(result: Result, reading: Reading) -> dict[str, Any]:
    sent_at, finished_at = _instants(result, reading)
    cost = result.job.cost if result.cost is None else result.cost
    return {
        "pk": result.job.attempt_id,
        "worker": result.job.worker,
        "sent_at": sent_at,
        "finished_at": finished_at,
        "outcome": result.outcome,
        **(result.kept or kept_answer.NOTHING),
        "error_message": _error(result),
        "cost": cost,
        "calls": cost_of(cost, "calls"),
    }


def _columns_of_told(
    using: str, job: Job, reading: Reading, like: Mapping[str, Any]
) -> dict[str, Any]:
    """The columns of an attempt that goes on, as they are, but for when it was sent: all those that
    this record writes of others.
    """
    as_they_are = {
        **dict.fromkeys(like),
        "pk": job.attempt_id,
        "worker": job.worker,
        "outcome": states.OPEN,
        **kept_answer.NOTHING,
        "error_message": "",
        "cost": job.charged,
        "calls": cost_of(job.charged, "calls"),
    }
    if "correction_pending" in like:
        as_they_are["correction_pending"] = False
    return {**as_they_are, "sent_at": telling.sent_at(using, job, reading)}


def _error(result: Result) -> str:
    return result.error[:LONGEST_MESSAGE]


def _instants(result: Result, reading: Reading) -> tuple[datetime | None, datetime]:
    """When it was sent and answered, on the database's clock as it is now."""
    if result.ended_at is None:
        return result.sent_at, from_us(reading.at)
    by = astray(result, reading)
    return (result.sent_at + by if result.sent_at else None), result.ended_at + by


def _tell(using: str, results: Sequence[Result]) -> None:
    ended: dict[int, list[int]] = {}
    for result in results:
        job, status = result.job, result.status
        if status == states.DONE:
            events.emit("call_done", **job.facts)
        if status in states.FINAL:
            ended.setdefault(status, []).append(job.pk)
        else:
            events.emit("attempt_failed", **job.facts, reason=result.error)
    for status, ids in ended.items():
        if callbacks.has_listeners(status) or any(one.job.callback for one in results):
            callbacks.announce(using, ids, status)
