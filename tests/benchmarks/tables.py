"""Large tables: whether a pass costs the same whatever waits, and what operators wait for.

Rows are made in the database by the hundred thousand; nothing is sent. Nothing is cached but by
PostgreSQL: its own cache is what it is after a vacuum.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.benchmarks.stage import open_stage, say, sql, timed

BATCH, PASSES, WARM, SMALL = 20, 50, 15, 1000
LIMITS = {
    "backlog": 'SlidingWindow("100000/s")',
    "keys": 'SlidingWindow("1000/s", per="key")',
    "window": 'SlidingWindow("1000000/d")',
    "used": 'SlidingWindow("1000/d", per="key")',
    "open": 'SlidingWindow("1000000/d")',
}
PAIRS = "".join(
    f'"{name}-{size}": Rule(limits=[{limit}]), '
    for name, limit in LIMITS.items()
    for size in ("small", "large")
)


def flat(options: Any) -> list[list[str]]:
    """Pairs of rules that differ in one size; their passes are measured in turn."""
    waiting, keys, counted = options.waiting, options.keys, options.counted
    with open_stage(f'CALLQUEUE = {{"ALLOWED_NETWORKS": ["127.0.0.0/8"], "RULES": {{{PAIRS}}}}}'):
        say(f"flat: making {waiting:,} calls, {keys:,} keys and {counted:,} attempts")
        make_calls("backlog-small", SMALL, "''")
        make_calls("backlog-large", waiting, "''")
        make_calls("keys-small", 300 * 10, "'k' || i % 300")
        make_calls("keys-large", keys * 10, f"'k' || i % {keys}")
        for size, attempts in (("small", SMALL), ("large", counted)):
            used_up = attempts // 1000
            make_attempts(attempts, f"'window-{size}'", "''")
            make_attempts(attempts, f"'open-{size}'", "''", is_open=True)
            make_attempts(1000 * used_up, f"'used-{size}'", f"'k' || i % {used_up}")
            make_calls(f"used-{size}", 20 * used_up, f"'k' || i % {used_up}")
            make_calls(f"used-{size}", 70 * BATCH, "'free' || i % 7")
            for name in ("window", "open"):
                make_calls(f"{name}-{size}", 70 * BATCH, "''")
        sql("VACUUM ANALYZE callqueue_callqueue, callqueue_callattempt")
        told = {
            "backlog": f"{waiting:,} calls waiting, against {SMALL:,}",
            "keys": f"{keys:,} keys with calls waiting, against 300",
            "window": f"{counted:,} attempts in a day's window, against {SMALL:,}",
            "used": f"{counted // 1000} keys that used up 1000/d, calls waiting, against 1",
            "open": f"{counted:,} open attempts, against {SMALL:,}",
        }
        rows = [[what, *_pair(name)] for name, what in told.items()]
    return [["a pass, median", "small ms", "large ms", "ratio"], *rows]


def _pair(name: str) -> list[str]:
    from callqueue.dispatch.release_pass import ensure_state_rows

    taken: dict[str, list[float]] = {f"{name}-small": [], f"{name}-large": []}
    ensure_state_rows("default", list(taken))
    for number in range(PASSES):
        for rule, times in taken.items():
            took = _pass(rule, is_warm=number >= WARM)
            if number >= WARM:
                times.append(took)
    small, large = map(statistics.median, taken.values())
    say(f"  {name}: {small:.2f} and {large:.2f} ms")
    return [f"{small:.2f}", f"{large:.2f}", f"{large / small:.2f}"]


def _pass(rule: str, *, is_warm: bool) -> float:
    """Milliseconds of one pass; what it released is answered afterwards."""
    from callqueue.dispatch.release_pass import release

    done: list[Any] = []
    took = timed(lambda: done.append(release("default", [rule], batch=BATCH)))
    if is_warm and len(done[0].released) < BATCH:
        raise AssertionError(f"{rule}: released {len(done[0].released)}: {done[0].next_look=}")
    sql(
        "UPDATE callqueue_callqueue SET status = 3, finished_at_dt = clock_timestamp() WHERE status = 1"
    )
    answered = "finished_at = clock_timestamp() - interval '2s', outcome = 'succeeded'"
    sql(
        f"UPDATE callqueue_callattempt SET {answered} WHERE finished_at IS NULL AND lease_until < now() + interval '30 min'"
    )
    return took


def make_calls(rule: str, count: int, key: str) -> None:
    """Copies of one call that was sent in the ordinary way, under keys that are SQL of `i`."""
    from callqueue.models import CallQueue

    call = CallQueue.objects.send(
        {"method": "post", "params": {"url": "http://127.0.0.1/", "data": "x" * 200}}, rule=rule
    )
    assert call is not None
    names = [field.column for field in CallQueue._meta.concrete_fields if field.name != "id"]
    later = "due_at_dt + i * interval '1 us'"
    own = {"key": key, "idempotency_key": "gen_random_uuid()", "due_at_dt": later}
    listed = ", ".join(f'"{name}"' for name in names)
    selected = ", ".join(own.get(name, f'"{name}"') for name in names)
    for start in range(0, count, 100_000):
        numbers = f"generate_series({start + 1}, {min(count, start + 100_000)}) AS i"
        copied = f"SELECT {selected} FROM callqueue_callqueue, {numbers} WHERE id = {call.pk}"
        sql(f"INSERT INTO callqueue_callqueue ({listed}) {copied}")
    sql(f"DELETE FROM callqueue_callqueue WHERE id = {call.pk}")


def make_attempts(
    count: int, rule: str, key: str, *, over: str = "72000 s", is_open: bool = False
) -> None:
    """Answered attempts, spread over that time until now; or open ones, begun just now."""
    ends = "NULL, NULL, ''" if is_open else "t - interval '0.2 s', t, 'succeeded'"
    sql(
        "INSERT INTO callqueue_callattempt (call_id, number, rule, key, queue, cost, calls, released_at, started_at, sent_at, "
        "finished_at, outcome, response_status, response_body, error_message, worker, lease_until) "
        f"SELECT 1000000000 + i, 1, {rule}, {key}, '', '1', 1, t - interval '0.3 s', t - interval '0.25 s', {ends}, "
        "200, '{\"ok\": true}', '', 'w', clock_timestamp() + interval '1 hour' "
        f"FROM (SELECT i, clock_timestamp() - i * interval '{over}' / {count} AS t FROM generate_series(1, {count}) AS i) AS a"
    )


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
# The lists' queries: what an operator asks for, alone and combined.
LISTS = ("status__exact=0", "status__exact=4", "rule__exact=pay", "q=k77", "q=api.example.com")


def dashboard(options: Any) -> list[list[str]]:
    """Pages and commands of a service that has its sums and has made a pass of each rule."""
    with open_stage(SETTINGS):
        say(f"dashboard: making {options.rows:,} calls and as many attempts")
        _fill(options.rows)
        _count()
        _release_of_each()
        rows = [[what, f"{took:.0f}"] for what, took in _looks().items()]
    return [["as many attempts, 250 rules", "median ms"], *rows]


def _fill(rows: int) -> None:
    """Half of the calls wait; a quarter of the others ended in the last hour, the rest that day."""
    _make_mixed_calls(rows // 2, "0, true, NULL, 0", "0")
    ended = "3 + (i % 50 = 0)::int, false, now() - i % 1000 * {each}, 1"
    _make_mixed_calls(rows // 8, ended.format(each="interval '3.6 s'"), "1")
    _make_mixed_calls(rows - rows // 2 - rows // 8, ended.format(each="interval '86.4 s'"), "1")
    # four tenths of the attempts are of the rule of a million a day
    listed = [*RULES, *["bulk"] * (len(RULES) - 2)]
    for count, over in ((rows // 4, "3600 s"), (rows - rows // 4, "86000 s")):
        make_attempts(count, _rules(listed), _keys(len(listed)), over=over)
    sql("VACUUM ANALYZE callqueue_callqueue, callqueue_callattempt")


def _rules(listed: Any) -> str:
    """These rules in turn, every fifth row one of the 242 others."""
    others, array = "'provider-' || i / 5 % 242", list(listed)
    return f"CASE WHEN i % 5 = 3 THEN {others} ELSE (ARRAY{array})[1 + i % {len(array)}] END"


def _keys(count: int) -> str:
    """A thousand keys, where the rule has limits per key."""
    return f"CASE WHEN i % {count} IN (0, 2) THEN 'k' || i % 1000 ELSE '' END"


def _make_mixed_calls(count: int, state: str, attempts: str) -> None:
    columns = (
        "status, ready, finished_at_dt, failed_count, last_attempt, rule, key, queue, priority, cost, created_dt, due_at_dt, "
        "call_data, method, host, path, throttled_count, error_message, callback_pending, reconcile_count, idempotency_key"
    )
    data = """'{"method": "post", "params": {"url": "https://api.example.com/v1/", "data": "' || repeat('x', 200) || '"}}'"""
    for start in range(0, count, 100_000):
        sql(
            f"INSERT INTO callqueue_callqueue ({columns}) SELECT {state}, {attempts}, {_rules(RULES)}, {_keys(len(RULES))}, '', "
            f"CASE WHEN i % {len(RULES)} = 0 THEN 5 ELSE 0 END, '1', now() - i * interval '1 ms', now() - i * interval '1 ms', "
            f"({data})::jsonb, 'post', 'api.example.com', '/v1/' || i % 1000, 0, '', false, 0, gen_random_uuid() "
            f"FROM generate_series({start}, {min(count, start + 100_000) - 1}) AS i"
        )


def _count() -> None:
    """What a dispenser would have counted of a day, of all but its last hour roughly."""
    from django.utils import timezone

    from callqueue.database import to_us
    from callqueue.history import sums
    from callqueue.models import Summed

    now = timezone.now()
    until, settled = to_us(now - timedelta(hours=1)), to_us(now) // 1_000_000
    Summed.objects.update_or_create(pk=1, defaults={"until": until, "settled": settled})
    while sums.add_up("default"):
        pass
    began, none = "floor(extract(epoch FROM finished_at) / 900) * 900", sums.new_buckets()
    sql(
        "INSERT INTO callqueue_sum (rule, width, start, sent, done, failed, throttled, lost, waits, answers) "
        f"SELECT rule, 900, {began}, count(*), count(*), 0, 0, 0, '{none}', '{none}' FROM callqueue_callattempt "
        "WHERE finished_at < now() - interval '1 h' GROUP BY rule, 3 "
        "ON CONFLICT (rule, width, start) DO UPDATE SET sent = callqueue_sum.sent + excluded.sent"
    )
    sql("VACUUM ANALYZE callqueue_sum")


def _release_of_each() -> None:
    """A pass of every group of rules, each of one call, so that the ledger's tallies are kept."""
    from callqueue.dispatch.release_pass import ensure_state_rows, release
    from callqueue.ledger import settings

    groups = settings.book_in_force("default").distinct_groups()
    ensure_state_rows("default", [rule for group in groups for rule in group])
    for group in groups:
        release("default", group, batch=1)


