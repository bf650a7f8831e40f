"""Takes back what was released and never begun, ends what was begun and fell silent, and expires
what waited too long.

Everything is fenced by the rows' own state and by the attempt's number, so any number of recoveries
may run beside workers and dispensers. A row that somebody has locked is passed over, and its turn
comes in a later round.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from callqueue import callbacks, conf, database, events, states, tables, transitions
from callqueue.database import from_us
from callqueue.ledger import account, agreement, clock_jumps, holds, ready_calls, row_locks
from callqueue.maintenance import deferred_endings
from callqueue.transitions import Ending, after_failure, after_loss, columns_of_call, ended

ORPHANED = timedelta(
    seconds=10
)  # for how long a due call may have a rule that these settings do not know
WENT_BACK = "the database went back in time: what it forgot may still count at the provider"
MOST = 1000  # rows that one statement of recovery handles


def recover(using: str) -> int:
    """One round of all that time brings, to be made every second or so; the count of calls whose
    state changed.
    """
    return (
        void_unbegun(using)
        + end_lost(using)
        + deferred_endings.write(using)
        + expire(using)
        + fail_orphans(using)
    )


def void_unbegun(using: str) -> int:
    """Let calls wait again whose attempt no worker began within its lease: the message was lost, or
    nobody listens.
    """
    overdue = (
        tables.attempts(using)
        .unbegun()
        .filter(lease_until__lt=database.ClockNow())
        .order_by("lease_until")
    )
    ids = list(overdue.values_list("pk", flat=True)[:MOST])
    return transitions.undo(using, ids) if ids else 0


def end_lost(using: str) -> int:
    """End attempts that a worker began and never answered: retried, failed or UNKNOWN, as their
    rule's `on_lost` says.
    """
    overdue = (
        tables.attempts(using)
        .open()
        .filter(started_at__isnull=False, lease_until__lt=database.ClockNow())
    )
    ids = list(overdue.order_by("lease_until").values_list("pk", flat=True)[:MOST])
    if not ids:
        return 0
    message = "the worker fell silent: no answer was recorded within the lease"
    with database.writing(using):
        reading = clock_jumps.held(using)
        if clock_jumps.watch(using).credited(reading) is None:
            return 0  # leases seem to have ended because the clock has jumped
        now = from_us(reading.at)
        free = row_locks.free_pairs(using, ids, begun=True)
        pairs = [
            pair
            for pair in free
            if pair.attempt.lease_until is not None and pair.attempt.lease_until < now
        ]
        lost = tables.attempts(using).filter(pk__in=[pair.attempt.pk for pair in pairs])
        lost.update(finished_at=now, outcome=states.LOST, error_message=message)
        endings = [_ending(pair.call, message, now) for pair in pairs if pair.call]
        rows = [columns_of_call(ending, now) for ending in endings]
        changed = database.update_each(
            _model(), using, rows, where=f"t.status = {states.DISPATCHED}"
        )
    for ending in endings:
        events.tell(
            "attempt_lost",
            call_id=ending.call_id,
            status=conf.NAMES_OF_STATUS[ending.status],
            reason=message,
        )
    for status in {e.status for e in endings if e.status in states.FINAL}:
        callbacks.announce(using, [e.call_id for e in endings if e.status == status], status)
    return changed


def expire(using: str) -> int:
    """End calls that were not released by their `expires_at`."""
    overdue = _model().objects.using(using).waiting().filter(expires_at_dt__lte=database.ClockNow())
    gone = _end(using, overdue.order_by("expires_at_dt"), "expires_at_dt", states.EXPIRED)
    if gone:
        events.tell("call_expired", calls=len(gone), first=gone[0])
    return len(gone)


def fail_orphans(using: str) -> int:
    """End calls whose rule is in nobody's settings any more, some seconds after they were due: none
    of a newer release's yet.
    """
    gone = [rule for rule in ready_calls.rules_of_ready(using) if rule not in conf.current().rules]
    if gone:
        known = agreement.known_rules(using)
        gone = [rule for rule in gone if rule not in known]
    calls = _model().objects.using(using).waiting()
    count = 0
    for rule in gone:
        overdue = calls.filter(
            rule=rule, ready=True, due_at_dt__lt=database.clock(using) - ORPHANED
        ).order_by("due_at_dt")
        why = f"the rule {rule!r} is not in CALLQUEUE['RULES'] any more"
        count += len(_end(using, overdue, "rule", states.FAILED, error_message=why))
    return count


def _end(using: str, overdue: Any, by: str, status: int, **columns: Any) -> list[int]:
    """End the first of these calls, those that nobody has locked, and announce them: each by the
    one who had it locked.

    `by`: the column that makes them overdue, which must not have changed meanwhile.
    """
    seen = dict(overdue.values_list("pk", by)[:MOST])
    if not seen:
        return []
    calls = _model().objects.using(using)
    with database.writing(using):
        rows = database.locked(calls.filter(pk__in=list(seen)).order_by("pk")).values_list(
            "pk", "status", by
        )
        free = [pk for pk, now, value in rows if now in states.WAITING and value == seen[pk]]
        calls.filter(pk__in=free).update(**ended(status), **columns)
    callbacks.announce(using, free, status)
    return free


@dataclass(frozen=True)
class Sign:
    """A dispenser's sign of life: when it was given, and the newest attempt of the ledger then (its
    id, its release).
    """

    at: datetime
    newest: tuple[int, datetime] | None


def beat(using: str, name: str) -> Sign:
    """Give a dispenser's sign of life; forgets the dispensers that have been silent for longer than
    anything counts.
    """
    now = database.clock(using)
    rows = tables.dispensers(using)
    if not rows.filter(pk=name).update(seen_at=now):
        rows.filter(seen_at__lt=now - _memory(using)).delete()
        rows.bulk_create(
            [tables.DispenserState(name=name, started_at=now, seen_at=now)], ignore_conflicts=True
        )
    return Sign(
        now, tables.attempts(using).order_by("-pk").values_list("pk", "released_at").first()
    )


def has_others(using: str, name: str) -> bool:
    """Whether there are other dispensers, or were not long ago."""
    return tables.dispensers(using).exclude(pk=name).exists()


def has_gone_back(using: str, name: str, last: Sign) -> bool:
    """Whether the database has forgotten this dispenser's last sign of life: it is a backup, or a
    copy that lagged behind.

    A row that is gone proves nothing where the ledger still has the attempt that was its newest
    then, or where the row was so old that others may have pruned it: what this dispenser knew of
    counts no more.
    """
    seen = tables.dispensers(using).filter(pk=name).values_list("seen_at", flat=True).first()
    if seen is not None:
        return bool(seen < last.at)
    return not _has_attempt(using, last.newest) and database.clock(using) - last.at < _memory(using)


def _has_attempt(using: str, attempt: tuple[int, datetime] | None) -> bool:
    return attempt is not None and bool(
        tables.attempts(using).filter(pk=attempt[0], released_at=attempt[1]).exists()
    )


def _memory(using: str) -> timedelta:
    """For how long a silent dispenser is remembered: as long as any limit counts what it released,
    and a day at least.
    """
    return max(
        timedelta(days=1),
        timedelta(microseconds=account.longest_window(agreement.book_in_force(using))),
    )


def hold_everything(using: str) -> None:
    """Hold every rule until nothing that the ledger may have forgotten counts any more: a full
    window of its own limits.
    """
    now, config, book = database.clock(using), conf.current(), agreement.book_in_force(using)
    for name, rule in config.rules.items():
        windows = [budget.limit.window_us for budget in book.budgets[name]]
        seconds = max(max(windows, default=0) / 1_000_000, rule.total_timeout + config.grace)
        until = now + timedelta(seconds=seconds)
        holds.lay(using, [name], "rule", "", until, WENT_BACK, source="operator")
    events.tell("ledger_went_back", rules=len(config.rules), reason=WENT_BACK)


def _ending(call: Any, message: str, now: Any) -> Ending:
    rule = conf.current().rules.get(call.rule)
    if rule is None:
        return after_failure(call, None, f"{message}; the rule {call.rule!r} is gone", now)
    return after_loss(call, rule, message, now)


def _model() -> Any:
    return tables.CallQueue
