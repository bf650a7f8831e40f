"""The processes of the demo, and the folder that they share: started together, and none of it left
afterwards.

Each process leads a group of its own, so that Ctrl-C reaches the demo alone, which then ends them
in order.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

ROOT = Path(__file__).resolve().parent.parent.parent
ADMIN = ("127.0.0.1", 8000)
READY_SECONDS = 60.0
# what is still there then has nothing left to lose: Celery takes 5 s to leave an idle pool
STOP_SECONDS = 2.0
WORKERS = {"one": "celery,egress-1", "two": "egress-2"}


class StageError(Exception):
    """Something that the demo needs is missing or did not start."""


class Stage:
    """`with Stage() as stage`: a folder, and on its way out every process that was started is
    ended.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="callqueue-demo-"))
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.vendor_url = ""

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def set_up(self) -> None:
        """Start the vendor, point Django at it and at the folder, and make the tables and the
        queues.
        """
        self.vendor_url = f"http://127.0.0.1:{self._start_vendor()}"
        os.environ.update(self._environment())
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0)
        _declare_queues()

    def start(self) -> None:
        """Start two workers and a dispenser, and wait for the workers: calls sent from now on go at
        their pace.
        """
        for name, queues in WORKERS.items():
            options = [
                "--queues",
                queues,
                "--concurrency",
                "2",
                "--hostname",
                f"{name}@%h",
                "--loglevel",
                "INFO",
            ]
            quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
            self._run(
                f"worker-{name}", "celery", "--app", "example_project", "worker", *options, *quiet
            )
        for name in WORKERS:
            self._wait_for(f"worker-{name}", " ready.")
        self._run("dispenser", "django", "callqueue_dispenser")

    def start_admin(self) -> str:
        """Start the admin on its port; the URL."""
        self._run(
            "admin", "django", "runserver", "--noreload", "--insecure", f"{ADMIN[0]}:{ADMIN[1]}"
        )
        self._wait_for("admin", "Quit the server with")
        return f"http://{ADMIN[0]}:{ADMIN[1]}/admin/"

    def check(self) -> None:
        """StageError if a process has ended, with the end of what it said."""
        for name, process in self.started.items():
            if process.poll() is not None:
                raise StageError(
                    f"the {name} ended with status {process.returncode}. "
                    f"It said:\n{self.said(name)[-2000:]}"
                )

    def said(self, name: str) -> str:
        return self._log(name).read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the processes and remove the folder, whatever signals come meanwhile. Safe to call
        twice.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for process in self.started.values():
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self.started.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _kill_group(process)
            process.wait()
        self.started.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_vendor(self) -> int:
        process = self._run(
            "vendor", "example_project.vendor", "--until-stdin-closes", stdin=subprocess.PIPE
        )
        self._wait_for("vendor", "\n")
        assert process.stdin is not None
        return int(self.said("vendor").split()[0])

    def _environment(self) -> dict[str, str]:
        return {
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
            "DJANGO_SECRET_KEY": os.urandom(32).hex(),
            "DJANGO_ALLOWED_HOSTS": "127.0.0.1,localhost",
            "DATABASE_URL": f"sqlite:///{self.folder / 'demo.sqlite3'}",
            "CELERY_BROKER_URL": f"filesystem://{self.folder / 'broker'}",
            "CACHE_URL": "",
            "VENDOR_URL": self.vendor_url,
        }

    def _run(
        self, name: str, module: str, *arguments: str, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        # A worker that is killed leaves its temporary folders, so those are in ours.
        own = {"TMPDIR": str(self.folder), "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        log: IO[bytes]
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env={**os.environ, **own},
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started[name] = process
        return process

    def _wait_for(self, name: str, text: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while text not in self.said(name):
            self.check()
            if time.monotonic() > deadline:
                raise StageError(
                    f"the {name} was not ready after {READY_SECONDS:g} s. "
                    f"It said:\n{self.said(name)[-2000:]}"
                )
            time.sleep(0.05)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def require_free_port() -> None:
    """StageError if something else has the admin's port."""
    try:
        with socket.create_server(ADMIN):
            pass
    except OSError:
        where = f"port {ADMIN[1]} on {ADMIN[0]}"
        raise StageError(
            f"{where} is in use. End what listens there, or run the demo without KEEP=1."
        ) from None


def _declare_queues() -> None:
    """Before the workers do, both at once: the file-system broker keeps its queues in a file that
    is not made twice.
    """
    from celery import current_app

    with current_app.connection_for_write() as connection:
        for queues in WORKERS.values():
            for name in queues.split(","):
                current_app.amqp.queues[name](connection.default_channel).declare()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """What is left of a process and its children."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
