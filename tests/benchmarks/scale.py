"""A day's million calls, end to end, judged by what arrived at the API.

In: the share of the full size. Out: time, CPU by role, memory of each process over
time, sizes of the tables; no limit may have been exceeded in any window, and every call must have
arrived exactly once, or the run fails.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.benchmarks import machine
from tests.benchmarks.report import quantiles, say
from tests.benchmarks.stage import Stage, open_stage
from tests.support.recorder import highest_in_window

TABLES = "callqueue_callqueue", "callqueue_callattempt"
QUEUES = 24


def million(share: float, rate: int = 100) -> dict[str, Any]:
    """24 rules on 24 queues; then cleanup while calls go on; then as many calls once more."""
    lines = [
        f'"r{i}": Rule(queues="{{queue}}{i}", limits=[SlidingWindow("{rate}/s")]),'
        for i in range(QUEUES)
    ]
    lines.append('"probe": Rule(queues="{queue}0", limits=[SlidingWindow("1000/s")]),')
    count = round(1_000_000 * share) // QUEUES * QUEUES
    with open_stage(_settings(*lines)) as on:
        running = _start(on, workers=2, queues=[f"celery{i}" for i in range(QUEUES)])
        names = [f"r{i}" for i in range(QUEUES)]
        found: dict[str, Any] = {"calls": count, "share": share, "rate": rate}
        found["first"] = _drain(
            on, running, count, lambda i: {"rule": names[i % QUEUES]}, names, rate
        )
        found["sizes"] = _sizes()
        found["cleanup"] = _clean_while_calls_go_on(on, count)
        found["sizes_after_cleanup"] = _sizes()
        found["second"] = _drain(
            on, running, count, lambda i: {"rule": names[i % QUEUES]}, names, rate
        )
        found["sizes_second"] = _sizes()
        grown = sum(found["sizes_second"].values()) / sum(found["sizes"].values())
        found["growth"] = grown
        say(f"the tables after the second run are {grown:.2f} times those after the first")
    return found


def _settings(*rules: str) -> str:
    # The default rule is 100 an hour, and no attempt is deleted that the longest window of all may
    # count.
    rules = (*rules, '"default": Rule(),')
    return "\n".join(['CALLQUEUE = {"ALLOWED_NETWORKS": ["127.0.0.0/8"], "RULES": {', *rules, "}}"])


def _start(on: Stage, *, workers: int, queues: Sequence[str]) -> dict[str, Any]:
    running = {f"worker {i + 1}": on.processes.worker(*queues) for i in range(workers)}
    return {**running, "dispenser": on.processes.dispenser()}


def _drain(
    on: Stage,
    running: dict[str, Any],
    count: int,
    options: Callable[[int], dict[str, Any]],
    names: Sequence[str],
    rate: int,
) -> dict[str, Any]:
    """Send so many calls, wait until all have ended, and judge."""
    on.api.clear()
    roles: dict[str, machine.IsRole] = {"api": machine.family(on.api.process.pid)}
    roles |= {name: machine.family(one.pid) for name, one in running.items()}
    roles |= {"postgresql": machine.postgresql(on.database), "rabbitmq": machine.rabbitmq}
    memory = []
    with machine.Meter(roles) as meter:
        began = time.monotonic()
        _send(on, count, options)
        sending = time.monotonic() - began
        while (arrived := on.api.count()) < count:
            say(f"  {arrived:,} of {count:,} arrived")
            memory.append(_memory(running))
            time.sleep(max(1.0, min(15.0, count / 50_000)))
        machine.wait_until(_all_ended, 120, every=0.1)
        seconds = time.monotonic() - began
    highest = _judge(on, count, names, rate)
    found = {
        "seconds": seconds,
        "sending_seconds": sending,
        "rate": count / seconds,
        "cpu_ms": {role: used * 1000 / count for role, used in meter.seconds.items()},
        "postgresql_cpu_share": meter.seconds["postgresql"] / seconds,
        "memory_mb": memory,
        "highest_in_a_second": highest,
    }
    cpu = ", ".join(f"{role} {ms:.2f}" for role, ms in found["cpu_ms"].items())
    say(
        f"  {count:,} calls in {seconds:.0f} s, {count / seconds:,.0f}/s; CPU ms a call: {cpu}; at most {highest} a second"
    )
    return found


def _send(on: Stage, count: int, options: Callable[[int], dict[str, Any]]) -> None:
    from callqueue.models import CallQueue

    def orders(at: int) -> Iterator[dict[str, Any]]:
        for i in range(at, min(count, at + 10_000)):
            own = options(i)
            params = {"url": on.api.url(f"/{own['rule']}"), "data": "x" * 200}
            yield {"call_data": {"method": "post", "params": params}, **own}

    for at in range(0, count, 10_000):
        CallQueue.objects.send_many(orders(at))


def _judge(on: Stage, count: int, names: Sequence[str], rate: int) -> int:
    """Every call arrived once and is done; no rule's limit was exceeded in any second. The highest
    count of any second.
    """
    from callqueue.models import CallAttempt, CallQueue

    arrivals = on.api.arrivals()
    highest = max(highest_in_window(arrivals[f"/{name}"], 1.0) for name in names)
    total = sum(len(arrivals[f"/{name}"]) for name in names)
    lost = CallQueue.objects.exclude(status=CallQueue.Status.DONE).count()
    if (
        highest > rate
        or total != count
        or lost
        or CallAttempt.objects.filter(finished_at=None).exists()
    ):
        raise AssertionError(
            f"{highest=} of {rate}, {total=} of {count}, {lost} calls that are not done"
        )
    return highest


def _all_ended() -> bool:
    from callqueue.models import CallQueue

    return not any(
        CallQueue.objects.order_by().filter(status=status).exists() for status in (0, 1, 2)
    )


def _memory(running: dict[str, Any]) -> dict[str, float]:
    return {name: machine.resident_mb(one.pid) for name, one in running.items()}


def _sizes() -> dict[str, int]:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT " + ", ".join(f"pg_total_relation_size('{table}')" for table in TABLES)
        )
        sizes = dict(zip(TABLES, cursor.fetchone(), strict=True))
    say("sizes: " + ", ".join(f"{table} {size / 1e6:,.0f} MB" for table, size in sizes.items()))
    return sizes


def _clean_while_calls_go_on(on: Stage, count: int) -> dict[str, Any]:
    """callqueue_cleanup of all that ended, with one call every tenth of a second before and
    meanwhile.

    Not before every limit has forgotten the attempts: they are kept so long, whatever becomes of
    their calls.
    """
    from callqueue import conf
    from callqueue.ledger import tallies

    newest = time.monotonic() + tallies.longest_window(conf.current().book) / 1_000_000
    with _probes(on) as before:
        time.sleep(max(10.0, newest + 1 - time.monotonic()))
    with _probes(on) as meanwhile:
        began = time.monotonic()
        done = on.processes.manage(
            "callqueue_cleanup", "--older-than", "1s", "--no-progress", "--vacuum", timeout=3600
        )
        seconds = time.monotonic() - began
    if done.returncode:
        raise AssertionError(done.stderr)
    said = done.stdout.strip()
    calls, attempts = (
        int(number)
        for number in re.findall(r"(\d+) (?:calls|attempts)", said.partition("deleted")[2])
    )
    if calls < count or attempts < count:
        raise AssertionError(f"there were {count} calls with an attempt each: {said}")
    found = {"seconds": seconds, "rows_per_second": (calls + attempts) / seconds, "said": said}
    found |= {
        "p95_before_ms": quantiles(before, 0.95)[0],
        "p95_meanwhile_ms": quantiles(meanwhile, 0.95)[0],
    }
    say(f"  cleanup: {calls:,} calls and {attempts:,} attempts in {seconds:.1f} s, {found['rows_per_second']:,.0f} rows/s; "
        f"p95 of a call {found['p95_before_ms']:.0f} ms before, {found['p95_meanwhile_ms']:.0f} ms meanwhile")  # fmt: skip
    return found


@contextmanager
def _probes(on: Stage) -> Iterator[list[float]]:
    """Calls, one every tenth of a second; their milliseconds from send to the wire."""
    from django.db import connection

    from callqueue.models import CallQueue

    on.api.clear()
    stop, sent, waits = threading.Event(), [], list[float]()

    def probe() -> None:
        while not stop.wait(0.1):
            sent.append(time.monotonic())
            CallQueue.objects.send(
                {"method": "post", "params": {"url": on.api.url(f"/probe{len(sent)}")}},
                rule="probe",
            )
        connection.close()

    thread = threading.Thread(target=probe)
    thread.start()
    yield waits
    stop.set()
    thread.join()
    machine.wait_until(lambda: on.api.count() >= len(sent), 60)
    arrivals = on.api.arrivals()
    waits += sorted((arrivals[f"/probe{i}"][0] - at) * 1000 for i, at in enumerate(sent, start=1))
    machine.wait_until(_all_ended, 60, every=0.1)
