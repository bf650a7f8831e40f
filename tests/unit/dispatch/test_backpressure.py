"""How many attempts a queue may have that nobody has begun."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callqueue.dispatch.choosing import LEAST, MOST, Shown, room_of_queue, trust

leases = st.floats(0.1, 86400)
counts = st.integers(0, 10**6)


@given(counts, counts, leases)
def test_what_is_unbegun_never_passes_trust_and_what_was_begun_lately(
    unbegun: int, begun: int, lease: float
) -> None:
    assert unbegun + room_of_queue(Shown(unbegun, begun), lease) <= max(unbegun, MOST + begun)


@given(counts, leases)
def test_a_silent_queue_has_one_attempt_at_a_time(unbegun: int, lease: float) -> None:
    assert room_of_queue(Shown(unbegun, is_silent=True), lease) == (0 if unbegun else 1)


@given(counts, counts, leases)
def test_workers_that_begin_everything_are_never_short(
    begun: int, unbegun: int, lease: float
) -> None:
    """As many as they began lately may wait for them, and some more."""
    assert room_of_queue(Shown(min(unbegun, begun), begun), lease) >= LEAST


@pytest.mark.parametrize(
    ("lease", "allowed"), [(0.1, 32), (10, 32), (60, 180), (300, 900), (86400, 1000)]
)
def test_what_a_queue_gets_on_trust_grows_with_the_lease(lease: float, allowed: int) -> None:
    assert trust(lease) == allowed
