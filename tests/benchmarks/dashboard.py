"""What operators wait for: the dashboard of 250 rules, a rule's page, lists, status and a call's
forecast over large tables.

In: how many rows each table has. Out: milliseconds of each page and command, medians. Rows are made in the database by the
hundred thousand; nothing is sent. Nothing is cached but by PostgreSQL: its own cache is what it is
after a vacuum.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.benchmarks.flat import _sql
from tests.benchmarks.report import say
from tests.benchmarks.stage import open_stage

ROUNDS = 7
RULES = ("pay", "read", "chat", "maps", "bulk", "day", "mail", "default")
SETTINGS = """
CALLQUEUE = {
    "ALLOWED_NETWORKS": ["127.0.0.0/8"],
    "RULES": {
        "pay": Rule(priority=5, limits=[SlidingWindow("100/s", name="account"), SlidingWindow("5/s", per="key")]),
        "read": Rule(limits=[SlidingWindow("100/s", name="account")]),
        "chat": Rule(limits=[SlidingWindow("50/m", per="key"), TokenBucket("20/s", burst=40)]),
        "maps": Rule(limits=[FixedWindow("250000/d", timezone="America/Los_Angeles"), Concurrency(8)]),
        "bulk": Rule(limits=[SlidingWindow("1000000/d")]),
        "day": Rule(limits=[SlidingWindow("300000/d"), SlidingWindow("1500/m")]),
        "mail": Rule(limits=[SlidingWindow("40000/h")]),
        "default": Rule(limits=[SlidingWindow("100/s")]),
        **{f"provider-{i}": Rule(limits=[SlidingWindow("10/s"), SlidingWindow("20000/d")]) for i in range(242)},
    },
}
"""
OTHERS = "'provider-' || i / 5 % 242"  # every fifth call's rule
# The lists' queries: what an operator asks for, alone and combined.
CALLS = ("status__exact=0", "status__exact=4", "rule__exact=pay", "q=k77", "q=api.example.com")
ATTEMPTS = ("", "rule__exact=chat", "outcome__exact=throttled")


def measure(rows: int) -> dict[str, Any]:
    """Milliseconds, by what was asked for, over `rows` calls and as many attempts."""
    with open_stage(SETTINGS):
        say(f"dashboard: making {rows:,} calls and as many attempts")
        fill(rows)
        say("dashboard: what a day in service leaves: its sums, and a pass of each rule")
        count_hour()
        count_day()
        release_of_each()
        return look()


def count_hour() -> None:
    """What a dispenser has counted of the last hour."""
    from django.utils import timezone

    from callqueue.database import to_us
    from callqueue.history import sums
    from callqueue.models import Summed

    since = to_us(timezone.now() - timedelta(hours=1))
    Summed.objects.update_or_create(
        pk=1, defaults={"until": since, "settled": to_us(timezone.now()) // 1_000_000}
    )
    while sums.add_up("default"):
        pass


def count_day() -> None:
    """What a dispenser would have counted of the day before that hour, by rule and quarter of an
    hour; without histograms, which nothing reads of so long ago.
    """
    from callqueue.history.sums import new_buckets

    began, none = "floor(extract(epoch FROM finished_at) / 900) * 900", new_buckets()
    _sql(
        "INSERT INTO callqueue_sum (rule, width, start, sent, done, failed, throttled, lost, waits, answers) "
        f"SELECT rule, 900, {began}, count(*), count(*), 0, 0, 0, '{none}', '{none}' FROM callqueue_callattempt "
        "WHERE finished_at < now() - interval '1 h' GROUP BY rule, 3 "
        "ON CONFLICT (rule, width, start) DO UPDATE SET sent = callqueue_sum.sent + excluded.sent"
    )
    _sql("VACUUM ANALYZE callqueue_sum")


def release_of_each() -> None:
    """A pass of every group of rules, each of one call, so that the ledger's tallies are kept."""
    from callqueue.dispatch.release_pass import ensure_states, release
    from callqueue.ledger import settings

    groups = settings.book_in_force("default").distinct_groups()
    ensure_states("default", [rule for group in groups for rule in group])
    for group in groups:
        release("default", group, batch=1)


