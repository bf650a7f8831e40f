"""Whole tables: how they are vacuumed, and how they go."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from django.db import NotSupportedError, connections

from callqueue.database.notify import SILENCE
from callqueue.database.statements import (
    dialect,
    is_mysql,
    is_postgresql,
    is_sqlite,
    placeholders,
    quoted,
    rows,
    run,
)

_FIND = {
    "postgresql": """
        SELECT c.conrelid::regclass::text,
            (SELECT string_agg(a.attname, ', ') FROM pg_attribute a
                WHERE a.attrelid = c.conrelid AND a.attnum = ANY (c.conkey)),
            c.conname, c.confrelid::regclass::text
        FROM pg_constraint c
        WHERE c.contype = 'f' AND c.conparentid = 0
            AND c.confrelid IN (SELECT to_regclass(t) FROM unnest(ARRAY[%TABLES]) t)
            AND c.conrelid NOT IN (SELECT to_regclass(t) FROM unnest(ARRAY[%TABLES]) t)
        ORDER BY 1, 2
    """,
    "mysql": """
        SELECT concat(if(table_schema = DATABASE(), '', concat('`', table_schema, '`.')), '`',
                table_name, '`'), group_concat(column_name),
            constraint_name, referenced_table_name
        FROM information_schema.key_column_usage
        WHERE referenced_table_schema = DATABASE()
            AND referenced_table_name IN (%TABLES)
            AND NOT (table_schema = DATABASE() AND table_name IN (%TABLES))
        GROUP BY table_schema, table_name, constraint_name, referenced_table_name
        ORDER BY 1, 2
    """,
    "sqlite": """
        SELECT m.name, f."from", '', f."table"
        FROM sqlite_master m, pragma_foreign_key_list(m.name) f
        WHERE m.type = 'table' AND f."table" IN (%TABLES) AND m.name NOT IN (%TABLES)
        ORDER BY 1, 2
    """,
}
_NAME = r"(?:\"[^\"]+\"|`[^`]+`|\[[^\]]+\]|\w+)"
_REFERENCE = rf"""
    (?: ,\s*(?:CONSTRAINT\s+{_NAME}\s+)?FOREIGN\s+KEY\s*\([^)]*\) | (?:\s+CONSTRAINT\s+{_NAME})? )
    \s*\bREFERENCES\s+["`\[]?(?:TABLES)["`\]]?(?=[\s(,)])(?:\s*\([^)]*\))?
    (?: \s+ON\s+(?:DELETE|UPDATE)\s+(?:SET\s+NULL|SET\s+DEFAULT|CASCADE|RESTRICT|NO\s+ACTION)
      | \s+MATCH\s+\w+
      | \s+(?:NOT\s+)?DEFERRABLE(?:\s+INITIALLY\s+(?:DEFERRED|IMMEDIATE))? )*
"""


def vacuum(using: str, tables: Sequence[str], *, full: bool = False) -> None:
    """Free deleted rows' space, on MySQL and SQLite only if `full`: that rewrites, locks tables."""
    words = dialect(using).vacuum_full if full else dialect(using).vacuum
    # A vacuum takes the pages of indexes that it found empty out of use, and only the next one lets
    # them be used again (PostgreSQL's nbtree/README, "Placing deleted pages in the FSM"). That one
    # finds little else to do.
    with connections[using].cursor() as cursor:
        for statement in dict.fromkeys(  # SQLite's is one for all tables
            word.format(quoted(using, table)) for word in words for table in tables
        ):
            cursor.execute(statement)
            if is_mysql(using):
                cursor.fetchall()


class ForeignKey(NamedTuple):
    """A constraint of a table that stays; names as they are written in SQL."""

    table: str
    columns: str
    name: str  # "" on SQLite, where it has none
    target: str


def existing_tables(using: str, tables: Sequence[str]) -> list[str]:
    with connections[using].cursor() as cursor:
        names = set(connections[using].introspection.table_names(cursor))
    return [table for table in tables if table in names]


def foreign_keys_to(using: str, tables: Sequence[str]) -> list[ForeignKey]:
    if not tables:
        return []
    sql = _FIND[dialect(using).name].replace("%TABLES", placeholders(tables))
    return [ForeignKey(*map(str, row)) for row in rows(using, sql, [*tables, *tables])]


def lock_tables(using: str, tables: Sequence[str]) -> None:
    """Let nobody read or write the tables until the transaction ends, where a database can."""
    if is_postgresql(using) and tables:
        names = ", ".join(quoted(using, table) for table in tables)
        run(using, f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE")


def drop_tables(using: str, tables: Sequence[str]) -> None:
    """Drop `tables`, all of callqueue's that exist, and the foreign keys that point at them, but
    no column and no row of a table that stays. In a transaction, which MariaDB and MySQL commit at
    each step. NotSupportedError where SQLite keeps a foreign key.
    """
    keys = foreign_keys_to(using, tables)
    if is_sqlite(using):
        _cut_out_foreign_keys(using, {key.table for key in keys}, tables)
    else:
        word = "FOREIGN KEY" if is_mysql(using) else "CONSTRAINT"
        for key in keys:
            run(using, f"ALTER TABLE {key.table} DROP {word} {quoted(using, key.name)}")
    if is_postgresql(using) and tables:
        for statement in SILENCE:
            run(using, statement)
    for table in tables:
        run(using, f"DROP TABLE {quoted(using, table)}")


def _cut_out_foreign_keys(using: str, owners: set[str], targets: Sequence[str]) -> None:
    # On SQLite, in the way of https://sqlite.org/lang_altertable.html: rows and indexes stay.
    if not owners:
        return
    one_of = "|".join(map(re.escape, targets))
    reference = re.compile(_REFERENCE.replace("TABLES", one_of), re.VERBOSE | re.IGNORECASE)
    version = int(rows(using, "PRAGMA schema_version")[0][0])
    run(using, "PRAGMA writable_schema = ON")
    for owner in sorted(owners):
        where = "WHERE type = 'table' AND name = %s"
        ((sql,),) = rows(using, f"SELECT sql FROM sqlite_master {where}", [owner])
        run(using, f"UPDATE sqlite_master SET sql = %s {where}", [reference.sub("", sql), owner])
    run(using, f"PRAGMA schema_version = {version + 1}")
    run(using, "PRAGMA writable_schema = RESET")
    if kept := foreign_keys_to(using, targets):
        names = ", ".join(f"{key.table}.{key.columns}" for key in kept)
        raise NotSupportedError(f"SQLite keeps the foreign keys {names}")
