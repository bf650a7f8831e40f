"""Many rows inserted in one statement, for models without inheritance and without given keys.

On PostgreSQL this takes about a fifth of bulk_create's time, see bulk_values. On other databases it
is bulk_create.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from django.db import connections, models
from django.db.models.base import ModelState
from django.db.models.expressions import DatabaseDefault
from django.db.models.signals import post_init, pre_init

from callqueue.database.bulk_values import shape
from callqueue.database.statements import is_postgresql, rows

M = TypeVar("M", bound=models.Model)


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
