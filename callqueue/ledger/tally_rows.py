"""What is stored of tallies, and what attempts of a budget charge, by the value of its `per`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from callqueue import database, states, tables
from callqueue.clocks import Us
from callqueue.database import (
    as_parameter,
    from_us,
    instant_us,
    json_value,
    placeholders,
    quoted,
    rows,
)
from callqueue.limits.budgets import Budget, Former, cost_of, costs_more
from callqueue.limits.kinds import SECOND, Limit

PARTS = 240  # parts of a bucket's window that a recount tells apart
CORRECTIONS = 1000  # corrections that one statement takes in
Stored = tuple[str, int, Us, int]  # a tally's row: value, used, full_at, pk


@dataclass
class Tally:
    used: int = 0  # what is charged; of a bucket, what has not gone into `full_at`
    full_at: Us = Us(0)  # when the bucket would be full again, open charges apart
    pk: int | None = None
    is_changed: bool = False
    planned: int = 0  # what a plan takes, and has not charged

    def is_idle(self, now: Us) -> bool:
        return self.used == 0 and self.full_at <= now


@dataclass
class Kept:
    """What the rules' locked row remembers of a budget's tallies."""

    print: str  # of the budget
    left: Us  # attempts that ended by then have been taken away
    counted: Us  # when they were counted anew
    has_former: bool = False  # attempts of former rules are among them
    values: dict[str, int] = field(default_factory=dict)  # the tallies, of a budget not per key


@lru_cache(maxsize=4096)
def fingerprint(budget: Budget) -> str:
    """A short text that differs where the limit as in force does, or the rules that it counts."""
    text = repr((budget.limit, budget.rules, budget.former))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def longest_lag(limit: Limit) -> int:
    """How many microseconds a tally may be behind its window; one further back is counted anew."""
    return max(60 * SECOND, limit.window_us // 4)


def stored_name(budget: Budget) -> str:
    digest = hashlib.sha256(budget.id.encode()).hexdigest()[:16]
    return budget.id if len(budget.id) <= 120 else f"{budget.id[:120]}:{digest}"


class Leaving(NamedTuple):
    """What is asked about a budget: what ended in (begin, ahead]; up to `end` it is summed up."""

    budget: Budget
    begin: Us
    end: Us
    ahead: Us


def what_left(using: str, asked: Sequence[Leaving]) -> list[list[tuple[str, Us, int]]]:
    """What left, or soon leaves, each budget's window, but for voided: (value, ended, cost). One
    statement for many. What is to be corrected stays: whoever corrects it takes it away.
    """
    found: list[list[tuple[str, Us, int]]] = [[] for _ in asked]
    selects = [_left_sql(using, place, one) for place, one in enumerate(asked)]
    for place, told, ended, spent in database.union_all(using, selects):
        value = _value_of(asked[place].budget, told)
        found[place].append((value, instant_us(ended), int(spent or 0)))
    for listed in found:
        listed.sort(key=itemgetter(1))
    return found


def _left_sql(using: str, place: int, leaving: Leaving) -> tuple[str, list[Any]]:
    # Rows: the place in what is asked, the rule, queue or key, the latest end, the cost.
    column, (cost, of_cost) = _value_column(using, leaving.budget), _cost_sql(using, leaving.budget)
    since, by, told_apart = _parameters(using, leaving.begin, leaving.ahead, leaving.end)
    apart, of_apart = "", list[Any]()
    if leaving.ahead > leaving.end:
        apart, of_apart = ", CASE WHEN finished_at > %s THEN finished_at END", [told_apart]
    sql = (
        f"SELECT {place}, {column}, MAX(finished_at), SUM({cost}) "
        f"FROM {tables.name(using, 'CallAttempt')} "
        f"WHERE rule IN ({placeholders(leaving.budget.rules)}) AND finished_at > %s "
        "AND finished_at <= %s AND outcome <> %s AND NOT correction_pending "
        f"GROUP BY {column}{apart}"
    )
    return sql, [*of_cost, *leaving.budget.rules, since, by, states.VOIDED, *of_apart]


def rows_of_values(using: str, wanted: Mapping[str, Sequence[str]]) -> dict[str, list[Stored]]:
    """The rows of these values, by budget. A statement for many budgets."""
    select, value = _rows_sql(using), quoted(using, "value")
    selects = [
        (f"{select} AND {value} IN ({placeholders(values)})", [name, *values])
        for name, values in wanted.items()
    ]
    return _rows_by_budget(database.union_all(using, selects))


def rows_of_fullest(using: str, budgets: Sequence[str], most: int) -> dict[str, list[Stored]]:
    first = f"{_rows_sql(using)} ORDER BY full_at DESC, used DESC LIMIT {most}"
    select = f"SELECT * FROM ({first}) AS fullest"
    return _rows_by_budget(database.union_all(using, [(select, [name]) for name in budgets]))


def _rows_sql(using: str) -> str:
    columns = f"budget, {quoted(using, 'value')}, used, full_at, id"
    return f"SELECT {columns} FROM {tables.name(using, 'Tally')} WHERE budget = %s"


def _rows_by_budget(listed: Iterable[Sequence[Any]]) -> dict[str, list[Stored]]:
    found: dict[str, list[Stored]] = {}
    for budget, value, used, full_at, pk in listed:
        found.setdefault(budget, []).append((value, int(used), Us(full_at), int(pk)))
    return found


def open_or_ended_since(
    using: str, asked: Sequence[tuple[Budget, Us]]
) -> list[list[tuple[str, int]]]:
    """All that is open, and what ended since that instant, of each budget, but for voided: (value,
    cost in its unit), a value perhaps several times. What is to be corrected counts as it was
    charged, whenever it ended, as the correction comes after: not if settled after its end.
    """
    found: list[list[tuple[str, int]]] = [[] for _ in asked]
    selects = [_open_or_ended_since_sql(using, place, *one) for place, one in enumerate(asked)]
    for place, told, before, count, total in database.union_all(using, selects):
        budget, _ = asked[place]
        cost = int(total or 0)
        if before is not None:
            cost = cost_of(database.json_value(before), budget.limit.unit) * int(count)
        found[place].append((_value_of(budget, told), cost))
    return found


def _open_or_ended_since_sql(
    using: str, place: int, budget: Budget, since: Us
) -> tuple[str, list[Any]]:
    # Rows: the place, the rule, queue or key, what each was charged if it is to be corrected, how
    # many they are, their cost.
    column, (cost, of_cost) = _value_column(using, budget), _cost_sql(using, budget)
    ended = "finished_at IS NULL OR finished_at > %s OR (correction_pending AND NOT settled)"
    before = "CASE WHEN correction_pending THEN charged END"
    sql = (
        f"SELECT {place}, {column}, {before}, COUNT(*), SUM({cost}) "
        f"FROM {tables.name(using, 'CallAttempt')} "
        f"WHERE rule IN ({placeholders(budget.rules)}) AND ({ended}) "
        "AND (outcome <> %s OR correction_pending) GROUP BY 2, 3"
    )
    return sql, [*of_cost, *budget.rules, *_parameters(using, since), states.VOIDED]


def charged_by_former(using: str, budget: Budget, horizon: Us) -> Iterator[tuple[str, int]]:
    """Of former rules, what is open or ended after the horizon, but for voided: (value, cost)."""
    column, (cost, of_cost) = _value_column(using, budget), _cost_sql(using, budget)
    where, of_former = _conditions_of_former(using, budget)
    sql = (
        f"SELECT {column}, SUM({cost}) FROM {tables.name(using, 'CallAttempt')} "
        f"WHERE ({' OR '.join(where)}) "
        f"AND (finished_at IS NULL OR finished_at > %s) AND outcome <> %s GROUP BY {column}"
    )
    params = [*of_cost, *of_former, *_parameters(using, horizon), states.VOIDED]
    for value, spent in _rows_by_value(using, budget, sql, params):
        yield value, int(spent or 0)


def ended_parts(using: str, budget: Budget, begin: Us, end: Us) -> Iterator[tuple[str, Us, int]]:
    """What ended in (begin, end], by parts of the window, in order: (value, latest end, cost).
    Without voided ones, nor those that are to be corrected, which `open_or_ended_since` counts.
    """
    column, (cost, of_cost) = _value_column(using, budget), _cost_sql(using, budget)
    width = max(1, budget.limit.window_us // PARTS)
    where, of_former = _conditions_of_former(using, budget)
    of_rules = " OR ".join([f"rule IN ({placeholders(budget.rules)})", *where])
    sql = (
        f"SELECT {column}, MAX(finished_at), SUM({cost}) FROM {tables.name(using, 'CallAttempt')} "
        f"WHERE ({of_rules}) AND finished_at > %s AND finished_at <= %s AND outcome <> %s "
        "AND NOT (correction_pending AND NOT settled) "
        f"GROUP BY {column}, {database.part_sql(using, 'finished_at', begin, width)} ORDER BY 2"
    )
    instants = _parameters(using, begin, end)
    params = [*of_cost, *budget.rules, *of_former, *instants, states.VOIDED]
    for value, ended, spent in _rows_by_value(using, budget, sql, params):
        yield value, instant_us(ended), int(spent or 0)


def first_end_after(using: str, budget: Budget, instant: Us) -> Us | None:
    one = (
        f"SELECT MIN(finished_at) FROM {tables.name(using, 'CallAttempt')} "
        "WHERE rule = %s AND finished_at IS NOT NULL AND finished_at > %s AND outcome <> %s"
    )
    since = _parameters(using, instant)
    found = database.union_all(using, [(one, [r, *since, states.VOIDED]) for r in budget.rules])
    return min((instant_us(ended) for (ended,) in found if ended is not None), default=None)


class Correction(NamedTuple):
    """An attempt that cost something else than it was charged (voided: 0), or was recorded late."""

    id: int
    settled: bool  # what it cost was told after its end
    rule: str
    key: str
    queue: str
    cost: Any
    charged: Any
    ended: Us


def take_next_corrections(using: str, group: Sequence[str]) -> list[Correction]:
    """The next CORRECTIONS attempts to correct that are free; unmarks them. Two statements."""
    key = quoted(using, "key")
    found = rows(
        using,
        f"SELECT id, settled, rule, {key}, queue, cost, charged, finished_at, outcome "
        f"FROM {tables.name(using, 'CallAttempt')} WHERE correction_pending "
        f"AND rule IN ({placeholders(group)}) "
        f"ORDER BY id LIMIT {CORRECTIONS}{database.skip_locked_sql(using)}",
        list(group),
    )
    corrections = [
        Correction(
            pk, bool(settled), rule, text, queue,
            0 if outcome == states.VOIDED else json_value(cost),
            json_value(charged), instant_us(ended),
        )
        for pk, settled, rule, text, queue, cost, charged, ended, outcome in found
    ]  # fmt: skip
    if corrections:
        _unmark(using, corrections)
    return corrections


def _unmark(using: str, corrections: Sequence[Correction]) -> None:
    # Where it cost more, `charged` stays: that part ages from another instant than the rest.
    more = [one.id for one in corrections if costs_more(one.cost, one.charged)]
    kept = f"CASE WHEN id IN ({database.listed(more)}) THEN charged END" if more else "NULL"
    ids = database.listed(one.id for one in corrections)
    table = tables.name(using, "CallAttempt")
    database.run(
        using,
        f"UPDATE {table} SET correction_pending = FALSE, charged = {kept} WHERE id IN ({ids})",
    )


def condition_of_former(using: str, former: Former) -> tuple[str, list[Any]]:
    """The condition, with its parameters, of what a former rule released while it was charged."""
    rule, until = former
    return "(rule = %s AND released_at <= %s)", [rule, *_parameters(using, until)]


def _conditions_of_former(using: str, budget: Budget) -> tuple[list[str], list[Any]]:
    found = [condition_of_former(using, former) for former in budget.former]
    return [where for where, _ in found], [one for _, params in found for one in params]


def _rows_by_value(
    using: str, budget: Budget, sql: str, params: Sequence[Any]
) -> Iterable[tuple[Any, ...]]:
    """The rows of a SELECT, with the budget's value in place of the key or queue of each."""
    for told, *rest in rows(using, sql, params):
        yield _value_of(budget, told), *rest


def _value_of(budget: Budget, key_or_queue: str) -> str:
    is_queue = budget.limit.is_per_queue
    return budget.value_of("" if is_queue else key_or_queue, key_or_queue if is_queue else "")


def _value_column(using: str, budget: Budget) -> str:
    if budget.limit.is_per_rule:
        return "rule"
    return "queue" if budget.limit.is_per_queue else quoted(using, "key")


def _cost_sql(using: str, budget: Budget) -> tuple[str, list[Any]]:
    if budget.limit.unit == "calls":
        return "calls", []
    return database.json_number_sql(using, "cost", budget.limit.unit)


def _parameters(using: str, *instants: Us) -> list[Any]:
    return [as_parameter(using, from_us(instant)) for instant in instants]
