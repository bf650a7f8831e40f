"""What a benchmark runs on: a database and queues of its own, the API, and processes of any kind,
gone afterwards.

PostgreSQL and RabbitMQ are the machine's, at the addresses that tests.support.servers knows.
`open_stage()` sets Django up, so nothing of callqueue's models may be imported before.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.server import Api
from tests.support import brokers, servers

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = ROOT / "bench-out"
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
            call_command("migrate", run_syncdb=True, verbosity=0)
            from tests.support.processes import Processes

            processes = Processes(broker)
            stack.callback(processes.close)
            stack.callback(connections.close_all)
            stage = Stage(database, broker, api, processes)
            stage.configure(source)
            yield stage
    finally:
        _sql(f'DROP DATABASE IF EXISTS "{database}" WITH (FORCE)')


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
