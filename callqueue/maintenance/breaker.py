"""The circuit breaker: holds a rule whose calls keep failing. It remembers its last hold alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from django.db import DatabaseError, InterfaceError
from django.db.models import Q

from callqueue import events, states, tables
from callqueue.ledger import holds, ledger_time
from callqueue.limits.rules import Breaker
from callqueue.transitions import Result

SOURCE = "breaker"
# An attempt's end counts against the provider where there was no answer, or one that is its own
# fault; a 404 is the call's. Throttled and voided attempts say nothing.
FAILED = Q(outcome__in=(states.ERRORED, states.LOST)) | Q(
    outcome=states.GAVE_UP, response_status__gte=500
)
WELL = Q(outcome=states.SUCCEEDED) | Q(outcome=states.GAVE_UP, response_status__lt=500)


def trip_where_failing(using: str, results: Sequence[Result]) -> None:
    """Trip the breakers of the rules of these recorded results, where their calls keep failing."""
    failed = {
        result.job.call.rule: result.job.rule.breaker
        for result in results
        if result.job.rule is not None and result.outcome != states.SUCCEEDED
    }
    for rule, breaker in failed.items():
        try:
            if breaker is not None:
                _hold_if_failing(using, rule, breaker)
        except (DatabaseError, InterfaceError) as error:
            # The ends are recorded; the next one looks again.
            events.emit("database_away", during="breaker", error=type(error).__name__)


def _hold_if_failing(using: str, rule: str, breaker: Breaker) -> None:
    """Hold it if `failures` in a row failed `within` seconds; longer, if the first since a hold."""
    now, many, lasts = ledger_time.now(using), breaker.failures, breaker.hold
    why = f"{many} attempts in a row failed within {breaker.within:g} s"
    ended = tables.attempts(using).filter(rule=rule, finished_at__isnull=False)
    last = tables.holds(using).filter(rule=rule, per="rule", source=SOURCE).first()
    if last is not None and last.until is not None:
        if last.until > now:
            return
        # what was in flight when it was held says nothing of what came after
        ended = ended.filter(finished_at__gt=last.until, released_at__gte=last.until)
        if not ended.filter(WELL).exists():
            many, why = 1, "it failed again after it was held"
            longer = (last.until - last.began_at).total_seconds() * breaker.factor
            lasts = min(breaker.longest, longer)
    lately = ended.filter(FAILED | WELL, finished_at__gt=now - timedelta(seconds=breaker.within))
    newest = list(lately.order_by("-finished_at", "-pk").values_list("pk", flat=True)[:many])
    if len(newest) == many and not lately.filter(WELL, pk__in=newest).exists():
        lasts_for, why = timedelta(seconds=lasts), f"the circuit breaker: {why}"
        holds.lay(using, [rule], "rule", "", lasts_for, why, source=SOURCE, extend=False)