def fill(rows: int) -> None:
    """Half of the calls wait; the others ended within the last day, a quarter of them in the last
    hour.
    """
    _make_calls(rows // 2, "0, true, NULL, 0", "0")
    ended = "3 + (i % 50 = 0)::int, false, now() - i % 1000 * {each}, 1"
    _make_calls(rows // 8, ended.format(each="interval '3.6 s'"), "1")
    _make_calls(rows - rows // 2 - rows // 8, ended.format(each="interval '86.4 s'"), "1")
    _make_attempts(rows // 4, "3600 s")
    _make_attempts(rows - rows // 4, "86000 s")
    _sql("VACUUM ANALYZE callqueue_callqueue, callqueue_callattempt")


def look() -> dict[str, Any]:
    """Each page, list and command as an operator asks for it."""
    from django.contrib.auth.models import User
    from django.test import Client, override_settings

    from callqueue.look import look as read
    from callqueue.management.commands.callqueue_status import as_json
    from callqueue.metrics import CallQueueCollector
    from callqueue.models import CallQueue

    client = Client()
    client.force_login(User.objects.create_superuser("operator"))
    last = {
        rule: CallQueue.objects.new().filter(rule=rule).order_by("due_at_dt").last()
        for rule in RULES
    }
    near = CallQueue.objects.new().filter(rule="day").order_by("due_at_dt")[1000]
    page = "/admin/callqueue/callqueue/dashboard/"
    asked: dict[str, Callable[[], Any]] = {
        "dashboard": lambda: _get(client, page),
        "the page of a rule": lambda: _get(client, f"{page}rule/?name=chat"),
        **{
            f"{title}, {query or 'all'}": (
                lambda model=model, query=query: _get(client, f"/admin/callqueue/{model}/?{query}")
            )
            for title, model, queries in (
                ("calls", "callqueue", CALLS),
                ("attempts", "callattempt", ATTEMPTS),
            )
            for query in queries
        },
        "metrics": lambda: list(CallQueueCollector().collect()),
        "callqueue_status --json": lambda: as_json(read("default")),
        "forecast, 1,000 calls ahead": near.forecast,
        **{f"forecast, last of {rule}": call.forecast for rule, call in last.items()},
    }
    with override_settings(ALLOWED_HOSTS=["*"]):
        return {name: {"what": name, "median_ms": _timed(ask)} for name, ask in asked.items()}


def _timed(ask: Callable[[], Any]) -> float:
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        ask()
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken)


def _get(client: Any, path: str) -> None:
    status = client.get(path).status_code
    if status != 200:
        raise AssertionError(f"{path}: {status}")


def _make_calls(count: int, state: str, attempts: str) -> None:
    """Calls of every rule in turn, of a thousand keys where the rule has limits per key; a fifth of
    them of the 242 others.
    """
    columns = (
        "status, ready, finished_at_dt, failed_count, last_attempt, rule, key, queue, priority, cost, created_dt, due_at_dt, "
        "call_data, method, host, path, throttled_count, error_message, callback_pending, reconcile_count, idempotency_key"
    )
    data = """'{"method": "post", "params": {"url": "https://api.example.com/v1/", "data": "' || repeat('x', 200) || '"}}'"""
    rules = f"CASE WHEN i % 5 = 3 THEN {OTHERS} ELSE (ARRAY{list(RULES)})[1 + i % {len(RULES)}] END"
    for start in range(0, count, 100_000):
        _sql(
            f"INSERT INTO callqueue_callqueue ({columns}) SELECT {state}, {attempts}, {rules}, "
            f"CASE WHEN i % {len(RULES)} IN (0, 2) THEN 'k' || i % 1000 ELSE '' END, '', "
            f"CASE WHEN i % {len(RULES)} = 0 THEN 5 ELSE 0 END, '1', now() - i * interval '1 ms', now() - i * interval '1 ms', "
            f"({data})::jsonb, 'post', 'api.example.com', '/v1/' || i % 1000, 0, '', false, 0, gen_random_uuid() "
            f"FROM generate_series({start}, {min(count, start + 100_000) - 1}) AS i"
        )


def _make_attempts(count: int, over: str) -> None:
    """Answered attempts spread evenly over this time: a fifth of them under the 242 others, four
    tenths under the rule of a million a day, the rest in turn.
    """
    listed = [*RULES, *["bulk"] * (len(RULES) - 2)]
    rules = f"CASE WHEN i % 5 = 3 THEN {OTHERS} ELSE (ARRAY{listed})[1 + i % {len(listed)}] END"
    _sql(
        "INSERT INTO callqueue_callattempt (call_id, number, rule, key, queue, cost, calls, released_at, started_at, sent_at, "
        "finished_at, outcome, response_status, response_body, error_message, worker) "
        f"SELECT 1000000000 + i, 1, {rules}, CASE WHEN i % {len(listed)} IN (0, 2) THEN 'k' || i % 1000 ELSE '' END, '', '1', 1, "
        "t - interval '0.3 s', t - interval '0.25 s', t - interval '0.2 s', t, 'succeeded', 200, '{\"ok\": true}', '', 'w' "
        f"FROM (SELECT i, now() - i * interval '{over}' / {count} AS t FROM generate_series(1, {count}) AS i) AS a"
    )
