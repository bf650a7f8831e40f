"""What the database itself knows of its tables: about how many rows, and how many deleted ones."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections

from callqueue.database.statements import places, quoted, rows, run


def estimated_rows(using: str, table: str) -> int | None:
    """About how many rows a table has, without reading it; None where no estimate is kept."""
    vendor = connections[using].vendor
    if vendor == "sqlite":
        return None
    if vendor == "postgresql":
        sql = "SELECT reltuples::bigint FROM pg_class WHERE oid = %s::regclass"
    else:
        sql = (
            "SELECT table_rows FROM information_schema.tables"
            " WHERE table_schema = DATABASE() AND table_name = %s"
        )
    count = next((count for (count,) in rows(using, sql, [table])), None)
    return None if count is None or count < 0 else int(count)


def dead_rows(using: str, tables: Sequence[str]) -> dict[str, tuple[int, int]] | None:
    """Dead and live rows of each table; None where the database keeps no such count."""
    if connections[using].vendor != "postgresql":
        return None
    found = _statistics(using, "n_dead_tup, n_live_tup", tables)
    return {name: (int(dead), int(live)) for name, dead, live in found}


def analyze_changed(using: str, tables: Sequence[str]) -> None:
    """Let PostgreSQL count anew what is in the tables that changed by a fifth since it last did:
    its plans go by that.

    Autovacuum does it within a minute; but it may be switched off, or behind after a bulk load.
    """
    if connections[using].vendor != "postgresql":
        return
    for table, live, changed in _statistics(using, "n_live_tup, n_mod_since_analyze", tables):
        if changed > 10_000 + live // 5:
            run(using, f"ANALYZE {quoted(using, table)}")


def _statistics(using: str, columns: str, tables: Sequence[str]) -> list[tuple[str, int, int]]:
    sql = f"SELECT relname, {columns} FROM pg_stat_user_tables WHERE relname IN ({places(tables)})"
    return rows(using, sql, list(tables))
