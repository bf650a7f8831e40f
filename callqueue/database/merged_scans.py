"""Reads of one order from many stretches of an index: the combinations of values that an index
begins with, and the first rows of all of them together.

An index of (rule, status, created_dt) has the rows of each rule and status in order, and those of
one status under all rules in as many orders as there are rules. Merged, these cost what is shown,
and not what the table holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db import connections
from django.db.models import Q, QuerySet

from callqueue.database.statements import places, quoted, rows

LAST_CHARACTER = "\U0010ffff"
MOST = 400  # stretches that one statement merges: SQLite takes 500
# Rows of each stretch up to which PostgreSQL may as well read and sort them all. To merge them, it
# plans each by itself, which takes longer than to read so few.
FEW = 200


def combinations(
    using: str, table: str, columns: Sequence[str], given: Mapping[str, Any], where: str = "1 = 1"
) -> list[tuple[Any, ...]] | None:
    """The combinations of values that there are of the columns that an index begins with, where
    those of `given` have these values; None where there are more than MOST. `where`: SQL that every
    row of the index fulfils.

    Each value is found by one step through the index, column by column.
    """
    found: list[tuple[Any, ...]] = [()]
    for place, column in enumerate(columns):
        if column in given:
            found = [(*before, given[column]) for before in found]
            if place == len(columns) - 1:  # a step to the next column finds those that there are
                found = _that_are(using, table, columns, found, where)
        else:
            found = _stepped(using, table, (columns[:place], column), found, where)
        if len(found) > MOST:
            return None
    return found


def values_that_begin(
    using: str, table: str, column: str, prefix: str, most: int = MOST
) -> list[str]:
    """The first values of a text column that begin with a text, `most` + 1 of them at most; empty
    ones do not count. In PostgreSQL by an index of varchar_pattern_ops.
    """
    name, table = quoted(using, column), quoted(using, table)
    where = f"NOT ({name} = '') AND {name} LIKE %s"
    like = connections[using].ops.prep_for_like_query(prefix) + "%"
    if _is_postgresql(using):
        step = (
            f"(SELECT {name} FROM {table} WHERE {where}{{past}} ORDER BY {name} USING ~<~ LIMIT 1)"
        )
        sql = (
            f"WITH RECURSIVE k(v) AS (SELECT {step.format(past='')} UNION ALL"
            f" SELECT {step.format(past=f' AND {name} ~>~ k.v')} FROM k WHERE k.v IS NOT NULL)"
            f" SELECT v FROM k WHERE v IS NOT NULL LIMIT {most + 1}"
        )
        return [value for (value,) in rows(using, sql, [like, like])]
    # LIKE is no range of an index for SQLite, which ignores case in it
    between = f"{name} >= %s AND {name} < %s AND NOT ({name} = '')"
    sql = f"SELECT DISTINCT {name} FROM {table} WHERE {between} ORDER BY {name} LIMIT {most + 1}"
    return [value for (value,) in rows(using, sql, [prefix, prefix + LAST_CHARACTER])]


def begins_with(using: str, column: str, text: str) -> Q:
    """A condition on a text column, as an index on it can use it: it begins with this text."""
    if _is_postgresql(using):
        return Q(**{f"{column}__startswith": text})
    return Q(**{f"{column}__gte": text, f"{column}__lt": text + LAST_CHARACTER})


@dataclass(frozen=True)
class Alike:
    """Stretches that differ in the values of some columns only: the rows that have one combination
    of values each. Their SQL is made once, however many there are.
    """

    rows: QuerySet[Any]
    columns: Sequence[str]
    values: Sequence[tuple[Any, ...]]


Stretch = QuerySet[Any] | Alike


def merged_pks(
    stretches: Sequence[Stretch],
    order: Sequence[str],
    start: int,
    stop: int,
    *,
    overlap: bool = False,
) -> list[int]:
    """The primary keys of the rows `start` to `stop` of all stretches, in this order of columns,
    which the last of is "pk" or "-pk". No stretch is read further than to its row `stop`.

    Stretches that `overlap` may have rows in common.
    """

    def first(found: QuerySet[Any]) -> QuerySet[Any]:
        found = found.order_by().values_list(*(name.lstrip("-") for name in order))
        # told to sort each, PostgreSQL merges them
        return found.order_by(*order)[:stop] if _may_nest(found.db) else found

    using, union, params = _union(stretches, first, overlap=overlap, at_once=stop <= FEW)
    if not union:
        return []
    places = ", ".join(
        f"{place} {'DESC' if name.startswith('-') else 'ASC'}"
        for place, name in enumerate(order, start=1)
    )
    sql = f"{union} ORDER BY {places} LIMIT {stop - start} OFFSET {start}"
    return [int(row[-1]) for row in rows(using, sql, params)]


def merged_count(stretches: Sequence[Stretch], most: int, *, overlap: bool = False) -> int:
    """How many rows all stretches have, counted up to `most` + 1."""
    using, union, params = _union(
        stretches,
        lambda found: found.order_by().values_list("pk"),
        overlap=overlap,
        at_once=True,
    )
    if not union:
        return 0
    sql = f"SELECT COUNT(*) FROM ({union} LIMIT {most + 1}) AS few"
    ((count,),) = rows(using, sql, params)
    return int(count)


def _may_nest(using: str) -> bool:
    """Whether the parts of a union may be in parentheses, sorted and limited."""
    return bool(connections[using].features.supports_slicing_ordering_in_compound)


def _union(
    stretches: Sequence[Stretch],
    prepare: Callable[[QuerySet[Any]], QuerySet[Any]],
    *,
    overlap: bool,
    at_once: bool,
) -> tuple[str, str, list[Any]]:
    """The database, the union of all stretches as SQL, and its parameters; no SQL where none has
    any rows. `at_once`: those that are alike may be one part of it.
    """
    using, parts, params = "", list[str](), list[Any]()
    for one in stretches:
        base = one.rows if isinstance(one, Alike) else one
        using = base.db
        for sql, own in _statements(one, prepare, at_once=at_once):
            parts.append(sql)
            params += own
    if len(parts) == 1:
        return using, f"SELECT * FROM ({parts[0]}) AS one", params
    if parts and _may_nest(using):
        parts = [f"({part})" for part in parts]
    return using, (" UNION " if overlap else " UNION ALL ").join(parts), params


def _statements(
    stretch: Stretch, prepare: Callable[[QuerySet[Any]], QuerySet[Any]], *, at_once: bool
) -> Iterator[tuple[str, Sequence[Any]]]:
    """The SQL of a stretch, with its parameters; of those that are alike that of each, or one for
    all.
    """
    if not isinstance(stretch, Alike):
        yield from _compiled(prepare(stretch))
        return
    if not stretch.values:
        return
    marks = [_mark(place, value) for place, value in enumerate(stretch.values[0])]
    marked = stretch.rows.filter(**dict(zip(stretch.columns, marks, strict=True)))
    for sql, params in _compiled(prepare(marked)):
        if at_once and len(stretch.values) > 1 and _is_postgresql(marked.db):
            yield _lateral(sql, params, marks, stretch.values)
            continue
        for values in stretch.values:
            meant = dict(zip(marks, values, strict=True))
            yield sql, [meant.get(p, p) if isinstance(p, str | int) else p for p in params]


def _lateral(
    sql: str, params: Sequence[Any], marks: Sequence[Any], values: Sequence[tuple[Any, ...]]
) -> tuple[str, list[Any]]:
    """SQL in which marks stand for values, as one statement for all of those: PostgreSQL plans it
    once. With an offset it is run for each, and not joined with the values.
    """
    names = {mark: f"v.c{place}" for place, mark in enumerate(marks)}
    kept, parts, given = list[Any](), list[str](), iter(params)
    for part in re.split("(%%|%s)", sql):
        param = next(given) if part == "%s" else None
        if isinstance(param, str | int) and param in names:
            parts.append(names[param])
            continue
        parts.append(part)
        kept += [param] if part == "%s" else []
    source = f"{_listed(values)} CROSS JOIN LATERAL ({''.join(parts)} OFFSET 0) AS found"
    return f"SELECT found.* FROM {source}", [*(value for row in values for value in row), *kept]


def _listed(values: Sequence[tuple[Any, ...]]) -> str:
    """Rows of values as PostgreSQL's table "v" of the columns c0, c1 and so on."""
    row = f"({places(values[0])})"
    names = ", ".join(f"c{place}" for place in range(len(values[0])))
    return f"(VALUES {', '.join([row] * len(values))}) AS v({names})"


