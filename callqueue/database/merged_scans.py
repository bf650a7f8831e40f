"""Reads of one order from many stretches of an index: the first rows of all of them together.

An index of (rule, status, created_dt) has the rows of each rule and status in order, and those of
one status under all rules in as many orders as there are rules. Merged, these cost what is shown,
and not what the table holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db import connections
from django.db.models import QuerySet, Value

from callqueue.database.statements import is_postgresql, rows, values_table

# Rows of each stretch up to which PostgreSQL may as well read and sort them all. To merge them, it
# plans each by itself, which takes longer than to read so few.
FEW = 200


@dataclass(frozen=True)
class Alike:
    """Stretches that differ in the values of some columns only: the rows that have one combination
    of values each. Their SQL is made once, however many there are.
    """

    rows: QuerySet[Any]
    columns: Sequence[str]
    values: Sequence[tuple[Any, ...]]


Stretch = QuerySet[Any] | Alike
Prepare = Callable[[QuerySet[Any]], QuerySet[Any]]


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

    using, union, params = _union(
        stretches, first, overlap=overlap, at_once=first if stop <= FEW else None
    )
    if not union:
        return []
    places = ", ".join(
        f"{place} {'DESC' if name.startswith('-') else 'ASC'}"
        for place, name in enumerate(order, start=1)
    )
    sql = f"{union} ORDER BY {places} LIMIT {stop - start} OFFSET {start}"
    return [int(row[-1]) for row in rows(using, sql, params)]


def merged_count(
    stretches: Sequence[Stretch], order: Sequence[str], most: int, *, overlap: bool = False
) -> int:
    """How many rows all stretches have, counted up to `most` + 1; an index has them in `order`, but
    for its last column, "pk" or "-pk".
    """

    def rows_of(found: QuerySet[Any]) -> QuerySet[Any]:
        """What tells rows apart, where they overlap; or a 1 for each, for which no row is read."""
        found = found.order_by() if overlap else found.order_by().annotate(one=Value(1))
        return found.values_list("pk" if overlap else "one")

    using, union, params = _union(
        stretches,
        rows_of,
        overlap=overlap,
        # In order and limited it takes the index, however rare the values are.
        at_once=lambda found: rows_of(found).order_by(*order[:-1])[: most + 1],
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
    prepare: Prepare,
    *,
    overlap: bool,
    at_once: Prepare | None,
) -> tuple[str, str, list[Any]]:
    """The database, the union of all stretches as SQL, and its parameters; no SQL where none has
    any rows. `at_once`: how those are prepared that are alike, where they may be one part of it.
    """
    using, parts, params = "", list[str](), list[Any]()
    for one in stretches:
        base = one.rows if isinstance(one, Alike) else one
        using = base.db
        for sql, own in _statements(one, prepare, at_once):
            parts.append(sql)
            params += own
    if len(parts) == 1:
        return using, f"SELECT * FROM ({parts[0]}) AS one", params
    if parts and _may_nest(using):
        parts = [f"({part})" for part in parts]
    return using, (" UNION " if overlap else " UNION ALL ").join(parts), params


def _statements(
    stretch: Stretch, prepare: Prepare, at_once: Prepare | None
) -> Iterator[tuple[str, Sequence[Any]]]:
    """The SQL of a stretch, with its parameters; of those that are alike that of each, or one for
    all.
    """
    if not isinstance(stretch, Alike):
        yield from _compiled(prepare(stretch))
        return
    if not stretch.values:
        return
    if at_once and len(stretch.values) > 1 and is_postgresql(stretch.rows.db):
        for sql, params, columns in _marked(stretch, at_once):
            yield _lateral(sql, params, columns, stretch.values)
        return
    for sql, params, columns in _marked(stretch, prepare):
        for values in stretch.values:
            pairs = zip(params, columns, strict=True)
            yield sql, [param if place is None else values[place] for param, place in pairs]


def _marked(
    alike: Alike, prepare: Prepare
) -> Iterator[tuple[str, Sequence[Any], Sequence[int | None]]]:
    """The SQL of any of these stretches, its parameters, and of which column each of them is the
    value, None: of none. It is made of two: where they differ, such a value is.
    """
    two = [[_mark(n, column, value) for column, value in enumerate(alike.values[0])] for n in "12"]
    made = [
        list(_compiled(prepare(alike.rows.filter(**dict(zip(alike.columns, marks, strict=True))))))
        for marks in two
    ]
    for (sql, params), (_, others) in zip(*made, strict=True):
        pairs = zip(params, others, strict=True)
        yield sql, params, [two[0].index(one) if one != other else None for one, other in pairs]


def _mark(number: str, column: int, value: Any) -> Any:
    """What stands for the value of a column while the SQL is made."""
    return int(number) * 100 + column if isinstance(value, int) else f"{number}{column}"


def _lateral(
    sql: str,
    params: Sequence[Any],
    columns: Sequence[int | None],
    values: Sequence[tuple[Any, ...]],
) -> tuple[str, list[Any]]:
    """The SQL as one statement for all of these values: PostgreSQL plans it once. It is limited, so
    that it is run for each, and not joined with the values.
    """
    kept, parts = list[Any](), list[str]()
    given = iter(zip(params, columns, strict=True))
    for part in re.split("(%%|%s)", sql):
        param, column = next(given) if part == "%s" else (None, None)
        if column is not None:
            parts.append(f"v.c{column}")
            continue
        parts.append(part)
        kept += [param] if part == "%s" else []
    source = f"{values_table(values)} CROSS JOIN LATERAL ({''.join(parts)}) AS found"
    return f"SELECT found.* FROM {source}", [*(value for row in values for value in row), *kept]


def _compiled(found: QuerySet[Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    try:
        yield found.query.get_compiler(found.db).as_sql()
    except EmptyResultSet:
        return
