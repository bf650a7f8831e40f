"""A permit that was granted: what it can be told, which is written at once, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from asgiref.sync import sync_to_async
from django.db import DatabaseError, InterfaceError

from callqueue import database, events, states, tables, transitions
from callqueue.execution import judging, recorder
from callqueue.ledger import rule_rows, settings
from callqueue.ledger.transaction import Locked, transaction, untimed_transaction
from callqueue.limits.budgets import cost_of, costs_more
from callqueue.maintenance import breaker
from callqueue.outcome import HoldUntil
from callqueue.permits.apart import is_in_callers_transaction, write_apart
from callqueue.sending import validation
from callqueue.texts import storable, worded_reason
from callqueue.transitions import LONGEST_MESSAGE, Job, Result

PATIENCE = 10.0  # seconds for which what a permit is told waits for a database that is away


class Permit:
    """A call that the ledger has admitted; `attempt_id` is its row of `CallAttempt`. What it is
    told is written at once, and raises nothing of the database's: the call is made by then.
    """

    def __init__(self, using: str, job: Job) -> None:
        self._using, self.job = using, job
        self._cost: Any = None
        self._why: str | None = None  # what `hold` was told; it will end as throttled then
        self._sent_at: datetime | None = None  # in ledger time
        self._has_ended = False

    @property
    def attempt_id(self) -> int:
        return self.job.attempt.id

    def sent(self) -> None:
        """Say that the request has left: its charge ages now, by limits that await no answer."""
        self._write(self._tell_sent)

    def settle(self, cost: int | Mapping[str, int]) -> None:
        """Say what it cost after all, as `send` takes it: charged at its end, at once if ended."""
        units = {"calls": 1, **cost} if isinstance(cost, Mapping) else cost
        checked = validation.check_cost(units)
        self._cost = checked
        if self._has_ended:
            self._write(lambda: self._settle(checked))

    def hold(self, until: float | datetime, why: str = "", scope: str | None = None) -> None:
        """Lay a hold up to `max_hold`; end as throttled. `until`: seconds or aware, or ValueError.
        `scope`: "rule", "queue", "key", a key's name; None: what its limits are per; else the rule.
        """
        is_instant = isinstance(until, datetime) and until.tzinfo is not None
        is_seconds = isinstance(until, int | float) and not isinstance(until, bool) and until >= 0
        if not (is_instant or is_seconds):
            raise ValueError("hold: seconds, 0 or more, or an aware datetime")
        said = storable(worded_reason(why))[:LONGEST_MESSAGE]
        self._why = said or "throttled"
        verdict = HoldUntil(until, said, scope=scope)
        result = judging.result_of_value(self.job, verdict)
        self._write(lambda: self._lay_hold(result))

    # --- its end

    def result_of(self, error: BaseException | None) -> Result:
        """How it ends if its block raised `error` (None: nothing); throttled if `hold` was told."""
        job = self.job
        if self._why is not None:
            result = transitions.after_giving_up(job, self._why, states.THROTTLED)
        elif error is None:
            result = transitions.after_success(job)
        elif isinstance(error, Exception):
            result = transitions.after_giving_up(job, type(error).__name__, states.ERRORED)
        else:  # it was cancelled, or its process is to end: the provider has no part in that
            result = transitions.after_giving_up(job, type(error).__name__)
        result.cost = self._cost
        return result

    def hold_and_tell_sent(self, result: Result) -> None:
        """Lay the hold that an answer asks for, and tell that the request was sent; no end yet."""
        self._write(lambda: self._lay_hold(result))
        self._write(self._tell_sent)

    def end_with(self, result: Result) -> None:
        self._has_ended = True  # a `settle` that comes later corrects the record
        self._write(lambda: self._end(result))

    # --- what is written of it, where it is still its own: recovery ends what outlives its lease

    @property
    def _own_row(self) -> dict[str, Any]:
        return {"pk": self.job.attempt.id, "worker": self.job.attempt.worker}

    def _tell_sent(self) -> None:
        def work(locked: Locked) -> datetime | None:
            told = transitions.tell_when_sent(
                self._using, [{**self._own_row, "sent_at": locked.now}]
            )
            return locked.now if told else None

        self._sent_at = transaction(self._using, work, lazily=True) or self._sent_at

    def _settle(self, cost: Any) -> None:
        """Correct its cost after its end. One that cost more ages from the end, not from `sent`."""
        row = tables.attempts(self._using).filter(**self._own_row)

        def work() -> None:
            _have_levels_recounted(self._using, self.job.call.rule)
            found = database.locked(row, wait=True).values("cost", "charged", "correction_pending")
            for known in found:
                believed = known["charged"] if known["correction_pending"] else known["cost"]
                is_more = costs_more(cost, known["cost"])
                # Marked though passes once believed this cost: one may have counted less since.
                columns = recorder.correction(believed, cost, states.SUCCEEDED, is_late=is_more)
                if is_more:
                    columns["sent_at"] = None
                none = {"charged": None, "correction_pending": False}
                costs = {"cost": cost, "calls": cost_of(cost, "calls"), "settled": True}
                row.update(**{**none, **costs, **columns})

        untimed_transaction(self._using, work)

    def _lay_hold(self, result: Result) -> None:
        if result.hold is not None:
            recorder.lay_hold(self._using, result)

    def _end(self, result: Result) -> None:
        """Lay its hold and record its end, perhaps hold a failing rule. If ended before: settle."""
        self._lay_hold(result)
        job, status = self.job, getattr(result.response, "status_code", None)
        final = replace(
            result,
            ended_at=None,  # it ages from the record on
            sent_at=self._sent_at,
            status=result.status if result.status in states.FINAL else states.FAILED,
            due_at=job.call.due_at_dt,
            kept={**recorder.NOTHING, "response_status": status},
        )
        # Should a crash of the database undo it, the permit is charged until its lease ends.
        is_lazy = result.cost in (None, job.attempt.cost)
        if recorder.record_once(self._using, [final], lazily=is_lazy):
            breaker.trip_where_failing(self._using, [result])
        elif result.cost not in (None, job.call.cost):
            self._settle(result.cost)

    def _write(self, work: Callable[[], Any]) -> None:
        """Write, within PATIENCE; else an event tells, and the lease's end makes up for that."""
        using = self._using

        def persistently() -> None:
            database.persist(using, work, during="permit", seconds=PATIENCE)

        try:
            write_apart(using, persistently)
        except (DatabaseError, InterfaceError) as error:
            if database.in_transaction(using) and not is_in_callers_transaction(using):
                raise  # a test's transaction, that is broken now
            events.emit("database_away", during="permit", error=type(error).__name__, calls=1)


class AsyncPermit(Permit):
    """A permit of a coroutine: threads write what it is told, before the block has ended."""

    def __init__(self, using: str, job: Job) -> None:
        super().__init__(using, job)
        self._last: asyncio.Task[None] | None = None  # its latest write, done or under way

    def _write(self, work: Callable[[], Any]) -> None:
        before, write = self._last, super()._write
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # told from a thread
            write(work)
            return

        async def after_the_last() -> None:
            if before is not None:
                await asyncio.wait([before])
            await sync_to_async(write)(work)

        self._last = loop.create_task(after_the_last())

    async def wait_until_written(self) -> None:
        if self._last is not None:
            await asyncio.shield(self._last)


def _have_levels_recounted(using: str, rule: str) -> None:
    """Lock the memos of the rule's group and take out their levels: the next pass counts anew."""
    book = settings.book_in_force(using)
    group = book.groups.get(rule, ())
    if any(budget.limit.keeps_level for budget in book.group_budgets(group)):
        memos = rule_rows.lock(using, group)
        fresh = [{"pk": rule, "memo": {**memo, "levels": {}}} for rule, memo in memos.items()]
        database.update_each(tables.RuleState, using, fresh)
