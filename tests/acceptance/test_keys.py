"""One key floods a rule; the others are released in the same passes as if it did not.

Compared by passes, not by time: a pass is what a dispenser makes at one instant, however fast the
machine is.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from django.db import connection

from callqueue import Rule, SlidingWindow, conf
from callqueue.dispatch.release_pass import ensure_states, release
from callqueue.dispatch.turns import KEYS
from callqueue.models import CallAttempt, CallQueue
from tests.support.length import ONLY_AT_LENGTH

FLOOD, OTHERS = 6_400, 300
URL = {"method": "get", "params": {"url": "http://vendor.example/"}}


@pytest.fixture
def rules(settings: Any, db: None) -> Callable[..., None]:
    def apply(**named: Rule) -> None:
        settings.CALLQUEUE = {"RULES": named}
        ensure_states("default", list(conf.current().rules))

    return apply


def flood() -> None:
    """Send some calls and double them in the database, until there are enough."""
    CallQueue.objects.send_many([URL] * (FLOOD // 32), rule="r", key="flood")
    columns = ", ".join(
        connection.ops.quote_name(f.column)
        for f in CallQueue._meta.local_fields
        if not f.primary_key
    )
    for _ in range(5):
        with connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO callqueue_callqueue ({columns}) SELECT {columns} FROM callqueue_callqueue"
            )


def others() -> None:
    CallQueue.objects.send_many(
        [{"call_data": URL, "key": f"k{i:04}"} for i in range(OTHERS)], rule="r"
    )


def pass_of_each_key(batch: int = 500) -> dict[str, int]:
    """In which pass each of the other keys had its turn; passes go on, each answered at once, until
    all have.
    """
    passes: dict[str, int] = {}
    for number in count():
        assert number < 100, f"only {len(passes)} of {OTHERS} keys had their turn"
        made = release("default", ["r"], batch=batch).released
        attempts = CallAttempt.objects.filter(pk__in=[r.attempt_id for r in made])
        passes.update(
            dict.fromkeys(attempts.exclude(key="flood").values_list("key", flat=True), number)
        )
        if len(passes) == OTHERS:
            break
    return passes


def waits(
    rules: Callable[..., None], limits: list[Any], batch: int, *, is_flooded: bool
) -> dict[str, int]:
    CallAttempt.objects.all().delete()
    CallQueue.objects.all().delete()
    rules(r=Rule(limits=limits))
    if is_flooded:
        flood()
    others()
    return pass_of_each_key(batch)


@pytest.mark.parametrize("batch", [100, pytest.param(500, marks=ONLY_AT_LENGTH)])
def test_the_others_wait_no_longer_than_without_the_flood(
    rules: Callable[..., None], batch: int
) -> None:
    limits = [SlidingWindow("1/s", per="key")]
    without = waits(rules, limits, batch, is_flooded=False)
    beside = waits(rules, limits, batch, is_flooded=True)
    later = {key: (beside[key], without[key]) for key in without if beside[key] > without[key] + 1}
    assert not later, f"keys that wait for more passes beside the flood: {later}"
    assert (
        sum(beside.values()) <= sum(without.values()) + OTHERS // min(batch, KEYS) + 1
    )  # the flood's own turns


def test_under_a_limit_of_the_rule_too_the_keys_take_turns(rules: Callable[..., None]) -> None:
    rules(r=Rule(limits=[SlidingWindow("100/h", per="key"), SlidingWindow("301/h")]))
    flood()
    others()
    while release("default", ["r"]).released:
        pass
    counted = CallAttempt.objects.exclude(key="flood").values_list("key", flat=True)
    assert len(set(counted)) == len(counted) == OTHERS
    assert CallAttempt.objects.filter(key="flood").count() == 1


def test_a_call_that_comes_during_the_flood_goes_in_the_next_pass(
    rules: Callable[..., None],
) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/h", per="key")]))
    flood()
    assert len(release("default", ["r"]).released) == 5
    late = CallQueue.objects.send(URL, rule="r", key="late")
    (made,) = release("default", ["r"]).released
    assert CallAttempt.objects.get(pk=made.attempt_id).call_id == late.pk
