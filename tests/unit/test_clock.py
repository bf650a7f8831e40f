"""Readings of the database's clock say together nothing wrong, and more than each alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callqueue.clocks import ClockEstimate, Reading
from callqueue.database import to_us
from callqueue.execution import claim

TRIPS = st.tuples(st.floats(0.0001, 0.05), st.floats(0.0, 1.0), st.floats(0.0, 3.0))


@given(st.lists(TRIPS, min_size=1, max_size=40), st.floats(-9e-5, 9e-5))
def test_a_narrowed_reading_still_brackets_the_truth(
    trips: list[tuple[float, float, float]], drift: float
) -> None:
    """The truth: the database shows 5000 + monotonic time, faster or slower by `drift`."""
    narrowed, mono = ClockEstimate(), 100.0
    for round_trip, share, pause in trips:
        before, after = mono, mono + round_trip
        read_at = before + share * round_trip
        reading = Reading(round((5000 + read_at * (1 + drift)) * 1_000_000), before, after)
        closer = narrowed.add(reading)
        assert before <= closer.before + 1e-5
        assert closer.after <= after + 1e-5
        assert closer.before - 1e-5 <= read_at <= closer.after + 1e-5
        mono = after + pause


def test_a_clock_that_was_set_starts_anew() -> None:
    narrowed = ClockEstimate()
    narrowed.add(Reading(1_000_000, 1.0, 1.001))
    jumped = Reading(9_000_000, 2.0, 2.001)
    assert narrowed.add(jumped) == jumped
    assert narrowed.add(Reading(9_500_000, 2.45, 2.6)).after < 2.502, "and is believed again"


def test_many_readings_are_closer_than_any() -> None:
    narrowed = ClockEstimate()
    for n in range(10):
        share = n / 9
        closer = narrowed.add(Reading(round((n + share * 0.01) * 1_000_000), float(n), n + 0.01))
    assert closer.after - closer.before < 0.005


@given(TRIPS, st.floats(0.0, 60.0))
def test_an_instant_is_never_taken_for_earlier_than_it_may_be(
    trip: tuple[float, float, float], later: float
) -> None:
    """No slot is used before it opens, and what is written down does not age sooner."""
    round_trip, share, _ = trip
    reading = Reading(round((5100 + share * round_trip) * 1_000_000), 100.0, 100.0 + round_trip)
    mono = 100.0 + round_trip + later
    truth = round((5000 + mono) * 1_000_000)
    assert reading.latest_ledger_time_at(mono) >= truth - 2
    assert reading.monotonic_at(truth) >= mono - 2e-6


@pytest.mark.parametrize(
    ("shows", "is_steady", "slot"),
    [(0.05, True, 0.1), (-60.0, True, -59.9), (-60.0, False, -59.9), (60.0, True, 0.1), (60.0, False, 60.1)],
)  # fmt: skip
def test_a_slot_is_never_later_than_it_was_ahead_and_just_that_where_the_clock_may_have_jumped(
    shows: float, is_steady: bool, slot: float
) -> None:
    released, instants = datetime(2030, 1, 1, tzinfo=UTC), [0.1, shows, slot]
    send_at, at, expected = (released + timedelta(seconds=one) for one in instants)
    clock = Reading(to_us(at), 0.0, 0.0)
    steady_from = released if is_steady else released + timedelta(microseconds=1)
    assert claim.send_at_by_clock(send_at, released, clock, steady_from) == expected
    assert claim.send_at_by_clock(None, released, clock, steady_from) is None


@pytest.mark.parametrize(
    ("went", "jump", "is_off"),
    [
        (4_978_997, -11_003, True),
        (4_978_998, 0, True),
        (4_979_999, 0, True),
        (4_980_000, 0, False),
        (5_020_000, 0, False),
        (5_020_001, 0, True),
        (5_021_002, 0, True),
        (5_021_003, 31_003, True),
        (60_000_000, 55_010_000, True),
        (-60_000_000, -64_990_000, True),
    ],
)
def test_between_two_readings_a_clock_was_set_by_what_time_did_not_surely_go(
    went: int, jump: int, is_off: bool
) -> None:
    """Readings of 10 ms, 5 s apart. What was set forward errs upwards, and is not credited."""
    first = Reading(1_000_000_000, 100.0, 100.01)
    later = Reading(1_000_000_000 + went, 105.0, 105.01)
    assert (first.jump_until(later), first.contradicts(later)) == (jump, is_off)
    assert first.credit(later) - first.at == min(went, 4_990_000 + 11_002)
