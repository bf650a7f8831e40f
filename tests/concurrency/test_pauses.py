"""A pause that is laid, replaced or ended beside dispensers, or that fails at any of its statements:
no moment, and no failure, leaves the rule free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

from callqueue import Rule, control
from callqueue.dispatch.release_pass import release
from callqueue.models import CallAttempt, Hold, RuleState
from tests.support.behaviour import send
from tests.support.locking import together, waiting_for_nobody

Rules = Callable[..., None]
DISPENSERS = 3


@contextmanager
def between_statements(work: Callable[[], None]) -> Iterator[None]:
    """Do this before each statement of this thread and after each commit, wherever others can."""
    commit = connection.commit
    has_row_locks = connection.features.has_select_for_update

    def before(execute: Callable[..., Any], *args: Any) -> Any:
        if has_row_locks or not connection.in_atomic_block:
            work()
        return execute(*args)

    def and_work() -> None:
        commit()
        work()

    connection.commit = and_work
    try:
        with connection.execute_wrapper(before):
            yield
    finally:
        del connection.commit


def pass_of_each_dispenser() -> None:
    together(*[lambda: release("default", ["r"])] * DISPENSERS)


def pauses() -> list[Callable[[], None]]:
    return [
        lambda: control.pause("default", "r", seconds=600, reason="for longer"),
        lambda: control.pause("default", "r", seconds=60, reason="for less"),
        lambda: control.pause("default", "r", reason="without end"),
    ]


@pytest.mark.parametrize("second", range(3))
def test_a_paused_rule_that_is_paused_anew_is_free_at_no_moment(rules: Rules, second: int) -> None:
    """Three dispensers make a pass between any two of its statements."""
    rules(r=Rule())
    for _ in range(DISPENSERS):
        send("r")
    control.pause("default", "r", seconds=300, reason="first")
    looks = []

    def look() -> None:
        looks.append(True)
        pass_of_each_dispenser()

    with between_statements(look):
        pauses()[second]()
    assert looks
    assert not CallAttempt.objects.exists()
    assert Hold.objects.get().reason != "first"
    control.resume("default", "r")
    pass_of_each_dispenser()
    assert CallAttempt.objects.count() == DISPENSERS


def test_a_pause_that_waits_for_a_pass_too_long_leaves_the_rule_held(
    rules: Rules, row_locks: None
) -> None:
    rules(r=Rule())
    send("r")
    control.pause("default", "r", reason="first")
    ends: list[bool] = []

    def pause() -> None:
        with waiting_for_nobody():
            try:
                control.pause("default", "r", seconds=600)
            except OperationalError:
                ends.append(True)

    with transaction.atomic():
        list(RuleState.objects.select_for_update().filter(rule="r"))
        together(pause)
    assert ends == [True]
    assert Hold.objects.get().reason == "first"
    release("default", ["r"])
    assert not CallAttempt.objects.exists()
