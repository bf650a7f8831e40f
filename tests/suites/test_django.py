"""Django's own tests of tasks on callqueue's backend; and ours, on a Django that has the API."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

from tests.suites import published
from tests.support.processes import ROOT

VERSION, PYTHON = "6.1.3", (3, 12)
OURS = "tests/db/integrations/test_django_tasks.py"
NEEDED = ["django~=6.0.0", "django-celery-beat>=2.8", "hypothesis", "pytest", "pytest-django",
          "pytest-rerunfailures"]  # fmt: skip
# The others want a refusal of what callqueue can, or edit the list of Django's dummy backend.
LEAST = 79


def own() -> list[str]:
    """What the app needs besides Django."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        wanted = tomllib.load(file)["project"]["dependencies"]
    return [one for one in wanted if not one.startswith("django>")]


def environment(*path: Path, **variables: str) -> dict[str, str]:
    """This process's environment, with these folders first on the path of modules."""
    before = os.environ.get("PYTHONPATH", "")
    folders = os.pathsep.join([*map(str, path), *filter(None, [before])])
    return {**os.environ, "PYTHONPATH": folders, "PYTHONDONTWRITEBYTECODE": "1", **variables}


def test_our_tests_of_tasks_pass_where_django_has_them(tmp_path: Path) -> None:
    """An older Django passes over them."""
    python, report = published.python(*PYTHON), tmp_path / "report.xml"
    beside = published.packages("django-ours", *NEEDED, *own(), python=python)
    options = ["--database=sqlite", f"--junitxml={report}", "-p", "no:cacheprovider"]
    command = [str(python), "-m", "pytest", *options, OURS]
    variables = environment(beside, ROOT, CALLQUEUE_TEST_DATABASE="sqlite")
    subprocess.run(command, cwd=ROOT, env=variables, timeout=300, check=True)
    assert published.passed(report, "our tests of tasks") >= 21


def test_djangos_tests_of_tasks(tmp_path: Path) -> None:
    """What differs is in the output: their runner says it."""
    python = published.python(*PYTHON)
    suite = published.source("django", VERSION, python="3.12")
    beside = published.packages("django", f"django=={VERSION}", *own(), python=python)
    variables = environment(
        beside,
        ROOT,
        suite / "tests",
        DJANGO_SETTINGS_MODULE="tests.suites.django_settings",
        DJANGO_ALLOW_ASYNC_UNSAFE="1",  # its async tests read `results`, which is no query of Django's
        CALLQUEUE_SUITE_DATABASE=str(tmp_path / "database"),
    )
    command = [str(python), "-m", "django", "test", "tasks", "--verbosity=2"]
    options = {"cwd": tmp_path, "env": variables, "stderr": subprocess.PIPE, "text": True}
    said = subprocess.run(command, timeout=300, **options).stderr
    passed = len(re.findall(r"(?:^| )ok$", said, re.MULTILINE))
    print(f"{said}\nDjango {VERSION}: {passed} pass")
    assert passed >= LEAST
