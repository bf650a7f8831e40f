"""Fixtures of tests that need a vendor, a broker or processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from tests.support import brokers, servers
from tests.support.brokers import Broker
from tests.support.processes import Processes
from tests.support.recorder import Recorder

PRELUDE = """\
from datetime import timedelta
from callqueue import Concurrency, FixedWindow, Retry, Rule, SlidingWindow, TokenBucket
"""


@pytest.fixture(autouse=True)
def announced_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Without workers, what is to be announced is announced here, at once; how it is sent else."""
    from celery import current_app

    from callqueue import broker

    sends = broker.send_beside
    if "processes" not in request.fixturenames:
        here = lambda name, args, queue="": current_app.tasks[name](*args)  # noqa: E731
        monkeypatch.setattr(broker, "send_beside", here)
    return sends


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The vendor of calls made in this process: see tests.support.behaviour."""
    from callqueue.execution import wire
    from tests.support.behaviour import Vendor

    vendor = Vendor()
    monkeypatch.setattr(wire, "request", vendor.request)
    return vendor


@pytest.fixture
def no_queued_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test's module has a task under a rule that this test does not have."""
    from callqueue import QueuedTask
    from tests.celery_app import app

    for name, task in list(app.tasks.items()):
        if isinstance(task, QueuedTask):
            monkeypatch.delitem(app.tasks, name)


@pytest.fixture
def listen() -> Iterator[Callable[..., Any]]:
    """`listen("127.0.0.2", port=..., answer=...)`: a server that counts whoever connects."""
    from tests.support.peer import Listener

    with ExitStack() as stack:

        def at(*where: Any, **options: Any) -> Listener:
            opened = Listener(*where, **options)
            stack.callback(opened.close)
            return opened

        yield at


# By how many minutes the clock of the ledger's database was set before each test: where that is not
# 0, whatever takes ledger time for wall time, or wall time for ledger time, is wrong by as much.
SET_BY = {"postgresql": 0, "mariadb": 37, "sqlite": -37}


@pytest.fixture(autouse=True)
def clock_set_before(request: pytest.FixtureRequest) -> None:
    """The ledger has been moved before each test of tests/db, by CALLQUEUE_TEST_SET_BY minutes."""
    default = SET_BY[request.config.getoption("database")]
    minutes = float(os.environ.get("CALLQUEUE_TEST_SET_BY", default))
    has_database = bool({"db", "transactional_db"} & set(request.fixturenames))
    has_database |= request.node.get_closest_marker("django_db") is not None
    if not has_database:
        return
    from callqueue import tables
    from callqueue.ledger import ledger_time
    from callqueue.ledger.ledger_time import ROW

    if minutes and "db" in request.path.parts:
        request.getfixturevalue("_django_db_helper")
        moved = round(minutes * 60_000_000)
        tables.ledger_state("default").update_or_create(pk=ROW, defaults={"moved": moved})
    ledger_time.forget_readings(is_new=False)  # the last test's may have been moved


@pytest.fixture(scope="session")
def vendor_process() -> Iterator[Recorder]:
    with Recorder() as recorder:
        yield recorder


@pytest.fixture
def vendor(vendor_process: Recorder) -> Recorder:
    """The recording HTTP server, its record empty."""
    vendor_process.clear()
    return vendor_process


@pytest.fixture(params=brokers.KINDS)
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """Each broker in turn; `parametrize("broker", ["redis"], indirect=True)` chooses."""
    yield from _open_broker(request.param, request)


@pytest.fixture
def any_broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """One broker, the best there is."""
    kind = next((kind for kind in ("rabbitmq", "redis") if servers.answers(kind)), "filesystem")
    yield from _open_broker(kind, request)


def _open_broker(kind: str, request: pytest.FixtureRequest) -> Iterator[Broker]:
    if kind in servers.DEFAULTS and (refusal := servers.refusal(kind)):
        pytest.skip(f"{kind}: {refusal}")
    request.node.user_properties.append(("server", kind))
    with brokers.broker(kind) as opened:
        yield opened


@pytest.fixture
def processes(transactional_db: None, request: pytest.FixtureRequest) -> Iterator[Processes]:
    """Workers and dispensers on this test's broker (or any) and database."""
    name = "broker" if "broker" in request.fixturenames else "any_broker"
    started = Processes(request.getfixturevalue(name))
    yield started
    logs = started.logs()
    started.close()
    print(logs)


@pytest.fixture
def configure(processes: Processes, settings: Any) -> Callable[[str], None]:
    """`configure(source)`: settings as Python source, here and in what is started from now on."""
    return partial(configured, processes, settings)


def configured(processes: Processes, settings: Any, source: str) -> None:
    """Settings for this process and for those that `processes` starts from now on."""
    source = PRELUDE + source
    names: dict[str, object] = {}
    exec(source, names)
    processes.configure(source)
    for name, value in names.items():
        if name.isupper():
            setattr(settings, name, value)
