"""What is shown is of one moment: an attempt that ends meanwhile is not counted twice."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connections

from callqueue import Rule, SlidingWindow, database
from callqueue.ledger import account
from callqueue.look import attempts, look
from callqueue.models import CallAttempt, CallQueue
from tests.support.behaviour import release, send

Rules = Callable[..., None]
Meanwhile = Callable[[], list[int]]


@pytest.fixture
def ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """From now on another process records an answer just after the open attempts were read."""
    ended: list[int] = []

    def end() -> None:
        try:
            open_ones = CallAttempt.objects.filter(finished_at=None)
            now = database.clock("default")
            ended.append(open_ones.update(started_at=now, finished_at=now, outcome="succeeded"))
        finally:
            connections.close_all()

    read_open = account.Account._read_open

    def then(own: account.Account) -> None:
        read_open(own)
        if "pay" in own.rules:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(end).result()

    def begin() -> list[int]:
        monkeypatch.setattr(account.Account, "_read_open", then)
        return ended

    return begin


@pytest.fixture(autouse=True)
def one_of_two_is_under_way(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("2/h", jitter=1)]))
    send("pay")
    assert len(release()) == 1


def its_use() -> bool:
    limit = look("default").rule("pay").limits[0]
    return (limit.used, limit.free) == (1, 1)


def there_is_room() -> bool:
    return CallQueue.objects.under_threshold("pay")


def its_forecast() -> bool:
    return CallQueue.objects.latest("pk").forecast().reason == "it goes at the next pass"


@pytest.mark.parametrize("is_of_one_moment", [its_use, there_is_room, its_forecast])
def test_what_is_said_of_a_limit(
    ends_meanwhile: Meanwhile, is_of_one_moment: Callable[[], bool]
) -> None:
    send("pay")
    ended = ends_meanwhile()
    assert is_of_one_moment()
    assert ended[0] == sum(ended) == 1, "whatever is read again"


def test_where_a_rule_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is released between two statements either waits or is in flight."""
    send("pay")
    read, released = attempts.read, []

    def then(*args: Any) -> attempts.Attempts:
        def release_one() -> None:
            try:
                released.append(len(release()))
            finally:
                connections.close_all()

        with ThreadPoolExecutor(1) as pool:
            pool.submit(release_one).result()
        return read(*args)

    monkeypatch.setattr(attempts, "read", then)
    rule = look("default").rule("pay")
    assert (rule.waits.calls, rule.flight.count) == (1, 1)
    assert released == [1]
