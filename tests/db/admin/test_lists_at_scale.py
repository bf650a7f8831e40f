"""Lists of many rows on PostgreSQL: what their statements read, filter by filter, as its plans say.
`make faults` has a million calls, and prints the time as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.urls import reverse

from callqueue import Rule
from callqueue.admin import lists
from tests.support.length import examples

CALLS = examples(20_000, 1_000_000)
AT_LENGTH = CALLS > 100_000
# In a small table, as much smaller: what is counted, and the next rows that are looked through.
COUNTED, NEAR = (1000, (5_000, 50_000)) if AT_LENGTH else (100, (200, 2_000))
# Rows that a page may read, of the two tables together, and blocks of 8 kB. A tenth of the calls is
# of a host that has been called no more.
MOST, BLOCKS = (200_000, 20_000) if AT_LENGTH else (6_000, 1_000)
LISTS = {
    "callqueue_callqueue": [
        "",
        *(f"status__exact={status}" for status in range(8)),
        *(f"rule__exact={rule}" for rule in ("payments", "rule3", "gone")),
        "rule__exact=payments&status__exact=4",
        "rule__exact=payments&status__exact=7",
        "rule__exact=rule3&status__exact=4",
        "rule__exact=rule3&status__exact=3&q=tenant-77",
        "rule__exact=rule3&status__exact=4&q=tenant-77",
        "rule__exact=rule3&status__exact=0&q=tenant-7",
        "q=17",
        "q=tenant",
        "q=tenant-77",
        "q=tenant-77&status__exact=4",
        "q=tenant-7777777",
        "q=01a20446-9308-7c99-9407-c4be62f2ffb5",
    ],
    "callqueue_callattempt": [
        "",
        "rule__exact=rule3",
        "rule__exact=gone",
        "outcome__exact=throttled",
        "outcome__exact=succeeded&rule__exact=rule3",
        "outcome__exact=open",
        "ended=1h",
        "ended=24h&outcome__exact=throttled",
        "q=tenant-77",
        "q=17",
    ],
}
CALLS_OF = """
INSERT INTO callqueue_callqueue (status, rule, queue, key, priority, cost, created_dt, due_at_dt,
 finished_at_dt, call_data, method, host, path, failed_count, throttled_count, last_attempt,
 error_message, ready, idempotency_key, callback_pending)
"""
ATTEMPTS_OF = """
INSERT INTO callqueue_callattempt (call_id, number, rule, key, queue, cost, calls, released_at,
 started_at, sent_at, finished_at, outcome, response_status, response_body, error_message, worker)
SELECT id, 1, rule, key, '', '1', 1, created_dt, created_dt, created_dt, created_dt,
"""
SEED = """
SELECT st, rule, '', key, 0, '1', at, at, CASE WHEN st > 2 THEN at END,
 '{}', CASE WHEN share < 0.003 THEN 'put' WHEN i % 2 = 0 THEN 'post' ELSE 'get' END,
 CASE WHEN share < 0.1 THEN 'old.example' ELSE 'api' || i % 25 || '.example' END,
 '/v1/things/' || i % 5000, 0, 0, 1, '', st = 0, gen_random_uuid(), false
FROM (SELECT i, i / COUNT.0 share, now() - (COUNT - i) * interval 'STEP s' AS at,
 CASE WHEN i % 1000 = 7 AND i < 0.03 * COUNT THEN 4 WHEN i % 500 = 1 AND i < 0.03 * COUNT THEN 7
  WHEN i > 0.94 * COUNT THEN 0 WHEN i % 700 = 3 THEN 4 WHEN i % 5000 = 4 THEN 5 ELSE 3 END st,
 CASE WHEN i < 0.03 * COUNT THEN 'payments' ELSE 'rule' || i % 25 END rule,
 CASE WHEN i % 3 = 0 THEN 'tenant-' || i % 4000 WHEN i < 0.3 * COUNT THEN 'hog' ELSE '' END AS key
 FROM generate_series(1, COUNT) i) x
"""
ATTEMPTS = """
 CASE WHEN status = 7 THEN 'lost' WHEN id % 900 = 5 THEN 'throttled' WHEN status = 4 THEN 'gave up' ELSE 'succeeded' END,
 CASE WHEN status = 7 THEN NULL WHEN id % 900 = 5 THEN 429 WHEN status = 4 THEN 402 ELSE 200 END, '', '', ''
FROM callqueue_callqueue WHERE status > 2
"""


# Few rules, of which one has nearly all, and combinations that are rare or not there at all.
RARE = """
SELECT CASE WHEN i % 10000 = 9 THEN 4 WHEN i > 0.5 * COUNT THEN 0 ELSE 3 END,
 CASE WHEN i % 10000 = 1 THEN 'rule1' WHEN i % 10000 = 2 AND RULES > 1 THEN 'rule2' ELSE 'default' END,
 '', '', 0, '1', at, at, CASE WHEN i <= 0.5 * COUNT THEN at END, '{}',
 CASE WHEN i % 2 = 0 THEN 'post' ELSE 'get' END, 'api', '/v1', 0, 0, 1, '', i > 0.5 * COUNT, gen_random_uuid(), false
