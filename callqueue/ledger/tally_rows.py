"""The statements of tallies: what attempts of a budget charge, by the value of its `per`. Reads the
attempts; the tallies themselves are kept by window_tallies and bucket_tallies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from callqueue import database, states, tables
from callqueue.database import as_parameter, from_us, instant_us, places, quoted, rows
from callqueue.limits.budgets import Budget, Former, cost_of

SLOTS = 240  # parts of a bucket's window that a recount tells apart


def left(
    using: str, budget: Budget, begin: int, end: int, ahead: int
) -> list[tuple[str, int, int]]:
    """What ended in (begin, ahead]: (value, ended, cost); what ended by `end` summed up, at its
    latest end.
    """
    key, what = quoted(using, "key"), _cost_sql(using, budget)
    names = _columns(using, budget)
    sql = (
        f"SELECT {names}, MAX(finished_at), SUM({what[0]}) FROM {attempts_table(using)} "
        f"WHERE rule IN ({places(budget.rules)}) AND finished_at > %s AND finished_at <= %s AND outcome <> %s "
        f"GROUP BY {names}, CASE WHEN finished_at > %s THEN finished_at END"
    )
    instants = [as_parameter(using, from_us(instant)) for instant in (begin, ahead, end)]
    params = [*what[1], *budget.rules, *instants[:2], states.VOIDED, instants[2]]
    return [
        (budget.value_of(text, queue), instant_us(ended), int(cost or 0))
        for text, queue, ended, cost in _named(rows(using, sql, params), names, key)
    ]


def charged(using: str, budget: Budget, horizon: int) -> Iterable[tuple[str, int]]:
    """What is open or ended after the horizon: (value, cost).

    What is to be corrected still costs what it was charged, since the correction comes after; ended
    before, the difference.
    """
    key, what, unit = quoted(using, "key"), _cost_sql(using, budget), budget.limit.unit
    of_corrected = [
        f"CASE WHEN correction_pending THEN {part} END"
        for part in ("cost", "outcome", "finished_at")
    ]
    sql = (
        f"SELECT {_columns(using, budget)}, charged, {', '.join(of_corrected)}, COUNT(*), SUM({what[0]}) "
        f"FROM {attempts_table(using)} WHERE rule IN ({places(budget.rules)}) "
        "AND (finished_at IS NULL OR finished_at > %s OR correction_pending) AND (outcome <> %s OR correction_pending) "
        "GROUP BY 1, 2, 3, 4, 5"
    )
    params = [*what[1], *budget.rules, as_parameter(using, from_us(horizon)), states.VOIDED]
    for text, queue, charged, cost, outcome, ended, count, total in _named(
        rows(using, sql, params), _columns(using, budget), key
    ):
        used = int(total or 0)
        if ended is not None:
            used = cost_of(database.loaded(charged), unit) * int(count)
            if outcome != states.VOIDED and instant_us(ended) <= horizon:
                used -= cost_of(database.loaded(cost), unit) * int(count)
        yield budget.value_of(text, queue), used


def charged_by_former(using: str, budget: Budget, horizon: int) -> Iterable[tuple[str, int]]:
    """What former rules' attempts cost that are open or ended after the horizon: (value, cost)."""
    key, what = quoted(using, "key"), _cost_sql(using, budget)
    names, formers = (
        _columns(using, budget),
        [former_sql(using, former) for former in budget.former],
    )
    sql = (
        f"SELECT {names}, SUM({what[0]}) FROM {attempts_table(using)} WHERE ({' OR '.join(where for where, _ in formers)}) "
        f"AND (finished_at IS NULL OR finished_at > %s) AND outcome <> %s GROUP BY {names}"
    )
    params = [
        *what[1],
        *(one for _, some in formers for one in some),
        as_parameter(using, from_us(horizon)),
        states.VOIDED,
    ]
    for text, queue, cost in _named(rows(using, sql, params), names, key):
        yield budget.value_of(text, queue), int(cost or 0)


def former_sql(using: str, former: Former) -> tuple[str, list[Any]]:
    """The condition of attempts that a former rule released while it was charged, and its
    parameters.
    """
    rule, until = former
    if until is None:
        return "(rule = %s)", [rule]
    return "(rule = %s AND released_at <= %s)", [rule, as_parameter(using, from_us(until))]


def by_slots(using: str, budget: Budget, begin: int, end: int) -> Iterable[tuple[str, int, int]]:
    """What ended in (begin, end], summed up by slots of the window at each one's latest end, oldest
    first.
    """
    key, what = quoted(using, "key"), _cost_sql(using, budget)
    names, width = _columns(using, budget), max(1, budget.limit.window_us // SLOTS)
    slot = database.slot_sql(using, "finished_at", begin, width)
    formers = [former_sql(using, former) for former in budget.former]
    of_rules = " OR ".join([f"rule IN ({places(budget.rules)})", *(where for where, _ in formers)])
    sql = (
        f"SELECT {names}, MAX(finished_at), SUM({what[0]}) FROM {attempts_table(using)} "
        f"WHERE ({of_rules}) AND finished_at > %s AND finished_at <= %s AND outcome <> %s "
        f"GROUP BY {names}, {slot} ORDER BY 2"
    )
    instants = [as_parameter(using, from_us(instant)) for instant in (begin, end)]
    params = [
        *what[1],
        *budget.rules,
        *(one for _, some in formers for one in some),
        *instants,
        states.VOIDED,
    ]
    found = rows(using, sql, params)
    for text, queue, ended, cost in _named(found, names, key):
        yield budget.value_of(text, queue), instant_us(ended), int(cost or 0)


def first_end(using: str, budget: Budget, after: int) -> int | None:
    """The first end of an attempt after this instant."""
    one = (
        f"SELECT MIN(finished_at) FROM {attempts_table(using)} "
        f"WHERE rule = %s AND finished_at IS NOT NULL AND finished_at > %s AND outcome <> %s"
    )
    params = [
        p
        for rule in budget.rules
        for p in (rule, as_parameter(using, from_us(after)), states.VOIDED)
    ]
    found = [
        ended
        for (ended,) in rows(using, " UNION ALL ".join([one] * len(budget.rules)), params)
        if ended is not None
    ]
    return min(map(instant_us, found), default=None)


def _columns(using: str, budget: Budget) -> str:
    """The columns that tell the budget's values apart."""
    if budget.limit.is_per_rule:
        return "rule"
    return "queue" if budget.limit.is_per_queue else quoted(using, "key")


def _named(found: Iterable[Sequence[Any]], names: str, key: str) -> Iterable[list[Any]]:
    """The rows with key and queue in front, whichever of the two was selected."""
    for first, *rest in found:
        yield [
            first if names.startswith(key) else "",
            first if names.startswith("queue") else "",
            *rest,
        ]


def _cost_sql(using: str, budget: Budget) -> tuple[str, list[Any]]:
    """What an attempt costs in the budget's unit, and the parameters of that."""
    if budget.limit.unit == "calls":
        return "calls", []
    return database.json_number_sql(using, "cost", budget.limit.unit)


def attempts_table(using: str) -> str:
    """The quoted name of the attempts' table."""
    return quoted(using, tables.CallAttempt._meta.db_table)
