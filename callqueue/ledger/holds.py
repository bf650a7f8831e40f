"""Holds: what keeps a scope of a rule from being released, whatever its limits say.

Read at every pass, so a hold acts within a pass. Laying one twice is one hold; only its end can
move, and only later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q

from callqueue import database, events, tables
from callqueue.database import as_parameter, from_us, instant_us, places, quoted, rows
from callqueue.ledger import clock_jumps, key_turns
from callqueue.limits.budgets import key_part


@dataclass(frozen=True)
class InForce:
    """A hold as a pass sees it."""

    rule: str
    per: str
    value: str
    until: datetime | None
    reason: str

    @property
    def end(self) -> float:
        """When it ends, in seconds since 1970; infinite where it does not by itself."""
        return float("inf") if self.until is None else self.until.timestamp()

    def is_on_key(self, key: str) -> bool:
        """Whether it keeps back the calls of this key, and not of all."""
        return self.per not in ("rule", "queue") and key_part(key, self.per) == self.value


@dataclass(frozen=True)
class Held:
    """The holds on some rules. `probing`: rules that only the breaker held, and no longer does."""

    by_rule: Mapping[str, Sequence[InForce]]
    probing: frozenset[str] = frozenset()

    def blocking(
        self, rule: str, key: str | None = None, queue: str | None = None
    ) -> InForce | None:
        """The hold on such a call; without key and queue, the hold on the whole rule."""
        for hold in self.by_rule.get(rule, ()):
            if hold.per == "rule":
                return hold
            if hold.per == "queue" and queue is not None and hold.value == queue:
                return hold
            if key is not None and hold.is_on_key(key):
                return hold
        return None

    @property
    def without_full_queues(self) -> Held:
        """The holds alone, for what waits for no worker."""
        return self

    def on_keys(self, rule: str) -> bool:
        """Whether any hold on the rule concerns keys."""
        return any(hold.per not in ("rule", "queue") for hold in self.by_rule.get(rule, ()))

    def first_end(self, rules: Iterable[str]) -> datetime | None:
        """When the first of these rules' holds ends; None where none does by itself."""
        return min(
            (h.until for rule in rules for h in self.by_rule.get(rule, ()) if h.until), default=None
        )


def in_force(using: str, rules: Sequence[str], now: datetime) -> Held:
    """The holds on these rules at `now`. One statement."""
    table = tables.name(using, "Hold")
    value, until = quoted(using, "value"), quoted(using, "until")
    sql = (
        f"SELECT rule, per, {value}, {until}, reason, began_at FROM {table} "
        f"WHERE rule IN ({places(rules)}) "
        f"AND ({until} IS NULL OR {until} > %s OR source = 'breaker') ORDER BY id"
    )
    by_rule: dict[str, list[InForce]] = {}
    probing = set()
    for rule, per, text, ends, reason, began in rows(
        using, sql, [*rules, as_parameter(using, now)]
    ):
        ends_at = None if ends is None else from_us(instant_us(ends))
        if ends_at is None or ends_at > now:
            by_rule.setdefault(rule, []).append(InForce(rule, per, text, ends_at, reason))
        elif instant_us(ends) > instant_us(began):  # else the breaker was closed at that instant
            probing.add(rule)
    return Held(by_rule, frozenset(probing))


def lay(
    using: str,
    rules: Sequence[str],
    per: str,
    value: str,
    until: datetime | None,
    reason: str,
    *,
    source: str,
    extend: bool = True,
) -> bool:
    """Hold a scope of these rules. True if it was not held before by the same source; a hold in
    force only ever gets longer.

    With `extend=False` a hold in force stays as it is.
    """
    scope = {"per": per, "value": value, "source": source}
    laid = database.again_after_deadlock(
        using, lambda: _lay_all(using, rules, scope, until, reason, extend)
    )
    if laid:
        told = "rule_paused" if source == tables.Hold.Source.OPERATOR else "rule_held"
        for rule in rules:
            events.emit(told, rule=rule, per=per, value=value, until=until, reason=reason)
    return laid


def _lay_all(
    using: str,
    rules: Sequence[str],
    scope: Mapping[str, str],
    until: datetime | None,
    reason: str,
    extend: bool,
) -> bool:
    """Hold the scope of each rule, one after the other in the rules' order; whether it is new."""
    laid = False
    with database.writing(using):
        now = from_us(clock_jumps.held(using).at)
        states = tables.rule_states(using).filter(rule__in=rules).order_by("rule")
        list(database.locked(states, wait=True).values_list("pk"))
        for rule in sorted(rules):
            laid |= _lay(using, {"rule": rule, **scope}, until, reason, now, extend)
    return laid


def _lay(
    using: str,
    scope: dict[str, str],
    until: datetime | None,
    reason: str,
    now: datetime,
    extend: bool,
) -> bool:
    """Hold one rule. That a hold gets no shorter is in the updates themselves: not all who write
    holds have the rule's lock.
    """
    stored = tables.holds(using)
    fresh = {"until": until, "reason": reason, "began_at": now}
    if stored.get_or_create(**scope, defaults=fresh)[1] or stored.filter(
        **scope, until__lte=now
    ).update(**fresh):
        return True
    shorter = stored.filter(**scope, until__isnull=False)
    if extend:
        (shorter.filter(until__lt=until) if until is not None else shorter).update(
            until=until, reason=reason
        )
    return False


def lift(
    using: str, rule: str, per: str | None = None, value: str = "", *, source: str | None = None
) -> int:
    """End the rule's holds, or those of a scope, or of a source; the count that was in force."""
    stored = tables.holds(using).filter(rule=rule)
    if per is not None:
        stored = stored.filter(per=per, value=value)
    if source is not None:
        stored = stored.filter(source=source)
    count = stored.filter(Q(until__isnull=True) | Q(until__gt=database.ClockNow())).count()
    stored.delete()
    key_turns.wake_all(using, [rule])
    if count:
        events.emit("rule_resumed", rule=rule, holds=count)
    return count
