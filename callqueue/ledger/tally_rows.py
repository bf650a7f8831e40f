"""The statements of tallies: what attempts of a budget charge, by the value of its `per`. Reads the
attempts; the tallies themselves are kept by window_tallies and bucket_tallies. Instants are
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from callqueue import database, states, tables
from callqueue.database import as_parameter, from_us, instant_us, places, quoted, rows
from callqueue.limits.budgets import Budget, Former, cost_of

PARTS = 250  # budgets that one statement asks about
SLOTS = 240  # parts of a bucket's window that a recount tells apart


class Leaving(NamedTuple):
    """What is asked about a budget: what ended in (begin, ahead]; what did by `end` is summed
    up.
    """

    budget: Budget
    begin: int
    end: int
    ahead: int


def left(using: str, asked: Sequence[Leaving]) -> list[list[tuple[str, int, int]]]:
    """What left each of these budgets: (value, ended, cost). A statement for PARTS of them.

    What is still to be corrected stays: whoever corrects it takes it away.
    """
    found: list[list[tuple[str, int, int]]] = [[] for _ in asked]
    for first in range(0, len(asked), PARTS):
        parts, params = list[str](), list[Any]()
        for place, one in enumerate(asked[first : first + PARTS], start=first):
            sql, own = _left_sql(using, one, place)
            parts.append(sql)
            params += own
        for place, told, ended, spent in rows(using, " UNION ALL ".join(parts), params):
            value = _value(asked[place].budget, told)
            found[place].append((value, instant_us(ended), int(spent or 0)))
    return found


def _left_sql(using: str, asked: Leaving, place: int) -> tuple[str, list[Any]]:
    budget = asked.budget
    column, (cost, of_cost) = _column(using, budget), _cost_sql(using, budget)
    sql = (
        f"SELECT {place}, {column}, MAX(finished_at), SUM({cost}) FROM {attempts_table(using)} "
        f"WHERE rule IN ({places(budget.rules)}) "
        "AND finished_at > %s AND finished_at <= %s AND outcome <> %s AND NOT correction_pending "
        f"GROUP BY {column}, CASE WHEN finished_at > %s THEN finished_at END"
    )
    since, by, told_apart = _parameters(using, asked.begin, asked.ahead, asked.end)
    return sql, [*of_cost, *budget.rules, since, by, states.VOIDED, told_apart]


Stored = tuple[str, int, int, int]  # a tally's row: value, used, full_at, pk


def stored(using: str, wanted: Mapping[str, Sequence[str]]) -> dict[str, list[Stored]]:
    """The rows of these values, by budget. A statement for PARTS budgets."""
    found: dict[str, list[Stored]] = {}
    table, value = tables.name(using, "Tally"), quoted(using, "value")
    names = list(wanted)
    for first in range(0, len(names), PARTS):
        some = names[first : first + PARTS]
        where = " OR ".join(f"budget = %s AND {value} IN ({places(wanted[name])})" for name in some)
        params = [one for name in some for one in (name, *wanted[name])]
        sql = f"SELECT budget, {value}, used, full_at, id FROM {table} WHERE {where}"
        _collect(found, rows(using, sql, params))
    return found


def fullest(using: str, names: Sequence[str], most: int) -> dict[str, list[Stored]]:
    """The rows of these budgets that are charged most, `most` of each. A statement for PARTS of
    them.
    """
    found: dict[str, list[Stored]] = {}
    value, table = quoted(using, "value"), tables.name(using, "Tally")
    one = (
        f"SELECT * FROM (SELECT budget, {value}, used, full_at, id FROM {table} "
        f"WHERE budget = %s ORDER BY full_at DESC, used DESC LIMIT {most}) AS fullest"
    )
    for first in range(0, len(names), PARTS):
        some = names[first : first + PARTS]
        _collect(found, rows(using, " UNION ALL ".join([one] * len(some)), list(some)))
    return found


def _collect(found: dict[str, list[Stored]], listed: Iterable[Sequence[Any]]) -> None:
    for budget, value, used, full_at, pk in listed:
        found.setdefault(budget, []).append((value, int(used), int(full_at), int(pk)))


def charged(using: str, budget: Budget, horizon: int) -> Iterator[tuple[str, int]]:
    """What is open or ended after the horizon: (value, cost).

    What is to be corrected costs what it was charged, since the correction comes after; a call's
    attempt also where it ended before.
    """
    (cost, of_cost), unit = _cost_sql(using, budget), budget.limit.unit
    sql = (
        f"SELECT {_column(using, budget)}, CASE WHEN correction_pending THEN charged END, "
        f"COUNT(*), SUM({cost}) "
        f"FROM {attempts_table(using)} WHERE rule IN ({places(budget.rules)}) AND (finished_at "
        "IS NULL OR finished_at > %s OR (correction_pending AND call_id IS NOT NULL)) "
        "AND (outcome <> %s OR correction_pending) GROUP BY 1, 2"
    )
    params = [*of_cost, *budget.rules, *_parameters(using, horizon), states.VOIDED]
    for value, before, count, total in _by_value(using, budget, sql, params):
        if before is None:
            yield value, int(total or 0)
        else:
            yield value, cost_of(database.loaded(before), unit) * int(count)


def charged_by_former(using: str, budget: Budget, horizon: int) -> Iterator[tuple[str, int]]:
    """What former rules' attempts cost that are open or ended after the horizon: (value, cost)."""
    column, (cost, of_cost) = _column(using, budget), _cost_sql(using, budget)
    where, of_former = _of_former(using, budget)
    sql = (
        f"SELECT {column}, SUM({cost}) FROM {attempts_table(using)} "
        f"WHERE ({' OR '.join(where)}) "
        f"AND (finished_at IS NULL OR finished_at > %s) AND outcome <> %s GROUP BY {column}"
    )
    params = [*of_cost, *of_former, *_parameters(using, horizon), states.VOIDED]
    for value, spent in _by_value(using, budget, sql, params):
        yield value, int(spent or 0)


