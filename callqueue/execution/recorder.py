"""Record: writes what came of attempts that are still this worker's own, and has it announced.
Attempts and calls are written in one transaction, a statement each for any number, tried again for
as long as a lease runs. A call that somebody has locked is not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from django.db import DatabaseError, InterfaceError, connections

from callqueue import answers, callbacks, clocks, database, events, states, transitions
from callqueue.clocks import Reading
from callqueue.database import from_us
from callqueue.execution.starvation import why_starved
from callqueue.ledger import holds, ledger_time, settings
from callqueue.ledger.transaction import Locked, transaction
from callqueue.limits.budgets import cost_of
from callqueue.maintenance import breaker
from callqueue.transitions import LONGEST_MESSAGE, Result, clock_correction

# An end that is recorded later may have left a tallied window by then: those are a second or more.
LATE = timedelta(seconds=0.5)
NOTHING: Mapping[str, Any] = {
    "response_status": None,
    "response_headers": None,
    "response_body": "",
    "response_form": "",
    "response_size": None,
}


def record(using: str, ended: Sequence[Result]) -> None:
    """Record, lay holds and trip breakers. Tries again while the database is away and a lease runs,
    then raises. A result that cannot be stored keeps none of the others from it.
    """
    pause = 0.05
    while True:
        try:
            for result in ended:
                if result.hold is not None:
                    lay_hold(using, result)
            record_once(using, ended)
            break
        except Exception as error:
            if interruption(error) is not None:
                raise
            if not database.is_transient(error) and not why_starved(error):
                return _record_one_by_one(using, ended, error)
            _wait_for_database(using, ended, error, pause)
            pause = min(2.0, pause * 2)
    breaker.trip_where_failing(using, ended)


def record_once(using: str, results: Sequence[Result], *, lazily: bool = False) -> int:
    """Write and announce results still this worker's; the count. `lazily`: it waits for no disk."""

    def work(locked: Locked) -> Sequence[Result]:
        rows = [_columns_of_attempt(result, locked.reading) for result in results]
        rows = _with_corrections(results, rows, locked.now - LATE)
        return transitions.record(using, results, rows, locked)

    calls = [result.job.call.id for result in results]
    kept = transaction(using, work, calls=calls, lazily=lazily) if results else []
    if len(kept) < len(results):
        count, why = len(results) - len(kept), "the lease had ended before the record"
        events.emit("attempt_refused", attempts=count, reason=why)
    try:
        _announce(using, kept)
    except (DatabaseError, InterfaceError) as error:
        # The ends are recorded: what is still owed of them is for a dispenser.
        why = type(error).__name__
        events.emit("database_away", during="announce", error=why, calls=len(kept))
    return len(kept)


def lay_hold(using: str, result: Result) -> None:
    """Lay the result's hold, for as long as asked though the clock was set; then it has none."""
    assert result.hold is not None
    hold, reading = dict(result.hold), ledger_time.read(using)
    ends = hold.pop("until") - timedelta(microseconds=result.job.clock.moved)
    lasts = ends + clock_correction(result, reading) - from_us(reading.at)
    rules = _rules_sharing_budget(using, result.job.call.rule, hold["per"])
    holds.lay(using, rules, **hold, lasts=lasts, source="provider")
    result.hold = None


def _rules_sharing_budget(using: str, rule: str, per: str) -> list[str]:
    """This rule, and those in force that share a named budget of this `per` with it. Reads once."""
    budgets = settings.book_in_force(using).budgets.get(rule, ())
    sharing = {other for b in budgets if b.limit.per == per and b.limit.name for other in b.rules}
    return sorted(sharing | {rule})


def _wait_for_database(using: str, ended: Sequence[Result], error: Exception, pause: float) -> None:
    """Disconnect and wait `pause` seconds. In a transaction, or when no lease is left: raise."""
    why = type(error).__name__
    if database.in_transaction(using):
        # A test's: what broke it stays broken, and its connection is not ours to close.
        raise error
    if clocks.monotonic() + pause >= max(result.job.lease_ends_at for result in ended):
        events.emit("database_away", during="record", error=why, calls=len(ended))
        raise error
    events.emit("record_delayed", calls=len(ended), error=why)
    connections[using].close()
    time.sleep(pause)


