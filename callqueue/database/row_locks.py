"""Row locks. SQLite has none: its one write lock stands in for them (see transactions.writing)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from django.db import connections, models, transaction
from django.db.models import QuerySet

M = TypeVar("M", bound=models.Model)


def locking(using: str) -> AbstractContextManager[None]:
    """A transaction for `locked` rows; nothing on a database without row locks."""
    if connections[using].features.has_select_for_update:
        return transaction.atomic(using=using)
    return nullcontext()


def locked(rows: QuerySet[M], *, wait: bool = False) -> QuerySet[M]:
    """Lock the rows that nobody else has locked, and pass over the rest; or wait for all."""
    features = connections[rows.db].features
    if not features.has_select_for_update:
        return rows
    return rows.select_for_update(
        skip_locked=features.has_select_for_update_skip_locked and not wait
    )


def skip_locked(using: str) -> str:
    """SQL for the end of a SELECT: lock its rows and pass over locked ones."""
    features = connections[using].features
    if not features.has_select_for_update:
        return ""
    return (
        " FOR UPDATE SKIP LOCKED" if features.has_select_for_update_skip_locked else " FOR UPDATE"
    )


def sharing(using: str) -> str:
    """SQL for the end of a SELECT: others may share its rows, and nobody may lock them."""
    clauses = {"postgresql": " FOR KEY SHARE", "mysql": " LOCK IN SHARE MODE"}
    return clauses.get(connections[using].vendor, "")


def free_ids(using: str, table: str, ids: str) -> str:
    """A SELECT that locks those rows of these ids (as `listed` writes them) that nobody else has
    locked, and returns their ids.
    """
    return f"SELECT id FROM {table} WHERE id IN ({ids}) ORDER BY id{skip_locked(using)}"
