"""The fixtures in a project of somebody else's, and the examples of the how-to."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from callqueue import database

PAGES = Path(__file__).resolve().parents[3] / "docs" / "how-to"
COMMITTING = pytest.mark.django_db(transaction=True)
PROJECT = {
    "settings_of_theirs.py": """
        SECRET_KEY = "x"
        INSTALLED_APPS = ["django.contrib.contenttypes", "callqueue"]
        DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "real.sqlite3"}}
    """,
    "test_theirs.py": """
        def test_it(callqueue_sent, callqueue_transport, callqueue_clock):
            from callqueue.models import CallQueue
            from callqueue.testing import run_callqueue

            callqueue_transport.default = 200
            CallQueue.objects.send({"method": "get", "params": {"url": "https://api.example.com/"}})
            assert run_callqueue() == 1
            assert callqueue_sent.last.status == CallQueue.Status.DONE
    """,
}


def test_the_fixtures_alone_bring_a_test_database(tmp_path: Path) -> None:
    for name, source in PROJECT.items():
        (tmp_path / name).write_text(textwrap.dedent(source), encoding="utf-8")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DJANGO_", "CALLQUEUE_", "PYTEST_"))
    }
    root = str(PAGES.parent.parent)
    environment = {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), root, kept.get("PYTHONPATH")])),
    }
    options = [
        "-q",
        "-p",
        "callqueue.testing",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "--ds=settings_of_theirs",
    ]
    command = [sys.executable, "-B", "-m", "pytest", *options, "test_theirs.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "real.sqlite3").exists()


def read_the_pages() -> list[Any]:
    text = "".join(
        (PAGES / page).read_text(encoding="utf-8")
        for page in ("test-your-code.md", "use-the-answer.md")
    )
    found: list[Any] = []
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        of_block = re.findall(r"^(async )?def (test_\w+)", block, re.MULTILINE)
        found += [
            pytest.param(block, name, id=name, marks=COMMITTING if is_async else ())
            for is_async, name in of_block
        ]
    return found


@pytest.mark.parametrize(("block", "name"), read_the_pages())
def test_the_pages_tests_pass(block: str, name: str, request: pytest.FixtureRequest) -> None:
    namespace: dict[str, Any] = {"__name__": f"of_the_page.{name}"}
    exec(compile(block, name, "exec"), namespace)
    wanted = inspect.signature(namespace[name]).parameters
    made = namespace[name](**{fixture: request.getfixturevalue(fixture) for fixture in wanted})
    if made is not None:
        asyncio.run(_in_a_loop(made))


async def _in_a_loop(made: Coroutine[Any, Any, Any]) -> None:
    try:
        await made
    finally:
        await sync_to_async(database.close_all)()  # the connection of the ORM's own thread
