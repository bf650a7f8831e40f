"""Many rows at once: in batches, inserted in one statement, changed or deleted by their keys.

On PostgreSQL all rows are one parameter of one statement: Django's bulk_create takes five times as
long. Its bulk_update writes a CASE of all rows for every column, and knows neither a condition
(here the fence that keeps a lost worker from writing) nor rows that are locked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, TypeVar

from django.db import connections, models, transaction
from django.db.models import QuerySet
from django.db.models.base import ModelState
from django.db.models.expressions import DatabaseDefault
from django.db.models.signals import post_init, pre_init

from callqueue.database.statements import (
    is_postgresql,
    listed,
    lock_ids_if_free_sql,
    placeholders,
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


def pks_in_batches(rows: QuerySet[Any], size: int) -> Iterator[list[int]]:
    """Primary keys in order, `size` at a time, each batch read when it is asked for; of a slice,
    all at once. None is missed though the caller changes those before it, which may leave `rows`.
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
    """Some fields of a model, and how their values become one JSON document. Slow to make: kept."""

    fields: tuple[Any, ...]
    columns: tuple[str, ...]  # quoted
    # by its place, what prepares values that JSON has another form for
    unready: tuple[tuple[int, Callable[[Any], Any]], ...]
    sealed: tuple[tuple[int, Any], ...]  # by its place, encrypted for the row of the primary key
    names: tuple[str, ...]
    types: str

    def recordset(self, values: Sequence[list[Any]]) -> tuple[str, list[Any]]:
        """SQL: the rows as a table `v` (v0, v1, ...), and its parameter. Changes `values`."""
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
        return source, [_json_document(records)]


def _json_document(records: list[dict[str, Any]]) -> str:
    # One look through the document costs a tenth of a look at every text before.
    document = json.dumps(records, default=str)
    if "\\u0000" in document or "\\ud" in document:
        return json.dumps(storable_json(records), default=str)
    return document


@lru_cache(maxsize=256)
def shape(using: str, model: type[models.Model], names: tuple[str, ...]) -> Shape:
    """The Shape of the fields of these names ("pk" is the primary key), in this order."""
    connection, key = connections[using], model._meta.pk
    fields: list[Any] = [key if name == "pk" else model._meta.get_field(name) for name in names]
    columns = tuple(f"v{i}" for i in range(len(fields)))
    types = [
        f"{column} {field.rel_db_type(connection)}"
        for column, field in zip(columns, fields, strict=True)
    ]
    placed = tuple(enumerate(fields))
    return Shape(
        tuple(fields),
        tuple(connection.ops.quote_name(field.column) for field in fields),
        unready=tuple((i, _json_converter(using, f)) for i, f in placed if type(f) not in _READY),
        sealed=tuple((i, f) for i, f in placed if getattr(f, "bound_to", "") == key.name),
        names=columns,
        types=", ".join(types),
    )


def _json_converter(using: str, field: Any) -> Callable[[Any], Any]:
    if hasattr(field, "value_in_json"):  # of `callqueue.fields`
        return field.value_in_json  # type: ignore[no-any-return]
    return lambda value: _unwrapped_json(field.get_db_prep_save(value, connections[using]))


def _unwrapped_json(value: Any) -> Any:
    """What a driver's wrapper of JSON wraps: psycopg's Jsonb, psycopg2's Json."""
    return getattr(value, "obj", getattr(value, "adapted", value))


def new_object(model: type[M], values: Mapping[str, Any]) -> M:
    """An unsaved object, as `model(**values)` makes it at a multiple of the cost."""
    defaults, makers = _defaults(model)
    made = {name: make() for name, make in makers.items() if name not in values}
    if pre_init.receivers or post_init.receivers:
        return model(*{**defaults, **made, **values}.values())
    one = model.__new__(model)
    one.__dict__.update(defaults, _state=ModelState(), **made)
    one.__dict__.update(values)
    return one


def object_from_row(model: type[M], using: str, values: Mapping[str, Any]) -> M:
    """An object of columns that were read, as `only` makes it at a multiple of the cost."""
    one = model.__new__(model)
    one.__dict__.update(values, _state=ModelState())
    one._state.adding, one._state.db = False, using
    return one


