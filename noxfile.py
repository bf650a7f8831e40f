"""The tests on every supported pair of Python and Django, with both of PostgreSQL's drivers.

`nox` runs all that this machine has a Python for, on each database and broker that answers. One
cell: `nox -s "behaviour(python='3.13', django='6.0', driver='psycopg3')"`. Arguments after `--` go
to pytest.
"""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False

DATABASES = ("postgresql", "mariadb", "sqlite")
DRIVERS = {
    "psycopg2": [],
    "psycopg3": ["psycopg[binary]>=3.2"],
}  # Django takes the newer one where both are installed
CELLS = [
    (python, django, driver)
    for python in ("3.11", "3.12", "3.13")
    for django in ("5.2", "6.0", "6.1")
    for driver in DRIVERS
    if not (django != "5.2" and python == "3.11")  # Django 6 needs Python 3.12
]
# The minor versions of Celery that are supported, and the tests of what is taken from Celery.
CELERIES = ("5.4", "5.5", "5.6", "5.7")
WITH_CELERY = ["tests/db/integrations", "tests/db/test_calls_from_send_to_end.py"]


def prepare(session: nox.Session, django: str, driver: str) -> None:
    session.install("--editable", ".[tests]", *DRIVERS[driver])
    session.install(
        f"django~={django}.0"
    )  # by itself: django-celery-beat 2.9 admits Django up to 6.0 only


@nox.session
@nox.parametrize(("python", "django", "driver"), CELLS)
def tests(session: nox.Session, django: str, driver: str) -> None:
    """Every test, as `make test` runs them."""
    prepare(session, django, driver)
    session.run("python", "-m", "tests.run", *session.posargs)


@nox.session
@nox.parametrize(("python", "django", "driver"), CELLS)
def behaviour(session: nox.Session, django: str, driver: str) -> None:
    """The suite that every database must pass, on each of the three; some minutes."""
    prepare(session, django, driver)
    for database in DATABASES:
        session.run(
            "python",
            "-m",
            "pytest",
            f"--database={database}",
            *(session.posargs or ["tests/db", "tests/concurrency"]),
        )


@nox.session(python=["3.12"])
@nox.parametrize("celery", CELERIES)
def celeries(session: nox.Session, celery: str) -> None:
    """Queued tasks with each supported version of Celery, on SQLite and PostgreSQL."""
    prepare(session, "5.2", "psycopg2")
    session.install(f"celery~={celery}.0")
    for database in ("sqlite", "postgresql"):
        session.run(
            "python", "-m", "pytest", f"--database={database}", *(session.posargs or WITH_CELERY)
        )


@nox.session
@nox.parametrize("theme", ("unfold", "jazzmin"))
def themes(session: nox.Session, theme: str) -> None:
    """The admin under a theme, and what axe finds on its pages; needs Chromium."""
    session.install("--editable", ".[tests]", f"django-{theme}")
    session.install("--no-deps", "axe-playwright-python")  # for the copy of axe in it
    tests = ["tests/browser/test_themes.py", "tests/browser/test_every_page.py"]
    session.run("python", "-m", "pytest", "-m", "fault", *tests)  # by themselves they are left out


@nox.session(python=["3.12"])
def sdks(session: nox.Session) -> None:
    """The SDKs that the how-to on permits names, against a provider on this machine."""
    prepare(session, "5.2", "psycopg2")
    session.install("stripe", "twilio", "boto3", "openai")
    tests = ["tests/db/permits/test_sdks.py", "-p", "no:cacheprovider"]
    session.run("python", "-m", "pytest", "--database=sqlite", *(session.posargs or tests))
