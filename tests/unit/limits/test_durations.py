"""Durations: as operators type them, and that of the wait before a retry."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callqueue import Retry
from callqueue.limits.durations import WrongDuration, parse_duration
from callqueue.limits.rules import backoff


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("90s", timedelta(seconds=90)),
        ("10m", timedelta(minutes=10)),
        ("2h", timedelta(hours=2)),
        ("7d", timedelta(days=7)),
        ("4w", timedelta(weeks=4)),
        ("0s", timedelta(0)),
        (" 1h ", timedelta(hours=1)),
    ],
)
def test_a_number_and_a_unit_is_a_duration(text: str, meant: timedelta) -> None:
    assert parse_duration(text) == meant


@pytest.mark.parametrize(
    "text",
    ["", "7", "d", "-1h", "1.5h", "2 hours", "1h30m", "7D", "١h", "1y", "1e3s", "9" * 13 + "s"],
)
def test_anything_else_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(WrongDuration, match='as in "90s"'):
        parse_duration(text)
    with pytest.raises(WrongDuration, match="longer than ten years"):
        parse_duration("999999999w")


# --- The wait before a retry


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
