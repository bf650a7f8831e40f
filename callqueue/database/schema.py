"""What migrations cannot say in Django's words: storage settings and a partial unique index on
PostgreSQL, whole indexes and the collation of text on MariaDB and MySQL.

Each takes the schema editor, and runs within the migration that calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import NotSupportedError

from callqueue.database.statements import places

# Every call is updated three times in its life: room on the page, and a vacuum that comes by the
# thousand rows.
_UPDATED_OFTEN = (
    "fillfactor = 80, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 2000,"
    " autovacuum_analyze_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 1"
)
_STORAGE = {
    "callqueue_callqueue": _UPDATED_OFTEN,
    "callqueue_callattempt": _UPDATED_OFTEN,
    "callqueue_rulestate": (
        "fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200"
    ),
}
_WRITTEN_AGAIN = (
    "fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 500"
)
# of tables that came later
_NEW_STORAGE = dict.fromkeys(("callqueue_tally", "callqueue_keyturn"), _WRITTEN_AGAIN)
# MariaDB and MySQL have no partial indexes: these stand in for those that Django leaves out there.
_WHOLE_INDEXES = {
    "callqueue_ready": ("callqueue_callqueue", "rule, ready, priority DESC, due_at_dt, id, status"),
    "callqueue_ready_by_key": (
        "callqueue_callqueue",
        "rule, ready, priority, `key`, due_at_dt, id, status",
    ),
    "callqueue_later": ("callqueue_callqueue", "status, ready, due_at_dt"),
    "callqueue_expiring": ("callqueue_callqueue", "status, expires_at_dt"),
    "callqueue_finished": ("callqueue_callqueue", "status, finished_at_dt"),
    "callqueue_callbacks": ("callqueue_callqueue", "callback_pending, id"),
    "callqueue_unique_key": ("callqueue_callqueue", "unique_key"),
    "callqueue_key": ("callqueue_callqueue", "`key`, id"),
    "callqueue_open": ("callqueue_callattempt", "finished_at, rule"),
    "callqueue_aging": ("callqueue_callattempt", "rule, finished_at"),
    "callqueue_aging_by_key": ("callqueue_callattempt", "rule, `key`, finished_at"),
}
_NEW_WHOLE_INDEXES = {
    "callqueue_turns_blocked": ("callqueue_keyturn", "rule, blocked_until"),
    "callqueue_corrections": ("callqueue_callattempt", "correction_pending, rule"),
}

_TASK_INDEXES = {"callqueue_task": ("callqueue_callqueue", "task_id")}


def tune_tables(schema_editor: Any) -> None:
    """Storage settings and indexes of the first migration's tables."""
    _tune(schema_editor, _STORAGE, _WHOLE_INDEXES)
    if schema_editor.connection.vendor == "postgresql":
        # Most calls have no key of their own: as a constraint it would hold a NULL for each of
        # them, three times in its life.
        schema_editor.execute(
            "ALTER TABLE callqueue_callqueue DROP CONSTRAINT callqueue_active_key"
        )
        schema_editor.execute(
            "CREATE UNIQUE INDEX callqueue_active_key ON callqueue_callqueue (active_key)"
            " WHERE active_key IS NOT NULL"
        )


def tune_new_tables(schema_editor: Any) -> None:
    """Storage settings and indexes of what came later: tallies, turns of keys, corrections."""
    _tune(schema_editor, _NEW_STORAGE, _NEW_WHOLE_INDEXES)


def tune_history(schema_editor: Any) -> None:
    """Storage settings of the tables of history, whose newest rows are written again and again."""
    names = ("callqueue_total", "callqueue_peak", "callqueue_counted")
    _tune(schema_editor, dict.fromkeys(names, _WRITTEN_AGAIN), {})


def index_task_ids(schema_editor: Any) -> None:
    """The index of the column that tells which task a call runs."""
    _tune(schema_editor, {}, _TASK_INDEXES)


def drop_whole_index(schema_editor: Any, table: str, name: str) -> None:
    """Drop an index that stands in for a partial one: Django, which did not make it, does not."""
    if schema_editor.connection.vendor == "mysql":
        schema_editor.execute(f"DROP INDEX {name} ON {table}")


def _tune(
    schema_editor: Any, storage: Mapping[str, str], indexes: Mapping[str, tuple[str, str]]
) -> None:
    vendor = schema_editor.connection.vendor
    if vendor == "postgresql":
        for table, options in storage.items():
            schema_editor.execute(f"ALTER TABLE {table} SET ({options})")
    elif vendor == "mysql":
        for name, (table, columns) in indexes.items():
            schema_editor.execute(f"CREATE INDEX {name} ON {table} ({columns})")


# Collations that compare text by its characters, trailing spaces too: MariaDB's, and MySQL's from
# 8.0.17 on.
_BY_CHARACTER = ("utf8mb4_nopad_bin", "utf8mb4_0900_bin")


def tell_text_apart(schema_editor: Any, tables: Sequence[str]) -> None:
    """Let MariaDB and MySQL compare the text of these tables by its characters: by default `A`, `a`
    and `a ` are one key there. A table that is right is not written anew.

    NotSupportedError where the server cannot: it would take one key for another.
    """
    if schema_editor.connection.vendor != "mysql":
        return
    with schema_editor.connection.cursor() as cursor:
        collation = _collation(cursor)
        cursor.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()"
            f" AND table_collation <> %s AND table_name IN ({places(tables)})",
            [collation, *tables],
        )
        wrong = [name for (name,) in cursor.fetchall()]
    for table in wrong:
        schema_editor.execute(
            f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE {collation}"
        )


def _collation(cursor: Any) -> str:
    cursor.execute(
        "SELECT collation_name FROM information_schema.collations"
        f" WHERE collation_name IN ({places(_BY_CHARACTER)})",
        list(_BY_CHARACTER),
    )
    found = [str(name) for (name,) in cursor.fetchall()]
    if not found:
        raise NotSupportedError(
            "callqueue wants MariaDB 10.6 or MySQL 8.0.17:"
            " an older MySQL takes 'a' and 'a ' for one key"
        )
    return found[0]
