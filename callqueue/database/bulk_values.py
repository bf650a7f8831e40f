"""Rows of values as one statement takes them: what bulk_insert and bulk_update share.

PostgreSQL reads all rows from one parameter, a JSON document. Binding every value apart, as
bulk_create and bulk_update do, would cost as much again as the statement itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.db import connections, models

from callqueue.texts import storable_json


@dataclass(frozen=True)
class Shape:
    """Some fields of a model, and how their values are written. It is kept: asking Django for the
    fields' types takes longer than writing them.

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


def _preparing(using: str, field: Any) -> Callable[[Any], Any]:
    """What prepares a field's values for a JSON document: its own `in_document`, or Django."""
    if hasattr(field, "in_document"):
        return field.in_document  # type: ignore[no-any-return]
    return lambda value: _bare(field.get_db_prep_save(value, connections[using]))


def _bare(value: Any) -> Any:
    """What a driver's wrapper of JSON wraps: psycopg's Jsonb, psycopg2's Json."""
    return getattr(value, "obj", getattr(value, "adapted", value))
