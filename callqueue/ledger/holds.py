"""Holds: what keeps a scope of a rule from being released, whatever its limits say. Each change is
one transaction, after passes under way: none sees half of it. To lay one voids known room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import Case, F, Q, QuerySet, Value, When

from callqueue import broker, conf, events, tables
from callqueue.database import as_parameter, from_us, instant_us, placeholders, quoted, rows
from callqueue.ledger import ready_calls, rule_rows
from callqueue.ledger.ledger_time import LedgerNow
from callqueue.ledger.transaction import Locked, transaction, untimed_transaction
from callqueue.limits.budgets import Book, scopes_of


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
        """When it ends, seconds since 1970 of ledger time; infinite if not by itself."""
        return float("inf") if self.until is None else self.until.timestamp()

    def is_on_key(self, key: str) -> bool:
        return (self.per, self.value) in scopes_of(key)


@dataclass(frozen=True)
class Held:
    by_rule: Mapping[str, Sequence[InForce]]

    def blocking_hold(
        self, rule: str, key: str | None = None, queue: str | None = None
    ) -> InForce | None:
        """The first laid hold on such a call; without key and queue, that on the whole rule."""
        for hold in self.by_rule.get(rule, ()):
            if hold.per == "rule":
                return hold
            if hold.per == "queue" and queue is not None and hold.value == queue:
                return hold
            if key is not None and hold.is_on_key(key):
                return hold
        return None

    def rules_taking_turns(self, book: Book, rules: Iterable[str]) -> list[str]:
        """Those of these rules with a limit or a hold per key: their keys take turns."""
        return [
            rule
            for rule in rules
            if any(one.limit.is_keyed for one in book.budgets.get(rule, ()))
            or any(hold.per not in ("rule", "queue") for hold in self.by_rule.get(rule, ()))
        ]

    def first_end(self, rules: Iterable[str]) -> datetime | None:
        return min(
            (h.until for rule in rules for h in self.by_rule.get(rule, ()) if h.until), default=None
        )


def in_force(using: str, rules: Sequence[str], now: datetime) -> Held:
    """The holds on these rules at `now`. One statement."""
    table = tables.name(using, "Hold")
    value, until = quoted(using, "value"), quoted(using, "until")
    sql = (
        f"SELECT rule, per, {value}, {until}, reason FROM {table} "
        f"WHERE rule IN ({placeholders(rules)}) AND ({until} IS NULL OR {until} > %s) ORDER BY id"
    )
    by_rule: dict[str, list[InForce]] = {}
    for rule, per, text, ends, reason in rows(using, sql, [*rules, as_parameter(using, now)]):
        ends_at = None if ends is None else from_us(instant_us(ends))
        by_rule.setdefault(rule, []).append(InForce(rule, per, text, ends_at, reason))
    return Held(by_rule)


def lay(
    using: str,
    rules: Sequence[str],
    per: str,
    value: str,
    lasts: timedelta | None,
    reason: str,
    *,
    source: str,
    extend: bool = True,
    replace: bool = False,
) -> bool:
    """Hold a scope of these rules; `lasts=None`: until lifted. A hold in force gets longer only;
    `extend=False`: it stays as it is; `replace=True`: it is as if laid now, keys wake. Announces
    the rules that its source did not hold before (`replace`: all). Whether there are any.
    """
    scope = {"per": per, "value": value, "source": source}

    def work(locked: Locked) -> tuple[list[str], datetime | None]:
        rule_rows.forget_room(using, rule_rows.lock(using, rules))
        until = None if lasts is None else locked.now + lasts
        laid = [
            rule
            for rule in sorted(rules)
            if _lay_one(using, {"rule": rule, **scope}, until, reason, locked.now, extend, replace)
        ]
        if replace:
            ready_calls.wake_all_keys(using, rules)
        return laid, None if lasts is None else locked.wall + lasts

    laid, until = transaction(using, work)
    _announce(laid, scope, until, reason)
    return bool(laid)


def _announce(
    rules: Sequence[str], scope: Mapping[str, str], until: datetime | None, reason: str
) -> None:
    """Log the holds and tell receivers, by a message; `until`: wall time, None: until lifted."""
    event = "rule_paused" if scope["source"] == tables.Hold.Source.OPERATOR else "rule_held"
    for rule in rules:
        facts = {"rule": rule, "per": scope["per"], "value": scope["value"], "until": until}
        events.log(event, **facts, reason=reason)
        if events.has_receivers(event):
            told: tuple[Any, ...] = ([], "default", event, {**facts, "reason": reason})
            queue = conf.current().queue_of(rule)
            broker.send_beside(broker.ANNOUNCE, told, queue=queue)


def _lay_one(
    using: str,
    scope: dict[str, str],
    until: datetime | None,
    reason: str,
    now: datetime,
    extend: bool,
    replace: bool,
) -> bool:
    """Lay or lengthen one hold; whether its source did not hold the scope before, or `replace`."""
    # No shorter, in the updates themselves: not all who write holds have the rule's lock.
    stored = tables.holds(using)
    fresh = {"until": until, "reason": reason, "began_at": now}
    old = stored.filter(**scope) if replace else stored.filter(**scope, until__lte=now)
    if stored.get_or_create(**scope, defaults=fresh)[1] or old.update(**fresh):
        return True
    shorter = stored.filter(**scope, until__isnull=False)
    if extend:
        # It has begun by now: what is ahead is of before the clock was set back, and gets shorter
        # (`ledger_time`).
        began_at = Case(When(began_at__gt=now, then=Value(now)), default=F("began_at"))
        (shorter.filter(until__lt=until) if until is not None else shorter).update(
            until=until, reason=reason, began_at=began_at
        )
    return False


def count(using: str, rule: str, key: str = "", *, but_sources: Sequence[str] = ()) -> int:
    """How many holds `lift` would end."""
    return _holds_to_lift(using, rule, key, but_sources).filter(_NOW).count()


_NOW = Q(until__isnull=True) | Q(until__gt=LedgerNow())


def _holds_to_lift(
    using: str, rule: str, key: str, but_sources: Sequence[str]
) -> QuerySet[tables.Hold]:
    # those that have ended, too
    stored = tables.holds(using).filter(rule=rule).exclude(source__in=but_sources)
    if not key:
        return stored
    return stored.filter(reduce(or_, (Q(per=per, value=value) for per, value in scopes_of(key))))


def lift(
    using: str,
    rule: str,
    key: str = "",
    *,
    but_sources: Sequence[str] = (),
) -> int:
    """Lift a rule's holds, or a key's, but for some sources'; wake keys, tell. How many held."""
    stored = _holds_to_lift(using, rule, key, but_sources)

    def work() -> int:
        ready_calls.wake_all_keys(using, [rule])
        count = stored.filter(_NOW).count()
        stored.delete()
        return count

    count = untimed_transaction(using, work)
    if count:
        events.emit("rule_resumed", rule=rule, holds=count)
    return count
