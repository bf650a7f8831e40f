"""The admin under django-unfold and django-jazzmin, where they are installed (`nox -s themes`)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.length import ONLY_AT_LENGTH

pytest.importorskip("selenium", reason="selenium is not installed")
pytestmark = ONLY_AT_LENGTH


@pytest.mark.parametrize("theme", ["unfold", "jazzmin"])
def test_every_control_works(theme: str) -> None:
    """In a process of its own: a theme is there from the start, or not at all."""
    pytest.importorskip(theme, reason=f"django-{theme} is not installed")
    database = os.environ.get("CALLQUEUE_TEST_DATABASE", "postgresql")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        f"--database={database}",
        "-p",
        "no:cacheprovider",
    ]
    ran = subprocess.run(
        [*command, "tests/browser/themed.py"],
        env={**os.environ, "CALLQUEUE_TEST_THEME": theme},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
