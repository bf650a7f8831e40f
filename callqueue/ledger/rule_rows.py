"""The rows of rules, which passes lock and in which they remember."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from callqueue import database, tables

# seconds without a statement after which the server ends a transaction for which others wait: its
# process is frozen, or gone
SILENT = 5


def ensure(using: str, rules: Collection[str]) -> None:
    states = tables.rule_states(using)
    missing = set(rules) - set(states.filter(rule__in=rules).values_list("rule", flat=True))
    if missing:
        made = [tables.RuleState(rule=rule) for rule in sorted(missing)]
        states.bulk_create(made, ignore_conflicts=True)


def lock(using: str, rules: Collection[str]) -> dict[str, dict[str, Any]]:
    """Lock the rows of these rules, by name; the memo of each. Waits for passes to end."""
    database.set_idle_timeout(using, SILENT)
    rows = tables.rule_states(using).filter(rule__in=rules).order_by("rule")
    return dict(database.locked(rows, wait=True).values_list("pk", "memo"))


def try_lock(using: str, rules: Collection[str]) -> bool:
    """Lock the rows that nobody else has; whether that is all of them. In a transaction."""
    database.set_idle_timeout(using, SILENT)
    rows = tables.rule_states(using).filter(rule__in=rules).order_by("rule")
    return len(database.locked(rows).values_list("rule")) == rows.count()


def forget_room(using: str, memos: Mapping[str, dict[str, Any]]) -> None:
    """Have known room forgotten, after a hold was laid. With the rows locked, by their memos."""
    laid = {rule: {**memo, "laid": memo.get("laid", 0) + 1} for rule, memo in memos.items()}
    fresh = [{"pk": rule, "memo": memo} for rule, memo in laid.items()]
    database.update_each(tables.RuleState, using, fresh)


def passes_and_memos(using: str, rules: Collection[str]) -> dict[str, tuple[int, dict[str, Any]]]:
    stored = tables.rule_states(using).filter(rule__in=rules).values_list("rule", "passes", "memo")
    return {rule: (passes, memo or {}) for rule, passes, memo in stored}
