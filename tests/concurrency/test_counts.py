"""What speed rests on, as counts and never as times: statements, and messages per attempt."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from callqueue import Rule, SlidingWindow, TokenBucket
from callqueue.dispatch import publisher
from callqueue.dispatch.release_pass import Pass, ensure_state_rows, release
from callqueue.models import CallAttempt, CallQueue
from tests.support.behaviour import Vendor, make_together

pytestmark = pytest.mark.django_db(transaction=True)

RULES = {
    "plain": Rule(limits=[SlidingWindow("100000/m")]),
    "long": Rule(limits=[SlidingWindow("1000000/d"), TokenBucket("100000/s", burst=1000)]),
    "keyed": Rule(limits=[SlidingWindow("100000/m", per="key")]),
    "spread": Rule(queues=["a", "b"], limits=[SlidingWindow("100000/m", per="queue")]),
}


@pytest.fixture(autouse=True)
def rules(settings: Any) -> None:
    if connection.vendor == "sqlite":
        pytest.skip("SQLite takes so few values a statement that large batches are several there")
    settings.CALLQUEUE = {"RULES": RULES}
    ensure_state_rows("default", list(RULES))
    # the first pass of a process looks at the clock, and what a pass remembers is written once
    for rule in RULES:
        release("default", [rule])


CALL = {"method": "post", "params": {"url": "http://vendor.example/"}}


def send(count: int, rule: str = "plain") -> None:
    calls = [{"call_data": CALL, "key": f"k{i}"} for i in range(count)]
    CallQueue.objects.send_many(calls, rule=rule)


def statements(of: Callable[[], Any]) -> tuple[int, Any]:
    with CaptureQueriesContext(connection) as captured:
        result = of()
    return len(captured), result


def a_pass(rule: str) -> tuple[int, Pass]:
    return statements(lambda: release("default", [rule]))


@pytest.mark.parametrize("rule", RULES)
def test_a_pass_makes_as_many_statements_for_two_hundred_calls_as_for_two(rule: str) -> None:
    send(2, rule)
    few, one = a_pass(rule)
    send(200, rule)
    many, other = a_pass(rule)
    assert (len(one.released), len(other.released)) == (2, 200)
    # an update a queue; the keys' turns, once they are remembered; and where two are known to fit,
    # two hundred are looked for once more and counted
    more = {"spread": 1, "keyed": 1, "plain": 3, "long": 4}
    assert many <= few + more[rule]


def test_a_pass_is_no_dearer_where_much_waits() -> None:
    send(20)
    few, _ = statements(lambda: release("default", ["plain"], batch=10))
    send(2000)
    many, _ = statements(lambda: release("default", ["plain"], batch=10))
    # MariaDB and MySQL read the version once more: their UPDATE would lock its row for all others
    assert many == few <= (12 if connection.vendor == "mysql" else 11), few


def test_a_message_is_begun_and_recorded_in_a_few_statements_whatever_it_carries(
    remote: Vendor,
) -> None:
    def a_message(count: int) -> int:
        send(count)
        ids = [one.attempt_id for one in release("default", ["plain"]).released]
        made, begun = statements(lambda: make_together(ids))
        assert begun == count
        return made

    # Where a reading of the clock took long, a worker looks at it once more: the least of a few.
    few, many = (min(a_message(count) for _ in range(3)) for count in (2, 32))
    # where no statement passes over locked rows and changes the others: two more, and a transaction
    assert few == many <= (7 if connection.vendor == "postgresql" else 10)


@pytest.mark.parametrize(("attempts", "messages"), [(1, 1), (4, 4), (5, 3), (80, 4), (500, 16)])
def test_attempts_share_messages_once_there_are_enough_of_them(
    attempts: int, messages: int
) -> None:
    send(attempts)
    packed = publisher.pack(release("default", ["plain"]).released)
    ids = [pk for _, some in packed for pk in some]
    assert (len(packed), len(ids), len(set(ids))) == (messages, attempts, attempts)


def test_workers_that_are_behind_get_full_messages(remote: Vendor) -> None:
    """Where attempts wait already, a message more for their queue only costs more."""
    send(12)
    first = [one.attempt_id for one in release("default", ["plain"]).released]
    CallAttempt.objects.update(released_at=F("released_at") - timedelta(seconds=1))
    send(12)
    assert len(publisher.pack(release("default", ["plain"]).released)) == 1
    make_together(first)
    make_together(list(CallAttempt.objects.open().values_list("pk", flat=True)))
    send(12)
    assert len(publisher.pack(release("default", ["plain"]).released)) == 4


def test_a_send_is_one_insert_and_so_are_a_thousand_calls() -> None:
    count, _ = statements(lambda: CallQueue.objects.send(CALL, rule="plain"))
    assert count == 1
    count, _ = statements(lambda: send(1000))
    assert count <= 4  # news of their keys, and the transaction around them
