"""What one process makes of its readings of the clock."""

from __future__ import annotations

from dataclasses import replace

from callqueue.clocks import Mono, Reading, Us
from callqueue.ledger.ledger_time import SETTLED, Watch
from callqueue.limits.kinds import SECOND

BEGAN = 100.0


def reading(after_s: float, error_s: float, moved: int = 0) -> Reading:
    """So long after the first; it took twice `error_s`."""
    at = Us(round((BEGAN + after_s) * SECOND) + 10**15)
    instants = Mono(BEGAN + after_s - error_s), Mono(BEGAN + after_s + error_s)
    return Reading(at, *instants, moved, 1, at)


def error_of(one: Reading) -> float:
    return (one.after - one.before) / 2


def test_readings_make_each_other_narrower_but_none_from_before_others_moved_the_ledger() -> None:
    watch = Watch("default")
    for after_s in (0, SETTLED, SETTLED + 1):
        watch.keep_and_narrow(reading(after_s, 0.0001))
    assert error_of(watch.keep_and_narrow(reading(SETTLED + 2, 0.01))[0]) < 0.0005
    assert error_of(watch.keep_and_narrow(reading(SETTLED + 2.5, 0.01, moved=1))[0]) > 0.009


def test_what_was_read_while_new_is_not_gone_by_once_others_have_moved_the_ledger() -> None:
    watch = Watch("default")
    watch.keep_and_narrow(reading(0, 0.0001))
    assert watch.keep_and_credit(reading(SETTLED / 2, 0.0001)) is not None
    assert watch.keep_and_credit(reading(SETTLED, 0.0001, moved=1)) is None
    assert watch.wants_look


def test_who_is_not_new_puts_forward_what_is_late_unless_others_have_agreed_since() -> None:
    watch = Watch("default")
    first = reading(0, 0.0001)
    watch.keep_and_narrow(first)
    later = reading(2 * SETTLED, 0.0001)
    assert not watch._is_new(-SECOND, first, later)
    assert watch._is_new(-SECOND, first, replace(later, agreements=2))
