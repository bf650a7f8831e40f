"""What the lists' indexes cost a call: PostgreSQL's time and WAL for the rows of a call on its way,
with all of them and without each, in turn within one run.

The way is five statements for many calls at once: inserted, released with its attempt, begun,
recorded, both rows. Microseconds differ from machine to machine; bytes of WAL hardly do.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from tests.benchmarks.flat import _sql
from tests.benchmarks.report import say
from tests.benchmarks.stage import open_stage

ALL = "all indexes"
LISTS = ("of_rule", "of_status", "keyed", "target", "idempotency_key", "unusual")
SETTINGS = "CALLQUEUE = {}"
# As `new_idempotency_key` makes them: by time, and random behind it.
UUID = """
    (lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0') || '7'
     || substr(md5(random()::text), 1, 3) || '8' || substr(md5(random()::text), 1, 15))::uuid
"""
WAY = (
    """
    INSERT INTO callqueue_callqueue (status, ready, failed_count, last_attempt, rule, key, queue,
     priority, cost, created_dt, due_at_dt, call_data, method, host, path, throttled_count,
     error_message, callback_pending, reconcile_count, idempotency_key)
    SELECT 0, true, 0, 0, 'rule' || i % 8, CASE WHEN i % 2 = 0 THEN 'tenant-' || i % 1000 ELSE '' END,
     '', 0, '1', now(), now(), '{{"method": "post"}}', 'post', 'api.example.com',
     '/v1/things/' || i, 0, '', false, 0, {uuid} FROM generate_series(1, {calls}) AS i
    """,
    """
    INSERT INTO callqueue_callattempt (call_id, number, rule, key, queue, cost, calls, released_at,
     outcome, response_body, error_message, worker)
    SELECT id, 1, rule, key, '', '1', 1, now(), '', '', '', '' FROM callqueue_callqueue WHERE status = 0
    """,
    "UPDATE callqueue_callqueue SET status = 1, ready = false, last_attempt = 1, dispatched_at_dt = now() WHERE status = 0",
    "UPDATE callqueue_callattempt SET started_at = now(), worker = 'w' WHERE finished_at IS NULL",
    """
    UPDATE callqueue_callattempt SET finished_at = now(), sent_at = now(), response_status = 200,
     outcome = CASE WHEN id % 100 = 0 THEN 'failed' ELSE 'succeeded' END WHERE finished_at IS NULL
    """,
    "UPDATE callqueue_callqueue SET status = 3, finished_at_dt = now() WHERE status = 1",
)


def measure(calls: int, rounds: int) -> dict[str, dict[str, float]]:
    """By what is left out: microseconds, bytes of WAL and bytes of index a call, medians."""
    variants = {ALL: (), **{f"without {one}": (one,) for one in LISTS}, "without these": LISTS}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    with open_stage(SETTINGS):
        made = _definitions()
        for number in range(rounds):
            for name, left_out in variants.items():
                say(f"indexes: round {number + 1} of {rounds}, {name}")
                found[name].append(_round(calls, [f"callqueue_{one}" for one in left_out], made))
    return {
        name: {what: statistics.median(one[what] for one in those) for what in those[0]}
        for name, those in found.items()
    }


def _round(calls: int, left_out: list[str], made: dict[str, str]) -> dict[str, float]:
    _sql("TRUNCATE callqueue_callqueue, callqueue_callattempt")
    for name in left_out:
        _sql(f"DROP INDEX {name}")
    _sql("CHECKPOINT")  # else pages are written whole once more, whenever one happens to come
    taken, wal = 0.0, 0
    for start in (True, False):  # the first thousands fill the tables, so that indexes have depth
        before, began = _one("SELECT pg_current_wal_insert_lsn()"), time.monotonic()
        for statement in WAY:
            _sql(statement.format(calls=calls, uuid=UUID))
        if not start:
            taken = time.monotonic() - began
            wal = int(_one(f"SELECT pg_current_wal_insert_lsn() - '{before}'::pg_lsn"))
    size = sum(
        int(_one(f"SELECT pg_indexes_size('{table}')"))
        for table in ("callqueue_callqueue", "callqueue_callattempt")
    )
    for name in left_out:
        _sql(made[name])
    return {"us": 1e6 * taken / calls, "wal": wal / calls, "bytes": size / calls / 2}


def _definitions() -> dict[str, str]:
    """How each index is made."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT indexname, indexdef FROM pg_indexes WHERE tablename LIKE 'callqueue_call%'"
        )
        return dict(cursor.fetchall())


def _one(statement: str) -> Any:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0]
