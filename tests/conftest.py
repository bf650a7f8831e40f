"""What every test can count on: a database chosen by `--database`, its servers, and no file that
tests nothing.

`pytest --database=postgresql|mariadb|sqlite` chooses; PostgreSQL comes from a wheel where no server
answers. Each run has a database of its own. CALLQUEUE_TEST_REPORT names a file for the counts (see
tests/run.py).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from tests.support import length, servers, verdicts

pytest_plugins = ["callqueue.testing", "tests.support.fixtures"]

# Whether an example took long says more of the machine than of the code.
HYPOTHESIS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

DATABASES = ("postgresql", "mariadb", "sqlite")
ran_on = pytest.StashKey[str]()
open_servers = pytest.StashKey[ExitStack]()


def pytest_addoption(parser: pytest.Parser) -> None:
    options = {"choices": DATABASES, "help": "what to run on (default: %(default)s)"}
    default = os.environ.get("CALLQUEUE_TEST_DATABASE", "postgresql")
    parser.addoption("--database", default=default, **options)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Bring up the servers and choose the settings, before pytest-django reads them."""
    database = config.getoption("database")
    config.stash[open_servers] = ExitStack()
    if config.option.help or config.option.version:
        return
    length.note(config)
    drawn = length.examples(30, 100)
    hypothesis_settings.register_profile("callqueue", max_examples=drawn, **HYPOTHESIS)
    hypothesis_settings.load_profile("callqueue")
    config.stash[ran_on] = _bring_up(database, config.stash[open_servers])
    folder = tempfile.TemporaryDirectory(prefix="callqueue-sqlite-")
    os.environ["CALLQUEUE_TEST_SQLITE_FOLDER"] = config.stash[open_servers].enter_context(folder)
    os.environ["CALLQUEUE_TEST_DATABASE"] = database
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    from django.conf import settings

    # pytest-django sets Django up, later, only where the settings have been read already
    assert settings.DATABASES


def _bring_up(database: str, stack: ExitStack) -> str:
    if database == "postgresql":
        return f"postgresql ({stack.enter_context(servers.postgresql())})"
    if database == "mariadb" and (refusal := servers.refusal("mariadb")):
        raise pytest.UsageError(f"--database=mariadb: {refusal}")
    return database


def pytest_unconfigure(config: pytest.Config) -> None:
    if open_servers in config.stash:
        config.stash[open_servers].close()


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"database: {config.stash[ran_on]}"] if ran_on in config.stash else []


# On a machine so busy that something had no turn in time, a test is tried again where it said that
# it was late, and nothing else: see tests/support/verdicts.py. Tests with processes of their own have
# to wait for them, and may say it by a timeout. How often is printed at the end.

NO_VERDICT = {"reruns": 2, "rerun_except": [verdicts.Verdict]}
AGAIN = pytest.mark.flaky(only_rerun=list(verdicts.FORGIVEN), **NO_VERDICT)
AGAIN_WHERE_LATE = pytest.mark.flaky(reruns=2, only_rerun=[verdicts.Late])
AGAIN_IN_A_BROWSER = pytest.mark.flaky(**NO_VERDICT)


# A test file that collects no test is a mistake, and pytest alone would pass over it.

modules: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if isinstance(collector, pytest.Module) and report.outcome == "passed":
        modules.add(collector.nodeid)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    empty = modules - {item.nodeid.partition("::")[0] for item in items}
    if empty:
        raise pytest.UsageError(f"collects no test: {', '.join(sorted(empty))}")
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & {"processes", "staged"}:
            item.add_marker(AGAIN)
        elif "live_server" in fixtures:
            item.add_marker(AGAIN_IN_A_BROWSER)
        else:
            item.add_marker(AGAIN_WHERE_LATE)
    with length.slow_ones_left_out(config, items):
        yield


# The counts of this run, and the servers that its tests used, for tests/run.py to add up.

counts: Counter[str] = Counter()
used: Counter[str] = Counter()
# tests that failed, and are no verdict: they may be tried again when no other runs
doubtful: list[str] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("server"):
        for server in marker.args:
            if refusal := servers.refusal(server):
                pytest.skip(f"{server}: {refusal}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    report = yield
    is_verdict = call.excinfo is not None and call.excinfo.errisinstance(verdicts.Verdict)
    report.user_properties.append(("verdict", is_verdict))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        counts[_word_for(report)] += 1
    if report.when == "call" and report.failed and ("verdict", True) not in report.user_properties:
        doubtful.append(report.nodeid)
    if report.when == "call" and report.passed:
        used.update(value for name, value in report.user_properties if name == "server")


def _word_for(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xpassed" if report.passed else "xfailed"
    if report.failed:
        return "failed" if report.when == "call" else "errors"
    return report.outcome


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the counts; errors of collection are in `session.testsfailed` only."""
    path = os.environ.get("CALLQUEUE_TEST_REPORT")
    if not path:
        return
    missing = session.testsfailed - counts["failed"] - counts["errors"]
    counts["errors"] += max(missing, 0)
    document = {"on": session.config.stash.get(ran_on, ""), "counts": counts, "used": used}
    Path(path).write_text(json.dumps({**document, "doubtful": doubtful}), encoding="utf-8")
