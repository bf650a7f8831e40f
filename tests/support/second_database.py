"""A second database of the project, beside the one of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.db import connections


@contextmanager
def second_database(alias: str, file: Path) -> Iterator[str]:
    """DATABASES has `alias`, an SQLite database without tables, until the end."""
    entry = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(file)}
    before = connections.settings
    connections.settings = connections.configure_settings({**before, alias: entry})
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        connections.settings = before