@cache
def _defaults(model: type[models.Model]) -> tuple[dict[str, Any], dict[str, Callable[[], Any]]]:
    """Every field's default, in order; and what makes it, where each object has one of its own."""
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
    """Insert rows, field names to values, in one statement; their primary keys, in the same order,
    None for each where the database does not return what it inserts. Every field without a database
    default is to be given.
    """
    if not is_postgresql(using) or not records:
        objects = [model(**record) for record in records]
        return [made.pk for made in _plain_queryset(model, using).bulk_create(objects)]
    values = [list(record.values()) for record in records]
    return [pk for (pk,) in _insert(using, model, tuple(records[0]), values, [model._meta.pk])]


def insert_objects(
    model: type[M], using: str, objects: Sequence[M], *, batch_size: int, unless_there: bool = False
) -> Sequence[M]:
    """Insert objects, `batch_size` a statement; they get the keys and defaults that it returns.
    `unless_there`: those that a unique index refuses are left out, and none is given its key; a
    conflict that a snapshot hides is a serialization error then, or passes unseen.
    """
    for at in range(0, len(objects), batch_size):
        batch = objects[at : at + batch_size]
        left_out, given = _split_fields(model, batch)
        if not is_postgresql(using) and len(batch) == 1 and not unless_there:
            batch[0].save_base(using=using, force_insert=True)  # bulk_create begins a transaction
            continue
        if not is_postgresql(using) or _has_expressions(given, batch):
            _plain_queryset(model, using).bulk_create(batch, ignore_conflicts=unless_there)
            continue
        back = [model._meta.pk, *left_out]
        names = tuple(field.name for field in given)
        conflicts = " ON CONFLICT DO NOTHING" if unless_there else ""
        found = _insert(using, model, names, _field_values(batch, given), back, conflicts)
        for one, values in () if unless_there else zip(batch, found, strict=True):
            _mark_inserted(one, using, back, values)
    return objects


def _plain_queryset(model: type[models.Model], using: str) -> QuerySet[Any]:
    # Not by the model's own manager or `save`, which know the app's rows from other code's.
    return QuerySet(model, using=using)


def _split_fields(model: type[M], batch: Sequence[M]) -> tuple[list[Any], list[Any]]:
    # left out: those that the database fills for every object; and given: the others
    left_out, given = list[Any](), list[Any]()
    for field in model._meta.concrete_fields:
        if field.primary_key:
            continue
        values = (getattr(one, field.attname) for one in batch)
        is_left_out = field.has_db_default() and all(isinstance(v, DatabaseDefault) for v in values)
        (left_out if is_left_out else given).append(field)
    return left_out, given


def _has_expressions(fields: Sequence[Any], objects: Sequence[M]) -> bool:
    """Whether some of the objects leave one of these fields to a database expression."""
    defaults = [field.attname for field in fields if field.has_db_default()]
    return any(
        hasattr(getattr(one, name), "resolve_expression") for name in defaults for one in objects
    )


def _field_values(objects: Sequence[M], fields: Sequence[Any]) -> list[list[Any]]:
    take = attrgetter(*(field.attname for field in fields))
    values = [list(take(one)) for one in objects]
    for i, field in enumerate(fields):
        if hasattr(field, "bind_row"):  # sealed with its row's identity
            for one, row in zip(objects, values, strict=True):
                row[i] = field.bind_row(row[i], getattr(one, field.bound_to))
    return values


def _mark_inserted(one: M, using: str, returned: Sequence[Any], values: Sequence[Any]) -> None:
    for field, value in zip(returned, values, strict=True):
        setattr(one, field.attname, value)
    one._state.adding, one._state.db = False, using


def _insert(
    using: str,
    model: type[models.Model],
    names: tuple[str, ...],
    values: Sequence[list[Any]],
    returned: Sequence[Any],
    conflicts: str = "",
) -> list[Any]:
    """Insert rows of these fields' values into PostgreSQL; the `returned` columns of each."""
    written = shape(using, model, names)
    source, parameters = written.recordset(values)
    given = ", ".join(f"v.{name}" for name in written.names)
    returning = ", ".join(quoted(using, field.column) for field in returned)
    sql = (
        f"INSERT INTO {quoted(using, model._meta.db_table)} ({', '.join(written.columns)})"
        f" SELECT {given} FROM {source}{conflicts} RETURNING {returning}"
    )
    return rows(using, sql, parameters)


