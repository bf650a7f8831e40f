"""Which servers answer on this machine, and an embedded PostgreSQL where none does.

In: the standard local ports, or CALLQUEUE_TEST_PG_URL, _MARIADB_URL, _REDIS_URL, _RABBITMQ_URL.
Out: addresses. Never starts, stops or configures a server that it did not bring itself.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch
from urllib.parse import unquote, urlsplit

DEFAULTS = {
    "postgresql": ("CALLQUEUE_TEST_PG_URL", "postgresql://postgres@127.0.0.1:5432"),
    "mariadb": ("CALLQUEUE_TEST_MARIADB_URL", "mysql://root@127.0.0.1:3306"),
    "redis": ("CALLQUEUE_TEST_REDIS_URL", "redis://127.0.0.1:6379"),
    "rabbitmq": ("CALLQUEUE_TEST_RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672//"),
}
EMBEDDED = "CALLQUEUE_TEST_PG_EMBEDDED"


def answers(server: str) -> bool:
    """Whether the server of that name is where it is expected, and lets us in."""
    return refusal(server) == ""


def refusal(server: str) -> str:
    """Why the server cannot be used; empty where it can be."""
    url = address(server)
    try:
        with socket.create_connection((url.host, int(url.port)), timeout=2):
            pass
    except OSError:
        return f"nothing answers at {url.host}:{url.port}"
    try:
        _log_in(server, url)
    except Exception as error:
        return (
            f"{url.host}:{url.port} refuses us ({type(error).__name__}); set {DEFAULTS[server][0]}"
        )
    return ""


def answering() -> list[str]:
    return [server for server in DEFAULTS if answers(server)]


@dataclass(frozen=True)
class ServerUrl:
    host: str
    port: str
    user: str
    password: str
    text: str


def address(server: str) -> ServerUrl:
    variable, default = DEFAULTS[server]
    text = os.environ.get(variable) or default
    parts = urlsplit(text)
    host, port = unquote(parts.hostname or "127.0.0.1"), parts.port or urlsplit(default).port
    return ServerUrl(host, str(port), parts.username or "", unquote(parts.password or ""), text)


def _log_in(server: str, url: ServerUrl) -> None:
    place = {"host": url.host, "port": int(url.port), "user": url.user, "password": url.password}
    if server == "postgresql":
        import psycopg2

        psycopg2.connect(dbname="postgres", connect_timeout=5, **place).close()
    elif server == "mariadb":
        import pymysql

        pymysql.connect(connect_timeout=5, **place).close()
    else:
        from kombu import Connection

        with Connection(url.text, connect_timeout=5) as connection:
            connection.ensure_connection(max_retries=1, timeout=5)


def postgresql_url() -> ServerUrl:
    return address("postgresql")


def mariadb_url() -> ServerUrl:
    return address("mariadb")


@contextmanager
def postgresql() -> Iterator[str]:
    """What the tests run PostgreSQL on: "server" where one answers, else "embedded"."""
    if answers("postgresql"):
        yield "embedded" if os.environ.get(EMBEDDED) else "server"
        return
    from tests.support.private import Postgres

    # on a free port of loopback, and it forgets everything; a process inside finds the same server
    with (
        Postgres("fsync=off", "synchronous_commit=off") as server,
        patch.dict(os.environ, {DEFAULTS["postgresql"][0]: server.url, EMBEDDED: "1"}),
    ):
        yield "embedded"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
