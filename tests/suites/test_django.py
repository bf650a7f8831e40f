"""Django's own tests of tasks, with callqueue's backend in place of Django's two; and ours, on a
Django that has the API.
"""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

from tests.suites import judged, published
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


def test_our_tests_of_tasks_pass_where_django_has_them(tmp_path: Path) -> None:
    """An older Django passes over them."""
    python, report = published.python(*PYTHON), tmp_path / "report.xml"
    beside = published.packages("django-ours", *NEEDED, *own(), python=python)
    environment = published.environment(beside, ROOT, CALLQUEUE_TEST_DATABASE="sqlite")
    command = [str(python), "-m", "pytest", "--database=sqlite", f"--junitxml={report}", OURS]
    subprocess.run(
        [*command, "-p", "no:cacheprovider"], cwd=ROOT, env=environment, timeout=300, check=True
    )
    assert judged.passed(report, "our tests of tasks") >= 21


def test_djangos_tests_of_tasks(tmp_path: Path) -> None:
    python, report = published.python(*PYTHON), tmp_path / "report.xml"
    suite = published.source("django", VERSION, python="3.12")
    beside = published.packages("django", f"django=={VERSION}", *own(), python=python)
    environment = published.environment(
        beside,
        ROOT,
        suite / "tests",
        DJANGO_SETTINGS_MODULE="tests.suites.django_settings",
        DJANGO_ALLOW_ASYNC_UNSAFE="1",  # its async tests read `results`, which is no query of Django's
        CALLQUEUE_SUITE_DATABASE=str(tmp_path / "database"),
        CALLQUEUE_SUITE_REPORT=str(report),
    )
    command = [str(python), "-m", "django", "test", "tasks"]
    subprocess.run(command, cwd=tmp_path, env=environment, timeout=300)
    assert judged.passed(report, f"Django {VERSION}") >= LEAST