def update_each(
    model: type[models.Model],
    using: str,
    records: Sequence[Mapping[str, Any]],
    where: str = "",
    params: Sequence[Any] = (),
    *,
    unchanged: str = "",
) -> int:
    """Update rows by primary key, each with values of its own; the count of rows found.

    Each record maps field names to values and has "pk"; all have the same names in the same order.
    `where` is a further condition on columns of the table `t`, in SQL of this app's own, its values
    in `params`; `unchanged` names a field that must have the record's value already.
    """
    if not records:
        return 0
    names = ("pk", *(name for name in records[0] if name != "pk"))
    written, values = shape(using, model, names), [[one[name] for name in names] for one in records]
    for i, field in written.sealed:
        for one in values:
            one[i] = field.bind_row(one[i], one[0])
    # As a CASE the condition fits no partial index: rows are found by their keys, and not by
    # reading every row for which it is true.
    fence = f" AND CASE WHEN {where} THEN 1 ELSE 0 END = 1" if where else ""
    table, (key, *columns) = quoted(using, model._meta.db_table), written.columns
    same = names.index(unchanged or "pk")
    if not is_postgresql(using):
        fence += f" AND t.{written.columns[same]} = %s"
        sets = ", ".join(f"{column} = %s" for column in columns)
        prepared = (_prepared_for_save(using, written.fields, one) for one in values)
        return _run_each(
            using,
            f"UPDATE {table} AS t SET {sets} WHERE t.{key} = %s{fence}",
            [[*rest, pk, *params, (pk, *rest)[same]] for pk, *rest in prepared],
        )
    # The keys are told besides: it would read the whole table to join it with a document, whose
    # keys it does not know.
    fence += f" AND t.{written.columns[same]} = v.v{same} AND t.{key} IN ({placeholders(records)})"
    sets = ", ".join(f"{column} = v.v{i}" for i, column in enumerate(columns, start=1))
    source, bound = written.recordset(values)
    sql = f"UPDATE {table} AS t SET {sets} FROM {source} WHERE t.{key} = v.v0{fence}"
    return run(using, sql, [*bound, *params, *(record["pk"] for record in records)])


def _run_each(using: str, sql: str, params: Sequence[Sequence[Any]]) -> int:
    """Run a statement for each of these parameters, all or none; the count of rows changed."""
    with transaction.atomic(using=using, savepoint=False), connections[using].cursor() as cursor:
        cursor.executemany(sql, params)
        return int(cursor.rowcount)


def _prepared_for_save(using: str, fields: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    connection = connections[using]
    return [
        field.get_db_prep_save(value, connection)
        for field, value in zip(fields, values, strict=True)
    ]


def update_free(
    model: type[models.Model],
    using: str,
    records: Sequence[Mapping[str, Any]],
    where: str,
    params: Sequence[Any] = (),
) -> int:
    """As `update_each`, for rows that nobody else has locked; the locked ones are passed over."""
    table, ids = quoted(using, model._meta.db_table), listed(one["pk"] for one in records)
    free = lock_ids_if_free_sql(using, table, ids)
    if is_postgresql(using):
        return update_each(model, using, records, f"t.id IN ({free}) AND {where}", params)
    with writing(using):
        mine = {pk for (pk,) in rows(using, free)}
        found = [record for record in records if record["pk"] in mine]
        return update_each(model, using, found, where, params)


def delete_each(model: type[models.Model], using: str, pks: Sequence[int]) -> int:
    """Delete rows by primary key; how many were there."""
    # Django's delete() would first read them. MariaDB and MySQL would read a small table whole for
    # a list, and wait for locked rows that concern nobody here.
    table = quoted(using, model._meta.db_table)
    if is_postgresql(using) or not pks:
        return run(using, f"DELETE FROM {table} WHERE id IN ({listed(pks)})")
    return _run_each(using, f"DELETE FROM {table} WHERE id = %s", [[pk] for pk in pks])
