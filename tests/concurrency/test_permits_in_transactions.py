"""Permits that are taken in transactions of their callers: all share one connection more."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction

import callqueue
from callqueue import Concurrency, NotNow, Rule, control, database
from callqueue.models import CallAttempt
from callqueue.permits import apart
from tests.support.waiters import waiting as waiting_rows

Rules = Callable[..., None]
THREADS, EACH = 20, 5

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="refused on SQLite"),
]


def connected() -> int:
    """How many connections this process has to the database, by the server's word."""
    [(count,)] = database.rows(
        "default",
        "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend'"
        if connection.vendor == "postgresql"
        else "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE()",
    )
    return int(count)


def in_threads(count: int, work: Callable[[], Any]) -> list[threading.Thread]:
    def run() -> None:
        try:
            work()
        finally:
            connection.close()

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_all_that_wait_in_transactions_share_one_connection(rules: Rules) -> None:
    """A hundred permits, of twenty threads: each has its own connection, and one more is there."""
    rules(r=Rule(limits=[Concurrency(1)]))
    granted: list[int] = []

    def take() -> None:
        for number in range(EACH):
            with transaction.atomic():
                CallAttempt.objects.first()
                try:
                    with callqueue.permit("r", wait=None if number % 2 else 0.2) as one:
                        granted.append(one.attempt_id)
                except NotNow:
                    pass

    before, most = connected(), 0
    threads = in_threads(THREADS, take)
    while any(thread.is_alive() for thread in threads):
        most = max(most, connected() - before)
        time.sleep(0.02)
    assert most <= THREADS + 1
    assert len(granted) >= THREADS * (EACH // 2)
    assert not waiting_rows().exists()
    assert not CallAttempt.objects.open().exists()
    wait_until(lambda: connected() == before)
    wait_until(lambda: "callqueue-permits" not in {one.name for one in threading.enumerate()})


def test_one_that_waits_for_its_callers_own_rows_keeps_no_other_waiting(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "PATIENCE", 1.0)
    monkeypatch.setattr(apart, "STUCK", 0.1)
    rules(r=Rule(), s=Rule())
    is_held, others_done = threading.Event(), threading.Event()

    def hold() -> None:
        with callqueue.permit("r") as permit, transaction.atomic():
            control.pause("default", "r", reason="mine")
            is_held.set()
            permit.hold(30, "429")
            assert others_done.wait(30)

    (holder,) = in_threads(1, hold)
    assert is_held.wait(30)
    wait_until(lambda: "default" in apart._keepers and apart._keepers["default"].is_stuck)
    with transaction.atomic(), callqueue.permit("s"):
        pass
    others_done.set()
    holder.join(30)
    wait_until(lambda: not apart._keepers)


def test_a_keeper_whose_connection_was_cut_takes_another(rules: Rules) -> None:
    rules(r=Rule())
    is_postgresql = connection.vendor == "postgresql"
    pid = "pg_backend_pid()" if is_postgresql else "CONNECTION_ID()"
    cut = apart._kept("default", lambda: database.rows("default", f"SELECT {pid}"))
    [(own,)] = cut.result(30)
    database.run(
        "default", f"SELECT pg_terminate_backend({own})" if is_postgresql else f"KILL {own}"
    )
    with transaction.atomic(), callqueue.permit("r"):
        pass
    assert CallAttempt.objects.filter(finished_at__isnull=False).count() == 1


def test_a_forked_child_has_a_keeper_of_its_own(rules: Rules) -> None:
    rules(r=Rule())
    with transaction.atomic(), callqueue.permit("r"):
        child = os.fork()
        if not child:
            status = 1
            try:
                assert not apart._keepers
                with apart._lock:
                    status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    with transaction.atomic(), callqueue.permit("r"):
        pass
    assert CallAttempt.objects.filter(finished_at__isnull=False).count() == 2
