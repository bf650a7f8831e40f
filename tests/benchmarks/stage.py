"""What a benchmark runs on: a database and queues of its own, the API, and processes of any kind,
gone afterwards.

PostgreSQL and RabbitMQ are the machine's, at the addresses that tests.support.servers knows.
`open_stage()` sets Django up, so nothing of callqueue's models may be imported before.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.server import Api
from tests.support import brokers, servers

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = ROOT / "bench-out"
RIVALS = Path(__file__).resolve().parent / "rivals"
RIVAL_PACKAGES = (
    "procrastinate==3.10.*",
    "django-tasks-db[compat]==0.13.*",
    "requests",
    "psycopg[binary]",
)

PRELUDE = """\
from datetime import timedelta
from callqueue import Concurrency, FixedWindow, Retry, Rule, SlidingWindow, TokenBucket
CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}
"""


@dataclass
class Stage:
    """Where a benchmark runs. `processes` starts callqueue's; `start` any other."""

    database: str
    broker: brokers.Broker
    api: Api
    processes: Any
    rival_databases: list[str] = field(default_factory=list)

    def configure(self, source: str) -> None:
        """Settings of this process and of those started from now on; `{queue}` stands for the
        benchmark's queue.
        """
        from django.conf import settings

        source = PRELUDE + source.replace("{queue}", self.broker.queue())
        names: dict[str, Any] = {}
        exec(source, names)
        self.processes.configure(source)
        for name, value in names.items():
            if name.isupper():
                setattr(settings, name, value)
        _reload(names)

    def rival_database(self, name: str) -> str:
        """A new, empty database; its address."""
        name = f"{self.database}_{name}"
        _sql(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)', f'CREATE DATABASE "{name}"')
        self.rival_databases.append(name)
        return _dsn(name)


@contextmanager
def open_stage(source: str) -> Iterator[Stage]:
    """Everything that a benchmark of callqueue needs, under settings given as Python source."""
    for server in ("postgresql", "rabbitmq"):
        if why := servers.refusal(server):
            raise SystemExit(f"The benchmark needs {server}: {why}")
    database = f"cqb_{secrets.token_hex(3)}"
    os.environ.update(
        DJANGO_SETTINGS_MODULE="tests.settings",
        CALLQUEUE_TEST_DATABASE="postgresql",
        CALLQUEUE_TEST_DB_NAME=database,
    )
    _sql(f'CREATE DATABASE "{database}"')
    stage = None
    try:
        with ExitStack() as stack:
            broker = stack.enter_context(brokers.broker("rabbitmq"))
            os.environ.update(broker.environment())
            api = stack.enter_context(Api())
            import django

            django.setup()
            from django.core.management import call_command
            from django.db import connections

            connections["default"].close()
            connections["default"].settings_dict["NAME"] = database
            call_command("migrate", verbosity=0)
            from tests.support.processes import Processes

            processes = Processes(broker)
            stack.callback(processes.close)
            stack.callback(connections.close_all)
            stage = Stage(database, broker, api, processes)
            stage.configure(source)
            yield stage
    finally:
        for name in [database, *(stage.rival_databases if stage else ())]:
            _sql(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


def rival_python() -> str:
    """The interpreter of a virtual environment with the rivals in it, made on first use."""
    folder = OUT / "rivals"
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists() or done.read_text() != "\n".join(RIVAL_PACKAGES):
        print(
            "making a virtual environment for procrastinate and django-tasks-db ...",
            file=sys.stderr,
        )
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", *RIVAL_PACKAGES], check=True
        )
        done.write_text("\n".join(RIVAL_PACKAGES))
    return str(python)


def _reload(names: dict[str, Any]) -> None:
    """Tell callqueue and Celery that settings have changed."""
    from django.conf import settings
    from django.core.signals import setting_changed

    if "CALLQUEUE" in names:
        setting_changed.send(
            sender=type(settings), setting="CALLQUEUE", value=names["CALLQUEUE"], enter=True
        )


def _dsn(name: str) -> str:
    url = servers.postgresql_url()
    password = f":{url.password}" if url.password else ""
    return f"postgresql://{url.user}{password}@{url.host}:{url.port}/{name}"


def _sql(*statements: str) -> None:
    import psycopg2

    connection = psycopg2.connect(_dsn("postgres"))
    connection.autocommit = True
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
    connection.close()


def run(command: Sequence[str], environment: dict[str, str]) -> None:
    """Run a rival's program to its end, in the folder of the rivals."""
    subprocess.run(command, check=True, cwd=RIVALS, env=environment, stdin=subprocess.DEVNULL)
