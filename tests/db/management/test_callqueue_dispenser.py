"""callqueue_dispenser: once, for a while, and until it is told to stop; and what every command says
of servers that are away.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection

from callqueue import Rule, SlidingWindow, texts
from callqueue.dispatch import publisher
from callqueue.dispatch.dispenser import give_sign_of_life
from callqueue.ledger import ledger_time
from callqueue.models import CallQueue, DispenserState
from tests.celery_app import app
from tests.db.commands import run
from tests.support.behaviour import send
from tests.support.history import statuses
from tests.support.processes import ROOT

Rules = Callable[..., None]
Status = CallQueue.Status


def test_once_releases_what_may_go_now_of_the_rules_named(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[int] = []

    def publish(using: str, messages: Any) -> bool:
        published.extend(pk for _, some in messages for pk in some)
        return True

    monkeypatch.setattr(publisher, "publish", publish)
    rules(r=Rule(limits=[SlidingWindow("2/m")]), a=Rule(), b=Rule(), c=Rule())
    calls = [send(rule) for rule in ("a", "b", "c", "r", "r", "r")]
    ran = run("dispenser", "--once", "--rule", "a", "--rule", "b")
    assert (ran.code, ran.out) == (0, "released 2 calls\n")
    assert statuses(*calls[:3]) == [Status.DISPATCHED, Status.DISPATCHED, Status.NEW]
    assert run("dispenser", "--once").out == "released 3 calls\n"
    assert len(published) == 5
    assert DispenserState.objects.exists()


def test_once_says_that_the_broker_is_away_and_the_call_waits_on(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, or in the middle."""
    rules(r=Rule())
    call = send("r")
    assert app.conf.task_default_queue  # reads the configuration, where nobody has yet
    with monkeypatch.context() as patch:
        patch.setitem(app.conf.changes, "broker_url", "amqp://guest:guest@127.0.0.1:1//")
        began = time.monotonic()
        ran = run("dispenser", "--once")
    assert time.monotonic() - began < 10
    assert ran.code == 1
    assert ran.error.startswith("the broker is away: ")
    assert statuses(call) == [Status.NEW]

    def refuse(using: str, messages: Any) -> None:
        raise publisher.BrokerAway("no route to host (amqp://mq:5672//)")

    monkeypatch.setattr(publisher, "publish", refuse)
    ran = run("dispenser", "--once")
    assert ran.code == 1
    assert "the broker is away: no route to host (amqp://mq:5672//)" in ran.error


def test_a_health_check_knows_a_dispenser_of_this_host_from_others(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And blames none for a database that is away."""
    rules(r=Rule())
    assert run("dispenser", "--alive").code == 1
    give_sign_of_life("default", "elsewhere:1:ab", "steady")
    give_sign_of_life("default", f"{texts.host_name()}:1:ab", "beat")
    give_sign_of_life("default", f"{texts.host_name()}:1:ef", "worker", digest="ab")
    assert run("dispenser", "--alive").code == 1, "it would not be started again if it hung"
    give_sign_of_life("default", f"{texts.host_name()}:2:cd", "steady")
    DispenserState.objects.update(digest="ab")
    assert run("dispenser", "--alive").code == 0
    DispenserState.objects.update(seen_at=ledger_time.now("default") - timedelta(seconds=21))
    silent = run("dispenser", "--alive")
    assert silent.code == 1
    assert "for 21 s" in silent.error
    DispenserState.objects.update(seen_at=ledger_time.now("default"), digest="")
    assert run("dispenser", "--alive").code == 1, "it has ended"

    def away(*_: object) -> None:
        raise OperationalError("nobody there")

    monkeypatch.setattr(ledger_time, "now", away)
    checked = run("dispenser", "--alive")
    assert (checked.code, "nobody there" in checked.out) == (0, True)


@pytest.mark.django_db(transaction=True)
def test_it_ends_after_the_seconds_it_was_given(rules: Rules) -> None:
    rules(r=Rule())
    call = send("r")
    began = time.monotonic()
    ran = run("dispenser", "--for", "0.3")
    assert 0.3 <= time.monotonic() - began < 5
    assert ran.code == 0
    assert CallQueue.objects.get(pk=call.pk).status == Status.DISPATCHED


def test_a_signal_ends_it_while_the_database_is_away() -> None:
    command = [sys.executable, "-m", "django", "callqueue_dispenser"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=without_database(), **streams)
    try:
        assert process.stdout is not None
        said = iter(process.stdout.readline, "")
        assert any("database_away" in line for line in said)
        process.terminate()
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.communicate()


AWAY = [
    "dispenser --once", "cleanup", "status", "send {file}", "requeue", "cancel --dry-run",
    "pause default", "resume default", "schedule", "audit",
    "simulate --rule default --calls 5", "doctor",
]  # fmt: skip
ALL_AT_ONCE = """
import json, sys, threading, django
django.setup()
from tests.db.commands import run
said = {}
def ask(line):
    ran = run(*line.split())
    said[line] = ran.code, ran.out + ran.error
asked = [threading.Thread(target=ask, args=(line,)) for line in sys.argv[2:]]
for one in asked:
    one.start()
ask(sys.argv[1])
for one in asked:
    one.join()
print(json.dumps(said))
"""


def test_a_database_that_is_away_is_named_within_seconds(tmp_path: Path) -> None:
    """By every command. All at once: what each does is wait."""
    file = tmp_path / "calls"
    file.write_text('{"method": "get", "params": {"url": "https://api.example.com/"}}')
    lines = [line.format(file=file) for line in AWAY]
    command = [sys.executable, "-c", ALL_AT_ONCE, *lines]
    done = subprocess.run(
        command, cwd=ROOT, env=without_database(), capture_output=True, text=True, timeout=60
    )
    said = json.loads(done.stdout or "{}")
    assert set(said) == set(lines), done.stderr
    for line, (code, text) in said.items():
        assert (code, "database" in text) == (1, True), (line, text)
    assert "Traceback" not in done.stderr


def without_database() -> dict[str, str]:
    """An environment whose database is nowhere."""
    away = {
        "CALLQUEUE_TEST_PG_URL": "postgresql://postgres@127.0.0.1:1",
        "CALLQUEUE_TEST_MARIADB_URL": "mysql://root@127.0.0.1:1",
    }
    name = "/nowhere/at/all.sqlite3" if connection.vendor == "sqlite" else "nowhere"
    return {**os.environ, **away, "CALLQUEUE_TEST_DB_NAME": name, "PYTHONUNBUFFERED": "1"}


@pytest.fixture(autouse=True)
def handlers_of_signals_are_left_as_they_were() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    yield
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
