"""What the migration cannot say: storage and trigger of PostgreSQL; indexes, collation of MySQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import NotSupportedError

from callqueue import states
from callqueue.database.notify import SILENCE, WAKE
from callqueue.database.statements import placeholders

# Calls and attempts are updated twice and more in their lives: room on the page, so that a version
# is written as what differs from the one before, and a begin writes no index; and a vacuum that
# comes by the thousand rows.
_UPDATED_OFTEN = (
    "autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 2000,"
    " autovacuum_analyze_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 1"
)
# Few rows, or the newest only, which are written again and again.
_WRITTEN_AGAIN = (
    "fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 500"
)
_STORAGE = {
    "callqueue_callqueue": f"fillfactor = 80, {_UPDATED_OFTEN}",
    "callqueue_callattempt": f"fillfactor = 50, {_UPDATED_OFTEN}",
    "callqueue_rulestate": (
        "fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200"
    ),
    "callqueue_tally": _WRITTEN_AGAIN,
    "callqueue_keyturn": _WRITTEN_AGAIN,
    "callqueue_keynews": _WRITTEN_AGAIN,
    "callqueue_sum": _WRITTEN_AGAIN,
    "callqueue_summed": _WRITTEN_AGAIN,
}
# MariaDB and MySQL have no partial indexes: these stand in for those that Django leaves out there.
_WHOLE_INDEXES = {
    "callqueue_ready": ("callqueue_callqueue", "rule, ready, priority DESC, due_at_dt, id, status"),
    "callqueue_ready_by_key": (
        "callqueue_callqueue",
        "rule, ready, `key`, priority, due_at_dt, id, status",
    ),
    "callqueue_later": ("callqueue_callqueue", "status, ready, due_at_dt"),
    "callqueue_expiring": ("callqueue_callqueue", "status, expires_at_dt"),
    "callqueue_finished": ("callqueue_callqueue", "status, finished_at_dt"),
    "callqueue_callbacks": ("callqueue_callqueue", "callback_pending, id"),
    "callqueue_unique_key": ("callqueue_callqueue", "unique_key, status"),
    "callqueue_open": ("callqueue_callattempt", "finished_at, rule"),
    "callqueue_aging": ("callqueue_callattempt", "rule, finished_at"),
    "callqueue_aging_by_key": ("callqueue_callattempt", "rule, `key`, finished_at"),
    "callqueue_turns_blocked": ("callqueue_keyturn", "rule, blocked_until"),
    "callqueue_permits": ("callqueue_callqueue", "method, ready, rule"),
    "callqueue_corrections": ("callqueue_callattempt", "correction_pending, rule"),
}
# Of a unique key one unfinished call: a unique index ignores NULL there as everywhere.
_ONE_UNFINISHED = (
    "ALTER TABLE callqueue_callqueue ADD COLUMN active_key VARCHAR(255) GENERATED ALWAYS AS"
    f" (CASE WHEN status IN {states.UNFINISHED} THEN unique_key END) STORED",
    "CREATE UNIQUE INDEX callqueue_active_key ON callqueue_callqueue (active_key)",
)
# Collations that compare text by its characters, trailing spaces too: MariaDB's, and MySQL's from
# 8.0.17 on.
_BY_CHARACTER = ("utf8mb4_nopad_bin", "utf8mb4_0900_bin")


def finish_tables(schema_editor: Any, tables: Sequence[str]) -> None:
    """Give all of callqueue's tables, still empty, what Django's operations cannot.

    NotSupportedError where the server cannot tell text apart: it would take one key for another.
    """
    vendor = schema_editor.connection.vendor
    if vendor == "postgresql":
        for table, options in _STORAGE.items():
            schema_editor.execute(f"ALTER TABLE {table} SET ({options})")
        for statement in WAKE:
            schema_editor.execute(statement)
    elif vendor == "mysql":
        _set_collation(schema_editor, tables)
        for name, (table, columns) in _WHOLE_INDEXES.items():
            schema_editor.execute(f"CREATE INDEX {name} ON {table} ({columns})")
        for statement in _ONE_UNFINISHED:
            schema_editor.execute(statement)


def unfinish_tables(schema_editor: Any) -> None:
    if schema_editor.connection.vendor == "postgresql":
        for statement in SILENCE:
            schema_editor.execute(statement)


def _set_collation(schema_editor: Any, tables: Sequence[str]) -> None:
    """Compare text by its characters: by default `A`, `a` and `a ` are one key there."""
    with schema_editor.connection.cursor() as cursor:
        collation = _find_collation(cursor)
    for table in tables:
        schema_editor.execute(
            f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE {collation}"
        )


def _find_collation(cursor: Any) -> str:
    cursor.execute(
        "SELECT collation_name FROM information_schema.collations"
        f" WHERE collation_name IN ({placeholders(_BY_CHARACTER)})",
        list(_BY_CHARACTER),
    )
    found = [str(name) for (name,) in cursor.fetchall()]
    if not found:
        raise NotSupportedError(
            "callqueue wants MariaDB 10.6 or MySQL 8.0.17:"
            " an older MySQL takes 'a' and 'a ' for one key"
        )
    return found[0]
