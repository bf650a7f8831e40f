"""What ended in each minute of the last hour, of rules and of keys, against a clock that stands
still.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.core.cache import cache
from django.db import connection
from django.test.utils import CaptureQueriesContext

from callqueue import database
from callqueue.models import CallAttempt
from callqueue.operations import throughput

NOW = database.EPOCH + timedelta(days=20_000, hours=12, seconds=30)
KEYS = [("pay", "a"), ("pay", ""), ("chat", "a")]

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _noon(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.clear()
    monkeypatch.setattr(database, "clock", lambda using: NOW)


def answered(rule: str, key: str, *ago: float, outcome: str = "succeeded", **columns: Any) -> None:
    CallAttempt.objects.bulk_create(
        CallAttempt(
            call_id=1, number=1, rule=rule, key=key, outcome=outcome, released_at=NOW - timedelta(seconds=one),
            finished_at=NOW - timedelta(seconds=one), **columns,
        )
        for one in ago
    )  # fmt: skip


def of_keys(seconds: float = 60) -> dict[tuple[str, str], list[tuple[int, int] | None]]:
    return dict(
        zip(
            KEYS, throughput.of_keys("default", KEYS, until=time.monotonic() + seconds), strict=True
        )
    )


def test_attempts_of_keys_are_counted_by_the_minute_of_their_answer() -> None:
    answered("pay", "a", 10, 20, 40, 3500)
    answered("pay", "a", 10, outcome="errored")
    answered("pay", "", 100)
    answered("chat", "a", 100, outcome="throttled")
    answered("chat", "b", 100)
    answered("pay", "a", 10, outcome="voided")
    answered("pay", "a", 4000)
    found = of_keys()
    assert {len(hour) for hour in found.values()} == {throughput.MINUTES}
    pay, empty, chat = found.values()
    assert {59 - place: counts for place, counts in enumerate(pay) if counts != (0, 0)} == {
        0: (2, 1),
        1: (1, 0),
        58: (1, 0),
    }
    assert {59 - place: counts for place, counts in enumerate(empty) if counts != (0, 0)} == {
        2: (1, 0)
    }
    assert {59 - place: counts for place, counts in enumerate(chat) if counts != (0, 0)} == {
        2: (0, 1)
    }


def test_what_there_is_no_time_for_is_counted_at_the_next_looks_and_only_once() -> None:
    answered("pay", "a", *range(5, 3500, 60))
    looks = [
        of_keys(seconds=0)["pay", "a"] for _ in range(throughput.MINUTES // throughput.OF_KEYS)
    ]
    assert [hour.count(None) for hour in looks] == [50, 40, 30, 20, 10, 0]
    assert looks[-1][1:] == [(1, 0)] * 58 + [(1, 0)]
    with CaptureQueriesContext(connection) as again:
        assert of_keys() == of_keys()
    assert len(again) == 0


def test_a_minute_that_was_not_over_is_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answered("pay", "a", 10)
    assert of_keys()["pay", "a"][-1] == (1, 0)
    answered("pay", "a", 5)
    monkeypatch.setattr(database, "clock", lambda using: NOW + timedelta(minutes=10))
    assert of_keys()["pay", "a"][-11] == (2, 0)
