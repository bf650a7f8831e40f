"""Many rows at once: in batches, inserted in one statement, changed or deleted by their keys.

Django's bulk_create takes five times as long on PostgreSQL. Its bulk_update writes a CASE of all
rows for every column, and knows neither a condition (here the fence that keeps a lost worker from
writing) nor rows that are locked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, TypeVar

from django.db import connections, models
from django.db.models import QuerySet
from django.db.models.base import ModelState
from django.db.models.expressions import DatabaseDefault
from django.db.models.signals import post_init, pre_init

from callqueue.database.statements import (
    free_ids,
    is_mysql,
    is_postgresql,
    listed,
    places,
    quoted,
    rows,
    run,
    writing,
)
from callqueue.texts import storable_json

# Fields whose values are written as JSON as they are.
_READY = (
    models.BigAutoField,
    models.BigIntegerField,
    models.BooleanField,
    models.CharField,
    models.DateTimeField,
    models.ForeignKey,
    models.JSONField,
    models.PositiveIntegerField,
    models.PositiveSmallIntegerField,
    models.SmallIntegerField,
    models.TextField,
    models.UUIDField,
)
M = TypeVar("M", bound=models.Model)
_SOURCE, _FREE, _KEYS = "{source}", "{free}", "{keys}"


def in_batches(rows: QuerySet[Any], size: int) -> Iterator[list[int]]:
    """The primary keys of `rows` in their order, `size` at a time, each batch read when it is asked
    for.

    Rows that the caller changes meanwhile, so that they are no more among `rows`, are not missed
    for that.
    """
    if rows.query.is_sliced:
        pks = sorted(rows.values_list("pk", flat=True))
        yield from (pks[at : at + size] for at in range(0, len(pks), size))
        return
    in_order, last = rows.order_by("pk").values_list("pk", flat=True), 0
    while pks := list(in_order.filter(pk__gt=last)[:size]):
        yield pks
        last = pks[-1]


@dataclass(frozen=True)
class Shape:
    """Some fields of a model, and how their values are written: PostgreSQL reads all rows from one
    parameter, a JSON document. Binding every value apart would cost as much again as the statement.
    A shape is kept: asking Django for the fields' types takes longer than writing them.

    `unready` prepares the values that JSON has another form for, `sealed` are the fields that are
    encrypted for their row, which the primary key names. Each has its place among `fields` before
    it.
    """

    fields: tuple[Any, ...]
    unready: tuple[tuple[int, Callable[[Any], Any]], ...]
    sealed: tuple[tuple[int, Any], ...]
    names: tuple[str, ...]
    types: str

    def recordset(self, values: Sequence[list[Any]]) -> tuple[str, list[Any]]:
        """The rows as a table `v` in PostgreSQL, with the columns v0, v1, ..., and its parameter.

        Changes the lists in `values`.
        """
        for one in values:
            for i, prepare in self.unready:
                one[i] = prepare(one[i])
        records = [dict(zip(self.names, one, strict=True)) for one in values]
        # The limit tells the planner the count. It would expect 100 rows, and read a small table
        # whole to find them.
        source = (
            f"(SELECT * FROM json_to_recordset(CAST(%s AS json)) AS r({self.types})"
            f" LIMIT {len(values)}) AS v"
        )
        return source, [_document(records)]


def _document(records: list[dict[str, Any]]) -> str:
    """The records as JSON that PostgreSQL keeps. One look through the document costs a tenth of a
    look at every text before.
    """
    document = json.dumps(records, default=str)
    if "\\u0000" in document or "\\ud" in document:
        return json.dumps(storable_json(records), default=str)
    return document


@lru_cache(maxsize=256)
def shape(using: str, model: type[models.Model], names: tuple[str, ...]) -> Shape:
    """The fields of these names ("pk" is the primary key), in this order."""
    connection, key = connections[using], model._meta.pk
    fields: list[Any] = [key if name == "pk" else model._meta.get_field(name) for name in names]
    columns = tuple(f"v{i}" for i in range(len(fields)))
    types = ""
    if connection.vendor == "postgresql":
        types = ", ".join(
            f"{column} {field.rel_db_type(connection)}"
            for column, field in zip(columns, fields, strict=True)
        )
    placed = tuple(enumerate(fields))
    return Shape(
        tuple(fields),
        unready=tuple((i, _preparing(using, f)) for i, f in placed if type(f) not in _READY),
        sealed=tuple((i, f) for i, f in placed if getattr(f, "bound_to", "") == key.name),
        names=columns,
        types=types,
    )


def _preparing(using: str, field: Any) -> Callable[[Any], Any]:
    """What prepares a field's values for a JSON document: its own `in_document`, or Django."""
    if hasattr(field, "in_document"):
        return field.in_document  # type: ignore[no-any-return]
    return lambda value: _bare(field.get_db_prep_save(value, connections[using]))


def _bare(value: Any) -> Any:
    """What a driver's wrapper of JSON wraps: psycopg's Jsonb, psycopg2's Json."""
    return getattr(value, "obj", getattr(value, "adapted", value))


def new_object(model: type[M], values: Mapping[str, Any]) -> M:
    """An unsaved object, as `model(**values)` makes it at a multiple of the cost: for models of
    which thousands are made at once. What is not given is the field's default.
    """
    defaults, makers = _defaults(model)
    made = {name: make() for name, make in makers.items() if name not in values}
    if pre_init.receivers or post_init.receivers:
        return model(*{**defaults, **made, **values}.values())
    one = model.__new__(model)
    one.__dict__.update(defaults, _state=ModelState(), **made)
    one.__dict__.update(values)
    return one