def _is_postgresql(using: str) -> bool:
    return str(connections[using].vendor) == "postgresql"


def _mark(place: int, value: Any) -> Any:
    """What stands for the value of a column while the SQL is made: nothing that anybody asks
    for.
    """
    return 32_000 + place if isinstance(value, int) else f"\x00{place}"


def _compiled(found: QuerySet[Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    try:
        yield found.query.get_compiler(found.db).as_sql()
    except EmptyResultSet:
        return


def _that_are(
    using: str,
    table: str,
    columns: Sequence[str],
    values: Sequence[tuple[Any, ...]],
    where: str,
) -> list[tuple[Any, ...]]:
    """Those of these combinations that some row has."""
    if not values:
        return []
    params = [part for place, row in enumerate(values) for part in (place, *row)]
    picked = f"SELECT 1 FROM {quoted(using, table)} WHERE {where}"
    names = [quoted(using, column) for column in columns]
    if _is_postgresql(using):
        numbered = [(place, *row) for place, row in enumerate(values)]
        same = " AND ".join(f"{name} = v.c{place}" for place, name in enumerate(names, start=1))
        # with its limit it is looked up for each, and not joined with the whole table
        exists = f"({picked} AND {same} LIMIT 1) IS NOT NULL"
        sql = f"SELECT v.c0 FROM {_listed(numbered)} WHERE {exists}"
    else:
        same = " AND ".join(f"{name} = %s" for name in names)
        one = f"SELECT %s WHERE EXISTS ({picked} AND {same})"
        sql = " UNION ALL ".join([one] * len(values))
    return [values[int(place)] for (place,) in rows(using, sql, params)]


def _stepped(
    using: str,
    table: str,
    columns: tuple[Sequence[str], str],
    known: Sequence[tuple[Any, ...]],
    where: str,
) -> list[tuple[Any, ...]]:
    """Each known combination with every value that the next column has beside it."""
    if not known:
        return []
    before, column = columns
    name, keys = quoted(using, column), [f"c{place}" for place in range(len(before))]
    pick = f"SELECT {name} FROM {quoted(using, table)} WHERE {where} AND {name} IS NOT NULL"

    def step(values: Sequence[str], past: str = "") -> str:
        same = [f" AND {quoted(using, b)} = {v}" for b, v in zip(before, values, strict=True)]
        return f"({pick}{''.join(same)}{past} ORDER BY {name} LIMIT 1)"

    params = [part for row in known for part in row]
    if keys and _is_postgresql(using):
        each = [f"v.{key}" for key in keys]
        first = f"SELECT {', '.join([*each, step(each)])} FROM {_listed(known)}"
    else:
        each, params = ["%s"] * len(keys), [part for row in known for part in (*row, *row)]
        first = " UNION ALL ".join([f"SELECT {', '.join([*each, step(each)])}"] * len(known))
    further = step([f"k.{key}" for key in keys], f" AND {name} > k.v")
    sql = (
        f"WITH RECURSIVE k({', '.join([*keys, 'v'])})"
        f" AS ({first} UNION ALL SELECT {', '.join([*keys, further])} FROM k WHERE k.v IS NOT NULL)"
        f" SELECT * FROM k WHERE v IS NOT NULL LIMIT {MOST + 1}"
    )
    return [tuple(row) for row in rows(using, sql, params)]
