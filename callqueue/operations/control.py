"""What operators do to rules: pause, resume, change a limit. Acts at the next pass, within a
second.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from callqueue import conf, database, events, texts
from callqueue.exceptions import InvalidCall
from callqueue.ledger import agreement, holds
from callqueue.sending.validation import check_key


def pause(
    using: str,
    rule: str,
    *,
    key: str | Mapping[str, str] = "",
    seconds: float | None = None,
    until: datetime | None = None,
    reason: str = "",
) -> None:
    """Hold a rule, or one key of it, for `seconds`, until an instant, or until it is resumed.
    UnknownRule suggests.
    """
    conf.current().rule(rule)
    if seconds is not None:
        until = database.clock(using) + timedelta(seconds=seconds)
    text = check_key(key)
    per = "key" if text else "rule"
    holds.lift(using, rule, per, text, source="operator")  # one of his own may get shorter
    holds.lay(using, [rule], per, text, until, reason or "paused by an operator", source="operator")


def resume(using: str, rule: str, *, key: str | Mapping[str, str] = "") -> int:
    """End the holds on a rule, whoever laid them, those on its keys too; or those on one key. The
    count of them.
    """
    conf.current().rule(rule)
    text = check_key(key)
    return holds.lift(using, rule, "key", text) if text else holds.lift(using, rule)


def change_limit(using: str, rule: str, budget_id: str, rate: str | None) -> str:
    """Give one of the rule's limits another rate, for all rules that share it; None: as the
    settings say. The rate in force.

    It stays whatever becomes of the rules, until it is given another. Where dispensers differ in
    the limit, it is for all.
    """
    config = conf.current()
    config.rule(rule)
    budgets = {budget.id: budget for budget in config.book.budgets[rule]}
    if budget_id not in budgets:
        raise InvalidCall(
            "limit", f"rule {rule!r} has no limit {budget_id!r}{texts.suggest(budget_id, budgets)}"
        )
    limit = budgets[budget_id].limit
    if rate is not None:
        limit = limit.with_rate(rate)
    agreement.set_rate(using, budget_id, rate)
    events.emit("limit_changed", rule=rule, limit=budget_id, rate=limit.rate_text)
    return limit.rate_text
