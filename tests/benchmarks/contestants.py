"""The systems that are compared. Each sends, makes and records calls in its own best way, with two
workers of two processes.

In: a stage. `start()` brings up its processes, `enqueue(count)` sends so many calls,
`has_ended(count)` says whether the last is recorded (or answered, where nothing is recorded).
`roles()` says whose CPU is the contestant's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from tests.benchmarks import machine, stage
from tests.benchmarks.stage import Stage

WORKERS, PROCESSES = 2, 2
BATCH = 1000  # calls that are sent in one transaction
SETTINGS = """
CELERY_WORKER_PREFETCH_MULTIPLIER = 4
CALLQUEUE = {
    "ALLOWED_NETWORKS": ["127.0.0.0/8"],
    "RULES": {"bench": Rule(queues="{queue}", limits=[SlidingWindow("100000/s")])},
}
"""


class Contestant:
    """One of the systems; `name` is its row in the table."""

    name = ""
    counts_postgresql = True
    counts_rabbitmq = False

    def __init__(self, on: Stage) -> None:
        self.stage = on
        self.url = on.api.url("/call")
        self.running: list[Any] = []
        self.environment = dict(os.environ)
        self.folder = stage.ROOT

    def start(self) -> None:
        """Bring up its processes, ready to work."""

    def stop(self) -> None:
        for running in self.running:
            running.stop()

    def enqueue(self, count: int) -> None:
        """Send so many calls."""
        raise NotImplementedError

    def send(self) -> None:
        """Send one call from this process."""
        raise NotImplementedError

    def command_to_send_apart(self, count: int) -> list[str] | None:
        """A program that sends calls one by one, and prints when; None where `send` does it
        here.
        """
        return None

    def has_ended(self) -> bool:
        """Whether all that was sent has been recorded."""
        return True

    def databases(self) -> list[str]:
        return []

    def roles(self) -> dict[str, machine.IsRole]:
        families = [machine.family(running.pid) for running in self.running]
        roles: dict[str, machine.IsRole] = {
            "processes": lambda pid, title: any(f(pid, title) for f in families)
        }
        if self.counts_postgresql:
            roles["postgresql"] = machine.postgresql(*self.databases())
        if self.counts_rabbitmq:
            roles["rabbitmq"] = machine.rabbitmq
        roles["sender"] = lambda pid, title: pid == os.getpid() or machine.is_child_of_this(pid)
        return roles


class Callqueue(Contestant):
    """Limits counted, attempts recorded, fences, acknowledged late, publications confirmed."""

    name = "callqueue"
    counts_rabbitmq = True

    def start(self) -> None:
        for _ in range(WORKERS):
            self.running.append(self.stage.processes.worker(concurrency=PROCESSES))
        self.running.append(self.stage.processes.dispenser())

    def enqueue(self, count: int) -> None:
        from callqueue.models import CallQueue

        data = {"method": "post", "params": {"url": self.url, "data": "x" * 200}}
        for left in range(count, 0, -BATCH):
            CallQueue.objects.send_many([data] * min(left, BATCH), rule="bench")

    def send(self) -> None:
        from callqueue.models import CallQueue

        CallQueue.objects.send(
            {"method": "post", "params": {"url": self.url, "data": "x" * 200}}, rule="bench"
        )

    def has_ended(self) -> bool:
        from callqueue.models import CallQueue

        rows = CallQueue.objects.order_by()
        return not any(rows.filter(status=s).exists() for s in (1, 0, 2))

    def databases(self) -> list[str]:
        return [self.stage.database]


class Workers(Callqueue):
    """No dispenser: one of the workers' processes releases, and makes a few calls itself."""

    name = "callqueue, workers alone"

    def start(self) -> None:
        for _ in range(WORKERS):
            self.running.append(self.stage.processes.worker(concurrency=PROCESSES))


class Run(Callqueue):
    """No broker: as many processes as the others' workers are, each releases and makes its own."""

    name = "callqueue_run, two processes"
    counts_rabbitmq = False

    def start(self) -> None:
        for _ in range(WORKERS):
            running = self.stage.processes.run()
            running.wait_for_log("running all rules")
            self.running.append(running)


class Raw(Contestant):
    """Celery and a session, nothing else."""

    name = "raw Celery + Session"
    counts_postgresql = False
    counts_rabbitmq = True

    def __init__(self, on: Stage) -> None:
        super().__init__(on)
        self.queue = on.broker.queue("raw")
        # With settings, Celery sets Django up, as in every Django project's workers. They are those of
        # a project without callqueue, which would look for calls in these workers.
        own = {"DJANGO_SETTINGS_MODULE": "django.conf.global_settings"}
        own |= {"RAW_BROKER_URL": on.broker.url, "RAW_QUEUE": self.queue}
        self.environment = {**os.environ, **own}

    def start(self) -> None:
        others = self.stage.processes.environment
        self.stage.processes.environment = {**others, **self.environment}
        for number in range(WORKERS):
            name = ["--hostname", f"raw{number}-{self.queue}@%h"]
            quiet = ["--without-gossip", "--without-mingle", "--loglevel", "WARNING"]
            command = [
                sys.executable,
                "-m",
                "celery",
                "--app",
                "tests.benchmarks.raw",
                "worker",
                *name,
                *quiet,
            ]
            command += ["--concurrency", str(PROCESSES), "--queues", self.queue]
            self.running.append(self.stage.processes.start("raw", command))
        self.stage.processes.environment = others

    def enqueue(self, count: int) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.raw",
            "enqueue",
            self.url,
            str(count),
        ]
        subprocess.run(command, check=True, cwd=stage.ROOT, env=self.environment)

    def command_to_send_apart(self, count: int) -> list[str]:
        return [sys.executable, "-m", "tests.benchmarks.raw", "apart", self.url, str(count)]


class Loops(Contestant):
    """Two loops over requests.Session in processes of their own: the ceiling for requests on two
    cores.
    """

    name = "two bare Session loops"
    counts_postgresql = False

    def enqueue(self, count: int) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.raw",
            "loop",
            self.url,
            str(count // 2),
        ]
        loops = [subprocess.Popen(command, cwd=stage.ROOT) for _ in range(2)]
        assert [loop.wait() for loop in loops] == [0, 0]


ALL: dict[str, type[Contestant]] = {
    "callqueue": Callqueue,
    "workers": Workers,
    "run": Run,
    "raw": Raw,
    "loops": Loops,
}
