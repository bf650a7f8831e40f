"""Rows that are changed by their keys, and no more read than that."""

from __future__ import annotations

import pytest
from django.db import connection

from callqueue import database
from callqueue.database import rows
from callqueue.models import CallAttempt

MANY = 20_000


@pytest.mark.django_db
@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="others are told by which index")
@pytest.mark.parametrize("count", [1, 32])
def test_rows_that_are_not_changed_are_not_read(count: int) -> None:
    """The begin of a message would read every attempt that there is."""
    rows(
        "default",
        """INSERT INTO callqueue_callattempt (call_id, number, rule, key, queue, cost, calls, released_at,
        outcome, response_body, error_message, worker, finished_at)
        SELECT i, 1, 'r', '', '', '1', 1, NOW(), '', '', '', '', CASE WHEN i <= 19900 THEN NOW() END
        FROM generate_series(1, %s) i RETURNING 1""",
        [MANY],
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE callqueue_callattempt")
    newest = list(CallAttempt.objects.order_by("-pk")[:count])
    before = _read_in_turn()

    changed = [{"pk": attempt.pk, "worker": "w"} for attempt in newest]
    database.update_free(CallAttempt, "default", changed, "t.finished_at IS NULL")
    database.update_each(CallAttempt, "default", changed, "t.finished_at IS NULL")

    assert _read_in_turn() - before < MANY
    assert CallAttempt.objects.filter(worker="w").count() == count


def _read_in_turn() -> int:
    """Rows of attempts that this transaction has read without an index."""
    found = rows(
        "default",
        "SELECT seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'callqueue_callattempt'",
    )
    return int(found[0][0] or 0)
