"""The circuit breaker: holds a rule whose calls keep failing, lets one call probe it, and resumes
or holds it longer.

In: the ends of attempts, from the ledger. Out: a hold with the source "breaker". That row is all
there is to remember: in force, the rule is held; past its end, it is being probed; begun and ended
in the same instant, it was closed then.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import DatabaseError, InterfaceError

from callqueue import conf, events, states, tables
from callqueue.ledger import holds, ledger_time
from callqueue.limits.rules import Breaker
from callqueue.transitions import Result

SOURCE = "breaker"
MOST = 10_000  # attempts that one look at a rule reads
# throttled and voided attempts say nothing
TELLING = (states.SUCCEEDED, states.ERRORED, states.GAVE_UP, states.LOST)
Ended = tuple[str, int | None]  # an attempt's outcome and the status of its answer


def observe(using: str, results: Sequence[Result]) -> None:
    """After these results were recorded: trip, close or hold again the breakers of their rules. No
    statement without any.
    """
    any_failed: dict[str, bool] = {}
    for result in results:
        rule, name = result.job.rule, result.job.call.rule
        if rule is not None and rule.breaker is not None:
            failed = result.outcome != states.SUCCEEDED
            any_failed[name] = any_failed.get(name, False) or failed
    for name, may_trip in any_failed.items():
        try:
            _settle(using, name, may_trip=may_trip)
        except (DatabaseError, InterfaceError) as error:
            # The ends are recorded; the next one looks again.
            events.emit("database_away", during="breaker", error=type(error).__name__)


def room(using: str, name: str, open_attempts: int, now: datetime) -> int | None:
    """How many calls of a rule past the end of its breaker's hold may go, in a pass at `now`: 1 to
    probe, 0 while that one is out; None: any.
    """
    if open_attempts:
        return 0
    state = _settle(using, name, may_trip=False, in_pass_at=now)
    return {"closed": None, "held": 0, "probing": 1}[state]


def is_failure(outcome: str, status: int | None) -> bool:
    """Whether an attempt's end counts against the provider: no answer, or one that is its own
    fault; a 404 is the call's.
    """
    return outcome in (states.ERRORED, states.LOST) or (
        outcome == states.GAVE_UP and (status or 0) >= 500
    )


def _settle(using: str, name: str, *, may_trip: bool, in_pass_at: datetime | None = None) -> str:
    """Bring the breaker up to date with the ledger; whether it is "closed", "held" or "probing"
    now.
    """
    rule = conf.current().rules.get(name)
    if rule is None or rule.breaker is None:
        return "closed"
    hold = _stored(using, name).first()
    now = in_pass_at or ledger_time.now(using)
    if hold is not None and hold.until > now:
        return "held"
    if hold is not None and hold.until > hold.began_at:
        return _judge_probe(using, name, rule.breaker, hold, now, in_pass=in_pass_at is not None)
    if may_trip:
        since = now - timedelta(seconds=rule.breaker.within)
        since = max(since, hold.until) if hold else since
        why = _why(rule.breaker, _ended(using, name, MOST, finished_at__gt=since))
        if why:
            _hold(using, name, timedelta(seconds=rule.breaker.hold), why)
            return "held"
    return "closed"


def _judge_probe(
    using: str, name: str, breaker: Breaker, hold: Any, now: datetime, *, in_pass: bool
) -> str:
    """What came of the call that probed the rule, if one did: closed, or held for longer."""
    ended = _ended(using, name, 1, released_at__gte=hold.until)
    if not ended:
        return "probing"
    if is_failure(*ended[0]):
        whole = (hold.until - hold.began_at) * breaker.factor
        longer = min(timedelta(seconds=breaker.longest), whole)
        why = "the circuit breaker: the call that probed the rule failed too"
        if in_pass:
            holds.lay_in_pass(using, name, now + longer, why, now, source=SOURCE)
        else:
            _hold(using, name, longer, why)
        return "held"
    mine = _stored(using, name).filter(pk=hold.pk, until=hold.until)
    if mine.update(until=now, began_at=now):
        why = "the call that probed it went well"
        events.emit("rule_resumed", rule=name, holds=1, reason=why)
    return "closed"


def _why(breaker: Breaker, ended: Sequence[Ended]) -> str | None:
    """Why to trip after these ends, newest first; None where there is no reason."""
    failed = [is_failure(*end) for end in ended]
    in_row, share, count = breaker.failures, breaker.share, len(failed)
    within = f"failed within {breaker.within:g} s"
    if in_row is not None and count >= in_row and all(failed[:in_row]):
        return f"the circuit breaker: {in_row} attempts in a row {within}"
    if share is not None and count >= breaker.least and sum(failed) >= share * count:
        return f"the circuit breaker: {sum(failed)} of {count} attempts {within}"
    return None


def _hold(using: str, name: str, lasts: timedelta, why: str) -> None:
    holds.lay(using, [name], "rule", "", lasts, why, source=SOURCE, extend=False)


def _stored(using: str, name: str) -> Any:
    return tables.holds(using).filter(
        rule=name, per="rule", value="", source=SOURCE, until__isnull=False
    )


def _ended(using: str, name: str, most: int, **which: datetime) -> list[Ended]:
    """How the rule's attempts ended, newest first, without what says nothing of the provider."""
    rows = tables.attempts(using).filter(
        rule=name, outcome__in=TELLING, finished_at__isnull=False, **which
    )
    rows = rows.exclude(outcome=states.GAVE_UP, response_status__isnull=True)
    return list(
        rows.order_by("-finished_at", "-pk").values_list("outcome", "response_status")[:most]
    )
