"""What a benchmark runs on: a database and queues of its own, the API, and processes of any kind,
gone afterwards.

PostgreSQL and RabbitMQ are the machine's, at the addresses that tests.support.servers knows.
`open_stage()` sets Django up, so nothing of callqueue's models may be imported before.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import brokers, servers
from tests.support.recorder import Recorder

ROOT = Path(__file__).resolve().parent.parent.parent
PRELUDE = 'CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}\n'
_began = time.monotonic()


@dataclass
class Stage:
    """Where a benchmark runs: `vendor` is the API that is called, `processes` starts callqueue's."""

    database: str
    broker: brokers.Broker
    vendor: Recorder
    processes: Any

    def send(self, count: int, rule: str, path: str = "/ok") -> None:
        from callqueue.models import CallQueue

        data = {"method": "post", "params": {"url": self.vendor.url(path), "data": "x" * 200}}
        if count == 1:
            CallQueue.objects.send(data, rule=rule)
        else:
            CallQueue.objects.send_many([data] * count, rule=rule)


@contextmanager
def open_stage(source: str) -> Iterator[Stage]:
    """All that a benchmark needs, under these settings; `{queue}` stands for its queue."""
    for server in ("postgresql", "rabbitmq"):
        if why := servers.refusal(server):
            raise SystemExit(f"The benchmark needs {server}: {why}")
    database = f"cqb_{secrets.token_hex(3)}"
    os.environ.update(
        DJANGO_SETTINGS_MODULE="tests.settings",
        CALLQUEUE_TEST_DATABASE="postgresql",
        CALLQUEUE_TEST_DB_NAME=database,
    )
    _on_server(f'CREATE DATABASE "{database}"')
    try:
        with ExitStack() as stack:
            broker = stack.enter_context(brokers.broker("rabbitmq"))
            os.environ.update(broker.environment())
            vendor = stack.enter_context(Recorder())
            import django

            django.setup()
            from django.conf import settings
            from django.core.management import call_command
            from django.core.signals import setting_changed
            from django.db import connections

            from tests.support.fixtures import configured
            from tests.support.processes import Processes

            connections["default"].close()
            connections["default"].settings_dict["NAME"] = database
            call_command("migrate", run_syncdb=True, verbosity=0)
            processes = Processes(broker)
            stack.callback(processes.close)
            stack.callback(connections.close_all)
            configured(processes, settings, PRELUDE + source.replace("{queue}", broker.queue()))
            changed = {"setting": "CALLQUEUE", "value": settings.CALLQUEUE, "enter": True}
            setting_changed.send(sender=type(settings), **changed)
            yield Stage(database, broker, vendor, processes)
    finally:
        _on_server(f'DROP DATABASE IF EXISTS "{database}" WITH (FORCE)')


def _on_server(statement: str) -> None:
    import psycopg2

    url = servers.postgresql_url()
    connection = psycopg2.connect(
        host=url.host, port=url.port, user=url.user, password=url.password, dbname="postgres"
    )
    connection.autocommit = True
    connection.cursor().execute(statement)
    connection.close()


def sql(statement: str) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(statement)


def say(text: str) -> None:
    """One line of progress."""
    print(f"[{time.monotonic() - _began:6.1f} s] {text}", file=sys.stderr, flush=True)


def timed(work: Callable[[], Any]) -> float:
    """The milliseconds that it takes."""
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def quantiles(waits: Sequence[float], *shares: float) -> list[float]:
    """The waits that so large shares of them do not exceed; none of none."""
    ordered = sorted(waits)
    return [ordered[min(len(ordered) - 1, int(len(ordered) * one))] for one in shares if ordered]


MS = ["median ms", "p95 ms", "worst ms"]


def in_ms(waits: Sequence[float], digits: int = 1) -> list[str]:
    """What stands under MS."""
    return [f"{one:.{digits}f}" for one in quantiles(waits, 0.5, 0.95, 1.0)]


def wait_until(is_so: Callable[[], bool], timeout: float, every: float = 0.02) -> float:
    """The monotonic instant at which it was found to be so; TimeoutError otherwise."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if is_so():
            return time.monotonic()
        time.sleep(every)
    raise TimeoutError(f"not within {timeout} s")


def has_ended() -> bool:
    """Whether all that was sent, and has arrived, has been recorded."""
    from callqueue.models import CallQueue

    rows = CallQueue.objects.order_by()
    return not any(rows.filter(status=status).exists() for status in (1, 0, 2))
