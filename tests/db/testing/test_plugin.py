"""The fixtures in a project of somebody else's, and the examples of the how-to."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "test-your-code.md"
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
    root = str(PAGE.parent.parent.parent)
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


def read_the_page() -> list[Any]:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    found: list[Any] = []
    for block in blocks:
        names = re.findall(r"^def (test_\w+)", block, re.MULTILINE)
        found += [pytest.param(block, name, id=name) for name in names]
    return found


@pytest.mark.parametrize(("block", "name"), read_the_page())
def test_the_pages_tests_pass(block: str, name: str, request: pytest.FixtureRequest) -> None:
    namespace: dict[str, Any] = {"__name__": f"of_the_page.{name}"}
    exec(compile(block, PAGE.name, "exec"), namespace)
    wanted = inspect.signature(namespace[name]).parameters
    namespace[name](**{fixture: request.getfixturevalue(fixture) for fixture in wanted})