FROM (SELECT i, now() - (COUNT - i) * interval 'STEP s' AS at FROM generate_series(1, COUNT) i) x
"""
RARE_ATTEMPTS = """
 CASE WHEN id % 20 = 0 THEN 'throttled' WHEN id % 21 = 0 THEN 'gave up' ELSE 'succeeded' END,
 CASE WHEN id % 20 = 0 THEN 429 WHEN id % 21 = 0 THEN 402 ELSE 200 END, '', '', ''
FROM callqueue_callqueue
"""
RARE_LISTS = {
    "callqueue_callqueue": [
        "status__exact=4",
        "status__exact=7",
        "rule__exact=rule1&status__exact=3",
        "rule__exact=default&status__exact=4",
        "rule__exact=gone",
    ],
    "callqueue_callattempt": [
        "outcome__exact=lost",
        "outcome__exact=succeeded",
        "rule__exact=gone",
        "ended=1h",
        "ended=24h&outcome__exact=lost",
    ],
}


def read_rows(plan: dict[str, Any]) -> int:
    """The rows that a plan took from tables and indexes."""
    own = 0
    if "Relation Name" in plan:
        passed = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
        own = round((passed + plan.get("Rows Removed by Index Recheck", 0)) * plan["Actual Loops"])
    return own + sum(read_rows(child) for child in plan.get("Plans", ()))


class Watched:
    """Has each statement on the app's tables explained as it runs."""

    def __init__(self) -> None:
        self.rows = self.blocks = self.statements = 0

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "callqueue_call" in sql and sql.lstrip("(").startswith(("SELECT", "WITH")):
            with connection.cursor() as cursor:
                cursor.cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", params)
                (found,) = cursor.cursor.fetchone()
            plan = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
            self.statements += 1
            self.rows += read_rows(plan)
            self.blocks += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        return execute(sql, params, many, context)


# by what the tables are: the calls, their attempts, and the lists that are looked at
TABLES = {
    "many": (SEED, ATTEMPTS, LISTS),
    "of one rule": (RARE.replace("RULES", "1"), RARE_ATTEMPTS, RARE_LISTS),
    "of two rules": (RARE.replace("RULES", "2"), RARE_ATTEMPTS, RARE_LISTS),
}


@pytest.fixture(scope="module", params=TABLES)
def lists_of(request: Any, django_db_setup: None, django_db_blocker: Any) -> Iterator[Any]:
    """The tables full, committed so that what is dead and visible is as in service: of two days and
    a half, however many there are.
    """
    if connection.vendor != "postgresql":
        pytest.skip("reads PostgreSQL's plans")
    calls, attempts, lists_of = TABLES[request.param]
    step = str(2.5 * 86_400 / CALLS)
    calls = calls.replace("COUNT", str(CALLS)).replace("STEP", step)
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        # each call was new once: what has gone left its room in the indexes of what is new
        cursor.execute(CALLS_OF + calls)
        cursor.execute("UPDATE callqueue_callqueue SET status = 0, ready = NOT ready")
        cursor.execute("DELETE FROM callqueue_callqueue")
        cursor.execute("VACUUM callqueue_callqueue")
        cursor.execute(CALLS_OF + calls)
        cursor.execute(ATTEMPTS_OF + attempts)
        cursor.execute("VACUUM ANALYZE callqueue_callqueue, callqueue_callattempt")
        yield lists_of
        cursor.execute("TRUNCATE callqueue_callqueue, callqueue_callattempt")


def test_any_filter_reads_little_more_than_what_it_shows(
    lists_of: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, root: Client, rules: Any
) -> None:
    """On the first page and on the second. PostgreSQL plans for any value, and takes none for rare:
    what is rare or not there is looked up.
    """
    monkeypatch.setattr(lists, "COUNTED", COUNTED)
    monkeypatch.setattr(lists, "NEAR", NEAR)
    rules(default=Rule(), payments=Rule(), **{f"rule{n}": Rule() for n in range(25)})
    wrong, explained = [], 0
    for table, queries in lists_of.items():
        address = reverse(f"admin:{table}_changelist")
        for query in queries:
            link = f"?{query}"
            for _ in range(2):
                watched = Watched()
                with connection.execute_wrapper(watched):
                    page = root.get(f"{address}{link}")
                assert page.status_code == 200, query
                explained += watched.statements
                if watched.rows > MOST or watched.blocks > BLOCKS:
                    wrong.append((link, watched.rows, watched.blocks))
                if AT_LENGTH:
                    began = time.perf_counter()
                    root.get(f"{address}{link}")
                    took = time.perf_counter() - began
                    print(f"{table}{link}: {1000 * took:.0f} ms, {watched.rows} rows")
                link = page.context["cl"].older
                if not link:
                    break
    assert explained > 2 * sum(map(len, lists_of.values()))
    assert wrong == []
