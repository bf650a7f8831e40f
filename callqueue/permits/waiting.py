"""How a permit is waited for: a pass of its own, and where that has no room for it, a request that
every pass over the rule sees.

In: what is wanted. Out: a begun attempt, or NotNow. `Waiter.step` does one thing and says how long
to pause before the next, so that threads and coroutines wait each in their own way. Nobody polls
the limits: a waiter sleeps until its slot is about to open. One that has others before it only
looks at its own row, since those who go first, or a dispenser, grant it in its turn; the first of
its line makes a pass once those before it are gone. A slot that opens before its time is found by
one of all who wait: each makes a pass now and then, the less often the more they are.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
from dataclasses import dataclass
from datetime import datetime

from django.db import router

from callqueue import clocks, conf, database, forecast, tables, texts
from callqueue.database import from_us
from callqueue.dispatch import release_pass
from callqueue.dispatch.turns import Answer
from callqueue.exceptions import InvalidCall, NotNow
from callqueue.ledger.ready_calls import Asked, Candidate
from callqueue.ledger.settings import Party
from callqueue.permits import begun, chores, request_rows
from callqueue.permits.apart import apart
from callqueue.permits.asking import Wanted
from callqueue.permits.begun import Granted, now
from callqueue.permits.request_rows import BEAT
from callqueue.transitions import Job

LOOK = 0.06  # seconds between two looks at whether another pass has granted it
# While no pass has room for it, for all that is known, seconds between two looks, and between two
# passes of all that wait together: a share of the time that is left, at least and at most.
PART, REST, REVIEW = 20, (0.5, 2.0), (0.5, 5.0)
LONGEST = 20.0  # seconds between two passes of one permit, however many wait
PAUSED = 20.0  # seconds that are taken to be left where an operator alone knows how many
ANSWERS = 0.01, 0.2  # seconds between two passes that wait for an answer, at first and at most
BUSY = 0.002, 0.05  # seconds until the next try where another pass has the rules, likewise
AT_ONCE = 1.0  # seconds for which a permit that does not wait tries to get the rules
LAST = 2**62  # the number of a call that all others of its due time go before


@dataclass
class Waiter:
    """One permit that is waited for. Call `step` until it gives a Job; `withdraw` where nobody
    wants it any more.
    """

    wanted: Wanted

    def __post_init__(self) -> None:
        self.using: str = router.db_for_write(tables.CallQueue)
        self.asked = Asked(_name(), self.wanted.label, lease=self.wanted.lease)
        self.began = now()
        self.wait = self.wanted.wait
        self.request: int | None = None  # its row, once it waits
        self.due_at: datetime | None = None
        self.beat_at = self.pass_at = 0.0
        self.last: Answer | None = None
        self.is_first = False  # no other of its rule and key goes before it
        self.near_at = 0.0  # from when on a pass may have room for it
        self.in_vain = self.passes = 0
        self.is_outdated = False  # its last pass went by settings of the past
        # a pass is under way, or was, and its end is not known
        self.is_passing = self.has_given_up = False

    @property
    def left(self) -> float | None:
        """Seconds that are left of the wait; None: any."""
        return None if self.wait is None else max(0.0, self.began + self.wait - now())

    def step(self) -> Job | float:
        """Look, or make a pass: the begun attempt as a job, whose slot may still be to open, or the
        seconds until the next step. NotNow once the wait is over.
        """
        return apart(self.using, self._step)

    def withdraw(self) -> None:
        """Nobody waits any more; what was granted, perhaps unknown to it, is given back."""
        if not self.has_given_up:
            apart(self.using, self._withdraw)

    def _step(self) -> Job | float:
        if (seconds := chores.settling(self.using)) > 0 and self.passes == 0:
            return seconds
        if self.request is not None and (job := self._look()) is not None:
            return job
        if now() >= self.pass_at and (job := self._pass()) is not None:
            return job
        if self._is_over:
            return self._give_up()
        self._keep_alive()
        return self._pause()

    @property
    def _patience(self) -> float | None:
        """Seconds until it gives up; None: never. What does not wait still gets an answer, from a
        pass of its own or, where many are in each other's way, a slot from another's.
        """
        if self.wait is None or self.last is not None:
            return self.left
        return self.began + self.wait + AT_ONCE - now()

    @property
    def _is_over(self) -> bool:
        return self._patience is not None and self._patience <= 0

    # --- one step

    def _look(self) -> Job | None:
        """See whether a pass has granted it, and begin it then."""
        assert self.request is not None
        reading = self.last.reading if self.last is not None else None
        now_us = 0 if reading is None else reading.latest(clocks.monotonic())
        attempt_id, is_first = request_rows.look(self.using, self.request, now_us)
        if attempt_id is not None:
            return self._take_up(attempt_id)
        if is_first and not self.is_first:
            self.pass_at = 0.0
        self.is_first = is_first
        return None

    def _take_up(self, attempt_id: int) -> Job | None:
        assert self.request is not None
        lease, owner = self.wanted.lease, self.asked.owner
        found = request_rows.take_up(self.using, self.request, attempt_id, owner, lease)
        if found is None:
            self.pass_at = 0.0
            return None
        self.request = None
        return self._job(found)

    def _pass(self) -> Job | None:
        """Make a pass, and note when the next one is."""
        answer = database.persist(self.using, self._made_pass, during="permit")
        self.passes += 1
        if answer.attempt_id is not None:
            self.request = None
            return self._job(begun.granted_by(answer))
        if answer.reading is None:
            self._put_off(answer)
            return None
        self.last, self.in_vain, self.is_outdated = answer, 0, False
        self.due_at = self.due_at or from_us(answer.reading.wall)
        if answer.is_misfit:
            self._withdraw()
            self.has_given_up = True
            raise InvalidCall("cost", answer.reason.removeprefix("cost: "))
        self.is_first = answer.is_first
        self.near_at, self.pass_at = self._next_times(answer)
        if answer.until is None:
            chores.end_overdue(self.using)
        return None

    def _made_pass(self) -> Answer:
        using, rule = self.using, self.wanted.rule_name
        conf.current().rule(rule)  # UnknownRule where the settings have it no more
        party = _parties.setdefault(using, Party(using))
        before = party.book
        book = party.brought_up(conf.current().book, is_outdated=self.is_outdated)
        if book is not before or self.in_vain:
            release_pass.ensure_states(using, book.groups[rule])
        lead = release_pass.LEAD if self.left is None else min(release_pass.LEAD, self.left)
        if self.is_passing:  # the answer to its commit was lost
            self._withdraw()
        self.is_passing = True
        answer = release_pass.permit(using, book, self._candidate(), lead, self.left)
        self.is_passing = False
        return answer

    def _candidate(self) -> Candidate:
        wanted = self.wanted
        return Candidate(
            id=self.request or 0,
            rule=wanted.rule_name,
            key=wanted.key,
            priority=wanted.priority,
            cost=wanted.cost,
            method=wanted.method,
            last_attempt=0,
            due_at=self.due_at,
            asked=self.asked,
        )

    def _put_off(self, answer: Answer) -> None:
        """No pass was made: the next try is soon, and ever later."""
        self.in_vain += 1
        self.is_outdated = answer.is_outdated
        if answer.is_gone:
            self.beat_at = 0.0
        self.pass_at = now() + _growing(BUSY, self.in_vain)

    def _next_times(self, answer: Answer) -> tuple[float, float]:
        """From when on another pass may have room for it, and when its own next pass is: just
        before its slot opens, and where nobody knows when that is, ever later.
        """
        assert answer.reading is not None
        known = answer.until if answer.until or answer.is_held else answer.earliest
        left = (known - answer.reading.at) / 1_000_000 if known else 0.0
        if answer.is_held and known is None:
            left = PAUSED
        pause = _within(REVIEW, left / PART) * max(1, answer.waiting) * random.uniform(0.75, 1.25)
        if answer.until is not None:
            pause = min(pause, max(0.001, left - release_pass.LEAD / 2) + random.uniform(0.0, 0.01))
        elif not (answer.is_behind or answer.is_held):
            pause = min(pause, _growing(ANSWERS, self.passes) * max(1.0, answer.waiting / 8))
        return now() + left - release_pass.LEAD, now() + min(LONGEST, pause)

    def _keep_alive(self) -> None:
        """Have a request that passes see, and say that its waiter lives."""
        if self.request is not None and now() < self.beat_at:
            return
        within = self._patience
        if self.request is None or not request_rows.beat(self.using, self.request, within):
            args = self._candidate(), self.due_at, within  # its old place
            self.request = request_rows.insert(self.using, *args)
        self.beat_at = now() + BEAT

    def _pause(self) -> float:
        """Seconds until the next step."""
        left = self.near_at - now()
        until_look = max(LOOK, min(left, _within(REST, left / PART)))
        until = min(until_look, max(0.0, self.pass_at - now()))
        if self.left is not None and self.left > 0:
            until = min(until, self.left)
        return max(0.001, until)

    # --- the end of the wait

    def _give_up(self) -> Job:
        if self.request is not None:
            attempt_id = request_rows.take_back(self.using, self.request)
            if attempt_id is not None and (job := self._take_up(attempt_id)) is not None:
                return job
            self._withdraw()
        self.has_given_up = True
        raise NotNow(*self._expected())

    def _withdraw(self) -> None:
        args = self.wanted.rule_name, self.asked.owner, self.request
        request_rows.withdraw(self.using, *args)
        self.request = None

    def _expected(self) -> tuple[datetime | None, str]:
        """When it should be had, and what it waits for."""
        last = self.last
        if last is None:
            return None, "other passes over the rule were in the way"
        until = last.instant
        if not last.is_behind:
            return until, last.reason
        call = tables.CallQueue(
            pk=LAST,
            rule=self.wanted.rule_name,
            key=self.wanted.key,
            priority=self.wanted.priority,
            cost=self.wanted.cost,
            due_at_dt=self.due_at or database.clock(self.using),
        )
        call._state.db = self.using
        found = forecast.forecast(call)
        if found.position == 1 and until is not None:
            return until, last.reason
        return found.release_at, found.reason or last.reason

    def _job(self, granted: Granted) -> Job:
        return begun.job_of(self.wanted, self.asked.owner, granted, self.due_at)


_parties: dict[str, Party] = {}  # by database: this process


def _within(bounds: tuple[float, float], seconds: float) -> float:
    return min(bounds[1], max(bounds[0], seconds))


def _growing(bounds: tuple[float, float], times: int) -> float:
    """Seconds that double each time, about: those who wait do not all wake at once."""
    least, most = bounds
    return min(most, least * 2.0 ** min(times, 10)) * random.uniform(0.5, 1.0)


def _name() -> str:
    """What no other waiter is called."""
    host = texts.storable(socket.gethostname())[:60]
    return f"{host}:{os.getpid()}:{secrets.token_hex(8)}"
