"""Where every rule stands: what the dashboard, callqueue_status and the metrics show. Reads, and
changes nothing.

In: a database alias. Out: `look()`, a list of RuleOverview, or `overview()`, all of it as one JSON
document. Every read is bounded, so that it costs the same with a million calls waiting as with ten
thousand; only `exact` counts are not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from callqueue import conf
from callqueue.ledger import agreement, holds
from callqueue.limits.kinds import SECOND
from callqueue.operations import limit_usage, status_snapshot
from callqueue.operations.drain_time import drain_s
from callqueue.operations.limit_usage import KeyOverview, LimitOverview
from callqueue.operations.not_queued import NotQueued
from callqueue.operations.status_snapshot import Snapshot

COUNTING = 0.04  # seconds spent on counting what large windows hold


@dataclass(frozen=True)
class RuleOverview:
    """One rule. Times in seconds; None: nothing is due, nobody can say.

    `waiting` is exact unless `is_estimate`. `rate_per_s`: attempts answered over the last minute;
    `failing`: the share of them that did not succeed, also where their calls are tried again; None
    where none was answered. `drain_s`: until everything that waits is answered, if the limits are
    all that holds it back. `hold`: on the whole rule; `holds`: all. `in_flight` counts permits too,
    which `not_queued` are.
    """

    name: str
    priority: int
    waiting: int
    is_estimate: bool
    in_flight: int
    oldest_due_s: float | None
    drain_s: float | None
    rate_per_s: float
    hold: holds.InForce | None
    limits: Sequence[LimitOverview]
    holds: Sequence[holds.InForce] = ()
    keys: Sequence[KeyOverview] = ()
    queues: tuple[str, ...] = ()
    failing: float | None = None
    not_queued: NotQueued = field(default_factory=NotQueued)

    def as_json(self) -> dict[str, Any]:
        """What `callqueue_status --json` prints of a rule."""
        hold = self.hold
        return {
            "waiting": self.waiting,
            "in_flight": self.in_flight,
            "not_queued": {
                "in_flight": self.not_queued.in_flight,
                "waiting": self.not_queued.waiting,
                "labels": dict(self.not_queued.labels),
            },
            "oldest_due_s": _rounded(self.oldest_due_s),
            "drain_s": _rounded(self.drain_s),
            "rate_per_s": round(self.rate_per_s, 3),
            "hold": hold and {"until": _iso(hold.until), "reason": hold.reason},
            "holds": [
                {"per": h.per, "value": h.value, "until": _iso(h.until), "reason": h.reason}
                for h in self.holds
                if h.per != "rule"
            ],
            "limits": [
                {name: getattr(limit, name) for name in _OF_A_LIMIT} for limit in self.limits
            ],
        }


def overview(using: str) -> dict[str, Any]:
    """`{"rules": {NAME: {...}}, "disagreements": [...]}` as `callqueue_status --json` prints it,
    with exact counts.
    """
    return {
        "rules": {rule.name: rule.as_json() for rule in look(using, exact=True)},
        "disagreements": [
            {
                "limit": one.limit,
                "rules": list(one.rules),
                "said": {what: list(who) for what, who in one.said.items()},
            }
            for one in agreement.disagreements(using)
        ],
    }


def look(
    using: str,
    *,
    exact: bool = False,
    keys: int = 0,
    rates: Mapping[str, str] | None = None,
    only: str | None = None,
    until: float | None = None,
) -> list[RuleOverview]:
    """Every rule of the settings, or `only` one, in the settings' order.

    With `exact` every waiting call is counted, one index entry each. `keys`: so many keys of each
    rule that is limited per key. `rates`: what if these budgets had other rates (budget id ->
    rate)? `until`: when (monotonic) it is late, and what large windows hold is estimated.
    """
    config = conf.current()
    book = agreement.book_in_force(using)
    names = tuple(rule for rule in config.rules if only is None or rule in book.groups[only])
    late = time.monotonic() + COUNTING
    seen = status_snapshot.read(
        using,
        book.with_rates(rates or {}),
        names,
        exact=exact,
        keys=keys,
        until=late if until is None else min(until, late),
    )
    return [_of_rule(seen, name) for name in names if only in (None, name)]


def drain_with(using: str, rule: str, rates: Mapping[str, str]) -> float | None:
    """The rule's drain time if these budgets had other rates; None where nobody can say."""
    (found,) = look(using, only=rule, rates=rates)
    return found.drain_s


def _of_rule(seen: Snapshot, name: str) -> RuleOverview:
    rule, held, oldest = seen.book.rules[name], seen.held.by_rule.get(name, ()), seen.oldest_due
    hold = max((h for h in held if h.per == "rule"), key=lambda hold: hold.end, default=None)
    return RuleOverview(
        name=name,
        priority=rule.priority,
        waiting=seen.waiting.by_rule[name],
        is_estimate=name in seen.waiting.estimated,
        in_flight=seen.in_flight.get(name, 0),
        oldest_due_s=max(0.0, (seen.now - oldest[name]) / SECOND) if name in oldest else None,
        drain_s=drain_s(seen, name, hold),
        rate_per_s=seen.rates[name].per_second,
        hold=hold,
        limits=limit_usage.of_rule(seen, name),
        holds=held,
        keys=limit_usage.of_keys(seen, name),
        queues=tuple(rule.queues or ()),
        failing=seen.rates[name].failing,
        not_queued=seen.not_queued.get(name, NotQueued()),
    )


_OF_A_LIMIT = ("name", "per", "rate", "used", "free", "note")


def _iso(instant: datetime | None) -> str | None:
    return None if instant is None else instant.isoformat()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
