"""The values that an index begins with: the combinations that there are of its first columns, found
by one step through the index for each, and the texts that begin with some text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import connections
from django.db.models import Q

from callqueue.database.statements import is_postgresql, quoted, rows, values_table

LAST_CHARACTER = "\U0010ffff"
MOST = 400  # stretches that one statement merges: SQLite takes 500


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
    if is_postgresql(using):
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
    if is_postgresql(using):
        return Q(**{f"{column}__startswith": text})
    return Q(**{f"{column}__gte": text, f"{column}__lt": text + LAST_CHARACTER})


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
    names, of_table = [quoted(using, one) for one in columns], f"FROM {quoted(using, table)}"
    if is_postgresql(using):
        numbered = [(place, *row) for place, row in enumerate(values)]
        *same, (last, wanted) = [(name, f"v.c{n}") for n, name in enumerate(names, start=1)]
        where += "".join(f" AND {name} = {value}" for name, value in same)
        # A step through the index: where it asked for equal rows only, PostgreSQL would expect to
        # find one soon in any order, and where there is none read the whole table.
        step = f"SELECT {last} {of_table} WHERE {where} AND {last} >= {wanted} ORDER BY 1 LIMIT 1"
        sql = f"SELECT v.c0 FROM {values_table(numbered)} WHERE ({step}) = {wanted}"
    else:
        where += "".join(f" AND {name} = %s" for name in names)
        one = f"SELECT %s WHERE EXISTS (SELECT 1 {of_table} WHERE {where})"
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
    if keys and is_postgresql(using):
        each = [f"v.{key}" for key in keys]
        first = f"SELECT {', '.join([*each, step(each)])} FROM {values_table(known)}"
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
