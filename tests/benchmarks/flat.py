"""Whether a pass costs the same whatever waits: pairs of rules that differ in one size, their
passes measured in turn.

In: how many calls, keys and counted attempts the larger of each pair has. Out: medians of time and
statements, by pair. Rows are made in the database by the hundred thousand; nothing is sent.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from tests.benchmarks.report import say
from tests.benchmarks.stage import open_stage

BATCH, PASSES, WARM, SMALL = 20, 50, 15, 1000
WORKSPACE = """'{"workspace":"w' || i %% %d || '"}'"""
TOKENS = '{"calls": 1, "tokens": 100}'
LIMITS = {
    "backlog": 'limits=[SlidingWindow("100000/s")]',
    "keys": 'limits=[SlidingWindow("1000/s", per="key")]',
    "window": 'limits=[SlidingWindow("1000000/d")]',
    "named": 'limits=[SlidingWindow("1000/d", per="workspace")]',
    "tokens": 'limits=[SlidingWindow("900000000/d", unit="tokens")]',
    "settled": 'limits=[SlidingWindow("900000000/d", unit="tokens")], settle="callqueue.outcome.Succeeded"',
    "used": 'limits=[SlidingWindow("1000/d", per="key")]',
    "many": 'limits=[SlidingWindow("5000/d", per="workspace")]',
    "open": 'limits=[SlidingWindow("1000000/d")]',
    "batch": 'limits=[SlidingWindow("100000/s")]',
}
RULES = "".join(
    f'"{name}-{size}": Rule({limits}), '
    for name, limits in LIMITS.items()
    for size in ("small", "large")
)
SETTINGS = f'CALLQUEUE = {{"ALLOWED_NETWORKS": ["127.0.0.0/8"], "RULES": {{{RULES}}}}}'


def measure(waiting: int, keys: int, counted: int) -> dict[str, Any]:
    """The pairs: calls waiting, keys waiting, attempts in a window of a day, calls that a pass
    releases.
    """
    with open_stage(SETTINGS):
        say(f"flat: making {waiting:,} calls, {keys:,} keys and {counted:,} attempts")
        make_calls("backlog-small", SMALL, "''")
        make_calls("backlog-large", waiting, "''")
        make_calls("keys-small", 300 * 10, "'k' || i % 300")
        make_calls("keys-large", keys * 10, f"'k' || i % {keys}")
        for rule in ("window-small", "window-large", "batch-small", "batch-large"):
            make_calls(rule, 70 * BATCH if "batch" not in rule else 30_000, "''")
        _make_attempts("window-small", SMALL)
        _make_attempts("window-large", counted)
        for rule, attempts in (("named-small", SMALL), ("named-large", counted)):
            _make_attempts(rule, attempts, key=WORKSPACE % 400)
            make_calls(rule, 20 * 400, WORKSPACE % 400)
        for rule, attempts in (("tokens-small", SMALL), ("tokens-large", counted)):
            _make_attempts(rule, attempts, cost=TOKENS)
            _make_attempts(rule.replace("tokens", "settled"), attempts, cost=TOKENS)
            for name in (rule, rule.replace("tokens", "settled")):
                make_calls(name, 70 * BATCH, "''", cost=TOKENS)
        for rule, keys_used in (("used-small", 1), ("used-large", counted // 1000)):
            _make_attempts(rule, 1000 * keys_used, key=f"'k' || i % {keys_used}")
            make_calls(rule, 20 * keys_used, f"'k' || i % {keys_used}")
            make_calls(rule, 70 * BATCH, "'free' || i % 7")
        for rule, workspaces in (("many-small", 1000), ("many-large", 4000)):
            _make_attempts(rule, counted, key=WORKSPACE % workspaces)
            make_calls(rule, 4 * workspaces, WORKSPACE % workspaces)
        for rule, attempts in (("open-small", SMALL), ("open-large", counted)):
            _make_attempts(rule, attempts, is_open=True)
            make_calls(rule, 70 * BATCH, "''")
        _sql("VACUUM ANALYZE callqueue_callqueue, callqueue_callattempt")
        told = {
            "backlog": f"{waiting:,} calls waiting, against {SMALL:,}",
            "keys": f"{keys:,} keys with calls waiting, against 300",
            "window": f"{counted:,} attempts in a day's window, against {SMALL:,}",
            "named": f"{counted:,} attempts under 1000/d per workspace, against {SMALL:,}",
            "tokens": f"{counted:,} attempts under 900M tokens/d, against {SMALL:,}",
            "settled": f"{counted:,} attempts under settled tokens, against {SMALL:,}",
            "used": f"{counted // 1000} keys that used up 1000/d, calls waiting, against 1",
            "many": "4,000 workspaces under 5000/d, against 1,000",
            "open": f"{counted:,} open attempts, against {SMALL:,}",
            "batch": "500 calls released, against 20 (statements)",
        }
        return {
            name: {"what": what, **_pair(name, BATCH, 500 if name == "batch" else BATCH)}
            for name, what in told.items()
        }


def _pair(name: str, small: int, large: int) -> dict[str, Any]:
    from callqueue.dispatch.release_pass import ensure_states

    rules = {f"{name}-small": small, f"{name}-large": large}
    ensure_states("default", list(rules))
    taken: dict[str, list[tuple[float, int]]] = {rule: [] for rule in rules}
    for number in range(PASSES):
        for rule, batch in rules.items():
            one = _pass(rule, batch, is_warm=number >= WARM)
            if number >= WARM:
                taken[rule].append(one)
    times = [
        statistics.median(seconds * 1000 for seconds, _ in passes) for passes in taken.values()
    ]
    statements = [statistics.median(count for _, count in passes) for passes in taken.values()]
    say(
        f"  {name}: {times[0]:.2f} and {times[1]:.2f} ms, {statements[0]:.0f} and {statements[1]:.0f} statements"
    )
    return {
        "small_ms": times[0],
        "large_ms": times[1],
        "ratio": times[1] / times[0],
        "small_statements": statements[0],
        "large_statements": statements[1],
    }


def _pass(rule: str, batch: int, *, is_warm: bool) -> tuple[float, int]:
    """Seconds and statements of one pass; what it released is answered afterwards."""
    from django.db import connection

    from callqueue.dispatch.release_pass import release

    count = 0

    def counted(execute: Any, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        return execute(*arguments)

    with connection.execute_wrapper(counted):
        began = time.perf_counter()
        done = release("default", [rule], batch=batch)
        seconds = time.perf_counter() - began
    if is_warm and len(done.released) < batch:
        raise AssertionError(
            f"{rule}: released {len(done.released)} of {batch}: {done.opens_in=} {done.next_look=}"
        )
    _sql(
        "UPDATE callqueue_callqueue SET status = 3, finished_at_dt = clock_timestamp() WHERE status = 1"
    )
    answered = "finished_at = clock_timestamp() - interval '2s', outcome = 'succeeded'"
    _sql(
        f"UPDATE callqueue_callattempt SET {answered} WHERE finished_at IS NULL AND lease_until < now() + interval '30 min'"
    )
    return seconds, count


def make_calls(rule: str, count: int, key: str, cost: str = "1") -> None:
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
    own["cost"] = f"CAST('{cost}' AS jsonb)"
    listed, selected = (
        ", ".join(f'"{n}"' for n in names),
        ", ".join(own.get(n, f'"{n}"') for n in names),
    )
    for start in range(0, count, 100_000):
        numbers = f"generate_series({start + 1}, {min(count, start + 100_000)}) AS i"
        copied = f"SELECT {selected} FROM callqueue_callqueue, {numbers} WHERE id = {call.pk}"
        _sql(f"INSERT INTO callqueue_callqueue ({listed}) {copied}")
    _sql(f"DELETE FROM callqueue_callqueue WHERE id = {call.pk}")


def _make_attempts(
    rule: str, count: int, *, key: str = "''", cost: str = "1", is_open: bool = False
) -> None:
    """Answered attempts, spread over the last 20 hours; or open ones, begun just now."""
    ends = "NULL, NULL, ''" if is_open else "t, t, 'succeeded'"
    _sql(
        "INSERT INTO callqueue_callattempt (call_id, number, rule, key, queue, cost, calls, released_at, started_at, sent_at, "
        "finished_at, outcome, response_status, response_body, error_message, worker, lease_until) "
        f"SELECT 1000000000 + i, 1, '{rule}', {key}, '', CAST('{cost}' AS jsonb), 1, t, t, {ends}, 200, '', '', '', "
        "clock_timestamp() + interval '1 hour' "
        f"FROM (SELECT i, clock_timestamp() - i * interval '72000 s' / {count} AS t FROM generate_series(1, {count}) AS i) AS a"
    )


def _sql(statement: str) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(statement)
