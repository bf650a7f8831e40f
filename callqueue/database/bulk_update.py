"""Many rows changed or deleted by their primary keys, in one statement.

Django's bulk_update writes a CASE of all rows for every column, and knows neither a condition (here
the fence that keeps a lost worker from writing) nor rows that are locked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from django.db import connections, models

from callqueue.database.bulk_values import Shape, shape
from callqueue.database.row_locks import free_ids
from callqueue.database.statements import is_mysql, is_postgresql, listed, places, quoted, rows, run
from callqueue.database.transactions import writing

_SOURCE, _FREE = "{source}", "{free}"


def update_each(
    model: type[models.Model],
    using: str,
    records: Sequence[Mapping[str, Any]],
    where: str = "",
    params: Sequence[Any] = (),
    *,
    free: str = "",
) -> int:
    """Update rows by primary key, each with values of its own; the count of rows changed.

    Each record maps field names to values and has "pk"; all have the same names in the same order.
    `where` is a further condition on columns of the table, in SQL of this app's own, its values in
    `params`; {free} in it stands for `free`. In MariaDB the count leaves out rows that had the
    values already.
    """
    if not records:
        return 0
    connection = connections[using]
    names = ("pk", *(name for name in records[0] if name != "pk"))
    source, bound = _source(connection, shape(using, model, names), names, records)
    sql = _update_sql(using, model, names, where).replace(_SOURCE, source, 1).replace(_FREE, free)
    with connection.cursor() as cursor:
        cursor.execute(sql, [*bound, *params])
        if cursor.rowcount >= 0:
            return int(cursor.rowcount)
        cursor.execute("SELECT CHANGES()")  # sqlite3 counts no statement that begins with WITH
        return int(cursor.fetchone()[0])


def update_free(
    model: type[models.Model],
    using: str,
    records: Sequence[Mapping[str, Any]],
    where: str,
    params: Sequence[Any] = (),
) -> int:
    """As `update_each`, for rows that nobody else has locked; the locked ones are passed over."""
    if connections[using].vendor == "sqlite":
        return update_each(model, using, records, where, params)
    table, ids = quoted(using, model._meta.db_table), listed(one["pk"] for one in records)
    free = free_ids(using, table, ids)
    if is_postgresql(using):
        where = f"t.id IN ({_FREE}) AND {where}"
        return update_each(model, using, records, where, params, free=free)
    with writing(using):
        mine = {pk for (pk,) in rows(using, free)}
        found = [record for record in records if record["pk"] in mine]
        return update_each(model, using, found, where, params)


def delete_each(model: type[models.Model], using: str, pks: Sequence[int]) -> int:
    """Delete rows by primary key; the count of them.

    Django's delete() would first read them, and look in other tables for rows that refer to them.
    """
    table = quoted(using, model._meta.db_table)
    if not is_mysql(using):
        return run(using, f"DELETE FROM {table} WHERE id IN ({listed(pks)})")
    gone = 0
    for at in range(0, len(pks), 500):
        ids = " UNION ALL ".join(f"SELECT {int(pk)} AS id" for pk in pks[at : at + 500])
        gone += run(using, f"DELETE t FROM ({ids}) v {_by_key(table, 'id', 'id')}")
    return gone


def _source(
    connection: Any, shape: Shape, names: tuple[str, ...], records: Sequence[Mapping[str, Any]]
) -> tuple[str, list[Any]]:
    """The records as a table with the columns v0, v1, ..., and its parameters."""
    values = [[record[name] for name in names] for record in records]
    for i, field in shape.sealed:
        for one in values:
            one[i] = field.bound(one[i], one[0])
    if connection.vendor == "postgresql":
        return shape.recordset(values)
    bound = [
        field.get_db_prep_save(value, connection)
        for one in values
        for field, value in zip(shape.fields, one, strict=True)
    ]
    return _listed_rows(connection.vendor, names, len(values)), bound


def _listed_rows(vendor: str, names: tuple[str, ...], count: int) -> str:
    """A table of so many rows of parameters, for databases without recordsets."""
    row = places(names)
    if vendor != "mysql":
        return "VALUES " + ", ".join([f"({row})"] * count)
    first = ", ".join(f"%s AS v{i}" for i in range(len(names)))
    selects = [f"SELECT {first}", *[f"SELECT {row}"] * (count - 1)]
    return f"({' UNION ALL '.join(selects)}) v"


@lru_cache(maxsize=256)
def _update_sql(using: str, model: type[models.Model], names: tuple[str, ...], where: str) -> str:
    """The statement of `update_each`, with a place for the table of values: `v.v0` is the primary
    key, `v.v1` and on the values.
    """
    connection = connections[using]
    quote = connection.ops.quote_name
    fields = shape(using, model, names).fields
    table, (key, *columns) = quote(model._meta.db_table), [quote(f.column) for f in fields]
    # As a CASE the condition fits no partial index: rows are found by their keys, and not by
    # reading every row for which it is true.
    condition = f" AND CASE WHEN {where} THEN 1 ELSE 0 END = 1" if where else ""
    own = "t." if connection.vendor == "mysql" else ""
    sets = ", ".join(f"{own}{column} = v.v{i}" for i, column in enumerate(columns, start=1))
    if connection.vendor == "postgresql":
        return f"UPDATE {table} AS t SET {sets} FROM {_SOURCE} WHERE t.{key} = v.v0{condition}"
    if connection.vendor == "mysql":
        return f"UPDATE {_SOURCE} {_by_key(table, key, 'v0')} SET {sets} WHERE 1 = 1{condition}"
    names_of_v = ", ".join(f"v{i}" for i in range(len(fields)))
    return (
        f"WITH v ({names_of_v}) AS ({_SOURCE})"
        f" UPDATE {table} AS t SET {sets} FROM v WHERE t.{key} = v.v0{condition}"
    )


def _by_key(table: str, key: str, value: str) -> str:
    """MariaDB and MySQL: join each row by its key. They would read a small table whole, and wait
    for locked rows that concern nobody here.
    """
    return f"STRAIGHT_JOIN {table} t FORCE INDEX (PRIMARY) ON t.{key} = v.{value}"
