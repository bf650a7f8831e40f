"""The connection that a worker keeps from one message to the next."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection

from callqueue import database
from callqueue.database.connections import kept
from callqueue.models import RuleState


@pytest.fixture(autouse=True)
def _nothing_is_kept(transactional_db: None) -> Iterator[None]:
    """No connection is kept for what comes after."""
    yield
    for one in kept.pop((os.getpid(), "default"), []):
        one.close()


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="keeps no connection")
def test_a_connection_outlives_the_thread_that_kept_it() -> None:
    """gevent has a greenlet for each message, so what a thread keeps for itself would be kept for
    nobody.
    """
    seen: list[Any] = []

    def use() -> None:
        with database.kept_connection("default"):
            assert RuleState.objects.count() >= 0
            seen.append(connection.connection)

    for _ in range(3):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join(20)
    assert len(seen) == 3
    assert seen[0] is seen[1] is seen[2]
