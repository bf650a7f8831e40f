"""What is written of a permit that was granted: when it was sent, what it cost, how it ended.

In: the permit's job, and a result as the executor's judge makes it. Out: the columns of its attempt
and its call, where they are still the permit's own: recovery ends what outlives its lease. A permit
is never retried, so what a call would be retried for has failed.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from callqueue import database, states, tables, transitions
from callqueue.execution import recorder
from callqueue.ledger import settings
from callqueue.ledger.transaction import transaction, untimed
from callqueue.limits.budgets import cost_of, costs_more
from callqueue.maintenance import breaker
from callqueue.transitions import Job, Result


def tell_sent(using: str, job: Job) -> datetime | None:
    """Its request has left by now: from then on it ages, though it has no answer yet. The instant;
    None where the permit is not its own any more.
    """
    own = {"pk": job.attempt.id, "worker": job.attempt.worker}

    def work(locked: Any) -> datetime | None:
        told = transitions.tell(using, [{**own, "sent_at": locked.now}])
        return locked.now if told else None

    return transaction(using, work, lazily=True)


def settle(using: str, job: Job, cost: Any) -> None:
    """Charge what it cost after all, of a permit that has ended already: by then tallies and levels
    may count it as it was, so they are told. What it costs more ages from its end, with the rest.
    """
    row = tables.attempts(using).filter(pk=job.attempt.id, worker=job.attempt.worker)

    def work() -> None:
        _forget_levels(using, job.call.rule)
        found = database.locked(row, wait=True).values("cost", "charged", "correction_pending")
        for known in found:
            believed = known["charged"] if known["correction_pending"] else known["cost"]
            columns = recorder.correction(believed, cost, states.SUCCEEDED)
            if costs_more(cost, known["cost"]):
                columns["sent_at"] = None
            none = {"charged": None, "correction_pending": False}
            costs = {"cost": cost, "calls": cost_of(cost, "calls"), "settled": True}
            row.update(**{**none, **costs, **columns})

    untimed(using, work)


def end(using: str, result: Result, sent_at: datetime | None) -> None:
    """Record how it ended, and what that means for its rule: holds, and the circuit breaker."""
    lay_hold(using, result)
    job, status = result.job, getattr(result.response, "status_code", None)
    final = replace(
        result,
        ended_at=None,  # it ages from the record on
        sent_at=sent_at,
        status=result.status if result.status in states.FINAL else states.FAILED,
        due_at=job.call.due_at_dt,
        kept={**recorder.NOTHING, "response_status": status},
    )
    # Should a crash of the database undo it, the permit is charged until its lease ends.
    if recorder.write(using, [final], lazily=result.cost in (None, job.attempt.cost)):
        breaker.observe(using, [result])
    elif result.cost not in (None, job.call.cost):
        settle(using, job, result.cost)


def lay_hold(using: str, result: Result) -> None:
    """Lay the hold that the result asks for, if it does."""
    if result.hold is not None:
        recorder.lay(using, result)


def _forget_levels(using: str, rule: str) -> None:
    """Have the next pass count anew what the buckets of the rule's group hold."""
    book = settings.book_in_force(using)
    group = book.groups.get(rule, ())
    if any(budget.limit.keeps_level for budget in book.group_budgets(group)):
        rows = tables.rule_states(using).filter(rule__in=group).order_by("rule")
        for state in database.locked(rows, wait=True):
            rows.filter(pk=state.pk).update(memo={**state.memo, "levels": {}})
