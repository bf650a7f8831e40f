"""The tests on every supported pair of Python and Django: `nox`, or `nox -s "tests-3.13(django='6.0')"`."""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True

PAIRS = [
    (python, django)
    for python in ("3.11", "3.12", "3.13")
    for django in ("5.2", "6.0")
    if not (django == "6.0" and python == "3.11")  # Django 6 needs Python 3.12
]


@nox.session
@nox.parametrize(("python", "django"), PAIRS)
def tests(session: nox.Session, django: str) -> None:
    session.install("--editable", ".[tests]", f"django~={django}.0")
    session.run("python", "-m", "tests.run", *session.posargs)
