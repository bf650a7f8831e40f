"""How a permit is waited for: a pass of its own, and where that has no room for it, a row that
every pass over the rule sees. Passes charge it in its turn, whoever makes them, and its waiter
begins it.

Nobody polls the limits: the first in line makes a pass when a slot is about to open, and those
behind it only look at their rows. A slot that opens before its time is found by one of all who
wait: each makes a pass now and then, the less often the more go before it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from django.db import OperationalError, router

from callqueue import clocks, conf, database, forecast, states, tables, transitions
from callqueue.database import from_us
from callqueue.dispatch import release_pass
from callqueue.dispatch.next_look import NO_STREAK
from callqueue.dispatch.release_pass import OwnCall, Pass, Taker
from callqueue.exceptions import InvalidCall, NotNow
from callqueue.execution import claim, judging, recorder
from callqueue.ledger import ledger_time, ready_calls, rule_rows
from callqueue.ledger.settings import Party
from callqueue.ledger.transaction import untimed_transaction
from callqueue.maintenance import recovery
from callqueue.permits.apart import run_apart
from callqueue.permits.asking import Wanted
from callqueue.transitions import Job

# seconds until a permit expires whose waiter gives no sign of life (fewer, if it waits for less),
# and seconds between two signs
ALIVE, SIGN_EVERY = 8.0, 2.0
LOOK = 0.06  # seconds between two looks at whether another pass has charged it
# Seconds between two looks (REST), and between two passes (REVIEW), while nobody is known to have
# room: 1/PART of the time until a slot opens, within these bounds.
PART, REST, REVIEW = 20, (0.5, 2.0), (0.5, 5.0)
LONGEST = 20.0  # seconds between two passes of one permit, however many go before it
NEAR = 8  # permits before one that make it look no less often
MANY = 64  # permits before one that are counted
PAUSED = 20.0  # seconds that are taken to be left where an operator alone knows how many
ANSWERS = 0.01, 0.2  # seconds between two passes that wait for an answer, at first and at most
BUSY = 0.002, 0.05  # seconds until the next pass where this one did not see all, likewise
AT_ONCE = 1.0  # seconds beyond its wait in which a permit that has not had the rules yet tries to
OVERDUE = 1.0  # seconds between two looks for what has died with its process
CANCELLED = "cancelled"
IN_THE_WAY = "other passes over the rule were in the way"
STANDS_STILL = "this process stands still for longer than the lease"


class RowSeen(NamedTuple):
    status: int  # the call's
    why: str  # its error_message
    attempt_id: int | None  # what it was charged as
    ahead: int  # the permits before it, MANY at most


def shifted_monotonic() -> float:
    """This process's monotonic seconds, and those by which a test has moved its clock on."""
    return clocks.monotonic() + database.server_clock.ahead.total_seconds()