def by_slots(using: str, budget: Budget, begin: int, end: int) -> Iterator[tuple[str, int, int]]:
    """What ended in (begin, end], summed up by slots of the window at each one's latest end, oldest
    first: (value, ended, cost).
    """
    column, (cost, of_cost) = _column(using, budget), _cost_sql(using, budget)
    width = max(1, budget.limit.window_us // SLOTS)
    where, of_former = _of_former(using, budget)
    of_rules = " OR ".join([f"rule IN ({places(budget.rules)})", *where])
    sql = (
        f"SELECT {column}, MAX(finished_at), SUM({cost}) FROM {attempts_table(using)} "
        f"WHERE ({of_rules}) AND finished_at > %s AND finished_at <= %s AND outcome <> %s "
        "AND NOT (correction_pending AND call_id IS NOT NULL) "
        f"GROUP BY {column}, {database.slot_sql(using, 'finished_at', begin, width)} ORDER BY 2"
    )
    instants = _parameters(using, begin, end)
    params = [*of_cost, *budget.rules, *of_former, *instants, states.VOIDED]
    for value, ended, spent in _by_value(using, budget, sql, params):
        yield value, instant_us(ended), int(spent or 0)


def first_end(using: str, budget: Budget, after: int) -> int | None:
    """The first end of an attempt after this instant."""
    one = (
        f"SELECT MIN(finished_at) FROM {attempts_table(using)} "
        "WHERE rule = %s AND finished_at IS NOT NULL AND finished_at > %s AND outcome <> %s"
    )
    params = [
        parameter
        for rule in budget.rules
        for parameter in (rule, *_parameters(using, after), states.VOIDED)
    ]
    found = rows(using, " UNION ALL ".join([one] * len(budget.rules)), params)
    return min((instant_us(ended) for (ended,) in found if ended is not None), default=None)


def former_sql(using: str, former: Former) -> tuple[str, list[Any]]:
    """The condition, with its parameters, of what a former rule released while it was charged."""
    rule, until = former
    if until is None:
        return "(rule = %s)", [rule]
    return "(rule = %s AND released_at <= %s)", [rule, *_parameters(using, until)]


def attempts_table(using: str) -> str:
    """The quoted name of the attempts' table."""
    return quoted(using, tables.CallAttempt._meta.db_table)


def _of_former(using: str, budget: Budget) -> tuple[list[str], list[Any]]:
    """The conditions of the budget's former rules, and their parameters."""
    found = [former_sql(using, former) for former in budget.former]
    return [where for where, _ in found], [one for _, params in found for one in params]


def _by_value(
    using: str, budget: Budget, sql: str, params: Sequence[Any]
) -> Iterable[tuple[Any, ...]]:
    """The rows, with the budget's value in the place of `_column`, their first."""
    for told, *rest in rows(using, sql, params):
        yield _value(budget, told), *rest


def _value(budget: Budget, told: str) -> str:
    """The budget's value of rows with this in `_column`."""
    is_queue = budget.limit.is_per_queue
    return budget.value_of("" if is_queue else told, told if is_queue else "")


def _column(using: str, budget: Budget) -> str:
    """The column that tells the budget's values apart."""
    if budget.limit.is_per_rule:
        return "rule"
    return "queue" if budget.limit.is_per_queue else quoted(using, "key")


def _cost_sql(using: str, budget: Budget) -> tuple[str, list[Any]]:
    """What an attempt costs in the budget's unit, and the parameters of that."""
    if budget.limit.unit == "calls":
        return "calls", []
    return database.json_number_sql(using, "cost", budget.limit.unit)


def _parameters(using: str, *instants: int) -> list[Any]:
    return [as_parameter(using, from_us(instant)) for instant in instants]
