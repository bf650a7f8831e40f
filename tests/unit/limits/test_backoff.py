"""The wait before a retry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callqueue import Retry
from callqueue.limits.rules import backoff


def test_it_doubles_up_to_the_cap() -> None:
    waits = [backoff(Retry(base=1, factor=2, cap=60, jitter=False), n, 0) for n in range(1, 9)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


@given(
    failures=st.integers(1, 10**6),
    rand=st.floats(0, 1, exclude_max=True),
    base=st.floats(0, 100),
    factor=st.floats(1, 100),
)
def test_jitter_draws_the_second_half(
    failures: int, rand: float, base: float, factor: float
) -> None:
    whole = backoff(Retry(base=base, factor=factor, cap=600, jitter=False), failures, rand)
    assert (
        whole / 2
        <= backoff(Retry(base=base, factor=factor, cap=600, jitter=True), failures, rand)
        <= whole
        <= 600
    )


@pytest.mark.parametrize(("base", "factor"), [(1, 2), (1.0, 2.0), (0.001, 100)])
def test_no_count_of_failures_is_too_large(base: float, factor: float) -> None:
    assert backoff(Retry(base=base, factor=factor, cap=60, jitter=False), 10**18, 0) == 60


def test_half_of_the_wait_is_certain_and_the_other_half_is_drawn() -> None:
    assert [backoff(Retry(base=8, factor=1), 1, rand) for rand in (0, 0.5, 0.75)] == [4, 6, 7]


def test_a_base_of_nothing_never_waits() -> None:
    assert backoff(Retry(base=0, factor=2.0, cap=60, jitter=True), 10**6, 0.5) == 0


def test_a_factor_of_one_waits_the_base_each_time() -> None:
    assert backoff(Retry(base=3, factor=1, cap=60, jitter=False), 10**6, 0) == 3