class Waiter:
    """One permit that is waited for. Call `step` until it gives a Job, whose slot opens in
    `seconds_until_slot` seconds; `withdraw` where nobody wants it any more.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.using: str = router.db_for_write(tables.CallQueue)
        self.wanted, self.wait = wanted, wanted.wait
        self.worker = f"{states.OF_PERMITS}{claim.new_worker_name()}"
        self.rule, self.key = wanted.call["rule"], wanted.call["key"]
        self.priority: int = wanted.call["priority"]
        self._takes_turns = bool(self.key) or any(one.is_keyed for one in wanted.rule.limits)
        self.began = shifted_monotonic()
        self.pk: int | None = None  # its row, as far as is known
        self.due_at: datetime | None = None  # in wall time: its place in line
        self.ahead = 0  # permits that go before it
        self.passes = 0  # of its own, those that had the rules
        self._identity: UUID = uuid4()
        # its pass is under way; it is not known whether the last one was committed
        self._is_passing = self._is_in_doubt = False
        # whether it was in line in the last pass; None: that had not the rules, or was undone
        self._waits: bool | None = None
        self._has_given_up = False  # nothing is left to be withdrawn
        self._is_in_line = False  # its row is in line, and its key has had news
        self._is_outdated = False  # the last pass went by settings of the past
        self._streak = NO_STREAK
        self.passed_at, self._pause_of_pass = shifted_monotonic(), 0.0
        # when a slot opens for somebody, a sign of life is due, its own slot opens
        self._opens_at = self._next_sign_at = self._slot_at = 0.0

    def step(self) -> Job | float:
        """Look, or make a pass: the begun job, or seconds to the next step. Late, ended: NotNow."""
        using = self.using
        return run_apart(using, lambda: database.persist(using, self._step, during="permit"))

    def withdraw(self) -> None:
        """Wait no more, and give back what a pass has charged, perhaps without its knowing."""
        using = self.using
        if not self._has_given_up:
            run_apart(using, lambda: database.persist(using, self._withdraw, during="permit"))

    def seconds_until_slot(self) -> float:
        return max(0.0, self._slot_at - shifted_monotonic())

    @property
    def seconds_left(self) -> float | None:
        return None if self.wait is None else max(0.0, self.began + self.wait - shifted_monotonic())

    @property
    def next_pass_at(self) -> float:
        """When it makes its next pass; the first in line makes them for all, the others seldom."""
        if not self.ahead or not self.passes:
            return self.passed_at + self._pause_of_pass
        rest = _bounded(REVIEW, (self._opens_at - self.passed_at) / PART)
        return self.passed_at + min(LONGEST, max(rest, self._pause_of_pass) * (1 + self.ahead))

    # --- one step

    def _step(self) -> Job | float:
        if (seconds := self._clock_settles_in()) > 0 and self.passes == 0:
            return seconds
        is_due = shifted_monotonic() >= self.next_pass_at
        found = self._charge_by_pass() if is_due else self._look_at_row()
        if found is not None:
            return found
        if self._patience is not None and self._patience <= 0:
            return self._give_up()
        if shifted_monotonic() >= self._next_sign_at:
            self._give_sign_of_life()
        return self._seconds_until_step()

    def _clock_settles_in(self) -> float:
        """Seconds until ledger time is settled; 0.0 in a transaction or without dispensers."""
        if database.in_transaction(self.using):
            return 0.0
        left = ledger_time.watch(self.using).seconds_to_settle()
        return left if left > 0 and tables.dispensers(self.using).exists() else 0.0

    @property
    def _patience(self) -> float | None:
        """Seconds until it gives up; None: never. AT_ONCE more before it has made a pass."""
        if self.wait is None or self.passes:
            return self.seconds_left
        return self.began + self.wait + AT_ONCE - shifted_monotonic()

    def _look_at_row(self) -> Job | None:
        """The job, begun here, if charged; None: it waits, anew if expired. Ended: raises."""
        if self.pk is None or self.due_at is None:
            return None
        reading = ledger_time.watch(self.using).last
        shown = self.due_at
        if reading is not None:
            shown = from_us(reading.latest_ledger_time_at(clocks.monotonic()) + reading.moved)
        seen = self._read_row(self.pk, self.due_at, shown)
        if seen is None or seen.status == states.EXPIRED:  # it was taken for dead: it waits again
            self._forget_row()
        elif seen.status in states.WAITING:
            self.ahead = seen.ahead
        elif seen.attempt_id is not None:
            return self._begin_charged(seen.attempt_id)
        elif seen.status != states.DISPATCHED:
            self._has_given_up = True
            if seen.status == states.FAILED and seen.why.startswith("cost: "):
                raise InvalidCall("cost", seen.why.removeprefix("cost: "))
            why = {states.CANCELLED: CANCELLED, states.UNKNOWN: STANDS_STILL}
            raise NotNow(None, why.get(seen.status, seen.why))
        return None

    def _forget_row(self) -> None:
        """Its row is gone or has expired: the next pass makes another, in the old place."""
        self.pk, self._identity, self.passed_at, self.ahead = None, uuid4(), 0.0, 0
        self._is_in_line = False

    def _begin_charged(self, attempt_id: int) -> Job | None:
        jobs = claim.begin(self.using, [attempt_id], self.worker, self.wanted.lease)
        return self._accept_begun(jobs)

    def _accept_begun(self, jobs: Sequence[Job]) -> Job | None:
        """The job, if any was begun. Unfit: recorded, and NotNow; expired: None, it waits anew."""
        if not jobs:
            return None
        (job,) = jobs
        if job.unfit is None:
            opens = job.slot_opens_at()
            shift = shifted_monotonic() - clocks.monotonic()
            self._slot_at = 0.0 if opens is None else opens + shift
            return job
        recorder.record_once(self.using, [judging.result_of_unfit(job)])
        if job.unfit != claim.EXPIRED:
            self._has_given_up = True
            raise NotNow(None, job.unfit)
        self._forget_row()
        return None

    # --- its own passes

    def _charge_by_pass(self) -> Job | None:
        """Make a pass, or look at what another's has done; the job, if it is charged and begun."""
        done = self._make_pass()
        if done is None:
            return self._look_at_row()
        if done.begun is not None:
            own, lease = done.begun, self.wanted.lease
            return self._accept_begun(claim.take_begun(self.using, own.rows, own.reading, lease))
        if self._waits is False:  # it waits no more, or somebody has locked its row
            self.passed_at, self._pause_of_pass = shifted_monotonic(), LOOK
            return self._look_at_row()
        self._plan_next_pass(done)
        if not self._waits:  # another pass has the rules, and perhaps charges it
            return self._look_at_row()
        self._end_overdue()
        return None

    def _make_pass(self) -> Pass | None:
        """Make a pass; None where an earlier one, whose end was not known, has left a row."""
        using, wanted, before = self.using, self.wanted, self.pk
        if self._is_in_doubt and self.pk is None:
            self.pk = before = self._find_pk()
            if self.pk is not None:
                self._is_in_doubt = False
                return None
        conf.current().rule(self.rule)  # UnknownRule where the settings have it no more
        party = _parties.setdefault(using, Party(using))
        known = party.book
        book = party.book_to_charge_by(conf.current().book, is_outdated=self._is_outdated)
        if book is not known or self._streak.locked:
            release_pass.ensure_state_rows(using, book.groups[self.rule])
        left, lead = self.seconds_left, release_pass.LEAD
        lead = lead if left is None else min(lead, left)
        maker = OwnCall(
            self.rule,
            self.priority,
            wanted.lease,
            lead,
            self._get_in_line,
            is_new=not self._is_in_line,
        )
        self._is_passing, self._waits = True, None
        try:
            done = release_pass.release(
                using,
                book.groups[self.rule],
                book,
                last=self._streak,
                taker=Taker(self.worker, claim.READS),
                own_call=maker,
            )
            release_pass.tell_of_unfit(using, done)
        except BaseException:
            self.pk, self._is_in_doubt = before, True
            raise
        finally:
            self._is_passing = False
        self._is_outdated = done.next_look.joins
        if self._is_outdated:  # it was undone, and its row with it
            self.pk, self._waits = before, None
        elif self._waits is not None:  # who has the rules' rows sees what was committed
            self._is_in_doubt, self._is_in_line = False, self._is_in_line or self._waits
        return done

    def _get_in_line(self, wall: datetime) -> int | None:
        """Insert its row or keep it alive, in a pass or alone; its pk. None: ended, or locked."""
        if self._is_in_doubt and self.pk is None:
            self.pk = self._find_pk()  # its commit has come through since, perhaps
        within = ALIVE if self._patience is None else min(ALIVE, max(self._patience, 0.1))
        until = wall + timedelta(seconds=within)
        self._next_sign_at = shifted_monotonic() + SIGN_EVERY
        if self._is_passing:
            self._wake_key()
        self.due_at = self.due_at or wall
        self._waits = self.pk is None or self._keep_alive(self.pk, self.due_at, until)
        if not self._waits:
            return None
        if self.pk is None:
            self.pk = self._insert_row(self.due_at, until)
        if not self._is_passing and not self._is_in_line:  # else a pass does, where keys take turns
            ready_calls.tell_of_keys(self.using, [self.pk])
        return self.pk

    def _give_sign_of_life(self) -> None:
        """Insert its row or keep it alive. A second commit puts a new row in line: the first may
        come through after its waiter has left, and no lock would show that it is still to come.
        """
        if self._is_in_doubt:  # perhaps it has a row
            return
        if self.pk is None:
            with database.writing(self.using):
                at = database.clock(self.using)
                over = at + timedelta(seconds=ALIVE)  # due when it has expired: never ready
                self.due_at, self.pk = self.due_at or at, self._insert_row(over, over, ready=False)
        with database.writing(self.using):
            stands = self._get_in_line(database.clock(self.using)) is not None
        self._is_in_line |= stands
        # In a commit of its own: passes wait for who has a key's turn, and this process may freeze.
        self._wake_key()

    def _wake_key(self) -> None:
        if self._takes_turns:  # its key may wait for room for a costlier permit that is gone
            ready_calls.wake_key(self.using, self.rule, self.priority, self.key)

    def _plan_next_pass(self, done: Pass) -> None:
        """Set its next pass: as a slot opens, or sooner; where it waits for answers, ever later."""
        look, self._streak = done.next_look, done.next_look.streak
        self.passed_at = shifted_monotonic()
        if self._waits is None:  # somebody else has the rules, or the settings are not agreed on
            self._pause_of_pass = look.after * random.uniform(0.5, 1.0)
            return
        self.passes += 1
        left = done.opens_in
        if left is None:
            left = 0.0 if look.on_answer else PAUSED
        self._opens_at = shifted_monotonic() + left
        pause = _bounded(REVIEW, left / PART) * random.uniform(0.75, 1.25)
        if done.opens_in is not None:
            pause = min(pause, max(0.001, left) + random.uniform(0.0, 0.01))
        elif look.on_answer:
            pause = min(pause, _growing_pause(ANSWERS, self.passes))
        if look.goes_on:
            pause = min(pause, _growing_pause(BUSY, self.passes))
        self._pause_of_pass = pause

    def _end_overdue(self) -> None:
        """End what has died with its process and may be in the way: there may be no dispenser."""
        # A test's clock may go back.
        if abs(shifted_monotonic() - _looked_for_overdue.get(self.using, -OVERDUE)) >= OVERDUE:
            _looked_for_overdue[self.using] = shifted_monotonic()
            recovery.end_lost(self.using)
            recovery.void_unbegun(self.using)
            recovery.expire(self.using)

    def _seconds_until_step(self) -> float:
        # until it looks at its row, makes its own pass, or gives up: whichever is first
        left = self._opens_at - shifted_monotonic()
        until_look = max(LOOK * max(1.0, self.ahead / NEAR), min(left, _bounded(REST, left / PART)))
        until = min(until_look, max(0.0, self.next_pass_at - shifted_monotonic()))
        if self.seconds_left:
            until = min(until, self.seconds_left)
        return max(0.001, until)

    # --- the end of the wait

    def _give_up(self) -> Job:
        """Delete its row, or withdraw, and raise NotNow; the job, where it was charged just now."""
        self.pk = self._pk_when_settled()
        until, reason = self._forecast()
        if self.pk is not None and not self._delete_row(self.pk):
            if (job := self._look_at_row()) is not None:
                return job
            self._withdraw()
        self._has_given_up = True
        raise NotNow(until, reason)

    def _forecast(self) -> tuple[datetime | None, str]:
        call = None
        if self.passes and self.pk is not None:
            call = tables.calls(self.using).filter(pk=self.pk).first()
        if call is None:
            return None, IN_THE_WAY
        found = forecast.forecast(call)
        return found.release_at, found.reason

    def _withdraw(self) -> None:
        pk = self._pk_when_settled()
        if pk is None or self._delete_row(pk) or transitions.cancel(self.using, [pk]):
            return
        # it was charged: it begins what nobody wants, and ends that as void
        attempts = tables.attempts(self.using).open().filter(call_id=pk)
        begun = list(attempts.values_list("pk", flat=True))
        jobs = claim.begin(self.using, begun, self.worker) if begun else []
        recorder.record_once(self.using, [transitions.after_expiry(job) for job in jobs])

    def _pk_when_settled(self) -> int | None:
        """Its pk, if it has one. OperationalError while its last pass may still be committed."""
        if self.pk is None and self._is_in_doubt:
            with database.writing(self.using):
                if not rule_rows.try_lock(self.using, [self.rule]):
                    raise OperationalError("a permit's pass may be committed yet")
        return self._find_pk() if self.pk is None else self.pk

    # --- its row among the calls, while it waits

    def _insert_row(self, due_at: datetime, expires_at: datetime, **more: Any) -> int:
        columns = {
            **self.wanted.call,
            **more,
            "idempotency_key": self._identity,
            "due_at_dt": due_at,
            "expires_at_dt": expires_at,
        }
        row = database.new_object(tables.CallQueue, columns)
        database.insert_objects(tables.CallQueue, self.using, [row], batch_size=1)
        pk = row.pk or self._find_pk()  # MySQL does not tell it
        assert pk is not None
        return pk

    def _keep_alive(self, pk: int, due_at: datetime, until: datetime) -> bool:
        """Say that the waiter lives; whether the permit still waits, and nobody has locked it."""
        said = [{"pk": pk, "due_at_dt": due_at, "ready": True, "expires_at_dt": until}]
        waits = f"t.status IN ({database.listed(states.WAITING)})"
        return bool(database.update_free(tables.CallQueue, self.using, said, waits))

    def _find_pk(self) -> int | None:
        rows = tables.calls(self.using).filter(idempotency_key=self._identity)
        return rows.values_list("pk", flat=True).first()

    def _read_row(self, pk: int, due_at: datetime, wall: datetime) -> RowSeen | None:
        """Its state, and the permits before it, unexpired at `wall`; None: gone. One statement."""
        using, priority = self.using, self.priority
        calls, attempts = (tables.name(using, model) for model in ("CallQueue", "CallAttempt"))
        at, shown = (database.as_parameter(using, one) for one in (due_at, wall))
        is_rival, rival = "o.rule = %s", [self.rule]
        if any(limit.is_keyed for limit in self.wanted.rule.limits):
            is_rival += f" AND o.{database.quoted(using, 'key')} = %s"
            rival.append(self.key)
        rivals = (
            f"SELECT 1 FROM {calls} o WHERE o.method = '{states.PERMIT}' AND o.ready AND o.status "
            f"IN ({database.listed(states.WAITING)}) AND {is_rival} AND (o.priority > %s OR "
            "(o.priority = %s AND (o.due_at_dt < %s OR (o.due_at_dt = %s AND o.id < %s)))) "
            f"AND o.expires_at_dt > %s LIMIT {MANY}"
        )
        found = database.rows(
            using,
            f"SELECT c.status, c.error_message, (SELECT MAX(a.id) FROM {attempts} a WHERE "
            f"a.call_id = c.id AND a.finished_at IS NULL), (SELECT COUNT(*) FROM ({rivals}) r) "
            f"FROM {calls} c WHERE c.id = %s",
            [*rival, priority, priority, at, at, pk, shown, pk],
        )
        return RowSeen(*found[0]) if found else None

    def _delete_row(self, pk: int) -> bool:
        """Delete its row, if there; nothing is left. False: it was charged or has ended before."""

        def work() -> bool:
            rows = tables.calls(self.using).filter(pk=pk)
            found = database.locked(rows, wait=True).values_list("status", "last_attempt").first()
            if found is not None and (found[0] not in states.WAITING or found[1]):
                return False
            rows.delete()
            return True

        return untimed_transaction(self.using, work)


_parties: dict[str, Party] = {}  # by database: this process
_looked_for_overdue: dict[str, float] = {}  # by database: when, by shifted_monotonic


def _bounded(bounds: tuple[float, float], seconds: float) -> float:
    return min(bounds[1], max(bounds[0], seconds))


def _growing_pause(bounds: tuple[float, float], times: int) -> float:
    least, most = bounds  # those who wait do not all wake at once
    return min(most, least * 2.0 ** min(times, 10)) * random.uniform(0.5, 1.0)
