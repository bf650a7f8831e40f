"""A job, which is a begun attempt with its call, and the result that came of it.

In: what a worker read when it began the attempt. Out: what the record writes. Rows of calls have
the names of a job that decide what its call becomes, so recovery, which has no job, passes a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from callqueue import clocks
from callqueue.clocks import Reading
from callqueue.database import from_us, to_us
from callqueue.limits.rules import Rule

LONGEST_MESSAGE = 2000  # characters of a call's or an attempt's error message that are kept


@dataclass
class Job:
    """A begun attempt and its call. `lease_ends` is monotonic. `unfit`: why it cannot be made any
    more.

    `begins_at`: of a permit, the monotonic instant at which its slot has certainly opened.
    `charged`: what it was charged at its release. `is_through`: it is through its gate: it has been
    sent, or is about to be. `gate`: what its request passes, which
    knows when it was sent; None while there is no request. `arrived`: the monotonic instant by
    which the other side had all of it, as far as that is known; `is_late`: it did not at the last
    look; `is_told`: whether the ledger knows when it was sent.
    """

    attempt_id: int
    number: int
    queue: str
    send_at: datetime | None
    pk: int
    rule_name: str
    key: str
    cost: Any
    method: str
    params: Mapping[str, Any] = field(repr=False)
    failed_count: int
    throttled_count: int
    unique_key: str | None
    callback: str | None
    first_sent_dt: datetime | None
    due_at_dt: datetime
    idempotency_key: str
    worker: str
    clock: Reading
    trace_context: str | None = None
    charged: Any = 1
    rule: Rule | None = None
    lease_ends: float = 0.0
    unfit: str | None = None
    begins_at: float | None = None
    is_through: bool = False
    gate: Any = None
    arrived: float | None = None
    is_late: bool = False
    is_told: bool = False

    @property
    def sound_rule(self) -> Rule:
        """The rule, of a job that is fit."""
        assert self.rule is not None
        return self.rule

    @property
    def facts(self) -> dict[str, Any]:
        """What events say of it."""
        return {"call_id": self.pk, "rule": self.rule_name, "attempt": self.number}

    def now(self) -> datetime:
        """The latest that the database's clock can show now."""
        return self.shown_at(clocks.monotonic())

    def shown_at(self, instant: float) -> datetime:
        """The latest that the database's clock can have shown at this monotonic instant."""
        return from_us(self.clock.latest(instant))

    def arrived_by(self, sent: float, answered: float) -> float:
        """The latest instant at which the other side can have had all of a request that was sent
        then, as far as this process saw. All three are monotonic.
        """
        if self.arrived is not None:
            return max(sent, self.arrived)
        return answered if self.is_late else sent

    def slot_opens(self) -> float | None:
        """The monotonic instant at which its slot has certainly opened; None without a slot."""
        return None if self.send_at is None else self.clock.monotonic_at(to_us(self.send_at))


@dataclass
class Result:
    """What came of a job: what its call becomes, how its attempt ended, and what is kept of both.

    `status` and `due_at`: the call's state, and when it may go again (or was due, where it has
    ended). `why` is the call's text, `error` the attempt's; `value` is what a handler returned.
    `sent_at` and `ended_at` are by the database's clock as it was read at begin, `ended_mono` by
    this process's own; None and 0 where there is no instant but that of the record. `hold`: the
    arguments of `holds.lay`, where the provider asked for a hold. `is_whole`: whether all of the
    response's body was read; `kept`: the columns of what is kept of the answer, with nothing secret
    in them. `is_bare`: its texts were left
    out, since they could not be stored.
    """

    job: Job
    outcome: str
    status: int
    due_at: datetime
    failed_count: int
    throttled_count: int
    why: str = field(default="", repr=False)
    error: str = field(default="", repr=False)
    response: Any = field(default=None, repr=False)
    value: Any = field(default=None, repr=False)
    sent_at: datetime | None = None
    ended_at: datetime | None = None
    ended_mono: float = 0.0
    cost: Any = None
    hold: dict[str, Any] | None = field(default=None, repr=False)
    is_whole: bool = True
    kept: Mapping[str, Any] | None = field(default=None, repr=False)
    is_bare: bool = False

    def at(self, ended_at: datetime, ended_mono: float, sent_at: datetime | None = None) -> Result:
        """This result, with the instants at which its attempt was sent and ended."""
        self.ended_at, self.ended_mono, self.sent_at = ended_at, ended_mono, sent_at
        return self