def _looks() -> dict[str, float]:
    """Each page, list and command as an operator asks for it."""
    from django.contrib.auth.models import User
    from django.test import Client, override_settings

    from callqueue.look import look
    from callqueue.management.commands.callqueue_status import as_json
    from callqueue.metrics import CallQueueCollector
    from callqueue.models import CallQueue

    client, calls = Client(), "/admin/callqueue/callqueue/"
    client.force_login(User.objects.create_superuser("operator"))

    def get(path: str) -> None:
        if (status := client.get(path).status_code) != 200:
            raise AssertionError(f"{path}: {status}")

    asked: dict[str, Callable[[], Any]] = {
        "dashboard": lambda: get(f"{calls}dashboard/"),
        "the page of a rule": lambda: get(f"{calls}dashboard/rule/?name=chat"),
        **{f"calls, {query}": lambda query=query: get(f"{calls}?{query}") for query in LISTS},
        "metrics": lambda: list(CallQueueCollector().collect()),
        "callqueue_status --json": lambda: as_json(look("default")),
    }
    for rule in RULES:
        last = CallQueue.objects.new().filter(rule=rule).order_by("due_at_dt").last()
        asked[f"forecast, last of {rule}"] = last.forecast
    with override_settings(ALLOWED_HOSTS=["*"]):
        return {
            name: statistics.median(timed(ask) for _ in range(ROUNDS))
            for name, ask in asked.items()
        }