def read_object(model: type[M], using: str, values: Mapping[str, Any]) -> M:
    """The object of a row of which these columns were read, as `only` makes it at a multiple of the
    cost.
    """
    one = model.__new__(model)
    one.__dict__.update(values, _state=ModelState())
    one._state.adding, one._state.db = False, using
    return one


@cache
def _defaults(model: type[models.Model]) -> tuple[dict[str, Any], dict[str, Callable[[], Any]]]:
    """The default of every field by its name, in the fields' order; and what makes it, where each
    object is to have one of its own, or where a test kit's clock may stand in.
    """
    fields = model._meta.concrete_fields
    makers = {
        f.attname: f.get_default
        for f in fields
        if f.has_db_default() or (f.has_default() and callable(f.default))
    }
    return {f.attname: f.get_default() for f in fields}, makers


def insert_each(
    model: type[models.Model], using: str, records: Sequence[Mapping[str, Any]]
) -> list[int | None]:
    """Insert rows, field names to values, in one statement; their primary keys, in the same order.

    Every field without a database default is to be given. A database that does not return what it
    inserts gives None for each.
    """
    if not is_postgresql(using) or not records:
        objects = [model(**record) for record in records]
        return [made.pk for made in model._default_manager.using(using).bulk_create(objects)]
    values = [list(record.values()) for record in records]
    return [pk for (pk,) in _inserted(using, model, tuple(records[0]), values, [model._meta.pk])]


def insert_objects(
    model: type[M], using: str, objects: Sequence[M], *, batch_size: int, unless_there: bool = False
) -> Sequence[M]:
    """Insert objects, `batch_size` a statement, and give them their keys and database defaults.

    With `unless_there` those that a unique index refuses are left out, and none is given its key. A
    conflict that a snapshot hides is a serialization error then, or passes unseen.
    """
    for at in range(0, len(objects), batch_size):
        batch = objects[at : at + batch_size]
        left_out, given = _fields(model, batch)
        if not is_postgresql(using) or _has_expressions(given, batch):
            model._default_manager.using(using).bulk_create(batch, ignore_conflicts=unless_there)
            continue
        back = [model._meta.pk, *left_out]
        names = tuple(field.name for field in given)
        conflicts = " ON CONFLICT DO NOTHING" if unless_there else ""
        found = _inserted(using, model, names, _values(batch, given), back, conflicts)
        for one, values in () if unless_there else zip(batch, found, strict=True):
            _complete(one, using, back, values)
    return objects


def _fields(model: type[M], batch: Sequence[M]) -> tuple[list[Any], list[Any]]:
    """The fields but the key: those that the database fills for every object, and the others."""
    left_out, given = list[Any](), list[Any]()
    for field in model._meta.concrete_fields:
        if field.primary_key:
            continue
        values = (getattr(one, field.attname) for one in batch)
        is_left_out = field.has_db_default() and all(isinstance(v, DatabaseDefault) for v in values)
        (left_out if is_left_out else given).append(field)
    return left_out, given


def _has_expressions(given: Sequence[Any], batch: Sequence[M]) -> bool:
    """Whether the database is to fill in one of these fields for some of the objects only."""
    defaults = [field.attname for field in given if field.has_db_default()]
    return any(
        hasattr(getattr(one, name), "resolve_expression") for name in defaults for one in batch
    )


def _values(batch: Sequence[M], given: Sequence[Any]) -> list[list[Any]]:
    """Each object's values of these fields, in turn; what may be sealed is bound to its row."""
    take = attrgetter(*(field.attname for field in given))
    values = [list(take(one)) for one in batch]
    for i, field in enumerate(given):
        if hasattr(field, "bound"):
            for one, row in zip(batch, values, strict=True):
                row[i] = field.bound(row[i], getattr(one, field.bound_to))
    return values


def _complete(one: M, using: str, back: Sequence[Any], values: Sequence[Any]) -> None:
    """Tell the object that it is in the table, and what the database filled in."""
    for field, value in zip(back, values, strict=True):
        setattr(one, field.attname, value)
    one._state.adding, one._state.db = False, using


def _inserted(
    using: str,
    model: type[models.Model],
    names: tuple[str, ...],
    values: Sequence[list[Any]],
    back: Sequence[Any],
    conflicts: str = "",
) -> list[Any]:
    """Insert rows of these fields' values into PostgreSQL; the columns `back` of each in turn."""
    connection = connections[using]
    quote, written = connection.ops.quote_name, shape(using, model, names)
    source, parameters = written.recordset(values)
    columns = ", ".join(quote(field.column) for field in written.fields)
    given = ", ".join(f"v.{name}" for name in written.names)
    returned = ", ".join(quote(field.column) for field in back)
    sql = (
        f"INSERT INTO {quote(model._meta.db_table)} ({columns}) SELECT {given} FROM {source}"
        f"{conflicts} RETURNING {returned}"
    )
    return rows(using, sql, parameters)


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
    if connection.vendor == "postgresql":
        sql = sql.replace(_KEYS, places(records))
        params = [*params, *(record["pk"] for record in records)]
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
    # reading every row for which it is true. PostgreSQL is told the keys besides: it would read the
    # whole table to join it with a document, whose keys it does not know.
    condition = f" AND CASE WHEN {where} THEN 1 ELSE 0 END = 1" if where else ""
    own = "t." if connection.vendor == "mysql" else ""
    sets = ", ".join(f"{own}{column} = v.v{i}" for i, column in enumerate(columns, start=1))
    if connection.vendor == "postgresql":
        return (
            f"UPDATE {table} AS t SET {sets} FROM {_SOURCE}"
            f" WHERE t.{key} = v.v0{condition} AND t.{key} IN ({_KEYS})"
        )
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
