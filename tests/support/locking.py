"""A host's transaction that holds rows while a test goes on, and statements that must not wait for
it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection, connections, transaction

from callqueue import database
from callqueue.models import CallQueue

PATIENCE = 30  # seconds after which a thread that waits for another one has lost it


@contextmanager
def held_by_a_host(*pks: int, first: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """Another connection's transaction has these calls' rows locked, and has done what `first`
    does.
    """
    has_them, may_end = threading.Event(), threading.Event()

    def host() -> None:
        try:
            with transaction.atomic():
                first()
                list(CallQueue.objects.select_for_update().filter(pk__in=pks).order_by("pk"))
                has_them.set()
                assert may_end.wait(PATIENCE)
                transaction.set_rollback(True)
        finally:
            connections.close_all()

    thread = threading.Thread(target=host, daemon=True)
    thread.start()
    assert has_them.wait(PATIENCE)
    try:
        yield
    finally:
        may_end.set()
        thread.join(PATIENCE)


@contextmanager
def waiting_for_nobody() -> Iterator[None]:
    """In this thread a statement that waits for a lock fails, after a second or two."""
    name, value = {
        "postgresql": ("lock_timeout", "'1500ms'"),
        "mysql": ("innodb_lock_wait_timeout", "2"),
    }[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION {name} = {value}")
    try:
        yield
    finally:
        connection.close()


def until_one_waits_for_a_lock() -> None:
    """Return once some statement waits for a row that another transaction has locked."""
    waiting = {
        "postgresql": "SELECT COUNT(*) FROM pg_locks WHERE NOT granted",
        "mysql": "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
    }[connection.vendor]
    end = time.monotonic() + PATIENCE
    while not database.rows("default", waiting)[0][0]:
        assert time.monotonic() < end, "nobody waits for a lock"
        time.sleep(
            0.15
        )  # MariaDB renews what it shows only where nobody asked for a tenth of a second
