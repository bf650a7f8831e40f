"""What a busy machine may be forgiven, and what nothing is: the tests' own judges."""

from __future__ import annotations

import pytest

from tests.support.verdicts import (
    FORGIVEN,
    Late,
    Verdict,
    never_over,
    on_a_quiet_machine,
    until_none_is_left,
    verdict,
)


def test_a_verdict_is_never_forgiven() -> None:
    assert not issubclass(Verdict, FORGIVEN)
    assert issubclass(Late, FORGIVEN)
    assert not issubclass(AssertionError, FORGIVEN), "what is said of neither is a verdict"


def test_each_failure_keeps_its_kind_and_its_words() -> None:
    with pytest.raises(Verdict, match="arrived twice"), verdict():
        raise AssertionError("arrived twice")
    with pytest.raises(Late, match="took long"), on_a_quiet_machine():
        raise AssertionError("took long")
    with pytest.raises(Late), verdict(), on_a_quiet_machine():
        raise AssertionError
    with pytest.raises(Verdict), on_a_quiet_machine(), verdict():
        raise AssertionError


def test_one_too_many_in_any_window_is_a_verdict() -> None:
    never_over([0.0, 0.4, 1.0, 1.4], 2, 1.0)
    with pytest.raises(
        Verdict, match="3 in a window of 1 s that allows 2; between them 0.4000, 0.5900"
    ):
        never_over([0.0, 0.4, 0.99, 1.5], 2, 1.0)


def test_what_changes_no_more_is_stuck_and_what_goes_on_is_late() -> None:
    with pytest.raises(Verdict, match="stuck"):
        until_none_is_left(lambda: "one call", 0.0, stuck=0.2)
    endless = iter(range(1, 1_000_000))
    with pytest.raises(Late):
        until_none_is_left(lambda: next(endless), 0.3, stuck=0.2)
    ending = iter([3, 2, 2, 1, 0])
    until_none_is_left(lambda: next(ending), 0.0, stuck=0.5)
