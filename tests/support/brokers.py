"""A broker for one test: RabbitMQ, Redis or a folder, and nothing of it left afterwards.

In: the kind. Out: a Broker, whose `environment()` points a worker at it and whose `queue()` gives
names of its own. Shares the machine's servers with others: it deletes only queues that it named,
and flushes only a Redis database that was empty when it claimed it.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import Celery
from kombu import Connection

from tests.support import servers

KINDS = ("filesystem", "redis", "rabbitmq")
CLAIM_SECONDS = 3600
REDIS_DATABASES = range(15, 0, -1)


@dataclass
class Broker:
    kind: str
    url: str
    prefix: str
    folder: Path | None = None
    named: set[str] = field(default_factory=set)

    def queue(self, name: str = "celery") -> str:
        """The name of a queue that no other test has, the same one whenever asked."""
        self.named.add(name)
        return f"{self.prefix}{name}"

    def environment(self) -> dict[str, str]:
        """What tests/settings.py reads."""
        folder = {"CALLQUEUE_TEST_BROKER_FOLDER": str(self.folder)} if self.folder else {}
        return {
            "CALLQUEUE_TEST_BROKER_URL": self.url,
            "CALLQUEUE_TEST_QUEUE": self.queue(),
            **folder,
        }

    def transport_options(self) -> dict[str, Any]:
        if self.folder is None:
            return {}
        messages, control = self.folder / "messages", self.folder / "control"
        return {
            "data_folder_in": str(messages),
            "data_folder_out": str(messages),
            "control_folder": str(control),
        }

    def connection(self) -> Connection:
        return Connection(self.url, transport_options=self.transport_options(), connect_timeout=5)

    def waiting(self, queue: str) -> int:
        """How many messages are in the queue of that short name."""
        with self.connection() as connection:
            name = f"{self.prefix}{queue}"
            return int(connection.default_channel.queue_declare(name, passive=True).message_count)

    def send(self, app: Celery, task: str, *args: Any, queue: str = "celery") -> str:
        """Send a task to a worker of this broker, whatever broker the application itself has."""
        options = {"args": args, "queue": self.queue(queue)}
        with self.connection() as connection:
            return str(app.send_task(task, connection=connection, **options).id)


@contextmanager
def broker(kind: str) -> Iterator[Broker]:
    """A broker of that kind; the server must answer (see tests.support.servers)."""
    with OPEN[kind](f"cq-{secrets.token_hex(4)}-") as opened:
        yield opened


@contextmanager
def _filesystem(prefix: str) -> Iterator[Broker]:
    with tempfile.TemporaryDirectory(prefix="callqueue-broker-") as name:
        folder = Path(name)
        for part in ("messages", "control"):
            (folder / part).mkdir()
        yield Broker("filesystem", "filesystem://", prefix, folder)


@contextmanager
def _redis(prefix: str) -> Iterator[Broker]:
    """A database that holds nothing; the claim runs out by itself if its owner dies."""
    import redis

    base = servers.address("redis")
    options = {"host": base.host, "port": int(base.port), "password": base.password or None}
    for number in REDIS_DATABASES:
        with redis.Redis(db=number, **options) as client:
            if client.dbsize() or not client.set(
                "callqueue-tests", prefix, nx=True, ex=CLAIM_SECONDS
            ):
                continue
            if client.dbsize() != 1:
                continue
            try:
                yield Broker("redis", f"{base.text.rstrip('/')}/{number}", prefix)
            finally:
                client.flushdb()
            return
    raise RuntimeError("No database of Redis is empty; tests take none that is not.")


@contextmanager
def _rabbitmq(prefix: str) -> Iterator[Broker]:
    """Celery declares an exchange of the same name for each queue, and that would stay too."""
    opened = Broker("rabbitmq", servers.address("rabbitmq").text, prefix)
    try:
        yield opened
    finally:
        with opened.connection() as connection:
            for name in sorted(opened.named):
                for delete in ("queue_delete", "exchange_delete"):
                    with suppress(connection.channel_errors):
                        getattr(connection.channel(), delete)(f"{prefix}{name}")


OPEN = {"filesystem": _filesystem, "redis": _redis, "rabbitmq": _rabbitmq}
