"""Real workers, dispensers and commands in processes of their own, for as long as a test lasts.

In: a broker, the database of the test, settings as source text. Out: Running processes, whose log
can be read and waited for, and which can be stopped, killed, frozen and thawed. Each leads a
process group, and none outlives `Processes.close()`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from django.db import connection

from tests.support.brokers import Broker
from tests.support.verdicts import Late

ROOT = Path(__file__).resolve().parent.parent.parent
CELERY = [sys.executable, "-m", "celery", "--app", "tests.celery_app"]
MANAGE = [sys.executable, "-m", "django"]
READY_SECONDS = 60.0
STOP_SECONDS = 15.0


class Running:
    """A process that was started, and what it has said so far (both streams)."""

    def __init__(
        self, name: str, command: list[str], environment: dict[str, str], log: Path
    ) -> None:
        self.name = name
        self.path = log
        self._lines: list[str] = []
        self._said = threading.Condition()
        self._ended = False
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
            stderr=subprocess.STDOUT,
            **streams,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        with self._said:
            return "".join(self._lines)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait_for_log(self, text: str, timeout: float = READY_SECONDS, *, times: int = 1) -> None:
        """Return once so many lines hold that; Late, with the log, if it ends or the time is up."""
        with self._said:
            self._said.wait_for(lambda: self._ended or self._has_said(text, times), timeout)
            found = self._has_said(text, times)
        if not found:
            raise Late(f"{self.name} did not say {text!r}. It said:\n{self.log[-8000:]}")

    def _has_said(self, text: str, times: int) -> bool:
        return sum(text in line for line in self._lines) >= times

    def wait(self, timeout: float = STOP_SECONDS) -> int:
        """Its exit status; subprocess.TimeoutExpired if it goes on."""
        return self.process.wait(timeout)

    def stop(self, timeout: float = STOP_SECONDS) -> int:
        """Ask it to end (SIGTERM) and return its status; Late if it does not."""
        self.process.terminate()
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Late(f"{self.name} ignored SIGTERM. It said:\n{self.log[-8000:]}") from None

    def kill(self) -> None:
        """SIGKILL to it and all of its children: as if the machine had lost power."""
        self._signal_group(signal.SIGKILL)
        self.process.wait(STOP_SECONDS)

    def children(self) -> list[int]:
        """The processes that it has made: the pool of a worker."""
        found: list[int] = []
        for task in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, task.read_text().split())
        return found

    def freeze(self) -> None:
        """SIGSTOP to it and all of its children: as a paused virtual machine."""
        self._signal_group(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_group(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self._reader.join(STOP_SECONDS)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout, self.path.open("wb") as file:
            for line in self.process.stdout:
                file.write(line)
                file.flush()
                with self._said:
                    self._lines.append(line.decode("utf-8", "replace"))
                    self._said.notify_all()
        with self._said:
            self._ended = True
            self._said.notify_all()


class Processes:
    """They share this test's database, broker and settings; the last thing to do is `close()`."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.started: list[Running] = []
        self._folder = tempfile.TemporaryDirectory(prefix="callqueue-processes-")
        self.folder = Path(self._folder.name)
        self.environment = self._environment()

    def configure(self, source: str, name: str = "settings_of_this_test") -> None:
        """Settings of what is started from now on: Python source, upper-case names count."""
        (self.folder / f"{name}.py").write_text(source, encoding="utf-8")
        self.environment["CALLQUEUE_TEST_SETTINGS"] = name

    def worker(
        self,
        *queues: str,
        concurrency: int = 2,
        pool: str = "prefork",
        arguments: Sequence[str] = (),
        wait: bool = True,
    ) -> Running:
        """A Celery worker on these queues (short names), ready for work."""
        names = ",".join(self.broker.queue(queue) for queue in queues or ("celery",))
        host = f"w{len(self.started)}-{self.broker.prefix}@%h"
        quiet = ["--without-gossip", "--without-mingle", "--loglevel=INFO", "--hostname", host]
        size = ["--queues", names, "--concurrency", str(concurrency), "--pool", pool]
        worker = self.start("worker", [*CELERY, "worker", *size, *quiet, *arguments])
        if wait:
            worker.wait_for_log(" ready.")
        return worker

    def dispenser(self, *arguments: str) -> Running:
        return self.start("dispenser", [*MANAGE, "callqueue_dispenser", *arguments])

    def run(self, *arguments: str) -> Running:
        """Releases calls, and makes them itself."""
        return self.start("run", [*MANAGE, "callqueue_run", *arguments])

    def beat(self, *arguments: str) -> Running:
        schedule = ["--schedule", str(self.folder / "schedule"), "--pidfile", "", "--loglevel=INFO"]
        return self.start("beat", [*CELERY, "beat", *schedule, *arguments])

    def start(self, name: str, command: list[str]) -> Running:
        name = f"{name}-{len(self.started)}"
        running = Running(name, command, dict(self.environment), self.folder / f"{name}.log")
        self.started.append(running)
        return running

    def manage(
        self, *arguments: str, timeout: float = 60.0, text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a management command to its end, `text` on its standard input."""
        streams = {"input": text, "capture_output": True, "text": True, "timeout": timeout}
        return subprocess.run([*MANAGE, *arguments], cwd=ROOT, env=self.environment, **streams)

    def logs(self) -> str:
        return "\n".join(f"--- {running.name}\n{running.log[-4000:]}" for running in self.started)

    def close(self) -> None:
        """Kill all of them, and leave nothing. Who wants to see how one ends asks it to: `stop`."""
        for running in self.started:
            running.close()
        self._folder.cleanup()

    def _environment(self) -> dict[str, str]:
        path = [str(ROOT), str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "CALLQUEUE_TEST_DB_NAME": str(connection.settings_dict["NAME"]),
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONUNBUFFERED": "1",
        }
        return {**os.environ, **own, **self.broker.environment()}
