"""Holds and changed limits: what keeps a scope of a rule from being released, whatever its limits say.

Read at every pass, so a hold acts within a pass. Laying one twice is one hold; only its end can move, and only later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Q

from callqueue import conf, database, events
from callqueue.budgets import Book, key_part
from callqueue.database import as_parameter, from_us, instant_us, places, quoted, rows


@dataclass(frozen=True)
class InForce:
    """A hold as a pass sees it."""

    rule: str
    per: str
    value: str
    until: datetime | None
    reason: str


@dataclass(frozen=True)
class Held:
    """The holds in force on some rules; `probing`: rules whose circuit breaker's hold has ended, and nothing more."""

    by_rule: Mapping[str, Sequence[InForce]]
    probing: frozenset[str] = frozenset()

    def blocking(self, rule: str, key: str | None = None, queue: str | None = None) -> InForce | None:
        """The hold that keeps such a call back; without key and queue, one that keeps back the whole rule."""
        for hold in self.by_rule.get(rule, ()):
            if hold.per == "rule":
                return hold
            if hold.per == "queue":
                if queue is not None and hold.value == queue:
                    return hold
            elif key is not None and key_part(key, hold.per) == hold.value:
                return hold
        return None

    def on_keys(self, rule: str) -> bool:
        """Whether any hold on the rule concerns keys."""
        return any(hold.per not in ("rule", "queue") for hold in self.by_rule.get(rule, ()))

    def first_end(self, rules: Iterable[str]) -> datetime | None:
        """When the first of these rules' holds ends; None where none does by itself."""
        return min((h.until for rule in rules for h in self.by_rule.get(rule, ()) if h.until), default=None)


def in_force(using: str, rules: Sequence[str], now: datetime) -> Held:
    """The holds on these rules at `now`. One statement."""
    from callqueue.models import Hold

    value, until = quoted(using, "value"), quoted(using, "until")
    sql = (
        f"SELECT rule, per, {value}, {until}, reason, began_at FROM {quoted(using, Hold._meta.db_table)} "
        f"WHERE rule IN ({places(rules)}) AND ({until} IS NULL OR {until} > %s OR source = 'breaker') ORDER BY id"
    )
    by_rule: dict[str, list[InForce]] = {}
    probing = set()
    for rule, per, text, ends, reason, began in rows(using, sql, [*rules, as_parameter(using, now)]):
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
    """Hold a scope of these rules. True if it was not held before by the same source; a hold in force only ever gets longer.

    With `extend=False` a hold in force stays as it is.
    """
    from callqueue.models import Hold

    laid = False
    with database.writing(using):
        now = database.clock(using)
        stored = Hold.objects.using(using)
        for rule in sorted(rules):
            hold, created = stored.get_or_create(
                rule=rule,
                per=per,
                value=value,
                source=source,
                defaults={"until": until, "reason": reason, "began_at": now},
            )
            ended = not created and hold.until is not None and hold.until <= now
            if created or ended:
                laid = True
                stored.filter(pk=hold.pk).update(until=until, reason=reason, began_at=now)
            elif extend and hold.until is not None and (until is None or until > hold.until):
                stored.filter(pk=hold.pk).update(until=until, reason=reason)
    if laid:
        told = "rule_paused" if source == Hold.Source.OPERATOR else "rule_held"
        for rule in rules:
            events.tell(told, rule=rule, per=per, value=value, until=until, reason=reason)
    return laid


def lift(using: str, rule: str, per: str | None = None, value: str = "") -> int:
    """End the rule's holds, or the one of a scope; the count of holds that were in force."""
    from callqueue.models import Hold

    stored = Hold.objects.using(using).filter(rule=rule)
    if per is not None:
        stored = stored.filter(per=per, value=value)
    count = stored.filter(Q(until__isnull=True) | Q(until__gt=database.ClockNow())).count()
    stored.delete()
    if count:
        events.tell("rule_resumed", rule=rule, holds=count)
    return count


def book_in_force(using: str) -> Book:
    """The book of the settings, with the limits that operators changed."""
    config = conf.current()
    return config.book.with_rates(rates(using, list(config.rules)))


def rates(using: str, rules: Sequence[str]) -> dict[str, str]:
    """The limits that operators changed, of these rules: budget id -> rate."""
    return remembered(using, rules)[0]


def remembered(using: str, rules: Sequence[str]) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """The same, and by rule what passes remember of it, for a caller to change as it likes. One statement."""
    from callqueue.models import RuleState

    changed: dict[str, str] = {}
    memos: dict[str, dict[str, Any]] = {}
    stored = RuleState.objects.using(using).filter(rule__in=rules).values_list("rule", "rates", "memo")
    for rule, of_rule, memo in stored:
        changed.update(of_rule or {})
        memos[rule] = memo or {}
    return changed, memos
