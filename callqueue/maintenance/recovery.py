"""Takes back what was released and never begun, ends what was begun and fell silent, and expires
what waited too long. Everything is fenced by the rows' own state and by the attempt's number, so
any number may run. A row that somebody has locked is passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from callqueue import callbacks, conf, database, events, states, tables, transitions
from callqueue.handlers import method_of
from callqueue.ledger import ready_calls, settings
from callqueue.ledger.ledger_time import LedgerNow
from callqueue.ledger.transaction import Locked, Pair, lock_free_pairs, transaction
from callqueue.states import Move
from callqueue.transitions import Job, Result, after_loss

# for how long a due call may have a rule that these settings do not know
ORPHANED = timedelta(seconds=10)
SILENT = "the worker fell silent: no answer was recorded within the lease"
MOST = 1000  # rows that one statement of recovery handles
FEW = 50  # calls whose data is read at once: it may be large


def recover(using: str) -> int:
    """Do one round of all that time brings; the count of changed calls."""
    return sum(one(using) for one in ALL)


def void_unbegun(using: str) -> int:
    """Void attempts that no worker began in time: the message was lost, or nobody listens."""
    overdue = tables.attempts(using).unbegun().filter(lease_until__lt=LedgerNow())
    ids = list(overdue.order_by("lease_until").values_list("pk", flat=True)[:MOST])
    return transitions.void_and_log(using, ids) if ids else 0


def end_lost(using: str) -> int:
    """End begun attempts not recorded within their leases; calls become what `after_loss` says."""
    begun = tables.attempts(using).open().filter(started_at__isnull=False)
    overdue = begun.filter(lease_until__lt=LedgerNow()).order_by("lease_until")
    ids = _ids_to_end_here(using, overdue)
    if not ids:
        return 0

    def work(locked: Locked) -> tuple[int, list[Result]]:
        pairs = _lock_overdue(using, ids, locked.now)
        _set_methods(using, [pair.call for pair in pairs if pair.call])
        results = [_result_of_loss(pair.attempt, pair.call, locked) for pair in pairs if pair.call]
        attempt_ids = [pair.attempt.pk for pair in pairs]
        return transitions.lose(using, attempt_ids, results, SILENT, locked), results

    # Where leases seem to have ended because the clock has jumped, `transaction` looks again.
    changed, results = transaction(using, work)
    _announce_lost(using, results)
    return changed


def _ids_to_end_here(using: str, overdue: Any) -> list[int]:
    """The first of these attempts, but for those whose rule only others know: theirs to end."""
    found = list(overdue.values_list("pk", "rule")[:MOST])
    strange = {rule for _, rule in found} - conf.current().rules.keys()
    if strange and (theirs := strange & settings.known_rules(using)):
        own = overdue.exclude(rule__in=theirs)
        return list(own.values_list("pk", flat=True)[:MOST])
    return [pk for pk, _ in found]


def _lock_overdue(using: str, ids: list[int], now: datetime) -> list[Pair]:
    pairs = lock_free_pairs(using, ids, begun=True)
    leases = [(pair, pair.attempt.lease_until) for pair in pairs]
    return [pair for pair, lease_until in leases if lease_until is not None and lease_until < now]


def _set_methods(using: str, calls: Sequence[Any]) -> None:
    """Set the methods in memory, as begin does, by the calls' data, which it reads."""
    for at in range(0, len(calls), FEW):
        few = {call.pk: call for call in calls[at : at + FEW]}
        data = tables.calls(using).filter(pk__in=few)
        for pk, call_data in data.values_list("pk", "call_data"):
            few[pk].method = method_of(call_data, few[pk].method)


def _result_of_loss(attempt: Any, call: Any, locked: Locked) -> Result:
    rule = conf.current().rules.get(call.rule)
    why = SILENT if rule is not None else f"{SILENT}; the rule {call.rule!r} is gone"
    return after_loss(Job(attempt, call, locked.reading, rule), why, locked.wall)


def _announce_lost(using: str, results: list[Result]) -> None:
    ended: dict[int, list[int]] = {}
    for result in results:
        name = conf.NAMES_OF_STATUS[result.status]
        events.emit("attempt_lost", call_id=result.job.call.id, status=name, reason=SILENT)
        if result.status in states.FINAL:
            ended.setdefault(result.status, []).append(result.job.call.id)
    for status, ids in ended.items():
        callbacks.log_and_announce(using, ids, status)


def expire(using: str) -> int:
    """End calls that were not released by their `expires_at`, MOST at once; the count."""
    overdue = tables.calls(using).waiting().filter(expires_at_dt__lte=database.ClockNow())
    first = overdue.order_by("expires_at_dt")[:MOST]
    gone = transitions.end_unchanged(using, first, "expires_at_dt", Move.EXPIRE)
    if gone:
        events.emit("call_expired", calls=len(gone), first=gone[0])
    return len(gone)


def fail_orphans(using: str) -> int:
    """End calls whose rule is in nobody's settings any more, some seconds after they were due."""
    gone = [
        rule for rule in ready_calls.rules_named_by_ready(using) if rule not in conf.current().rules
    ]
    if gone:
        known = settings.known_rules(using)
        gone = [rule for rule in gone if rule not in known]
    return sum(_fail_orphans_of(using, rule) for rule in gone)


def _fail_orphans_of(using: str, rule: str) -> int:
    long_ago = database.clock(using) - ORPHANED
    ready = tables.calls(using).waiting().filter(rule=rule, ready=True)
    first = ready.filter(due_at_dt__lt=long_ago).order_by("due_at_dt")[:MOST]
    why = f"the rule {rule!r} is not in CALLQUEUE['RULES'] any more"
    return len(transitions.end_unchanged(using, first, "rule", Move.FAIL, error_message=why))


# each looks for what nobody else brings about
ALL = (void_unbegun, end_lost, transitions.end_deferred, expire, fail_orphans)
