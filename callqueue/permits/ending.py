"""What is written of a permit that was granted: when it was sent, what it cost, how it ended.

In: the permit's job, and a result as the executor's judge makes it. Out: the columns of its
attempt, where that is still the permit's own: recovery ends what outlives its lease.
"""

from __future__ import annotations

from typing import Any

from django.db import OperationalError

from callqueue import conf, database, events, states, tables, transitions
from callqueue.database import from_us
from callqueue.execution import results
from callqueue.ledger import clock_jumps
from callqueue.ledger.tallies import tallied_rules
from callqueue.limits.budgets import cost_of
from callqueue.maintenance import breaker
from callqueue.transitions import LONGEST_MESSAGE, Job, Result

LATE = "the lease of the permit had ended"


def tell_sent(using: str, job: Job) -> None:
    """Its request has left by now: from then on it ages, though it has no answer yet."""
    _change(using, job, lambda now: {"sent_at": now})


def settle(using: str, job: Job, cost: Any) -> None:
    """Charge what it cost after all, of a permit that has ended already."""
    with database.writing(using):
        row = tables.attempts(using).filter(pk=job.attempt_id, worker=job.worker)
        database.locked(row, wait=True).values_list("pk").first()
        row.update(**_cost(job, cost))
    job.charged = cost


def end(using: str, result: Result) -> None:
    """Write how it ended, and what that means for its rule: holds, and the circuit breaker."""
    job, cost = result.job, result.job.cost if result.cost is None else result.cost
    lay_hold(using, result)
    status = getattr(result.response, "status_code", None)
    columns: dict[str, Any] = {
        "outcome": result.outcome,
        "response_status": status,
        "error_message": result.error[:LONGEST_MESSAGE],
        **_cost(job, cost, is_voided=result.outcome == states.VOIDED),
    }
    is_ours = _change(using, job, lambda now: {"finished_at": now, **columns})
    job.charged = cost
    if is_ours:
        breaker.observe(using, [result])


def lay_hold(using: str, result: Result) -> None:
    """Lay the hold that the result asks for, if it does."""
    if result.hold is not None:
        results.lay(using, result, result.hold)
        result.hold = None


def give_back(using: str, job: Job) -> None:
    """Nothing was sent: the permit is not charged."""
    end(using, transitions.after_void(job, "its caller did not begin"))


def _change(using: str, job: Job, columns: Any) -> bool:
    """Write an instant, which is now, into the attempt, where it is still open; whether it was."""
    for _ in range(results.LOOKS):
        try:
            with database.writing(using):
                reading = clock_jumps.held(using)
                clock_jumps.check(using, reading)
                row = tables.attempts(using).open().filter(pk=job.attempt_id, worker=job.worker)
                changed = bool(row.update(**columns(from_us(reading.at))))
            break
        except clock_jumps.Jumped:
            clock_jumps.watch(using).settle()
    else:
        raise OperationalError("the database's clock cannot be followed")
    if not changed:
        events.emit("attempt_refused", attempts=1, reason=LATE)
    return changed


def _cost(job: Job, cost: Any, *, is_voided: bool = False) -> dict[str, Any]:
    """The columns of a cost; and where it is not what was charged, what tallies are to be told."""
    columns: dict[str, Any] = {"cost": cost, "calls": cost_of(cost, "calls")}
    is_wrong = is_voided or cost != job.charged
    if is_wrong and job.rule_name in tallied_rules(conf.current().book):
        columns |= {"charged": job.charged, "correction_pending": True}
    return columns
