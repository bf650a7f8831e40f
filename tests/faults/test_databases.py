"""A PostgreSQL that crashes, disconnects, turns read-only, and comes back older than it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.db.models import Max

from callqueue.database import rows
from callqueue.models import CallAttempt, DispenserState
from tests.faults.stage import Stage, Status
from tests.support import private
from tests.support.brokers import Broker
from tests.support.fixtures import configured
from tests.support.processes import ROOT, Processes
from tests.support.recorder import Recorder
from tests.support.verdicts import never_over, verdict, wait_until

Length = Callable[[Any, Any], Any]
TEMPLATE = "callqueue_template"
WINDOW = 4.0


@pytest.fixture(scope="module")
def server() -> Iterator[private.Postgres]:
    with private.Postgres() as running:
        yield migrated(running)


def migrated(server: private.Postgres) -> private.Postgres:
    """The server, with a migrated database to copy from."""
    server.execute(f"CREATE DATABASE {TEMPLATE}")
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "CALLQUEUE_TEST_DATABASE": "postgresql",
        "CALLQUEUE_TEST_PG_URL": server.url,
        "CALLQUEUE_TEST_DB_NAME": TEMPLATE,
    }
    command = [sys.executable, "-m", "django", "migrate", "--run-syncdb", "--verbosity=0"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    return server


@pytest.fixture
def database(server: private.Postgres, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database of this test's; the server runs again afterwards, whatever the test did to it."""
    name = f"callqueue_{abs(hash(request.node.name)) % 10**9}"
    server.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
    yield name
    if server.process is None:
        server.start()
    server.execute("ALTER SYSTEM RESET ALL")
    server.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@pytest.fixture
def at(
    transactional_db: None,
    any_broker: Broker,
    vendor: Recorder,
    settings: Any,
    database: str,
    tmp_path: Path,
) -> Iterator[Callable[..., Stage]]:
    """`at(url, server)`: processes have their database at `url`, this one at the server."""
    processes, before = Processes(any_broker), dict(connection.settings_dict)

    def staged(url: str, direct: private.Postgres) -> Stage:
        processes.environment["CALLQUEUE_TEST_PG_URL"] = url
        processes.environment["CALLQUEUE_TEST_DB_NAME"] = database
        connection.close()
        own = {"HOST": "127.0.0.1", "PORT": str(direct.port), "USER": "postgres", "PASSWORD": ""}
        connection.settings_dict.update(own, NAME=database)
        return Stage(processes, vendor, partial(configured, processes, settings), tmp_path)

    yield staged
    print(processes.logs())
    processes.close()
    connection.close()
    connection.settings_dict.update(before)


@pytest.fixture
def stage(at: Callable[..., Stage], server: private.Postgres) -> Stage:
    return at(server.url, server)


@pytest.mark.parametrize("maker", ["worker", "run"])
def test_postgresql_crashes_and_comes_back(
    stage: Stage, server: private.Postgres, length: Length, maker: str
) -> None:
    """With answers in hand one keeps trying within its lease: nothing is repeated, or UNKNOWN."""
    stage.rule(total=15.0)
    worker = stage.worker(concurrency=2) if maker == "worker" else stage.run()
    dispenser = stage.dispenser() if maker == "worker" else worker
    in_hand = stage.send(2, path="/hold/d", method="post")
    stage.vendor.wait_for(2)
    server.stop()
    connection.close()
    stage.vendor.release()
    worker.wait_for_log("record_delayed")
    server.start()
    for call in in_hand:
        stage.wait_for_status(call, Status.DONE)
    stage.judge(unknown_allowed=False)
    for _ in range(length(1, 8)):
        for method in ("post", "put", "get"):
            stage.send(20, path="/delay?s=0.1", method=method)
        seen = stage.vendor.count()
        wait_until(lambda seen=seen: stage.vendor.count() > seen + 10, 30)
        server.stop()
        time.sleep(length(0.5, 3))
        server.start()
        connection.close()
    stage.wait_for_all(90)
    assert dispenser.is_alive()
    assert "database_away" in dispenser.log
    stage.judge(recovery=10)


def disconnect(server: private.Postgres, database: str) -> None:
    """All that are connected to it."""
    ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    server.execute(f"{ended} WHERE datname = '{database}'")
    connection.close()


