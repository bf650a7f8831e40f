"""What a permit costs after all: never less is charged than was spent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import callqueue
from callqueue import NotNow, Rule, SlidingWindow, TokenBucket
from callqueue.maintenance import recovery
from callqueue.models import CallAttempt
from callqueue.testing import travel

Rules = Callable[..., None]
TOKENS = {
    "window": SlidingWindow("100/h", unit="tokens"),
    "bucket": TokenBucket("100/h", burst=100, unit="tokens"),
    "tallied window": SlidingWindow("100/h", unit="tokens", per="key"),
    "tallied bucket": TokenBucket("100/h", burst=100, unit="tokens", per="key"),
}
LIMITS = pytest.mark.parametrize("limit", TOKENS.values(), ids=TOKENS.keys())


def tokens(count: int) -> Any:
    return callqueue.permit("r", key="a", cost={"tokens": count}, wait=0)


def free(least: int, most: int) -> bool:
    """Whether so many tokens are free: `least` go now, and not `most`."""
    with pytest.raises(NotNow), tokens(most):
        pytest.fail("over the limit")
    with tokens(least) as permit:
        permit.settle({"tokens": 0})
    return True


@LIMITS
def test_a_cost_told_again_and_again_is_charged_as_it_was_told_last(
    rules: Rules, limit: Any
) -> None:
    rules(r=Rule(limits=[limit]))
    with tokens(10) as permit:
        permit.settle({"tokens": 90})
    permit.settle({"tokens": 20})
    permit.settle({"tokens": 60})
    assert free(least=40, most=42)
    permit.settle({"tokens": 30})
    assert free(least=70, most=72)
    assert free(least=70, most=72)
    permit.settle({"tokens": 80})  # above the charge, and however late
    assert free(least=20, most=22)


@LIMITS
def test_what_is_settled_in_a_block_that_outlives_its_lease_is_charged(
    rules: Rules, limit: Any
) -> None:
    rules(r=Rule(limits=[limit]))
    with travel() as clock:
        context = callqueue.permit("r", key="a", cost={"tokens": 10}, lease=1)
        permit = context.__enter__()
        clock.forward(2)
        recovery.recover("default")
        assert CallAttempt.objects.get(pk=permit.attempt_id).outcome == "lost"
        permit.settle({"tokens": 80})
        context.__exit__(None, None, None)
        assert free(least=20, most=23)
        permit.settle({"tokens": 50})
        assert free(least=50, most=53)


def test_what_the_answer_adds_ages_from_the_answer(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("100/m", unit="tokens")]))
    with travel() as clock:
        with tokens(10) as permit:
            permit.sent()
            clock.forward(50)
            permit.settle({"tokens": 90})
        clock.forward(15)
        assert free(least=20, most=25)  # what was sent has aged, what the answer added has not
        permit.settle({"tokens": 95})
        assert free(least=5, most=25)
        clock.forward(50)
        with tokens(100):
            pass
