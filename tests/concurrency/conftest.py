"""Fixtures of the tests of races: rules that every thread sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from callqueue import Rule


@pytest.fixture
def rules(settings: Any, transactional_db: None) -> Callable[..., None]:
    """`rules(name=Rule(...), more={...})`: CALLQUEUE from now on, in every thread."""
    from callqueue import conf
    from callqueue.dispatch.release_pass import ensure_state_rows

    def apply(more: dict[str, Any] | None = None, **named: Rule) -> None:
        settings.CALLQUEUE = {"RULES": named, **(more or {})}
        ensure_state_rows("default", list(conf.current().rules))

    return apply


@pytest.fixture
def row_locks() -> None:
    """SQLite has one lock for the whole database: its transactions come one after the other."""
    from django.db import connection

    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("this database has no row locks")