@pytest.mark.slow
def test_the_database_is_read_only_for_a_while(
    stage: Stage, server: private.Postgres, database: str
) -> None:
    """As after a failover to a copy: nothing goes out that could not be written down."""
    stage.worker(concurrency=2)
    dispenser = stage.dispenser()
    stage.send(10)
    stage.vendor.wait_for(10)
    stage.wait_for_all()
    server.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    disconnect(server, database)
    dispenser.wait_for_log("cannot execute UPDATE in a read-only transaction")
    seen = stage.vendor.count()
    with pytest.raises(Exception, match="read-only"):
        stage.send(1)
    server.execute(f"ALTER DATABASE {database} RESET default_transaction_read_only")
    disconnect(server, database)
    assert stage.vendor.count() == seen
    stage.send(10)
    stage.wait_for_all()
    assert stage.judge(unknown_allowed=False) == {"DONE": 20}


def test_behind_pgbouncer_in_transaction_mode(
    at: Callable[..., Stage], server: private.Postgres, length: Length
) -> None:
    """Nothing of a session may be counted on."""
    with private.PgBouncer(server.port) as bouncer:
        stage = at(bouncer.url, server)
        stage.plant("before-socket", "child", "child")
        stage.worker(concurrency=3)
        dispensers = [stage.dispenser() for _ in range(2)]
        for method in ("post", "put", "get"):
            stage.send(length(60, 400), method=method)
        stage.wait_for_all(90)
        stage.judge()
        command = [sys.executable, "-m", "tests.support.permit_process", "20"]
        stage.processes.start("permits", command).wait_for_log("20 permits taken")
        permits = CallAttempt.objects.filter(call__method="permit")
        assert permits.filter(outcome="succeeded").count() == permits.count() == 20
        assert all(dispenser.is_alive() for dispenser in dispensers)
        for dispenser in dispensers:
            dispenser.kill()
        idle = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
        assert rows("default", idle) == [(0,)]


@pytest.mark.slow
def test_a_restored_backup_is_noticed_and_held(
    stage: Stage, server: private.Postgres, database: str
) -> None:
    """The ledger is older than what the dispenser wrote: every rule is held for its window."""
    stage.rule(20)  # calls a WINDOW
    source = (stage.processes.folder / "settings_with_sabotage.py").read_text("utf-8")
    stage.processes.configure(
        source.replace('"20/s"', f'"20/{WINDOW:g}s"'), name="settings_with_sabotage"
    )
    stage.worker(concurrency=2)
    dispenser = stage.dispenser()
    wait_until(_beats, 20)
    stage.send(40)
    server.execute(f"DROP DATABASE IF EXISTS {database}_backup")
    place = ["-h", "127.0.0.1", "-p", str(server.port), "-U", "postgres"]
    options = {"check": True, "capture_output": True, "timeout": 60}
    dump = subprocess.run([server.binaries / "pg_dump", *place, "-Fc", database], **options)
    wait_until(lambda: stage.vendor.count() >= 20, 20)
    beats = _beats()
    wait_until(lambda: _beats() != beats, 20)  # a sign of life that the backup does not know
    server.execute(f"UPDATE pg_database SET datallowconn = false WHERE datname = '{database}'")
    disconnect(server, database)
    server.execute(f"DROP DATABASE {database} WITH (FORCE)")
    # under another name first: a dispenser that finds half of it would write into it
    server.execute(f"CREATE DATABASE {database}_backup")
    restore = [server.binaries / "pg_restore", *place, "-d", f"{database}_backup"]
    subprocess.run(restore, input=dump.stdout, **options)
    server.execute(f"ALTER DATABASE {database}_backup RENAME TO {database}")
    dispenser.wait_for_log("ledger_went_back", timeout=40)
    doctor = json.loads(stage.processes.manage("callqueue_doctor", "--json").stdout)
    (ledger,) = [check for check in doctor["checks"] if check["name"] == "ledger"]
    assert not ledger["ok"] and "back" in ledger["detail"]
    stage.wait_for_all(60)
    arrivals = stage.vendor.arrivals()
    never_over([arrival.at for arrival in arrivals], 20, WINDOW)
    repeated = [arrival.idempotency_key for arrival in arrivals]
    with verdict():
        assert {one.query["call"] for one in arrivals} == {str(n) for n in range(40)}, "lost"
        # calls of the gap go again under the same key
        assert len(repeated) > len(set(repeated)) == 40


def _beats() -> Any:
    """When a dispenser gave its last sign of life."""
    return DispenserState.objects.aggregate(last=Max("seen_at"))["last"]