def _record_one_by_one(using: str, ended: Sequence[Result], error: Exception) -> None:
    """Record each of several alone; a single one bare; one that is bare is left to its lease."""
    if len(ended) > 1:
        for result in ended:
            record(using, [result])
    elif not ended[0].is_bare:
        record(using, [_make_bare(ended[0], error)])
    else:
        events.emit("record_failed", **ended[0].job.facts, error=type(error).__name__)


def _make_bare(result: Result, error: Exception) -> Result:
    drop_answer(result, error)
    result.cost, result.is_bare = None, True
    return result


def drop_answer(result: Result, error: Exception) -> None:
    """Keep only the status of an answer that cannot be cleaned or stored; texts name the error."""
    status = getattr(result.response, "status_code", None)
    why = f"what it said could not be stored ({type(error).__name__})"
    result.kept, result.error, result.why = NOTHING, why, why if result.why else ""
    if isinstance(status, int) and 100 <= status < 1000:
        was_there = {"response_headers": {}, "response_form": answers.WITHHELD, "response_size": 0}
        result.kept = {**NOTHING, "response_status": status, **was_there}
    if result.hold is not None:
        result.hold["reason"] = why


def interruption(raised: BaseException | None) -> BaseException | None:
    """This, or what it came of, if that struck this thread from outside; None: it just failed."""
    while isinstance(raised, Exception) and not isinstance(raised, SoftTimeLimitExceeded):
        raised = raised.__context__
    return raised


def correction(charged: Any, cost: Any, outcome: str, *, is_late: bool = False) -> dict[str, Any]:
    """Columns that mark for the next pass what was voided, recorded late or cost not as charged."""
    if charged == cost and outcome != states.VOIDED and not is_late:
        return {}
    return {"charged": charged, "correction_pending": True}


def _with_corrections(
    results: Sequence[Result], rows: list[dict[str, Any]], late: datetime
) -> list[dict[str, Any]]:
    """The columns, with what `correction` adds. What ended before `late` was recorded late."""
    found = [
        correction(
            one.job.attempt.cost, own["cost"], one.outcome, is_late=own["finished_at"] < late
        )
        for one, own in zip(results, rows, strict=True)
    ]
    if not any(found):
        return rows
    none = {"charged": None, "correction_pending": False}
    return [{**own, **(more or none)} for own, more in zip(rows, found, strict=True)]


def _columns_of_attempt(result: Result, reading: Reading) -> dict[str, Any]:
    sent_at, finished_at = _sent_and_finished_at(result, reading)
    attempt, cost = result.job.attempt, result.cost
    cost = result.job.call.cost if cost is None else cost
    return {
        "pk": attempt.id,
        "worker": attempt.worker,
        "sent_at": sent_at,
        "finished_at": finished_at,
        "outcome": result.outcome,
        **(result.kept or NOTHING),
        "error_message": result.error[:LONGEST_MESSAGE],
        "cost": cost,
        "calls": cost_of(cost, "calls"),
    }


def _sent_and_finished_at(result: Result, reading: Reading) -> tuple[datetime | None, datetime]:
    if result.ended_at is None:  # in ledger time as it is now
        return result.sent_at, from_us(reading.at)
    by = clock_correction(result, reading)
    return (result.sent_at + by if result.sent_at else None), result.ended_at + by


def _announce(using: str, results: Sequence[Result]) -> None:
    """Log what each call became; announce the ends of which somebody is to be told."""
    ended = []
    for result in results:
        job, call, status = result.job, result.job.call, result.status
        if status == states.DONE:
            events.emit("call_done", **job.facts)
        if status not in states.FINAL:
            events.emit("attempt_failed", **job.facts, reason=result.error)
            continue
        callbacks.log_end(call.id, status, call.rule, result.why)
        if transitions.owes_announcement(result):
            ended.append((call.id, call.rule))
    callbacks.ask_to_announce(using, ended)
