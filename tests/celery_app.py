"""The Celery application of the tests, and tasks for tests to send.

It reads its settings lazily from Django's (`CELERY_...`), so importing it needs neither.
"""

from __future__ import annotations

import ctypes
import os
import time

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

app = Celery("tests")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@app.task(name="tests.echo")
def echo(path: str, text: str) -> None:
    """Append a line to a file: so a test sees that a worker ran something."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(text + "\n")


@app.task(name="tests.compute")
def compute(path: str, pid: int) -> None:
    """In the process of this id, compute for as long as the file is there, which says so."""
    if os.getpid() != pid:
        time.sleep(0.5)
        return
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{pid}\n")
    while os.path.exists(path):
        sum(range(10_000))


@app.task(name="tests.hold")
def hold(path: str, pid: int) -> None:
    """In the process of this id, let no other thread run for 40 seconds, as some libraries do."""
    if os.getpid() != pid:
        time.sleep(0.5)
        return
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{pid}\n")
    ctypes.PyDLL(None).sleep(40)
