"""The databases of a simulation: made with the tables in them, and dropped at its end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2

from tests.support import servers

# No table is vacuumed but between two runs, and none is written to the log.
UNDISTURBED = """
DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT relname FROM pg_class WHERE relkind = 'r' AND relname LIKE 'callqueue\\_%' LOOP
        EXECUTE format('ALTER TABLE %I SET (autovacuum_enabled = FALSE)', name);
    END LOOP;
END $$
"""
# The clock of each session is a sequence, behind functions that hide the server's own.
CLOCK = """
CREATE SCHEMA IF NOT EXISTS sim;
CREATE UNLOGGED SEQUENCE sim.now MINVALUE 0 START 0;
CREATE FUNCTION sim.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql VOLATILE AS
$$ BEGIN RETURN timestamptz 'epoch' + pg_sequence_last_value('sim.now') * interval '1 microsecond';
END $$;
CREATE FUNCTION sim.statement_timestamp() RETURNS timestamptz LANGUAGE plpgsql STABLE AS
$$ BEGIN RETURN timestamptz 'epoch' + pg_sequence_last_value('sim.now') * interval '1 microsecond';
END $$;
"""
# The server would end who is silent by its own time, on a slow machine within any run.
SILENT = """
CREATE FUNCTION sim.set_config(text, text, boolean) RETURNS text LANGUAGE sql AS
$$ SELECT $2 $$;
"""
SESSIONS = {
    "search_path": "sim, public, pg_catalog",
    "synchronous_commit": "off",
    "deadlock_timeout": "'10s'",  # rings are found here, not there
    "jit": "off",
}


def connection(name: str) -> Any:
    """A session of the driver's own."""
    url = servers.postgresql_url()
    return psycopg2.connect(
        host=url.host, port=url.port, user=url.user, password=url.password, dbname=name
    )


@contextmanager
def sqlite(count: int) -> Iterator[list[str]]:
    """As many SQLite databases with the tables in them."""
    with tempfile.TemporaryDirectory(prefix="callqueue-sim-") as folder:
        names = [f"{folder}/{number}.sqlite3" for number in range(count)]
        _migrate(names[0])
        for name in names[1:]:
            shutil.copy(names[0], name)
        yield names


@contextmanager
def postgresql(count: int) -> Iterator[list[str]]:
    """As many databases with the tables in them, for as long as this is open."""
    names = [f"callqueue_sim_{os.getpid()}_{number}" for number in range(count + 1)]
    with _administrator() as run:
        try:
            _create(run, names[0], "")
            with _session(names[0]) as run_there:
                run_there(CLOCK + SILENT)
            _migrate(names[0])
            with _session(names[0]) as run_there:
                run_there(UNDISTURBED)
            for name in names[1:]:
                _create(run, name, f"TEMPLATE {names[0]}")
            yield names[1:]
        finally:
            for name in names:
                run(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@contextmanager
def _administrator() -> Iterator[Any]:
    with _session("postgres") as run:
        yield run


@contextmanager
def _session(name: str) -> Iterator[Any]:
    raw = connection(name)
    raw.autocommit = True
    with raw.cursor() as cursor:
        yield cursor.execute
    raw.close()


def _create(run: Any, name: str, how: str) -> None:
    run(f"CREATE DATABASE {name} {how}")
    for setting, value in SESSIONS.items():
        run(f"ALTER DATABASE {name} SET {setting} = {value}")


def _migrate(name: str) -> None:
    set_django_up(name)
    from django.core.management import call_command
    from django.db import connections

    call_command("migrate", run_syncdb=True, verbosity=0)
    connections.close_all()


def set_django_up(name: str) -> None:
    """On this database."""
    os.environ["CALLQUEUE_TEST_DATABASE"] = "sqlite" if os.sep in name else "postgresql"
    os.environ["CALLQUEUE_TEST_DB_NAME"] = name
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.simulation.settings"
    import django

    django.setup()
