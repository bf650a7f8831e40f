"""Reads that step through an index from value to value, so that they cost what they return and not
what the table holds ("skip scans").

In all of them `where` and `order` are SQL of this app's own, with their values in `params`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db.models import Q

from callqueue.database.statements import is_postgresql, quoted, rows

PAIRS_A_STATEMENT = 200
LAST_CHARACTER = "\U0010ffff"


def begins_with(using: str, column: str, text: str) -> Q:
    """A condition on a text column, as an index on it can use it: it begins with this text."""
    if is_postgresql(using):
        return Q(**{f"{column}__startswith": text})
    return Q(**{f"{column}__gte": text, f"{column}__lt": text + LAST_CHARACTER})


def distinct_next(
    using: str,
    table: str,
    column: str,
    where: str,
    params: Sequence[Any],
    *,
    after: Any,
    down: bool,
    count: int,
) -> list[Any]:
    """The next `count` distinct values of a column past `after`, in order, among the rows that
    `where` picks.

    PostgreSQL is told to step from value to value; MariaDB does so by itself for DISTINCT; SQLite
    reads the index.
    """
    name, table = quoted(using, column), quoted(using, table)
    than, order = ("<", "DESC") if down else (">", "ASC")
    if not is_postgresql(using):
        sql = (
            f"SELECT DISTINCT {name} FROM {table} WHERE {where} AND {name} {than} %s"
            f" ORDER BY {name} {order} LIMIT %s"
        )
        return [value for (value,) in rows(using, sql, [*params, after, count])]
    step = (
        f"SELECT c.{name} FROM {table} c WHERE {where} AND c.{name} {than} {{after}}"
        f" ORDER BY c.{name} {order} LIMIT 1"
    )
    sql = (
        f"WITH RECURSIVE k(v) AS (({step.format(after='%s')})"
        f" UNION ALL SELECT ({step.format(after='k.v')}) FROM k WHERE k.v IS NOT NULL)"
        " SELECT v FROM k WHERE v IS NOT NULL LIMIT %s"
    )
    return [value for (value,) in rows(using, sql, [*params, after, *params, count])]


def pairs_next(
    using: str,
    table: str,
    first: str,
    second: str,
    where: str,
    params: Sequence[Any],
    after: tuple[Any, Any],
    count: int,
) -> list[tuple[Any, Any]]:
    """The next `count` distinct pairs of two columns past `after`, among the rows that `where`
    picks: the first column downward, the second upward. Databases step as in `distinct_next`.
    """
    one, two, table = (quoted(using, name) for name in (first, second, table))
    select = f"SELECT c.{one} AS a, c.{two} AS b FROM {table} c WHERE {where}"
    same, by_second = f"{select} AND c.{one} = {{a}} AND c.{two} > {{b}}", f"ORDER BY c.{two}"
    lower, by_both = f"{select} AND c.{one} < {{a}}", f"ORDER BY c.{one} DESC, c.{two}"
    if is_postgresql(using):
        step = f"({same} {by_second} LIMIT 1) UNION ALL ({lower} {by_both} LIMIT 1) LIMIT 1"
        begin, following = step.format(a="%s", b="%s"), step.format(a="k.a", b="k.b")
        sql = (
            f"WITH RECURSIVE k(a, b) AS (({begin})"
            f" UNION ALL SELECT n.a, n.b FROM k CROSS JOIN LATERAL ({following}) n)"
            " SELECT a, b FROM k LIMIT %s"
        )
        values = [*params, *after, *params, after[0], *params, *params, count]
        return [(a, b) for a, b in rows(using, sql, values)]
    same, lower = (
        sql.format(a="%s", b="%s").replace("SELECT", "SELECT DISTINCT") for sql in (same, lower)
    )
    found = rows(using, f"{same} {by_second} LIMIT %s", [*params, *after, count])
    if len(found) < count:
        values = [*params, after[0], count - len(found)]
        found = [*found, *rows(using, f"{lower} {by_both} LIMIT %s", values)]
    return [(a, b) for a, b in found]


def first_of_each(
    using: str,
    table: str,
    columns: tuple[str, str],
    where: str,
    params: Sequence[Any],
    order: str,
    counts: Mapping[tuple[Any, Any], int],
) -> list[tuple[tuple[Any, Any], int]]:
    """For each pair of values of two columns the first rows in `order`, as many as `counts` says:
    (pair, id), the rows of a pair together.
    """
    one, two, table = (quoted(using, name) for name in (*columns, table))
    is_lateral = is_postgresql(using)
    matching = f"FROM {table} WHERE {where} AND {one} = {{a}} AND {two} = {{b}} ORDER BY {order}"
    found: list[tuple[tuple[Any, Any], int]] = []
    items = list(counts.items())
    for start in range(0, len(items), PAIRS_A_STATEMENT):
        chunk = items[start : start + PAIRS_A_STATEMENT]
        if is_lateral:
            listed = ", ".join(["(%s, %s, %s)"] * len(chunk))
            sql = (
                f"SELECT v.a, v.b, c.id FROM (VALUES {listed}) AS v(a, b, n) CROSS JOIN LATERAL"
                f" (SELECT id {matching.format(a='v.a', b='v.b')} LIMIT v.n) c"
            )
            values = [part for (a, b), count in chunk for part in (a, b, count)] + list(params)
        else:
            select = f"SELECT %s AS a, %s AS b, id {matching.format(a='%s', b='%s')} LIMIT %s"
            sql = " UNION ALL ".join([f"SELECT * FROM ({select}) x"] * len(chunk))
            values = [part for (a, b), count in chunk for part in (a, b, *params, a, b, count)]
        found += [((a, b), pk) for a, b, pk in rows(using, sql, values)]
    return found
