"""What operators do to rules: pause, resume, change a limit. Acts at the next pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from django.db.models import Q, Value
from django.db.models.functions import StrIndex
from django.db.models.lookups import GreaterThan

from callqueue import conf, events, tables, texts
from callqueue.exceptions import InvalidCall
from callqueue.ledger import holds, ledger_time, settings
from callqueue.ledger.ledger_time import LedgerNow
from callqueue.limits.budgets import named_parts, scopes_of
from callqueue.limits.durations import LONGEST
from callqueue.limits.rules import MAX_NAME
from callqueue.sending.validation import check_key, compact_json


def pause(
    using: str,
    rule: str,
    *,
    key: str | Mapping[str, str] = "",
    seconds: float | None = None,
    reason: str = "",
) -> None:
    """Hold a rule, or one key of it, for `seconds` (None: until it is resumed; InvalidCall: not
    above 0, or over ten years). A key of one name holds all keys that have that name and value.
    An earlier pause is replaced, and nothing is released in between.
    """
    conf.current().rule(rule)  # else UnknownRule
    text = check_key(key)
    if seconds is not None and not 0 < seconds <= LONGEST.total_seconds():
        raise InvalidCall("for", "must be longer than 0 seconds, and ten years at most")
    per, value = _only_part(text) or ("key" if text else "rule", text)
    holds.lay(
        using,
        [rule],
        per,
        value,
        None if seconds is None else timedelta(seconds=seconds),
        reason or "paused by an operator",
        source="operator",
        replace=True,
    )


def condition_of_pause(key: str) -> Q:
    """The condition of the calls that a pause of this key, as `check_key` has it, holds."""
    per, value = _only_part(key) or ("key", key)
    whole = Q(key=key)
    if per == "key" and value == key and named_parts(key):
        return whole
    # In the text of several names: what is quoted within one has a backslash before its quotes.
    part = compact_json({per: value})[1:-1]
    among = [GreaterThan(StrIndex("key", Value(f"{mark}{part}")), 0) for mark in "{,"]
    named = Q(key__startswith="{") & (Q(among[0]) | Q(among[1]))
    return whole | named | Q(key=value) if per == "key" else whole | named


def _only_part(key: str) -> tuple[str, str] | None:
    """Name and value of a key with one name; None for others, and for a name over MAX_NAME."""
    parts = scopes_of(key) - {("key", key)}
    is_only = len(named_parts(key)) == 1
    return next((part for part in parts if is_only and len(part[0]) <= MAX_NAME), None)


def resume(
    using: str, rule: str, *, key: str | Mapping[str, str] = "", restored: bool = False
) -> int:
    """End the holds on a rule and on all its keys, whoever laid them; or those on one key, and on
    each of its names, for all keys that have it. Returns how many were in force. A rule's hold that
    was laid because the database went back in time ends only where `restored` says so.
    """
    conf.current().rule(rule)  # else UnknownRule
    text = check_key(key)
    return holds.lift(using, rule, text, but_sources=_kept_sources(text, restored=restored))


def count_holds_to_end(
    using: str, rule: str, *, key: str | Mapping[str, str] = "", restored: bool = False
) -> int:
    """How many holds `resume` would end now."""
    conf.current().rule(rule)  # else UnknownRule
    text = check_key(key)
    return holds.count(using, rule, text, but_sources=_kept_sources(text, restored=restored))


def _kept_sources(key: str, *, restored: bool) -> Sequence[str]:
    """The sources of holds that `resume` leaves in force; a restore lays none on keys."""
    return () if key or restored else ("restored",)


def restore_hold_ends_at(using: str, rule: str) -> datetime | None:
    """Until when a rule is held because the database went back in time; None where it is not."""
    kept = tables.holds(using).filter(rule=rule, source="restored", until__gt=LedgerNow())
    until = kept.values_list("until", flat=True).first()
    return None if until is None else ledger_time.to_wall(using, until)


def change_limit(using: str, rule: str, budget_id: str, rate: str | None) -> str:
    """Set and tell a limit's rate (None: the settings') for all that share it; return the rate."""
    config = conf.current()
    config.rule(rule)  # else UnknownRule
    budgets = {budget.id: budget for budget in config.book.budgets[rule]}
    if budget_id not in budgets:
        raise InvalidCall(
            "limit", f"rule {rule!r} has no limit {budget_id!r}{texts.suggest(budget_id, budgets)}"
        )
    limit = budgets[budget_id].limit
    if rate is not None:
        limit = limit.with_rate(rate)
    settings.set_rate(using, budget_id, rate)
    events.emit("limit_changed", rule=rule, limit=budget_id, rate=limit.rate_text)
    return limit.rate_text
