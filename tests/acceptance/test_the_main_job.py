"""The main job as its user runs it: calls of every fate through three rules, judged by what the
vendor recorded. 900 of them, and 2,000 in `make faults`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from callqueue.models import CallAttempt, CallQueue
from tests.support.length import examples
from tests.support.processes import Processes
from tests.support.recorder import Recorder
from tests.support.verdicts import never_over, until_none_is_left, verdict

Status = CallQueue.Status

SETTINGS = """
account = SlidingWindow("150/s", name="account")
CALLQUEUE = {
    "ALLOWED_NETWORKS": ["127.0.0.0/8"],
    "RULES": {
        "reads": Rule(queues=QUEUE_ONE, limits=[account, SlidingWindow("100/s")], retry=Retry(base=0.2, jitter=False),
                      total_timeout=2),
        "pays": Rule(queues=QUEUE_TWO, priority=5, limits=[account, SlidingWindow("12/s", per="key")],
                     retry=Retry(base=0.2, jitter=False), total_timeout=2),
        "slow": Rule(queues=QUEUE_TWO, limits=[TokenBucket("20/s", burst=5), Concurrency(4)], total_timeout=2),
    },
}
"""


@pytest.fixture
def queue_up(configure: Callable[[str], None], processes: Processes) -> None:
    broker = processes.broker
    configure(
        SETTINGS.replace("QUEUE_ONE", repr(broker.queue("one"))).replace(
            "QUEUE_TWO", repr(broker.queue("two"))
        )
    )


@pytest.mark.fault
def test_calls_of_every_fate_end_as_they_should(
    queue_up: None, processes: Processes, vendor: Recorder
) -> None:
    expected, special = send_them_all(vendor)
    for _ in range(2):
        processes.worker("one", "two", concurrency=2)
    processes.dispenser()
    unfinished = CallQueue.objects.filter(status__in=(0, 1, 2))
    until_none_is_left(lambda: Counter(unfinished.values_list("rule", "status")), 90)

    ended = dict(CallQueue.objects.values_list("pk", "status"))
    wrong = {
        pk: (Status(ended[pk]).name, status.name)
        for pk, status in expected.items()
        if ended[pk] != status
    }
    with verdict():
        assert not wrong
        arrivals = vendor.arrivals()
        assert_no_limit_was_exceeded(arrivals)
        assert_every_attempt_is_one_request(arrivals)
        assert_nothing_came_twice_that_should_not(arrivals, special)


def send_them_all(vendor: Recorder) -> tuple[dict[int, Any], dict[str, CallQueue]]:
    """All calls; what each should end as, and those with a part of their own."""
    expected: dict[int, Any] = {}
    special: dict[str, CallQueue] = {}

    def send(
        path: str, status: Any, rule: str = "reads", method: str = "post", **options: Any
    ) -> CallQueue:
        data = {"method": method, "params": {"url": vendor.url(path), "json": {"n": len(expected)}}}
        call = CallQueue.objects.send(data, rule=rule, **options)
        assert call is not None
        expected[call.pk] = status
        return call

    for i in range(examples(740, 1840)):
        rule, options = ("pays", {"key": f"k{i % 10}"}) if i % 3 == 0 else ("reads", {})
        send(f"/ok?i={i}", Status.DONE, rule, priority=i % 4, **options)
    for i in range(100):
        send(f"/fail/2/f{i}", Status.DONE)
    for i in range(40):
        send(f"/status/404?i={i}", Status.FAILED)
    for i in range(16):
        send(f"/status/500?i={i}", Status.FAILED)
    special["hang post"] = send("/hang?s=30&post=1", Status.UNKNOWN, "slow")
    special["later"] = send(
        "/ok?later=1", Status.DONE, not_before=timezone.now() + timedelta(seconds=6)
    )
    gone = send("/ok?expired=1", Status.EXPIRED, expires_at=timezone.now() + timedelta(seconds=1))
    CallQueue.objects.filter(pk=gone.pk).update(expires_at_dt=timezone.now() - timedelta(seconds=1))
    special["expired"] = gone
    special["cancelled"] = send("/ok?cancelled=1", Status.CANCELLED)
    special["cancelled"].cancel()
    special["unique"] = send("/ok?unique=1", Status.DONE, unique_key="order-1")
    assert send("/ok?unique=2", Status.DONE, unique_key="order-1") == special["unique"]
    return expected, special


def assert_no_limit_was_exceeded(arrivals: list[Any]) -> None:
    rules = dict(CallAttempt.objects.values_list("call_id", "rule"))
    keys = dict(CallQueue.objects.values_list("pk", "key"))
    body_to_call = {
        call.call_data["params"]["json"]["n"]: call.pk for call in CallQueue.objects.all()
    }
    by_rule: dict[str, list[float]] = {}
    by_key: dict[str, list[float]] = {}
    for arrival in arrivals:
        pk = body_to_call[int(arrival.body.split(":")[1].strip(" }"))]
        by_rule.setdefault(rules[pk], []).append(arrival.at)
        by_key.setdefault(keys[pk], []).append(arrival.at)
    never_over(by_rule["reads"] + by_rule["pays"], 150, 1.0, of="the account's limit")
    never_over(by_rule["reads"], 100, 1.0, of="the limit of reads")
    for key in filter(None, by_key):
        never_over(by_key[key], 12, 1.0, of=f"the limit of key {key}")


def assert_every_attempt_is_one_request(arrivals: list[Any]) -> None:
    charged = CallAttempt.objects.exclude(outcome="voided").count()
    assert len(arrivals) == charged
    assert not CallAttempt.objects.filter(finished_at=None).exists()
    assert not CallAttempt.objects.filter(outcome="").exists()


def assert_nothing_came_twice_that_should_not(
    arrivals: list[Any], special: dict[str, CallQueue]
) -> None:
    times = Counter(arrival.target for arrival in arrivals)
    assert {n for target, n in times.items() if target.startswith("/ok")} == {1}
    assert {n for target, n in times.items() if target.startswith("/fail/")} == {3}
    assert {n for target, n in times.items() if target.startswith("/status/404")} == {1}
    assert {n for target, n in times.items() if target.startswith("/status/500")} == {3}
    assert times["/hang?s=30&post=1"] == 1
    assert not times["/ok?expired=1"] and not times["/ok?cancelled=1"] and not times["/ok?unique=2"]
    keys = Counter(a.idempotency_key for a in arrivals if a.path.startswith("/fail/"))
    assert set(keys.values()) == {3} and len(keys) == 100
    later = special["later"]
    later.refresh_from_db()
    assert later.attempts.get().sent_at >= later.due_at_dt
