"""Statements written by hand: how to run one, what its rows are, and the SQL that vendors spell
each in their own way.

They are for what runs at every pass, where building a queryset would show, and for what Django
cannot say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.db import connections, models

from callqueue import conf


def rows(using: str, sql: str, params: Sequence[Any] = ()) -> list[Any]:
    """Run a statement; all rows that it returns."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql, params)
        found: list[Any] = cursor.fetchall()
        return found


def run(using: str, sql: str, params: Sequence[Any] = ()) -> int:
    """Run a statement that returns no rows; the count of rows that it changed."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql, params)
        return int(cursor.rowcount)


class Columns:
    """Columns of joined tables, by alias: the SQL that selects them, and their values as read."""

    def __init__(
        self, using: str, tables: Mapping[str, tuple[type[models.Model], Sequence[str]]]
    ) -> None:
        self.using = using
        self.names: list[str] = []
        self._listed: list[tuple[str, str, Any]] = []
        self._converters: list[tuple[int, Any, Any]] = []
        for alias, (model, names) in tables.items():
            for name in names:
                self._add(alias, name, model._meta.get_field(name))

    def _add(self, alias: str, name: str, field: Any) -> None:
        connection, column = connections[self.using], field.get_col(alias)
        quoted_name = connection.ops.quote_name(column.target.column)
        self._listed.append((alias, quoted_name, getattr(field, "selected", None)))
        converters = [
            *connection.ops.get_db_converters(column),
            *column.get_db_converters(connection),
        ]
        place = len(self.names)
        self._converters += [(place, converter, column) for converter in converters]
        self.names.append(f"{alias}.{name}")

    @property
    def sql(self) -> str:
        """The columns. With encryption keys, a sealed one comes with its row's identity."""
        own = conf.current().encryption_keys
        connection = connections[self.using]
        return ", ".join(
            f"{alias}.{name}" if selected is None or not own else selected(connection, alias)
            for alias, name, selected in self._listed
        )

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[list[Any]]:
        """All rows of a statement that selects these columns first."""
        connection = connections[self.using]
        found = [list(row) for row in rows(self.using, sql, params)]
        for row in found:
            for place, converter, column in self._converters:
                row[place] = converter(row[place], column, connection)
        return found

    def mapped(self, sql: str, params: Sequence[Any], *more: str) -> list[dict[str, Any]]:
        """All rows by the columns' names, "alias.name"; `more` names what else is selected."""
        names = [*self.names, *more]
        return [dict(zip(names, row, strict=True)) for row in self.rows(sql, params)]


def loaded(value: Any) -> Any:
    """JSON, from what the driver returned for its column."""
    return json.loads(value) if isinstance(value, str | bytes) else value


def quoted(using: str, name: str) -> str:
    """A table's or column's name, quoted."""
    return str(connections[using].ops.quote_name(name))


def places(values: Sequence[Any]) -> str:
    """The placeholders of a list of values: "%s, %s"."""
    return ", ".join(["%s"] * len(values))


def listed(ids: Iterable[int]) -> str:
    """Integers as SQL lists them, NULL for none. Binding hundreds of them one by one takes longer
    than finding their rows.
    """
    return ", ".join(str(int(one)) for one in ids) or "NULL"


def joined_sql(connection: Any, *parts: str) -> str:
    """SQL: texts and columns as one text; NULL where one of them is."""
    if connection.vendor == "mysql":
        return f"CONCAT({', '.join(parts)})"
    return " || ".join(f"CAST({part} AS text)" for part in parts)


def json_number_sql(using: str, column: str, name: str) -> tuple[str, list[Any]]:
    """SQL with parameters: the whole number under a name in a JSON column, or NULL."""
    vendor = connections[using].vendor
    if vendor == "postgresql":
        return f"CAST({column} ->> CAST(%s AS text) AS bigint)", [name]
    number = f"JSON_EXTRACT({column}, %s)"
    if vendor == "mysql":
        number = f"CAST(JSON_UNQUOTE({number}) AS SIGNED)"
    else:
        number = f"CAST({number} AS INTEGER)"
    return number, ["$." + json.dumps(name, ensure_ascii=False)]


def position_sql(using: str) -> str:
    """The function that says where one text begins in another: `f(text, part)`, 0 where nowhere."""
    return "strpos" if is_postgresql(using) else "instr"


def is_postgresql(using: str) -> bool:
    """Whether the database is PostgreSQL."""
    return str(connections[using].vendor) == "postgresql"


def is_mysql(using: str) -> bool:
    """Whether the database is MariaDB or MySQL."""
    return connections[using].vendor == "mysql"
