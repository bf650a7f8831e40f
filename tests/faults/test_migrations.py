"""Migrations forward and back on a full table while the application sends, and old code on new
tables.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.db.migrations.loader import MigrationLoader

from callqueue.models import CallAttempt, CallQueue
from tests.faults.test_handlers import age_them

Length = Callable[[Any, Any], Any]
LONGEST_WAIT = 2.0  # seconds that a send may wait for a migration


def migrations() -> list[str]:
    return sorted(
        name for app, name in MigrationLoader(connection).disk_migrations if app == "callqueue"
    )


@pytest.fixture
def migrated(transactional_db: None) -> Any:
    yield
    call_command("migrate", "callqueue", verbosity=0)


def test_forward_and_back_on_a_full_table_while_calls_are_sent(
    migrated: None, length: Length, settings: Any
) -> None:
    """To the first migration and back to the newest: no row is lost, and nobody waits for long."""
    names = migrations()
    age_them(length(20_000, 300_000))
    before = CallQueue.objects.count(), CallAttempt.objects.count()
    with Sending(old_model(names[0])) as sending:
        call_command("migrate", "callqueue", names[0], verbosity=0)
        call_command("migrate", "callqueue", verbosity=0)
        sending.wait_for_more(3)
    assert not sending.errors
    assert (CallQueue.objects.count() - sending.count, CallAttempt.objects.count()) == before
    assert sending.longest < LONGEST_WAIT, f"a send waited {sending.longest:.1f} s for a migration"
    newest = CallQueue.objects.order_by("-pk").first()
    assert newest is not None
    newest.refresh_from_db()
    assert newest.status == 0


def test_all_the_way_back_and_forward_again(migrated: None) -> None:
    call_command("migrate", "callqueue", "zero", verbosity=0)
    assert not [
        table for table in connection.introspection.table_names() if table.startswith("callqueue_")
    ]
    call_command("migrate", "callqueue", verbosity=0)
    assert CallQueue.objects.count() == 0


def test_old_code_runs_on_new_tables(migrated: None) -> None:
    """Whatever a migration has added has a default in the database, or may be empty: old senders
    know nothing of it.
    """
    for name in migrations():
        call = old_model(name).objects.create(
            rule="r", call_data={"method": "get", "params": {}}, ready=False
        )
        assert CallQueue.objects.get(pk=call.pk).status == CallQueue.Status.NEW


def old_model(migration: str) -> Any:
    """CallQueue as the code of that migration's time knew it."""
    return (
        MigrationLoader(connection)
        .project_state(("callqueue", migration))
        .apps.get_model("callqueue", "CallQueue")
    )


class Sending:
    """A thread that goes on inserting calls, as the oldest code would, and notes how long it had to
    wait for that.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.errors = model, list[BaseException]()
        self.longest, self.count = 0.0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> Sending:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def wait_for_more(self, calls: int) -> None:
        wanted, deadline = self.count + calls, time.monotonic() + 20
        while self.count < wanted and not self.errors and time.monotonic() < deadline:
            time.sleep(0.02)

    def _send(self) -> None:
        try:
            while not self._stop.wait(0.01):
                began = time.monotonic()
                with transaction.atomic():
                    self.model.objects.create(
                        rule="r", call_data={"method": "get", "params": {}}, ready=False
                    )
                self.longest = max(self.longest, time.monotonic() - began)
                self.count += 1
        except BaseException as error:
            self.errors.append(error)
        finally:
            connection.close()
