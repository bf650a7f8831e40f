"""Whether a pass costs the same whatever waits: pairs of rules that differ in one size, their
passes measured in turn.

In: how many calls, keys and counted attempts the larger of each pair has. Out: medians of time, by
pair. Rows are made in the database by the hundred thousand; nothing is sent.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from tests.benchmarks.report import say
from tests.benchmarks.stage import open_stage

BATCH, PASSES, WARM, SMALL = 20, 50, 15, 1000
LIMITS = {
    "backlog": 'limits=[SlidingWindow("100000/s")]',
    "keys": 'limits=[SlidingWindow("1000/s", per="key")]',
    "window": 'limits=[SlidingWindow("1000000/d")]',
    "used": 'limits=[SlidingWindow("1000/d", per="key")]',
    "open": 'limits=[SlidingWindow("1000000/d")]',
}
RULES = "".join(
    f'"{name}-{size}": Rule({limits}), '
    for name, limits in LIMITS.items()
    for size in ("small", "large")
)
SETTINGS = f'CALLQUEUE = {{"ALLOWED_NETWORKS": ["127.0.0.0/8"], "RULES": {{{RULES}}}}}'


def measure(waiting: int, keys: int, counted: int) -> dict[str, Any]:
    """The pairs: calls waiting, keys waiting, attempts in a window of a day, used up keys, open ones."""
    with open_stage(SETTINGS):
        say(f"flat: making {waiting:,} calls, {keys:,} keys and {counted:,} attempts")
        make_calls("backlog-small", SMALL, "''")
        make_calls("backlog-large", waiting, "''")
        make_calls("keys-small", 300 * 10, "'k' || i % 300")
        make_calls("keys-large", keys * 10, f"'k' || i % {keys}")
        for rule in ("window-small", "window-large"):
            make_calls(rule, 70 * BATCH, "''")
        _make_attempts("window-small", SMALL)
        _make_attempts("window-large", counted)
        for rule, keys_used in (("used-small", 1), ("used-large", counted // 1000)):
            _make_attempts(rule, 1000 * keys_used, key=f"'k' || i % {keys_used}")
            make_calls(rule, 20 * keys_used, f"'k' || i % {keys_used}")
            make_calls(rule, 70 * BATCH, "'free' || i % 7")
        for rule, attempts in (("open-small", SMALL), ("open-large", counted)):
            _make_attempts(rule, attempts, is_open=True)
            make_calls(rule, 70 * BATCH, "''")
        _sql("VACUUM ANALYZE callqueue_callqueue, callqueue_callattempt")
        told = {
            "backlog": f"{waiting:,} calls waiting, against {SMALL:,}",
            "keys": f"{keys:,} keys with calls waiting, against 300",
            "window": f"{counted:,} attempts in a day's window, against {SMALL:,}",
            "used": f"{counted // 1000} keys that used up 1000/d, calls waiting, against 1",
            "open": f"{counted:,} open attempts, against {SMALL:,}",
        }
        return {name: {"what": what, **_pair(name)} for name, what in told.items()}


def _pair(name: str) -> dict[str, float]:
    from callqueue.dispatch.release_pass import ensure_states

    rules = [f"{name}-small", f"{name}-large"]
    ensure_states("default", rules)
    taken: dict[str, list[float]] = {rule: [] for rule in rules}
    for number in range(PASSES):
        for rule in rules:
            seconds = _pass(rule, is_warm=number >= WARM)
            if number >= WARM:
                taken[rule].append(seconds * 1000)
    small, large = map(statistics.median, taken.values())
    say(f"  {name}: {small:.2f} and {large:.2f} ms")
    return {"small_ms": small, "large_ms": large, "ratio": large / small}


def _pass(rule: str, *, is_warm: bool) -> float:
    """Seconds of one pass; what it released is answered afterwards."""
    from callqueue.dispatch.release_pass import release

    began = time.perf_counter()
    done = release("default", [rule], batch=BATCH)
    seconds = time.perf_counter() - began
    if is_warm and len(done.released) < BATCH:
        raise AssertionError(
            f"{rule}: released {len(done.released)}: {done.opens_in=} {done.next_look=}"
        )
    _sql(
        "UPDATE callqueue_callqueue SET status = 3, finished_at_dt = clock_timestamp() WHERE status = 1"
    )
    answered = "finished_at = clock_timestamp() - interval '2s', outcome = 'succeeded'"
    _sql(
        f"UPDATE callqueue_callattempt SET {answered} WHERE finished_at IS NULL AND lease_until < now() + interval '30 min'"
    )
    return seconds


def make_calls(rule: str, count: int, key: str) -> None:
    """Copies of one call that was sent in the ordinary way."""
    from callqueue.models import CallQueue

    call = CallQueue.objects.send(
        {"method": "post", "params": {"url": "http://127.0.0.1/", "data": "x" * 200}}, rule=rule
    )
    assert call is not None
    names = [field.column for field in CallQueue._meta.concrete_fields if field.name != "id"]
    own = {
        "key": key,
        "idempotency_key": "gen_random_uuid()",
        "due_at_dt": "due_at_dt + i * interval '1 us'",
    }
    listed, selected = (
        ", ".join(f'"{n}"' for n in names),
        ", ".join(own.get(n, f'"{n}"') for n in names),
    )
    for start in range(0, count, 100_000):
        numbers = f"generate_series({start + 1}, {min(count, start + 100_000)}) AS i"
        copied = f"SELECT {selected} FROM callqueue_callqueue, {numbers} WHERE id = {call.pk}"
        _sql(f"INSERT INTO callqueue_callqueue ({listed}) {copied}")
    _sql(f"DELETE FROM callqueue_callqueue WHERE id = {call.pk}")


def _make_attempts(rule: str, count: int, *, key: str = "''", is_open: bool = False) -> None:
    """Answered attempts, spread over the last 20 hours; or open ones, begun just now."""
    ends = "NULL, NULL, ''" if is_open else "t, t, 'succeeded'"
    _sql(
        "INSERT INTO callqueue_callattempt (call_id, number, rule, key, queue, cost, calls, released_at, started_at, sent_at, "
        "finished_at, outcome, response_status, response_body, error_message, worker, lease_until) "
        f"SELECT 1000000000 + i, 1, '{rule}', {key}, '', '1', 1, t, t, {ends}, 200, '', '', '', "
        "clock_timestamp() + interval '1 hour' "
        f"FROM (SELECT i, clock_timestamp() - i * interval '72000 s' / {count} AS t FROM generate_series(1, {count}) AS i) AS a"
    )


def _sql(statement: str) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(statement)
