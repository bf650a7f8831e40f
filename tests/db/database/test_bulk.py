"""Rows that are changed by their keys, and no more read than that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import connection

from callqueue import Rule, database
from callqueue.database import rows
from callqueue.models import CallAttempt
from tests.support.behaviour import release, send

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

    def read_without_an_index() -> int:
        sql = """SELECT COALESCE(SUM(seq_tup_read), 0) FROM pg_stat_xact_user_tables
            WHERE relname = 'callqueue_callattempt'"""
        return int(rows("default", sql)[0][0])

    before = read_without_an_index()
    changed = [{"pk": attempt.pk, "worker": "w"} for attempt in newest]
    database.update_free(CallAttempt, "default", changed, "t.finished_at IS NULL")
    database.update_each(CallAttempt, "default", changed, "t.finished_at IS NULL")
    assert read_without_an_index() - before < MANY
    assert CallAttempt.objects.filter(worker="w").count() == count


@pytest.mark.django_db
def test_rows_are_changed_by_what_they_are_now_and_counted(rules: Callable[..., None]) -> None:
    """Each with its own values, those that the fence lets through; what is deleted, too."""
    rules(r=Rule())
    for _ in range(4):
        send("r")
    release()
    pks = list(CallAttempt.objects.order_by("pk").values_list("pk", flat=True))
    mine = CallAttempt.objects.filter(pk__in=pks[:3])
    mine.update(worker="me", key="same")
    CallAttempt.objects.filter(pk=pks[2]).update(finished_at=database.clock("default"))
    records = [{"pk": pk, "worker": "me", "key": f"{n or 'same'}"} for n, pk in enumerate(pks)]

    def change(where: str) -> int:
        return database.update_each(CallAttempt, "default", records, where, unchanged="worker")

    assert change("t.finished_at IS NULL") == 2
    keys = CallAttempt.objects.order_by("pk").values_list("key", flat=True)
    assert list(keys) == ["same", "1", "same", ""]
    assert change("") == 3
    assert list(keys.all()) == ["same", "1", "2", ""]
    free = "t.worker = %s"
    assert database.update_free(CallAttempt, "default", records, free, ["nobody"]) == 0
    assert database.delete_each(CallAttempt, "default", [*pks[:2], pks[-1] + 1]) == 2
    assert database.delete_each(CallAttempt, "default", []) == 0
    assert list(CallAttempt.objects.order_by("pk").values_list("pk", flat=True)) == pks[2:]
