"""Vacuum: makes the space of deleted rows usable again, and tells how far one has come."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections

from callqueue.database.statements import places, quoted, rows


def vacuum(using: str, tables: Sequence[str], *, full: bool = False) -> None:
    """Make deleted rows' space usable again. `full` rewrites and locks the tables meanwhile."""
    connection = connections[using]
    names = [quoted(using, table) for table in tables]
    with connection.cursor() as cursor:
        for statement in _statements(connection.vendor, names, full):
            cursor.execute(statement)
            if connection.vendor == "mysql":
                cursor.fetchall()


def _statements(vendor: str, names: list[str], full: bool) -> list[str]:
    if vendor == "mysql":
        return [f"{'OPTIMIZE' if full else 'ANALYZE'} TABLE {name}" for name in names]
    if vendor != "postgresql":
        return ["VACUUM" if full else "PRAGMA optimize"]
    if full:
        return [f"VACUUM (FULL, ANALYZE) {name}" for name in names]
    # A vacuum takes the pages of indexes that it found empty out of use, and only the next one lets
    # them be used again (PostgreSQL's nbtree/README, "Placing deleted pages in the FSM"). That one
    # finds little else to do.
    return [f"VACUUM (ANALYZE) {name}" for name in names] + [f"VACUUM {name}" for name in names]


_FULL_VACUUM = """
    SELECT c.relname, p.phase,
        CASE WHEN p.phase = 'rebuilding index'
            THEN p.index_rebuild_count
            ELSE p.heap_blks_scanned END,
        CASE WHEN p.phase = 'rebuilding index'
            THEN (SELECT COUNT(*) FROM pg_index i WHERE i.indrelid = p.relid)
            ELSE p.heap_blks_total END
    FROM pg_stat_progress_cluster p JOIN pg_class c ON c.oid = p.relid
    WHERE p.datname = current_database()"""
_PLAIN_VACUUM = """
    SELECT c.relname, p.phase,
        CASE WHEN p.phase = 'vacuuming heap' THEN p.heap_blks_vacuumed
            ELSE p.heap_blks_scanned END,
        p.heap_blks_total
    FROM pg_stat_progress_vacuum p JOIN pg_class c ON c.oid = p.relid
    WHERE p.datname = current_database()"""


def vacuum_progress(
    using: str, tables: Sequence[str], *, full: bool = False
) -> tuple[str, str, int, int] | None:
    """Of a vacuum that runs elsewhere: table, phase, and how many of how many blocks (indexes,
    while those are rebuilt).

    None where none runs, or the database does not show it.
    """
    if connections[using].vendor != "postgresql":
        return None
    view = _FULL_VACUUM if full else _PLAIN_VACUUM
    found = rows(using, f"{view} AND c.relname IN ({places(tables)})", list(tables))
    if not found:
        return None
    table, phase, done, total = found[0]
    return table, phase, int(done), int(total)
