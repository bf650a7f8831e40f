"""What is written of a permit that was granted: when it was sent, what it cost, how it ended.

In: the permit's job, and a result as the executor's judge makes it. Out: the columns of its
attempt, where that is still the permit's own: recovery ends what outlives its lease.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from callqueue import database, events, states, tables, transitions
from callqueue.execution import recorder
from callqueue.ledger import settings
from callqueue.ledger.transaction import transaction, untimed
from callqueue.limits.budgets import cost_of, costs_more
from callqueue.maintenance import breaker
from callqueue.transitions import LONGEST_MESSAGE, Job, Result

LATE = "the lease of the permit had ended"


def tell_sent(using: str, job: Job) -> None:
    """Its request has left by now: from then on it ages, though it has no answer yet."""
    _change(using, job, lambda now: {"sent_at": now}, lazily=True)


def answer(using: str, result: Result) -> None:
    """It was sent by now, since it has an answer; and the hold that the answer asks for."""
    lay_hold(using, result)
    tell_sent(using, result.job)


def settle(using: str, job: Job, cost: Any) -> None:
    """Charge what it cost after all, of a permit that has ended already: by then tallies and levels
    may count it as it was, so they are told. What it costs more ages from its end, with the rest.
    """
    own = (job.attempt_id, job.worker)
    row = tables.attempts(using).filter(pk=job.attempt_id, worker=job.worker)

    def work() -> None:
        _forget_levels(using, job.rule_name)
        found = database.locked(row, wait=True).values("cost", "charged", "correction_pending")
        for known in found:
            believed = known["charged"] if known["correction_pending"] else known["cost"]
            columns = _cost(replace(job, charged=believed), cost, states.SUCCEEDED)
            if costs_more(cost, known["cost"]):
                columns["sent_at"] = None
            columns = {"charged": None, "correction_pending": False, **columns}
            transitions.charge_permit(using, *own, **columns)

    untimed(using, work)


def end(using: str, result: Result) -> None:
    """Write how it ended, and what that means for its rule: holds, and the circuit breaker."""
    job, cost = result.job, result.job.cost if result.cost is None else result.cost
    lay_hold(using, result)
    status = getattr(result.response, "status_code", None)
    columns: dict[str, Any] = {
        "outcome": result.outcome,
        "response_status": status,
        "error_message": result.error[:LONGEST_MESSAGE],
        **_cost(job, cost, result.outcome),
    }
    # Should a crash of the database undo it, the permit is charged until its lease ends.
    lazily = cost == job.charged
    if _change(using, job, lambda now: {"finished_at": now, **columns}, lazily=lazily):
        breaker.observe(using, [result])
    elif cost != job.cost:
        settle(using, job, cost)


def lay_hold(using: str, result: Result) -> None:
    """Lay the hold that the result asks for, if it does."""
    if result.hold is not None:
        recorder.lay(using, result)


def _change(using: str, job: Job, columns: Any, *, lazily: bool) -> bool:
    """Write an instant, which is now, into the attempt, where it is still open; whether it was."""
    own = (job.attempt_id, job.worker)
    changed = transaction(
        using,
        lambda locked: transitions.change_permit(using, *own, **columns(locked.now)),
        lazily=lazily,
    )
    if not changed:
        events.emit("attempt_refused", attempts=1, reason=LATE)
    return changed


def _cost(job: Job, cost: Any, outcome: str) -> dict[str, Any]:
    correction = recorder.correction(job, cost, outcome)
    return {"cost": cost, "calls": cost_of(cost, "calls"), **correction}


def _forget_levels(using: str, rule: str) -> None:
    """Have the next pass count anew what the buckets of the rule's group hold."""
    book = settings.book_in_force(using)
    group = book.groups.get(rule, ())
    if any(budget.limit.keeps_level for budget in book.group_budgets(group)):
        rows = tables.rule_states(using).filter(rule__in=group).order_by("rule")
        for state in database.locked(rows, wait=True):
            rows.filter(pk=state.pk).update(memo={**state.memo, "levels": {}})
