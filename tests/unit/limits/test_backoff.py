"""The wait before a retry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callqueue import Retry
from callqueue.limits.rules import backoff


@pytest.mark.parametrize(
    ("retry", "failures", "rand", "seconds"),
    [
        *((Retry(base=1, factor=2, cap=60, jitter=False), n, 0, 2 ** (n - 1)) for n in range(1, 7)),
        (Retry(base=1, factor=2, cap=60, jitter=False), 7, 0, 60),
        (Retry(base=1.0, factor=2.0, cap=60, jitter=False), 10**18, 0, 60),
        (Retry(base=0.001, factor=100, cap=60, jitter=False), 10**18, 0, 60),
        (Retry(base=8, factor=1), 1, 0, 4),
        (Retry(base=8, factor=1), 1, 0.5, 6),
        (Retry(base=0, factor=2.0, cap=60), 10**6, 0.5, 0),
        (Retry(base=3, factor=1, cap=60, jitter=False), 10**6, 0, 3),
    ],
)
def test_it_grows_by_the_factor_up_to_the_cap_and_half_of_it_is_drawn(
    retry: Retry, failures: int, rand: float, seconds: float
) -> None:
    assert backoff(retry, failures, rand) == seconds


@given(
    st.integers(1, 10**6), st.floats(0, 1, exclude_max=True), st.floats(0, 100), st.floats(1, 100)
)
def test_jitter_draws_the_second_half(
    failures: int, rand: float, base: float, factor: float
) -> None:
    whole, drawn = (
        backoff(Retry(base=base, factor=factor, cap=600, jitter=jitter), failures, rand)
        for jitter in (False, True)
    )
    assert whole / 2 <= drawn <= whole <= 600
